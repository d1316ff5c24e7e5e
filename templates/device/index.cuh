// Element offsets and divisions by numbers known only at launch.
//
// A kernel is generated with Index = int32_t where every offset fits, else int64_t. A Divisor is built on the
// host (jitconv/layout.py) and passed by value:
//
//     Divisor<int32_t>  { divisor, multiplier, shift }   quotient by multiply-high and shift, for 0 <= n < 2^31
//     Divisor<int64_t>  { divisor }                      the machine's own division; rare and huge problems only
#pragma once

#include "device/platform.cuh"

namespace jitconv {

template <class Index>
struct Divisor;

// q = (mulhi(n, multiplier) + n) >> shift with shift = ceil(log2 divisor) and
// multiplier = floor(2^32 (2^shift - divisor) / divisor) + 1: exact for n < 2^31, where the sum cannot overflow
// (Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994).
template <>
struct Divisor<int32_t> {
    uint32_t divisor;
    uint32_t multiplier;
    uint32_t shift;

    __device__ __forceinline__ int32_t divide(int32_t n) const {
        const uint32_t numerator = static_cast<uint32_t>(n);
        return static_cast<int32_t>((__umulhi(numerator, multiplier) + numerator) >> shift);
    }
};

template <>
struct Divisor<int64_t> {
    int64_t divisor;

    __device__ __forceinline__ int64_t divide(int64_t n) const { return n / divisor; }
};

// Quotient and remainder in one step: returns n mod divisor and replaces n by n / divisor.
template <class Index>
__device__ __forceinline__ Index take_remainder(Index& n, const Divisor<Index>& by) {
    const Index quotient = by.divide(n);
    const Index remainder = n - quotient * static_cast<Index>(by.divisor);
    n = quotient;
    return remainder;
}

// An index of a 5-D tensor [n, channel, d, h, w]; 1-D and 2-D problems have extents of 1 in front.
template <class Index>
struct Coordinate {
    Index n, channel, d, h, w;
};

// Offset of a coordinate under strides given in the same order.
template <class Index>
__device__ __forceinline__ Index offset_of(const Coordinate<Index>& at, const Index (&stride)[5]) {
    return at.n * stride[0] + at.channel * stride[1] + at.d * stride[2] + at.h * stride[3] + at.w * stride[4];
}

}  // namespace jitconv
