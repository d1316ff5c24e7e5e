// Warpgroup products of operands anywhere in shared memory, which holds a copy of x: each of the two warpgroups
// computes D = A B^T, plus what D was if `accumulate`, over `steps` products whose operands move on in shared memory.
#include "device/async_copy.cuh"
#include "device/math.cuh"
#include "device/platform.cuh"
#include "device/wgmma.cuh"

struct Operand {
    uint32_t start;    // bytes in shared memory
    uint32_t leading;  // bytes from the first half of k to the second
    uint32_t stride;   // bytes from 8 rows to the next 8
    uint32_t advance;  // bytes from one product to the next
    uint32_t group;    // bytes from the first warpgroup's to the second's
};

struct Arguments {
    const uint32_t* x;
    float* y;  // [2][64][n]
    int32_t words;
    int32_t math;
    int32_t n;
    int32_t steps;
    int32_t accumulate;
    Operand operand_a;
    Operand operand_b;
};

using namespace jitconv;

__device__ inline uint64_t describe(const Operand& operand, int group, int step) {
    const uint32_t start = operand.start + static_cast<uint32_t>(group) * operand.group +
                           static_cast<uint32_t>(step) * operand.advance;
    return descriptor_at(matrix_descriptor(operand.leading, operand.stride),
                         shared_address(shared_memory()) + start);
}

template <Math MATH, int N>
__device__ void multiply(const Arguments& arguments) {
    const int thread = static_cast<int>(threadIdx.x);
    const int group = thread / 128;
    const int row = 64 * group + thread % 128 / 32 * 16 + thread % 32 / 4;
    float* const y = arguments.y + row * N + 2 * (thread % 4);
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        d[i] = y[i / 2 % 2 * 8 * N + i / 4 * 8 + i % 2];
    }
    wgmma_fence();
    for (int step = 0; step < arguments.steps; ++step) {
        wgmma<MATH, N>(d, describe(arguments.operand_a, group, step), describe(arguments.operand_b, group, step),
                       arguments.accumulate != 0 || step > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        y[i / 2 % 2 * 8 * N + i / 4 * 8 + i % 2] = d[i];
    }
}

template <Math MATH>
__device__ void dispatch(const Arguments& arguments) {
    switch (arguments.n) {
        case 8: return multiply<MATH, 8>(arguments);
        case 16: return multiply<MATH, 16>(arguments);
        case 32: return multiply<MATH, 32>(arguments);
        case 64: return multiply<MATH, 64>(arguments);
        case 96: return multiply<MATH, 96>(arguments);
        case 128: return multiply<MATH, 128>(arguments);
        case 192: return multiply<MATH, 192>(arguments);
        default: return multiply<MATH, 256>(arguments);
    }
}

extern "C" __global__ void __launch_bounds__(256) products(const Arguments arguments) {
    uint32_t* const shared = reinterpret_cast<uint32_t*>(shared_memory());
    for (int i = static_cast<int>(threadIdx.x); i < arguments.words; i += 256) {
        shared[i] = arguments.x[i];
    }
    fence_proxy_async();
    __syncthreads();
    switch (arguments.math) {
        case 0: return dispatch<Math::TF32>(arguments);
        case 1: return dispatch<Math::HALF>(arguments);
        default: return dispatch<Math::BFLOAT16>(arguments);
    }
}
