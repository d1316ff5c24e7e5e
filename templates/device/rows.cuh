// Statistics of rows and windows, for the kernels behind a convolution.
#pragma once

#include "device/platform.cuh"
#include "device/warp.cuh"

namespace jitconv {

// A running pool over one window. The average divides by what the window really covers, which is less than its
// size where it hangs over the edge (ceil_mode); the maximum keeps NaN, as torch does.
struct AveragePool {
    float sum = 0.0f;
    int count = 0;
    __device__ __forceinline__ void take(float v) {
        sum += v;
        ++count;
    }
    __device__ __forceinline__ float result() const { return sum / static_cast<float>(count); }
};

struct MaximumPool {
    float maximum = __uint_as_float(0xff800000u);  // -Inf
    __device__ __forceinline__ void take(float v) { maximum = max_propagating_nan(v, maximum); }
    __device__ __forceinline__ float result() const { return maximum; }
};

// The mean in two parts: the sum of both has more digits than a float.
struct Moments {
    float mean, correction, reciprocal_deviation;

    __device__ __forceinline__ float normalise(float value) const {
        return ((value - mean) - correction) * reciprocal_deviation;
    }
};

// Mean and 1 / sqrt(variance + eps) of one row of WIDTH values held by LANES threads, of which this one holds
// value(i) at w = lane + i * LANES. `sum_lanes(v)` adds v over the lanes of the row.
//
// Two passes, the second corrected by its own residual (Chan, Golub and LeVeque, Algorithms for Computing the
// Sample Variance, 1983): the variance is that of centred values, never E[x^2] - E[x]^2. The residual also corrects
// the mean: a row such as 1e4 + noise loses nothing to the rounding of its mean to a float.
template <int WIDTH, int LANES, class Value, class SumLanes>
__device__ __forceinline__ Moments row_moments(int lane, float eps, const Value& value, const SumLanes& sum_lanes) {
    constexpr int VALUES = (WIDTH + LANES - 1) / LANES;
    constexpr int UNROLL = VALUES <= 32 ? VALUES : 1;
    float sum = 0.0f;
#pragma unroll UNROLL
    for (int i = 0; i < VALUES; ++i) {
        sum += lane + i * LANES < WIDTH ? value(i) : 0.0f;
    }
    const float mean = sum_lanes(sum) / WIDTH;
    float residual = 0.0f;
    float squares = 0.0f;
#pragma unroll UNROLL
    for (int i = 0; i < VALUES; ++i) {
        const float centred = lane + i * LANES < WIDTH ? value(i) - mean : 0.0f;
        residual += centred;
        squares = fmaf(centred, centred, squares);
    }
    residual = sum_lanes(residual);
    squares = sum_lanes(squares);
    const float correction = residual / WIDTH;
    const float variance = fmaxf((squares - residual * correction) / WIDTH, 0.0f);
    return {mean, correction, 1.0f / sqrtf(variance + eps)};
}

}  // namespace jitconv
