// Host twins of the asynchronous copies; included by device/async_copy.cuh only.
#pragma once

namespace jitconv {

template <int BYTES>
inline void cp_async_zero_fill(void* shared, const void* source, bool valid, JITCONV_HERE) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async moves 4, 8 or 16 bytes");
    host::asynchronous_copy(shared, valid ? source : nullptr, BYTES, here);
}

template <int BYTES>
inline void cp_async(void* shared, const void* source, JITCONV_HERE) {
    host::asynchronous_copy(shared, source, BYTES, here);
}

inline void cp_async_commit_group() { host::asynchronous_copy_commit(); }

template <int GROUPS>
inline void cp_async_wait_group() {
    host::asynchronous_copy_wait(GROUPS);
}

// Like their originals, the rest exists for sm_80, or sm_90, and later only: a kernel for an older architecture that
// uses it must not compile here either.
#if JITCONV_ARCH >= 800

inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals, JITCONV_HERE) {
    host::mbarrier_init(barrier, arrivals, here);
}
inline void mbarrier_arrive(uint64_t* barrier, JITCONV_HERE) { host::mbarrier_arrive(barrier, 0, here); }
inline void mbarrier_wait(uint64_t* barrier, uint32_t parity, JITCONV_HERE) {
    host::mbarrier_wait(barrier, parity, here);
}

#endif

#if JITCONV_ARCH >= 900

inline void fence_mbarrier_init() { host::mbarrier_init_fence(); }
inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes, JITCONV_HERE) {
    host::mbarrier_arrive(barrier, bytes, here);
}

inline void fence_proxy_async() { host::async_proxy_fence(); }

inline void bulk_load(void* shared, const void* source, uint32_t bytes, uint64_t* barrier, JITCONV_HERE) {
    host::bulk_load(shared, source, bytes, barrier, here);
}
inline void bulk_store(void* destination, const void* shared, uint32_t bytes, JITCONV_HERE) {
    host::bulk_store(destination, shared, bytes, here);
}
inline void bulk_commit_group() { host::bulk_commit(); }

template <int GROUPS>
inline void bulk_wait_group_read() {
    host::bulk_wait(GROUPS);
}

#endif

}  // namespace jitconv
