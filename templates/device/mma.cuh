// Warp-wide matrix products (mma.sync, sm_80 and up) and the loads that feed them.
//
// One instruction multiplies a 16 x k tile A by a k x 8 tile B into a 16 x 8 tile of fp32 accumulators, with
// g = lane / 4 and t = lane % 4. A word is one tf32 element (k = 8) or a pair of 16-bit ones (k = 16):
//
//     A  word 0: row g     word t        B  word 0: word t     of column g        C  0: row g     column 2t
//        word 1: row g + 8 word t           word 1: word t + 4 of column g           1: row g     column 2t + 1
//        word 2: row g     word t + 4                                                2: row g + 8 column 2t
//        word 3: row g + 8 word t + 4                                                3: row g + 8 column 2t + 1
//
// load_matrices reads four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8 and
// receives word t of row g of each: with positions as rows this is operand B, whatever the positions' addresses.
#pragma once

#include "device/numeric.cuh"
#include "device/platform.cuh"

#if defined(JITCONV_HOST)
#include "host/mma.h"
#else

namespace jitconv {

#if JITCONV_ARCH >= 800

__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// 16 bytes of a lane, read each time they are asked for: the compiler keeps no copy of what it has read before.
__device__ __forceinline__ uint4 load_again(const uint4* source) {
    uint4 words;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(shared_address(source))
                 : "memory");
    return words;
}

// c += a b; the multiplier reads the upper 19 bits of each word.
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    asm(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_half(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_bfloat16(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

#endif  // JITCONV_ARCH >= 800

}  // namespace jitconv

#endif
