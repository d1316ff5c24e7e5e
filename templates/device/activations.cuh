// Pointwise functions of the epilogue: one fp32 value in, one fp32 value out.
//
// What each function is stands in torch's documentation under the same name (torch.nn.functional.mish,
// torch.clamp, ...). How it is computed is decided here, by one rule over all of fp32:
//
//   error <= 1e-6 |exact|, or one step of 2^-149 where the result is subnormal
//
// where "exact" is the same function in real arithmetic. (Some of torch's own fp32 functions lose all digits
// in a tail, so theirs is no measure.) NaN, +-Inf and the sign of zero come out as from torch: silu, mish, gelu
// and hardswish of -Inf are NaN (-Inf * 0); minimum, maximum and clamp keep NaN.
//
// Tools that several functions share:
//
//   exp(-|v|) instead of exp(v)      never overflows, so no quotient is Inf / Inf. The negative side follows
//                                    from 1 / (1 + e^-v) = e^v / (1 + e^v).
//   h = exp(x / 2), then (v h) h     instead of v exp(x): exp(x) alone is subnormal, and has lost its digits,
//                                    already where v exp(x) is still a normal number. x / 2 is exact.
//   hi + lo                          an error d in x is a relative error d in exp(x), so an x near 90 that was
//                                    rounded once costs exp(x) 5e-6. Where x is itself a product, lo holds
//                                    what rounding dropped, exactly (Dekker's product by fma), and
//                                    exp(hi + lo) = exp(hi) (1 + lo). Correct with fma contraction on or off.
//
// Requires IEEE division, square root and subnormals (the compiler's defaults; not fast-math).
#pragma once

#include "device/platform.cuh"

namespace jitconv {
namespace act {

namespace detail {

// 1 / d for 2^-126 <= |d| <= 2^60. IEEE division branches to a slow path for operands that cannot occur
// here. One Newton step takes the hardware's approximation to within one rounding, and 1 / 1 to exactly 1.
__device__ __forceinline__ float reciprocal_in_range(float d) {
#if defined(JITCONV_HOST)
    float r = 1.0f / d;
#else
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
#endif
    return fmaf(r, fmaf(-d, r, 1.0f), r);
}

// v / (1 + e) for v >= 0 and v e / (1 + e) for v < 0: v times the logistic function, given e = h h = exp(-|x|)
// for an x with the sign of v. Multiplying by h twice keeps the negative tail's digits.
__device__ __forceinline__ float times_logistic(float v, float h) {
    const float numerator = v < 0.0f ? (v * h) * h : v;
    return numerator * reciprocal_in_range(fmaf(h, h, 1.0f));
}

}  // namespace detail

// ---- order: minimum, maximum and what follows from them --------------------------------------------------
// fminf and fmaxf drop NaN; torch keeps it. A NaN in `a` fails the comparison and stays, one in `b` is asked for:
// for a bound that is a constant or the same for all elements, that question costs nothing. Equal values give
// `a`, so a bound of 0 leaves -0 as it is.

__device__ __forceinline__ float minimum(float a, float b) {
    return b < a || b != b ? b : a;
}

__device__ __forceinline__ float maximum(float a, float b) {
    return b > a || b != b ? b : a;
}

__device__ __forceinline__ float clamp_min(float v, float lo) {
    return maximum(v, lo);
}

__device__ __forceinline__ float clamp_max(float v, float hi) {
    return minimum(v, hi);
}

// lo > hi gives hi: the upper bound is applied last.
__device__ __forceinline__ float clamp(float v, float lo, float hi) {
    return minimum(maximum(v, lo), hi);
}

__device__ __forceinline__ float hardtanh(float v, float lo, float hi) {
    return clamp(v, lo, hi);
}

__device__ __forceinline__ float relu(float v) {
    return maximum(v, 0.0f);
}

__device__ __forceinline__ float relu6(float v) {
    return clamp(v, 0.0f, 6.0f);
}

__device__ __forceinline__ float leaky_relu(float v, float slope) {
    return v > 0.0f ? v : v * slope;
}

// relu6(v + 3) / 6. v + 3 is exact where it is small; 6 * fl(1/6) rounds to exactly 1.
__device__ __forceinline__ float hardsigmoid(float v) {
    return relu6(v + 3.0f) * 0x1.555556p-3f;
}

// The factor is at most 1, so v near the largest float does not overflow on the way (6 v would).
__device__ __forceinline__ float hardswish(float v) {
    return v * hardsigmoid(v);
}

// ---- elementary ------------------------------------------------------------------------------------------

__device__ __forceinline__ float abs(float v) {
    return fabsf(v);
}

__device__ __forceinline__ float neg(float v) {
    return -v;
}

__device__ __forceinline__ float square(float v) {
    return v * v;
}

__device__ __forceinline__ float sqrt(float v) {
    return sqrtf(v);
}

__device__ __forceinline__ float reciprocal(float v) {
    return 1.0f / v;
}

__device__ __forceinline__ float exp(float v) {
    return expf(v);
}

// tanh |v| = (1 - e) / (1 + e) with e = exp(-2 |v|). Near zero 1 - e cancels: there v (1 + s P(s)), s = v^2, with P
// the minimax fit of (tanh v / v - 1) / s on |v| <= 0.3 (relative error of the result 1.2e-8).
__device__ __forceinline__ float tanh(float v) {
    const float magnitude = fabsf(v);
    const float e = expf(-2.0f * magnitude);
    const float large = copysignf((1.0f - e) * detail::reciprocal_in_range(1.0f + e), v);
    const float s = v * v;
    const float p = fmaf(fmaf(-0.0503723023f, s, 0.133149087f), s, -0.333330631f);
    const float small = v * fmaf(s, p, 1.0f);
    return magnitude < 0.3f ? small : large;
}

// v / (1 + |v|). The denominator goes up to the largest float: IEEE division.
__device__ __forceinline__ float softsign(float v) {
    return v / (1.0f + fabsf(v));
}

// ---- logistic family -------------------------------------------------------------------------------------

__device__ __forceinline__ float sigmoid(float v) {
    const float e = expf(-fabsf(v));
    return (v < 0.0f ? e : 1.0f) * detail::reciprocal_in_range(1.0f + e);
}

__device__ __forceinline__ float silu(float v) {
    return detail::times_logistic(v, expf(-0.5f * fabsf(v)));
}

// log(1 / (1 + e^-v)) = min(v, 0) - log1p(e^-|v|): two terms of one sign, in both tails.
__device__ __forceinline__ float logsigmoid(float v) {
    return fminf(v, 0.0f) - log1pf(expf(-fabsf(v)));
}

// log(1 + e^z) / beta = (max(z, 0) + log1p(e^-|z|)) / beta, z = v beta; v itself where z > threshold. z is the
// rounded product, as in torch, where it is compared; z + lo where it is an exponent. Below z = -20,
// log1p(e) = e to fp32 and the division comes between the two factors h. |z| < 128 keeps Inf - Inf out of lo;
// e^-104 is already 0.
__device__ __forceinline__ float softplus(float v, float beta, float threshold) {
    const float z = v * beta;
    const float magnitude = fabsf(z);
    const float lo = magnitude < 128.0f ? fmaf(v, beta, -z) : 0.0f;
    const float h = expf(-0.5f * magnitude);
    const float scaled = fmaf(h, z < 0.0f ? lo : -lo, h);
    const float inverse = 1.0f / beta;
    const float tail = (scaled * inverse) * h;
    const float body = (fmaxf(z, 0.0f) + log1pf(scaled * h)) * inverse;
    const float value = z < -20.0f ? tail : body;
    return z > threshold ? v : value;
}

// v tanh(log(1 + e)), e = e^v. tanh(log(1 + e)) = ((1 + e)^2 - 1) / ((1 + e)^2 + 1) = n / (n + 2), n = e (e + 2):
// sums of positive terms, nothing cancels. For v < 0 with n = h h (e + 2) and one h multiplied into v, so that the
// tail v e^v keeps its digits. Otherwise as 1 - 2 / (n + 2), which is exactly 1 from v = 9.1 on: 20 stands for
// all larger v, and nothing overflows (fminf drops a NaN; the factor v brings it back).
__device__ __forceinline__ float mish(float v) {
    const float h = expf(0.5f * fminf(v, 20.0f));
    const float e = h * h;
    const float e_plus_2 = e + 2.0f;
    const float r = detail::reciprocal_in_range(fmaf(e, e_plus_2, 2.0f));
    return v < 0.0f ? (v * h) * ((h * e_plus_2) * r) : v * fmaf(-2.0f, r, 1.0f);
}

// ---- exponential-linear family ---------------------------------------------------------------------------

__device__ __forceinline__ float elu(float v, float alpha) {
    return v < 0.0f ? alpha * expm1f(v) : v;
}

// elu with torch's alpha = 1.67326324... scaled by 1.05070098...; the second number is their product.
__device__ __forceinline__ float selu(float v) {
    return v < 0.0f ? 1.75809934f * expm1f(v) : 1.05070098f * v;
}

// alpha (e^(v / alpha) - 1) for v < 0. With alpha < 0 the exponent is positive and its rounding shows in the
// result, hence the second term: d/dx expm1(x) = expm1(x) + 1, times what rounding v / alpha left over.
// From 88.73 on e^x is Inf and needs no correction. A tiny v is its own result, also where v / alpha is subnormal.
__device__ __forceinline__ float celu(float v, float alpha) {
    const float inverse = 1.0f / alpha;
    const float x = v * inverse;
    const float rounded = expm1f(x);
    const float lo = fmaf(-x, alpha, v) * inverse;
    const float grown = x > 1.0f && x < 88.7f ? fmaf(rounded + 1.0f, lo, rounded) : rounded;
    return v < 0.0f && fabsf(x) > 0x1p-26f ? alpha * grown : v;
}

// ---- gelu ------------------------------------------------------------------------------------------------

// v Phi(v), Phi the normal distribution function. (1 + erf, as the definition reads, cancels for v < 0.) With
// x = |v|
//
//     Phi(-x) = exp(-x^2 / 2) g(x)        g(x) = erfcx(x / sqrt 2) / 2, slowly varying: 0.5 ... 0.028
//
// so the result is v Phi(-x) on the left and v (1 - Phi(-x)) on the right. x^2 = s + s_lo exactly, and
// exp(-x^2 / 2) = h h. g is u P(u), u = 1 / (1 + 0.35 x), P the minimax fit on x <= 15 (relative error
// 3.2e-8). From x = 24 on h itself is 0, as -0 for large negative v and NaN for -Inf require (fminf drops a NaN;
// the factor v brings it back).
__device__ __forceinline__ float gelu_erf(float v) {
    const float x = fminf(fabsf(v), 24.0f);
    const float s = x * x;
    const float s_lo = fmaf(x, x, -s);
    const float rounded = expf(-0.25f * s);
    const float h = fmaf(rounded, -0.25f * s_lo, rounded);
    const float u = detail::reciprocal_in_range(fmaf(0.35f, x, 1.0f));
    float g = -0.0291643962f;
    g = fmaf(g, u, 0.144063056f);
    g = fmaf(g, u, -0.255906403f);
    g = fmaf(g, u, 0.15939796f);
    g = fmaf(g, u, -0.0232671984f);
    g = fmaf(g, u, 0.105576172f);
    g = fmaf(g, u, 0.119815171f);
    g = fmaf(g, u, 0.139864385f);
    g = fmaf(g, u, 0.139621258f);
    const float tail = h * (u * g);
    return v < 0.0f ? (v * h) * tail : v * fmaf(-h, tail, 1.0f);
}

// (v / 2) (1 + tanh u) = v / (1 + e^-2u), 2u = v (A + B v^2), A = 2 sqrt(2 / pi), B = 0.044715 A. (1 + tanh cancels
// for v < 0.) 2u is carried as w + w_lo: A, B, v^2, the sum and the product each with what their rounding left.
// From |v| = 16 on h itself is 0, as -0 for large negative v and NaN for -Inf require.
__device__ __forceinline__ float gelu_tanh(float v) {
    const float A = 0x1.988454p+0f, A_lo = -0x1.857936p-25f;
    const float B = 0x1.2444f2p-4f, B_lo = 0x1.49b16ap-29f;
    const float c = fminf(fabsf(v), 16.0f);
    const float s = c * c;
    const float s_lo = fmaf(c, c, -s);
    const float q = B * s;
    const float q_lo = fmaf(B, s, -q) + fmaf(B, s_lo, fmaf(B_lo, s, A_lo));
    const float p = q + A;
    const float p_lo = fminf(q, A) - (p - fmaxf(q, A)) + q_lo;
    const float w = c * p;
    const float w_lo = fmaf(c, p, -w) + c * p_lo;
    const float h = expf(-0.5f * w);
    return detail::times_logistic(v, fmaf(h, -0.5f * w_lo, h));
}

}  // namespace act
}  // namespace jitconv
