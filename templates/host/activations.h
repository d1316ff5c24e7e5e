// Host twins of the approximate instructions in templates/device/activations.cuh.
//
// They round correctly where the hardware may be off by a unit or two, and take and give subnormals as zero, as it
// does. A test that asks whether the error bounds hold on any hardware defines the two macros to be as wrong as the
// hardware may be.
#pragma once

#include "host/platform.h"

#if !defined(JITCONV_EXP2)
#define JITCONV_EXP2(x) exp2f(x)
#define JITCONV_RECIPROCAL(d) (1.0f / (d))
#endif

namespace jitconv {
namespace act {
namespace detail {

inline float subnormal_to_zero(float v) { return fabsf(v) < 0x1p-126f ? copysignf(0.0f, v) : v; }

inline float exp2_approximate(float x) { return subnormal_to_zero(JITCONV_EXP2(subnormal_to_zero(x))); }

inline float reciprocal_approximate(float d) {
    // An infinity is written out: sanitizers may take a division by zero for a mistake.
    const float in = subnormal_to_zero(d);
    return in == 0.0f ? copysignf(HUGE_VALF, d) : subnormal_to_zero(JITCONV_RECIPROCAL(in));
}

// fmaxf takes NaN to 0, as the instruction's .sat does.
inline float saturate(float v) { return fminf(fmaxf(v, 0.0f), 1.0f); }

}  // namespace detail
}  // namespace act
}  // namespace jitconv
