// Every conversion of numeric.cuh, one element a thread.
#include "device/numeric.cuh"
#include "device/platform.cuh"

struct Arguments {
    const float* x;
    const jitconv::half_t* half_bits;          // 65536 patterns
    const jitconv::bfloat16_t* bfloat16_bits;  // 65536 patterns
    jitconv::half_t* to_half;
    jitconv::bfloat16_t* to_bfloat16;
    float* to_tf32;
    float* from_half;
    float* from_bfloat16;
    int32_t count;
};

extern "C" __global__ void __launch_bounds__(256) numeric(const Arguments arguments) {
    using namespace jitconv;
    const int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
    if (i < arguments.count) {
        arguments.to_half[i] = from_float<half_t>(arguments.x[i]);
        arguments.to_bfloat16[i] = from_float<bfloat16_t>(arguments.x[i]);
        arguments.to_tf32[i] = round_tf32(arguments.x[i]);
    }
    if (i < 65536) {
        arguments.from_half[i] = to_float(arguments.half_bits[i]);
        arguments.from_bfloat16[i] = to_float(arguments.bfloat16_bits[i]);
    }
}
