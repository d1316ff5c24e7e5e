// Host twins of the conversion instructions, bit by bit; included by device/numeric.cuh and by the runtime only.
#pragma once

namespace jitconv {

inline float half_bits_to_float(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0x1fu) {
        return __uint_as_float(mantissa == 0 ? sign | 0x7f800000u : 0x7fffffffu);
    }
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return __uint_as_float(sign | __float_as_uint(magnitude));
    }
    return __uint_as_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

inline uint16_t float_to_half_bits(float value) {
    const uint32_t bits = __float_as_uint(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return 0x7fffu;
    }
    if (magnitude >= 0x477ff000u) {  // 65520, the first value that rounds up to 2^16
        return static_cast<uint16_t>(sign | 0x7c00u);
    }
    if (magnitude < 0x38800000u) {  // below 2^-14: one unit of the result is 2^-24; scaling by 2^24 is exact
        const float units = rintf(__uint_as_float(magnitude) * 0x1p24f);
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(units));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

inline uint16_t float_to_bfloat16_bits(float value) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0x7fffu;
    }
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float round_tf32(float value) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7f800000u) == 0x7f800000u) {
        return (bits & 0x7fffffu) == 0 ? value : __uint_as_float(0x7fffe000u);
    }
    return __uint_as_float((bits + 0x1000u) & 0xffffe000u);
}

namespace host {

// What tensor cores take of a word that they read as tf32.
inline float tf32_operand(uint32_t word) { return __uint_as_float(word & 0xffffe000u); }

}  // namespace host

}  // namespace jitconv
