// Every atomic of the vocabulary, in global and in shared memory; no result depends on the order of the threads.
#include "device/platform.cuh"

constexpr int THREADS = 128;

struct Arguments {
    int32_t* integers;    // [6]: sum, maximum, minimum, last turn of the counter, threads that won, exchanged sum
    uint32_t* unsigneds;  // [3]: sum, maximum, minimum
    uint64_t* wide;       // [3]: sum, maximum, minimum
    float* sum;           // of small whole numbers: exact in any order
};

extern "C" __global__ void __launch_bounds__(THREADS) atomics(const Arguments arguments) {
    int* shared = reinterpret_cast<int*>(jitconv::shared_memory());  // [3]: sum, owner, slot
    const int thread = static_cast<int>(threadIdx.x);
    const int value = (thread * 37) % 101 - 50;
    if (thread < 3) {
        shared[thread] = 0;
    }
    __syncthreads();
    atomicAdd(&arguments.integers[0], value);
    atomicMax(&arguments.integers[1], value);
    atomicMin(&arguments.integers[2], value);
    atomicAdd(&shared[0], value * value);
    if (atomicCAS(&shared[1], 0, thread + 1) == 0) {
        atomicAdd(&arguments.integers[4], 1);
    }
    // Everybody puts a number and takes what was there: in the end all but one have been taken.
    const int taken = atomicExch(&shared[2], thread + 1);
    atomicAdd(&arguments.integers[5], taken);
    const uint32_t bits = static_cast<uint32_t>(value);
    atomicAdd(&arguments.unsigneds[0], bits);
    atomicMax(&arguments.unsigneds[1], bits);
    atomicMin(&arguments.unsigneds[2], bits);
    const uint64_t wide = static_cast<uint64_t>(bits) * 0x10001u;
    atomicAdd(&arguments.wide[0], wide);
    atomicMax(&arguments.wide[1], wide);
    atomicMin(&arguments.wide[2], wide);
    atomicAdd(arguments.sum, static_cast<float>(value));
    __syncthreads();
    if (thread == 0) {
        arguments.integers[3] = shared[0];
        arguments.integers[5] += shared[2];
    }
}
