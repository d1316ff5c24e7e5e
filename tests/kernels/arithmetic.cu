// Floating-point intrinsics, one triple of operands a thread; the results of thread i are column i of `results`.
#include "device/platform.cuh"

struct Arguments {
    const float* a;
    const float* b;
    const float* c;
    float* results;
    int32_t count;
};

extern "C" __global__ void __launch_bounds__(256) arithmetic(const Arguments arguments) {
    const int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
    if (i >= arguments.count) {
        return;
    }
    const float a = arguments.a[i];
    const float b = arguments.b[i];
    const float c = arguments.c[i];
    float* result = arguments.results + i;
    const auto put = [&](float value) {
        *result = value;
        result += arguments.count;
    };
    put(__fadd_rn(a, b));
    put(__fsub_rn(a, b));
    put(__fmul_rn(a, b));
    put(__fdiv_rn(a, b));
    put(__frcp_rn(a));
    put(__fsqrt_rn(a));
    put(__fmaf_rn(a, b, c));
    put(fmaf(a, b, c));
    put(fminf(a, b));
    put(fmaxf(a, b));
    put(min(a, b));
    put(max(a, b));
    put(rsqrtf(a));
}
