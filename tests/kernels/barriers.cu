// Rounds of y[i] += y[i + 1] / 2 around a ring of THREADS values in shared memory, then the same with one ring for
// each warp, then the sums over the block. Every barrier is needed.
#include "device/platform.cuh"
#include "device/warp.cuh"

constexpr int THREADS = 128;

struct Arguments {
    const float* x;
    float* ring;
    float* warp_ring;
    float* sums;
    int32_t rounds;
};

extern "C" __global__ void __launch_bounds__(THREADS) barriers(const Arguments arguments) {
    using namespace jitconv;
    float* shared = reinterpret_cast<float*>(shared_memory());
    float* scratch = shared + THREADS;
    const int thread = static_cast<int>(threadIdx.x);
    const int64_t position = static_cast<int64_t>(blockIdx.x) * THREADS + thread;
    float value = arguments.x[position];
    for (int round = 0; round < arguments.rounds; ++round) {
        shared[thread] = value;
        __syncthreads();
        value += 0.5f * shared[(thread + 1) % THREADS];
        __syncthreads();
    }
    arguments.ring[position] = value;

    value = arguments.x[position];
    for (int round = 0; round < arguments.rounds; ++round) {
        shared[thread] = value;
        __syncwarp();
        value += 0.5f * shared[thread / WARP_SIZE * WARP_SIZE + (thread + 1) % WARP_SIZE];
        __syncwarp();
    }
    arguments.warp_ring[position] = value;

    value = arguments.x[position];
    float sum = block_sum<THREADS>(value, scratch);
    sum += 2.0f * block_sum<THREADS>(value * value, scratch);
    sum += 4.0f * block_max<THREADS>(value, scratch);
    sum += 8.0f * block_max<THREADS>(-value, scratch);
    arguments.sums[position] = sum;
}
