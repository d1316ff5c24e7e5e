// Host twins of templates/device/wgmma.cuh; included by it only. What they do is in wgmma.cpp.
#pragma once

namespace jitconv {

// Like their originals, they exist for sm_90a only: a kernel for another architecture that uses them must not compile
// here either.
#if JITCONV_ARCH == 900

constexpr uint64_t matrix_descriptor(uint32_t leading, uint32_t stride) {
    return static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(stride >> 4) << 32;
}

inline uint64_t descriptor_at(uint64_t descriptor, uint32_t start) {
    return descriptor | static_cast<uint64_t>(start >> 4);
}

// The same operand `bytes` further.
inline uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) {
    return (descriptor & 0xffffffff00000000u) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

inline void wgmma_fence(JITCONV_HERE) { host::warpgroup_fence(here); }
inline void wgmma_commit_group(JITCONV_HERE) { host::warpgroup_commit(here); }

template <int GROUPS>
inline void wgmma_wait_group(JITCONV_HERE) {
    static_assert(GROUPS >= 0 && GROUPS <= 7, "wgmma.wait_group counts up to 7 groups");
    host::warpgroup_wait(GROUPS, here);
}

template <Math MATH, int N>
inline void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate, JITCONV_HERE) {
    static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 96 || N == 128 || N == 192 || N == 256,
                  "the device has no wgmma of this N");
    constexpr host::Operand OPERAND = MATH == Math::HALF       ? host::Operand::half
                                      : MATH == Math::BFLOAT16 ? host::Operand::bfloat16
                                                               : host::Operand::tf32;
    host::warpgroup_product(d, {OPERAND, N, a, b, accumulate}, here);
}

template <int COUNT>
inline void decrease_registers(JITCONV_HERE) {
    static_assert(COUNT >= 24 && COUNT <= 256 && COUNT % 8 == 0, "setmaxnreg takes a multiple of 8 from 24 to 256");
    host::warpgroup_registers(COUNT, here);
}

template <int COUNT>
inline void increase_registers(JITCONV_HERE) {
    static_assert(COUNT >= 24 && COUNT <= 256 && COUNT % 8 == 0, "setmaxnreg takes a multiple of 8 from 24 to 256");
    host::warpgroup_registers(COUNT, here);
}

#endif  // JITCONV_ARCH == 900

}  // namespace jitconv
