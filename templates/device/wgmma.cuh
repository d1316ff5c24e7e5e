// Warpgroup matrix products (wgmma, sm_90a): the 128 threads of four consecutive warps multiply operands that lie in
// shared memory into accumulators in their registers, while they go on.
//
//     wgmma_fence()                        before the first product, and whenever the accumulators were touched
//     wgmma<MATH, N>(d, a, b, accumulate)  issues D[64][N] = A[64][k] B[N][k]^T (+ D), k = 32 bytes of an operand
//     wgmma_commit_group()                 what was issued since the last one is a group
//     wgmma_wait_group<GROUPS>()           all but the latest GROUPS groups have read their operands and written D
//
// D  With g = lane / 4 and t = lane % 4 warp w of the group holds row 16 w + g (and, 8 below, 16 w + g + 8):
//        d[4 j + 0], d[4 j + 1]   row g      columns 8 j + 2 t, 8 j + 2 t + 1
//        d[4 j + 2], d[4 j + 3]   row g + 8  the same columns
//
// A, B  Rows of k elements, as matrix_descriptor says: 8 rows of 16 bytes, one behind the other, are a core matrix;
//       two of them, `leading` bytes apart, make up k; the next 8 rows lie `stride` bytes further. No swizzle. All
//       numbers are multiples of 16 bytes below 2^18, so rows may be taken at any offset of 16 bytes: a filter's tap
//       is another start.
//
// Operands are read in the async proxy: an ordinary write to shared memory needs fence_proxy_async() by its writer.
#pragma once

#include "device/math.cuh"
#include "device/opaque.cuh"
#include "device/platform.cuh"

#if defined(JITCONV_HOST)
#include "host/wgmma.h"
#else

namespace jitconv {

#if JITCONV_ARCH == 900

// The part of a descriptor that does not say where the operand starts.
__device__ constexpr uint64_t matrix_descriptor(uint32_t leading, uint32_t stride) {
    return static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(stride >> 4) << 32;
}

// The descriptor of an operand that starts at shared address `start`, a multiple of 16 bytes.
__device__ __forceinline__ uint64_t descriptor_at(uint64_t descriptor, uint32_t start) {
    return descriptor | static_cast<uint64_t>(start >> 4);
}

// The same operand `bytes` further, a multiple of 16.
__device__ __forceinline__ uint64_t advance_descriptor(uint64_t descriptor, uint32_t bytes) {
    // The start stays below 2^14: nothing is carried into the fields above it.
    const uint32_t low = static_cast<uint32_t>(descriptor) + (bytes >> 4);
    return (descriptor & 0xffffffff00000000u) | low;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int GROUPS>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

namespace detail {

template <int N>
struct Wgmma;

// Operand names of 16 accumulators each, and the accumulators themselves.
#define JITCONV_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JITCONV_NAMES_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JITCONV_NAMES_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define JITCONV_NAMES_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JITCONV_NAMES_4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define JITCONV_NAMES_5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JITCONV_NAMES_6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define JITCONV_NAMES_7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define JITCONV_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define JITCONV_D16(i) JITCONV_D4(i), JITCONV_D4(i + 4), JITCONV_D4(i + 8), JITCONV_D4(i + 12)
#define JITCONV_D32(i) JITCONV_D16(i), JITCONV_D16(i + 16)
#define JITCONV_D64(i) JITCONV_D32(i), JITCONV_D32(i + 32)

// A, B and P name the operands behind the accumulators; TAIL says that A and B are not negated (and, for 16-bit types,
// that both have k innermost).
#define JITCONV_WGMMA_ASM(N, TYPE, NAMES, A, B, P, TAIL, ...)                                                   \
    asm volatile(                                                                                               \
        "{\n"                                                                                                   \
        ".reg .pred accumulate;\n"                                                                              \
        "setp.ne.b32 accumulate, " P ", 0;\n"                                                                   \
        "wgmma.mma_async.sync.aligned.m64n" #N TYPE " {" NAMES "}, " A ", " B ", accumulate, " TAIL ";\n"        \
        "}\n"                                                                                                   \
        : __VA_ARGS__                                                                                           \
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate))                                                     \
        : "memory")

#define JITCONV_WGMMA(N, NAMES, A, B, P, ...)                                                                   \
    template <>                                                                                                 \
    struct Wgmma<N> {                                                                                           \
        template <Math MATH>                                                                                    \
        static __device__ __forceinline__ void issue(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) { \
            if constexpr (MATH == Math::HALF) {                                                                 \
                JITCONV_WGMMA_ASM(N, "k16.f32.f16.f16", NAMES, A, B, P, "1, 1, 0, 0", __VA_ARGS__);             \
            } else if constexpr (MATH == Math::BFLOAT16) {                                                      \
                JITCONV_WGMMA_ASM(N, "k16.f32.bf16.bf16", NAMES, A, B, P, "1, 1, 0, 0", __VA_ARGS__);           \
            } else {                                                                                            \
                JITCONV_WGMMA_ASM(N, "k8.f32.tf32.tf32", NAMES, A, B, P, "1, 1", __VA_ARGS__);                  \
            }                                                                                                   \
        }                                                                                                       \
    };

JITCONV_WGMMA(8, "%0, %1, %2, %3", "%4", "%5", "%6",
              JITCONV_D4(0))
JITCONV_WGMMA(16, "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10",
              JITCONV_D4(0), JITCONV_D4(4))
JITCONV_WGMMA(32, JITCONV_NAMES_0, "%16", "%17", "%18",
              JITCONV_D16(0))
JITCONV_WGMMA(64, JITCONV_NAMES_0 ", " JITCONV_NAMES_1, "%32", "%33", "%34",
              JITCONV_D32(0))
JITCONV_WGMMA(96, JITCONV_NAMES_0 ", " JITCONV_NAMES_1 ", " JITCONV_NAMES_2, "%48", "%49", "%50",
              JITCONV_D32(0), JITCONV_D16(32))
JITCONV_WGMMA(128, JITCONV_NAMES_0 ", " JITCONV_NAMES_1 ", " JITCONV_NAMES_2 ", " JITCONV_NAMES_3, "%64", "%65", "%66",
              JITCONV_D64(0))
JITCONV_WGMMA(192, JITCONV_NAMES_0 ", " JITCONV_NAMES_1 ", " JITCONV_NAMES_2 ", " JITCONV_NAMES_3 ", " JITCONV_NAMES_4 ", " JITCONV_NAMES_5, "%96", "%97", "%98",
              JITCONV_D64(0), JITCONV_D32(64))
JITCONV_WGMMA(256, JITCONV_NAMES_0 ", " JITCONV_NAMES_1 ", " JITCONV_NAMES_2 ", " JITCONV_NAMES_3 ", " JITCONV_NAMES_4 ", " JITCONV_NAMES_5 ", " JITCONV_NAMES_6 ", " JITCONV_NAMES_7, "%128", "%129", "%130",
              JITCONV_D64(0), JITCONV_D64(64))

#undef JITCONV_WGMMA
#undef JITCONV_WGMMA_ASM
#undef JITCONV_NAMES_0
#undef JITCONV_NAMES_1
#undef JITCONV_NAMES_2
#undef JITCONV_NAMES_3
#undef JITCONV_NAMES_4
#undef JITCONV_NAMES_5
#undef JITCONV_NAMES_6
#undef JITCONV_NAMES_7
#undef JITCONV_D4
#undef JITCONV_D16
#undef JITCONV_D32
#undef JITCONV_D64

}  // namespace detail

// d = a b, plus d if `accumulate`. The accumulators belong to the products until the wait behind them.
template <Math MATH, int N>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
    detail::Wgmma<N>::template issue<MATH>(d, a, b, accumulate);
}

// Registers of every thread of the calling warpgroup, a multiple of 8 up to 256: taken from or given to the others.
template <int COUNT>
__device__ __forceinline__ void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

#endif  // JITCONV_ARCH == 900

}  // namespace jitconv

#endif
