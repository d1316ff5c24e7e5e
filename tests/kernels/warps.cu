// Shuffles, votes and reductions of one warp for each block; the results of thread i are column i of `results`.
#include "device/platform.cuh"
#include "device/warp.cuh"

struct Arguments {
    const float* x;
    float* results;  // [RESULTS][threads of the grid]
    int32_t lane;    // operand of the shuffles
};

extern "C" __global__ void __launch_bounds__(32) warps(const Arguments arguments) {
    using namespace jitconv;
    const int i = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
    const float x = arguments.x[i];
    const int operand = arguments.lane;
    float* result = arguments.results + i;
    const auto put = [&](float value) {
        *result = value;
        result += gridDim.x * 32;
    };
    put(__shfl_sync(FULL_WARP, x, operand));
    put(__shfl_up_sync(FULL_WARP, x, static_cast<unsigned>(operand)));
    put(__shfl_down_sync(FULL_WARP, x, static_cast<unsigned>(operand)));
    put(__shfl_xor_sync(FULL_WARP, x, operand));
    put(__shfl_sync(FULL_WARP, x, operand, 8));
    put(__shfl_up_sync(FULL_WARP, x, static_cast<unsigned>(operand), 8));
    put(__shfl_down_sync(FULL_WARP, x, static_cast<unsigned>(operand), 8));
    put(__shfl_xor_sync(FULL_WARP, x, operand, 8));
    put(static_cast<float>(__ballot_sync(FULL_WARP, x > 0.0f) & 0xffffu));
    put(static_cast<float>(__ballot_sync(FULL_WARP, x > 0.0f) >> 16));
    put(static_cast<float>(__any_sync(FULL_WARP, x > 2.0f)));
    put(static_cast<float>(__all_sync(FULL_WARP, x > -2.0f)));
    put(warp_sum(x));
    put(warp_sum<8>(x));
    put(warp_max(x));
    put(warp_max<4>(x));
    const double wide = __shfl_xor_sync(FULL_WARP, static_cast<double>(x), 1);
    put(static_cast<float>(wide));
    // Half of the warp at a time, each with a mask of its own.
    const uint32_t half = threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u;
    put(__shfl_xor_sync(half, x, 3));
}
