// Copies that run while the threads go on, and the objects that tell when they have landed.
//
//     cp.async       one thread moves 4, 8 or 16 bytes, global to shared; groups of them complete in order
//                        copy copy | commit | copy | commit | wait_group<1>: the first group has landed
//     mbarrier       8 bytes of shared memory. A phase completes when all arrivals are in and all expected
//                    bytes have landed; waiting names the parity of the phase (the first is 0).
//     cp.async.bulk  one thread moves a row, a multiple of 16 bytes. Loads complete on an mbarrier, stores in
//                    groups of the issuing thread. They run in the async proxy, which sees an ordinary write to
//                    shared memory only after fence_proxy_async() by the writer.
//
// cp.async needs sm_80; below, it is an ordinary copy that has landed at once. mbarriers need sm_80, what counts bytes
// on them sm_90.
#pragma once

#include "device/platform.cuh"

#if defined(JITCONV_HOST)
#include "host/async_copy.h"
#else

namespace jitconv {

// ---- cp.async --------------------------------------------------------------------------------------------------

namespace detail {

template <int BYTES>
struct Chunk;
template <>
struct Chunk<4> {
    using type = uint32_t;
};
template <>
struct Chunk<8> {
    using type = uint2;
};
template <>
struct Chunk<16> {
    using type = uint4;
};

}  // namespace detail

// Copies BYTES bytes if `valid`, else writes zeros and does not read `source`. Both addresses are multiples of
// BYTES. 16 bytes bypass L1.
template <int BYTES>
__device__ __forceinline__ void cp_async_zero_fill(void* shared, const void* source, bool valid) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async moves 4, 8 or 16 bytes");
#if JITCONV_ARCH >= 800
    const int source_bytes = valid ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(source),
                     "r"(source_bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(source),
                     "n"(BYTES), "r"(source_bytes)
                     : "memory");
    }
#else
    using Chunk = typename detail::Chunk<BYTES>::type;
    *static_cast<Chunk*>(shared) = valid ? *static_cast<const Chunk*>(source) : Chunk{};
#endif
}

template <int BYTES>
__device__ __forceinline__ void cp_async(void* shared, const void* source) {
    cp_async_zero_fill<BYTES>(shared, source, true);
}

__device__ __forceinline__ void cp_async_commit_group() {
#if JITCONV_ARCH >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most GROUPS of this thread's latest groups are in flight. Other threads see the data only
// after a barrier behind this.
template <int GROUPS>
__device__ __forceinline__ void cp_async_wait_group() {
#if JITCONV_ARCH >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#endif
}

#if JITCONV_ARCH >= 800

// ---- mbarrier --------------------------------------------------------------------------------------------------

// One thread initialises; the others may use it after fence_mbarrier_init() by that thread and a barrier.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
#if JITCONV_ARCH >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#else
    asm volatile(
        "{\n"
        ".reg .b64 state;\n"
        "mbarrier.arrive.shared.b64 state, [%0];\n"
        "}\n" ::"r"(shared_address(barrier))
        : "memory");
#endif
}

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
#if JITCONV_ARCH >= 900
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "RETRY:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
        "@!complete bra RETRY;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "RETRY:\n"
        "mbarrier.test_wait.parity.shared.b64 complete, [%0], %1;\n"
        "@!complete bra RETRY;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
#endif
}

#endif  // JITCONV_ARCH >= 800

#if JITCONV_ARCH >= 900

__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and adds `bytes` to what the current phase waits for.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// ---- cp.async.bulk ---------------------------------------------------------------------------------------------

__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// `bytes`, both addresses: multiples of 16. The bytes count against `barrier` as they land.
__device__ __forceinline__ void bulk_load(void* shared, const void* source, uint32_t bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(source), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

__device__ __forceinline__ void bulk_store(void* destination, const void* shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the latest GROUPS groups of this thread's stores have read their source, which may then be
// written again.
template <int GROUPS>
__device__ __forceinline__ void bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS) : "memory");
}

#endif  // JITCONV_ARCH >= 900

}  // namespace jitconv

#endif
