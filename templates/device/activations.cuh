// Pointwise functions of the epilogue: one fp32 value in, one fp32 value out.
//
// What each function is stands in torch's documentation under the same name (torch.nn.functional.mish,
// torch.clamp, ...). How it is computed is decided here, by one rule over all of fp32:
//
//   error <= 1e-6 |exact|, plus half a step of 2^-149 where the result is subnormal
//
// where "exact" is the same function in real arithmetic. (Some of torch's own fp32 functions lose all digits
// in a tail, so theirs is no measure.) One exception: a gelu below 2^-122 (v < -10 or so) may be flushed to zero, as
// torch's own is from v = -6 on. NaN, +-Inf and the sign of zero come out as from torch: silu, mish, gelu
// and hardswish of -Inf are NaN (-Inf * 0); minimum, maximum and clamp keep NaN.
//
// Next to a product on tensor cores every instruction here counts, so the functions are straight lines (selects, no
// branches) around the hardware's own 2^x and 1 / d. Tools that several of them share:
//
//   no refinement       2^x is good to 2 units in the last place (2.4e-7), 1 / d to one (1.2e-7). Both fit into 1e-6
//                       as they are if nothing cancels: near a zero of the function a short polynomial stands in.
//   what rounding left  an error d in x is a relative error d in exp(x), so an exponent near 90 that was rounded
//                       once costs 5e-6. `rest` is what the exponent that was used lacks, exact to second order, and
//                       exp(x) (1 + rest) repairs it. Only the side where the exponential is the result needs it; on
//                       the other the result is near its limit.
//   rest in [0, 1]      log2(e) is chosen a little too large (or small), so that on the side that needs it rest is
//                       never negative. Clamping to [0, 1] comes with the instruction that computes rest and
//                       turns what Inf - Inf gives into 0, without a comparison.
//   exp(x) = a b        in two factors near exp(x / 2): exp(x) alone is subnormal, and has lost its digits, already
//                       where v exp(x) is still a normal number.
//
// All corrections are written with fmaf: results are right with fma contraction on or off. Requires IEEE division,
// square root and subnormals (the compiler's defaults; not fast-math).
#pragma once

#include "device/platform.cuh"

#if defined(JITCONV_HOST)
#include "host/activations.h"
#else

namespace jitconv {
namespace act {
namespace detail {

// 2^x and 1 / d by one instruction each, to 2 units in the last place and to 1; exact where the result is a power of
// two. Subnormals count as zero, going in and coming out.
__device__ __forceinline__ float exp2_approximate(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ float reciprocal_approximate(float d) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(d));
    return result;
}

// v clamped to [0, 1], NaN to 0. Costs nothing: the instruction that computes v does it.
__device__ __forceinline__ float saturate(float v) {
    return __saturatef(v);
}

}  // namespace detail
}  // namespace act
}  // namespace jitconv

#endif

namespace jitconv {
namespace act {

namespace detail {

constexpr float LOG2_E = 0x1.715476p+0f;
constexpr float LN_2 = 0x1.62e43p-1f;  // relative error 2.7e-9

// log2(e) / 2, off by 1.5e-7 and -0.96e-7: more than the 0.6e-7 that rounding a product with it may be off.
constexpr float HALF_LOG2_E_ABOVE = 0x1.71547ap-1f;
constexpr float HALF_LOG2_E_BELOW = 0x1.715474p-1f;

// exp(x) = rough * repaired
struct ExpFactors {
    float rough;
    float repaired;
};

// exp(x) for x <= 0, -Inf included; for x > 0 it is off by 1.5e-7 x, for want of a repair.
__device__ __forceinline__ ExpFactors exp_factors(float x) {
    const float t = x * HALF_LOG2_E_ABOVE;
    const float h = exp2_approximate(t);
    const float rest = saturate(fmaf(t, -2.0f * LN_2, x));
    return {h, fmaf(h, rest, h)};
}

// exp(x + x_lo) for x <= 0, x_lo what was left when x was rounded.
__device__ __forceinline__ ExpFactors exp_factors(float x, float x_lo) {
    const float t = x * HALF_LOG2_E_ABOVE;
    const float h = exp2_approximate(t);
    const float rest = saturate(fmaf(t, -2.0f * LN_2, x) + x_lo);
    return {h, fmaf(h, rest, h)};
}

// log(1 + e) / e for 0 <= e <= 1: minimax fit (relative error 2.2e-7) that is exactly 1 at 0.
__device__ __forceinline__ float log1p_over(float e) {
    float p = -0.00877753459f;
    p = fmaf(p, e, 0.0449815057f);
    p = fmaf(p, e, -0.109015696f);
    p = fmaf(p, e, 0.178467155f);
    p = fmaf(p, e, -0.245366991f);
    p = fmaf(p, e, 0.332840383f);
    p = fmaf(p, e, -0.499981791f);
    return fmaf(p, e, 1.0f);
}

// e^x - 1 for x <= 0; the caller drops the rest. Near zero, where the difference cancels, the minimax fit of
// (e^x - 1) / x on x >= -0.55 (relative error 1.4e-7). Below, e^x is small enough beside 1 for its error to fit.
__device__ __forceinline__ float expm1_of_negative(float x) {
    const float far = exp2_approximate(x * LOG2_E) - 1.0f;
    float p = 0.00667142775f;
    p = fmaf(p, x, 0.0409205593f);
    p = fmaf(p, x, 0.166531146f);
    p = fmaf(p, x, 0.499992222f);
    const float near = x * fmaf(p, x, 1.0f);
    return x > -0.55f ? near : far;
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

// The factor is at most 1, so v near the largest float does not overflow on the way (6 v would). Clamping the factor
// loses a NaN, which v brings back.
__device__ __forceinline__ float hardswish(float v) {
    return v * detail::saturate((v + 3.0f) * 0x1.555556p-3f);
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

// tanh |v| = 1 - 2 / (1 + e^2|v|), which is exactly 1 from where e^2|v| has outgrown the 1, infinite or not. Near zero
// that cancels: there v (1 + s P(s)), s = v^2, with P the minimax fit of (tanh v / v - 1) / s on |v| <= 0.42 (relative
// error of the result 1.7e-7).
__device__ __forceinline__ float tanh(float v) {
    const float magnitude = fabsf(v);
    const float e = detail::exp2_approximate(magnitude * (2.0f * detail::LOG2_E));
    const float far = copysignf(fmaf(-2.0f, detail::reciprocal_approximate(1.0f + e), 1.0f), v);
    const float s = v * v;
    const float p = fmaf(fmaf(-0.0472175591f, s, 0.132663622f), s, -0.333314121f);
    const float near = v * fmaf(s, p, 1.0f);
    return magnitude < 0.42f ? near : far;
}

// v / (1 + |v|). An eighth of the denominator keeps its reciprocal a normal number up to the largest float.
__device__ __forceinline__ float softsign(float v) {
    return (v * detail::reciprocal_approximate(fmaf(fabsf(v), 0.125f, 0.125f))) * 0.125f;
}

// ---- logistic family -------------------------------------------------------------------------------------

// 1 / (1 + e^-v), e^-v = h^2 (1 + rest). For v < 0 the result is 1 / e^-v but for its limit 1, so the repair is
// r (1 - rest). 2^-64 keeps 1 + e^-v and its reciprocal among the normal numbers to the end of the tail.
__device__ __forceinline__ float sigmoid(float v) {
    const float t = v * -detail::HALF_LOG2_E_BELOW;
    const float h = detail::exp2_approximate(t);
    const float rest = detail::saturate(fmaf(t, -2.0f * detail::LN_2, -v));
    const float r = detail::reciprocal_approximate(fmaf(h * 0x1p-64f, h, 0x1p-64f));
    return fmaf(-rest, r, r) * 0x1p-64f;
}

// v e / (1 + e), e = e^v = a b. The larger factors first, so that the tail v e^v keeps its digits. One v stands in e
// for all larger ones: there a = 2^30, b = a and 1 + e rounds to e, so that the result is v. (fminf drops a NaN; the
// factor v brings it back.)
__device__ __forceinline__ float silu(float v) {
    const detail::ExpFactors h = detail::exp_factors(fminf(v, 0x1.4cb5eap+5f));
    const float r = detail::reciprocal_approximate(fmaf(h.rough, h.repaired, 1.0f));
    return ((h.rough * r) * v) * h.repaired;
}

// log(1 / (1 + e^-v)) = min(v, 0) - log1p(e^-|v|): two terms of one sign, in both tails.
__device__ __forceinline__ float logsigmoid(float v) {
    const detail::ExpFactors h = detail::exp_factors(-fabsf(v));
    const float e = h.rough * h.repaired;
    return fmaf(-e, detail::log1p_over(e), fminf(v, 0.0f));
}

// log(1 + e^z) / beta = (max(z, 0) + log1p(e^-|z|)) / beta, z = v beta; v itself where z > threshold. max(z, 0) / beta
// is v or 0. z is the rounded product, as in torch, where it is compared; z + lo where it is an exponent. 1 / beta
// comes between the two factors of e^-|z|, so that a tail that beta makes larger has all its digits. Adding -0 keeps
// the sign of a tail that has become 0.
__device__ __forceinline__ float softplus(float v, float beta, float threshold) {
    const float z = v * beta;
    const float magnitude = fabsf(z);
    const float lo = fmaf(fabsf(v), fabsf(beta), -magnitude);
    const detail::ExpFactors h = detail::exp_factors(-magnitude, -lo);
    const float p = detail::log1p_over(h.rough * h.repaired);
    const float inverse = 1.0f / beta;
    const float value = fmaf((h.repaired * inverse) * h.rough, p, z > 0.0f ? v : -0.0f);
    return z > threshold ? v : value;
}

// v tanh(log(1 + e)), e = e^v = a b. tanh(log(1 + e)) = ((1 + e)^2 - 1) / ((1 + e)^2 + 1) = n / (n + 2), n = e (e + 2):
// sums of positive terms, nothing cancels. The larger factors first, so that the tail v e^v keeps its digits. One v
// stands in e for all larger ones: there a = 2^15, b = a, e + 2 and n + 2 round to powers of two, and the result is v.
// (fminf drops a NaN; the factor v brings it back.)
__device__ __forceinline__ float mish(float v) {
    const detail::ExpFactors h = detail::exp_factors(fminf(v, 0x1.4cb5eap+4f));
    const float e = h.rough * h.repaired;
    const float e_plus_2 = e + 2.0f;
    const float r = detail::reciprocal_approximate(fmaf(e, e_plus_2, 2.0f));
    return (((h.rough * e_plus_2) * r) * v) * h.repaired;
}

// ---- exponential-linear family ---------------------------------------------------------------------------

// The negative branch is computed first, for all v: an expression in the select would become a branch.
__device__ __forceinline__ float elu(float v, float alpha) {
    const float bent = alpha * detail::expm1_of_negative(v);
    return v < 0.0f ? bent : v;
}

// elu with torch's alpha = 1.67326324... scaled by 1.05070098...; the second number is their product.
__device__ __forceinline__ float selu(float v) {
    const float bent = 1.75809934f * detail::expm1_of_negative(v);
    return v < 0.0f ? bent : 1.05070098f * v;
}

// alpha (e^x - 1), x = v / alpha, for v < 0. With alpha < 0 the exponent is positive, hence the repair on that side; lo
// is what rounding v / alpha left over, and log2(e) is here taken 2.6e-7 too small. Near zero the minimax fit of
// (e^x - 1) / x on both sides (relative error 1.2e-7). A tiny v is its own result, also where v / alpha is subnormal.
__device__ __forceinline__ float celu(float v, float alpha) {
    const float inverse = 1.0f / alpha;
    const float x = v * inverse;
    const float t = x * 0x1.71547p+0f;
    const float lo = fmaf(-x, alpha, v);
    const float rest = detail::saturate(fmaf(lo, inverse, fmaf(t, -detail::LN_2, x)));
    const float far = fmaf(detail::exp2_approximate(t), 1.0f + rest, -1.0f);
    float p = 0.00138724432f;
    p = fmaf(p, x, 0.00840226281f);
    p = fmaf(p, x, 0.0416691042f);
    p = fmaf(p, x, 0.166661382f);
    p = fmaf(p, x, 0.499999821f);
    const float near = x * fmaf(p, x, 1.0f);
    const float bent = alpha * (fabsf(x) < 0.5f ? near : far);
    return v < 0.0f && fabsf(x) > 0x1p-26f ? bent : v;
}

// ---- gelu ------------------------------------------------------------------------------------------------

// v Phi(v), Phi the normal distribution function. (1 + erf, as the definition reads, cancels for v < 0.) With
// x = |v|
//
//     Phi(-x) = exp(-x^2 / 2) g(x)        g(x) = erfcx(x / sqrt 2) / 2, slowly varying: 0.5 ... 0.03
//
// and Phi(v) = Phi(-x) on the left, 1 - Phi(-x) on the right. x^2 / 2 = s + s_lo exactly. g is the minimax quotient
// p / d of two polynomials on x <= 13.3 (relative error 1.3e-7), with positive coefficients only. Beyond, the
// exponential is 0, as -0 for large negative v and NaN for -Inf require. (fminf drops a NaN; the factor v brings it
// back.)
__device__ __forceinline__ float gelu_erf(float v) {
    const float x = fminf(fabsf(v), 15.0f);
    const float half = 0.5f * x;
    const float s = half * x;
    const float s_lo = fmaf(half, x, -s);
    const float t = s * -detail::LOG2_E;
    const float e = detail::exp2_approximate(t);
    const float rest = fmaf(t, -detail::LN_2, -s) - s_lo;
    float p = 2.36941414e-07f;
    p = fmaf(p, x, 0.0143769201f);
    p = fmaf(p, x, 0.107670278f);
    p = fmaf(p, x, 0.339983689f);
    p = fmaf(p, x, 0.499999936f);
    float d = 0.03606554f;
    d = fmaf(d, x, 0.26933209f);
    d = fmaf(d, x, 0.89455093f);
    d = fmaf(d, x, 1.47784496f);
    d = fmaf(d, x, 1.0f);
    const float left = (p * detail::reciprocal_approximate(d)) * fmaf(e, rest, e);
    const float right_of_zero = v >= 0.0f ? 1.0f : 0.0f;
    return v * fabsf(right_of_zero - left);
}

// (v / 2) (1 + tanh u) = v / (1 + 2^-w), w = v (A + B v^2), A = 2 sqrt(2 / pi) log2(e), B = 0.044715 A. (1 + tanh
// cancels for v < 0.) w is carried as t + t_lo, with what v^2, the sum and the product each left when rounded. A and B
// are both taken larger by one factor, 1 + 3.091e-7, which makes both of them floats (to 4e-9) and A a multiple of
// 2^-20: then A - q is exact for all q < 16. It comes off again in rest, which by then is never negative for v < 0.
__device__ __forceinline__ float gelu_tanh(float v) {
    const float A = 0x1.26aec8p+1f, B = 0x1.a5a7d8p-4f, excess = 3.091e-7f;
    const float s = v * v;
    const float s_lo = fmaf(v, v, -s);
    const float q = fmaf(B, s, A);
    const float q_lo = fmaf(B, s_lo, fmaf(B, s, A - q));
    const float t = v * q;
    const float t_lo = fmaf(v, q_lo, fmaf(v, q, -t));
    const float rest = detail::saturate(fmaf(t, -excess * detail::LN_2, t_lo * detail::LN_2));
    const float r = detail::reciprocal_approximate(1.0f + detail::exp2_approximate(-t));
    return v * fmaf(r, rest, r);
}

}  // namespace act
}  // namespace jitconv
