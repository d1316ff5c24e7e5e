// Reductions over the lanes of a warp and the threads of a block.
//
//     lane    0 1 2 3 4 5 6 7          The exchange partner is lane ^ offset, offset = WIDTH/2 ... 2, 1.
//     step 4  0+4 1+5 2+6 3+7 ...      Addition commutes bit for bit, so all lanes end with the same bits,
//     step 2  (0+4)+(2+6) ...          run to run, whatever the schedule.
//     step 1  everything
#pragma once

#include "device/platform.cuh"

namespace jitconv {

constexpr int WARP_SIZE = 32;
constexpr uint32_t FULL_WARP = 0xffffffffu;

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) & (WARP_SIZE - 1); }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / WARP_SIZE; }

// Sum over each aligned group of WIDTH lanes; every lane receives it. All 32 lanes of the warp must call.
template <int WIDTH = WARP_SIZE>
__device__ __forceinline__ float warp_sum(float value) {
    static_assert(WIDTH > 0 && WIDTH <= WARP_SIZE && (WIDTH & (WIDTH - 1)) == 0, "WIDTH is a power of two");
#pragma unroll
    for (int offset = WIDTH / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(FULL_WARP, value, offset);
    }
    return value;
}

// The larger of two, NaN if either is NaN (fmaxf would drop it).
__device__ __forceinline__ float max_propagating_nan(float a, float b) { return a > b || isnan(a) ? a : b; }

// Maximum over each aligned group of WIDTH lanes; NaN if any lane holds NaN. All 32 lanes must call.
template <int WIDTH = WARP_SIZE>
__device__ __forceinline__ float warp_max(float value) {
    static_assert(WIDTH > 0 && WIDTH <= WARP_SIZE && (WIDTH & (WIDTH - 1)) == 0, "WIDTH is a power of two");
#pragma unroll
    for (int offset = WIDTH / 2; offset > 0; offset /= 2) {
        value = max_propagating_nan(value, __shfl_xor_sync(FULL_WARP, value, offset));
    }
    return value;
}

// Sum over the THREADS threads of the block; every thread receives it. `scratch` is shared memory for
// THREADS / 32 floats, free for other use as soon as the call returns. All threads must call.
template <int THREADS>
__device__ __forceinline__ float block_sum(float value, float* scratch) {
    static_assert(THREADS % WARP_SIZE == 0, "a block is made of whole warps");
    value = warp_sum(value);
    if (lane_index() == 0) {
        scratch[warp_index()] = value;
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < THREADS / WARP_SIZE; ++warp) {
        sum += scratch[warp];
    }
    __syncthreads();
    return sum;
}

// Maximum over the THREADS threads of the block, otherwise as block_sum.
template <int THREADS>
__device__ __forceinline__ float block_max(float value, float* scratch) {
    static_assert(THREADS % WARP_SIZE == 0, "a block is made of whole warps");
    value = warp_max(value);
    if (lane_index() == 0) {
        scratch[warp_index()] = value;
    }
    __syncthreads();
    float maximum = scratch[0];
#pragma unroll
    for (int warp = 1; warp < THREADS / WARP_SIZE; ++warp) {
        maximum = max_propagating_nan(maximum, scratch[warp]);
    }
    __syncthreads();
    return maximum;
}

}  // namespace jitconv
