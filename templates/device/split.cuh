// An fp32 value as the sum of two tf32 values, for products of fp32 accuracy on tensor cores.
//
//     x = hi + lo,  hi = x rounded to tf32 (11 bits),  lo = (x - hi) rounded to tf32: together 22 bits and the sign of
//                   lo, so that what is dropped is below 2^-23 of x.
#pragma once

#include "device/numeric.cuh"
#include "device/platform.cuh"

namespace jitconv {

// lo is 0 where hi is not finite, so that Inf and NaN travel in hi alone.
__device__ __forceinline__ void split_tf32(float value, uint32_t& hi, uint32_t& lo) {
    const float rounded = round_tf32(value);
    hi = __float_as_uint(rounded);
    const bool finite = (hi & 0x7f800000u) != 0x7f800000u;
    lo = finite ? __float_as_uint(round_tf32(value - rounded)) : 0u;
}

// A split product is exact to fp32 where hi and lo are normal numbers and finite: else the block that meets such a
// value computes in fp32. 2^-100 leaves lo its 11 bits above the smallest normal number, 2^-126.
__device__ __forceinline__ bool splits_exactly(float value) {
    const uint32_t magnitude = __float_as_uint(value) & 0x7fffffffu;
    return magnitude == 0u || (magnitude >= 0x0d800000u && magnitude < 0x7f000000u);
}

// Several values on their way into operands, by few instructions that wait for each other little: parts that mean nothing
// where one of the values does not split.
struct QuickSplit {
    uint32_t least = 0xffffffffu;  // twice the bits of the smallest value that is not 0, minus 1: the sign falls out
    float sum = 0.0f;              // of magnitudes

    // The low bits of lo mean nothing (tf32_operand).
    __device__ __forceinline__ void split(float value, uint32_t& hi, uint32_t& lo) {
        const uint32_t bits = __float_as_uint(value);
        least = min(least, bits * 2u - 1u);
        sum += fabsf(value);
        hi = (bits + 0x1000u) & 0xffffe000u;
        lo = __float_as_uint(value - __uint_as_float(hi)) + 0x1000u;
    }
    // Whether splits_exactly holds for all of them, and their sum is small enough too.
    __device__ __forceinline__ bool exact() const { return least >= 2u * 0x0d800000u - 1u && sum < 0x1p127f; }
};

}  // namespace jitconv
