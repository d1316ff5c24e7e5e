// Storage types and conversions. A tensor element is stored as one of
//
//     float       32 bits
//     half_t      16 bits   s eeeee mmmmmmmmmm        IEEE binary16
//     bfloat16_t  16 bits   s eeeeeeee mmmmmmm        the upper half of a float
//     double      64 bits   (0-d operands of an epilogue only)
//
// and is computed with as a float. Conversions to storage round to nearest even; NaN stays NaN, Inf stays Inf,
// subnormals are exact.
#pragma once

#include "device/platform.cuh"

namespace jitconv {

struct half_t {
    uint16_t bits;
};

struct bfloat16_t {
    uint16_t bits;
};

}  // namespace jitconv

#if defined(JITCONV_HOST)
#include "host/numeric.h"
#else

namespace jitconv {

__device__ __forceinline__ float half_bits_to_float(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ uint16_t float_to_half_bits(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ uint16_t float_to_bfloat16_bits(float value) {
#if JITCONV_ARCH >= 800
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    // Adding half of the dropped part, less one when the kept part is even, carries exactly when RN-even does.
    const uint32_t bits = __float_as_uint(value);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return static_cast<uint16_t>(isnan(value) ? 0x7fffu : rounded >> 16);
#endif
}

// Round to TF32 (10 bits of mantissa), to nearest, ties away from zero. The low 13 bits of the result are zero.
__device__ __forceinline__ float round_tf32(float value) {
#if JITCONV_ARCH >= 800
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
    // The instruction passes NaN through: one whose payload lies in the dropped bits alone would become Inf.
    return __uint_as_float(isnan(value) ? 0x7fffe000u : bits & 0xffffe000u);
#else
    const uint32_t bits = __float_as_uint(value);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    return __uint_as_float(isnan(value) ? 0x7fffe000u : (finite ? bits + 0x1000u : bits) & 0xffffe000u);
#endif
}

}  // namespace jitconv

#endif

namespace jitconv {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(double value) { return static_cast<float>(value); }
__device__ __forceinline__ float to_float(half_t value) { return half_bits_to_float(value.bits); }
__device__ __forceinline__ float to_float(bfloat16_t value) {
    return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}

template <class T>
struct FromFloat;

template <>
struct FromFloat<float> {
    static __device__ __forceinline__ float convert(float value) { return value; }
};

template <>
struct FromFloat<double> {
    static __device__ __forceinline__ double convert(float value) { return value; }
};

template <>
struct FromFloat<half_t> {
    static __device__ __forceinline__ half_t convert(float value) { return {float_to_half_bits(value)}; }
};

template <>
struct FromFloat<bfloat16_t> {
    static __device__ __forceinline__ bfloat16_t convert(float value) { return {float_to_bfloat16_bits(value)}; }
};

// from_float<half_t>(value): `value` rounded to T, the one rounding at the end of a kernel.
template <class T>
__device__ __forceinline__ T from_float(float value) {
    return FromFloat<T>::convert(value);
}

// A value as an operand of a TF32 product, which reads the upper 19 bits of the word: rounded as round_tf32 does, with
// low bits that mean nothing.
__device__ __forceinline__ uint32_t tf32_operand(float value) {
    return isnan(value) ? 0x7fffffffu : __float_as_uint(value) + 0x1000u;
}

// COUNT elements that move as one access of at most 16 bytes. The address must be a multiple of the whole size.
template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Vector {
    static_assert(sizeof(T) * COUNT <= 16, "one access moves at most 16 bytes");
    T element[COUNT];
};

template <int COUNT, class T>
__device__ __forceinline__ Vector<T, COUNT> load_vector(const T* source) {
    return *reinterpret_cast<const Vector<T, COUNT>*>(source);
}

template <int COUNT, class T>
__device__ __forceinline__ void store_vector(T* destination, const Vector<T, COUNT>& value) {
    *reinterpret_cast<Vector<T, COUNT>*>(destination) = value;
}

}  // namespace jitconv
