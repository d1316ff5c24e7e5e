// Integer intrinsics, one pair of operands a thread; the results of thread i are column i of `results`.
#include "device/platform.cuh"

struct Arguments {
    const uint64_t* a;
    const uint64_t* b;
    uint64_t* results;
    int32_t count;
};

extern "C" __global__ void __launch_bounds__(256) integers(const Arguments arguments) {
    const int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
    if (i >= arguments.count) {
        return;
    }
    const uint64_t a = arguments.a[i];
    const uint64_t b = arguments.b[i];
    const uint32_t a32 = static_cast<uint32_t>(a);
    const uint32_t b32 = static_cast<uint32_t>(b);
    uint64_t* result = arguments.results + i;
    const auto put = [&](uint64_t value) {
        *result = value;
        result += arguments.count;
    };
    put(__umulhi(a32, b32));
    put(static_cast<uint32_t>(__mulhi(static_cast<int>(a32), static_cast<int>(b32))));
    put(__umul64hi(a, b));
    put(static_cast<uint64_t>(__mul64hi(static_cast<int64_t>(a), static_cast<int64_t>(b))));
    put(static_cast<uint64_t>(__clz(static_cast<int>(a32))));
    put(static_cast<uint64_t>(__clzll(static_cast<int64_t>(a))));
    put(static_cast<uint64_t>(__ffs(static_cast<int>(a32))));
    put(static_cast<uint64_t>(__ffsll(static_cast<int64_t>(a))));
    put(static_cast<uint64_t>(__popc(a32)));
    put(static_cast<uint64_t>(__popcll(a)));
    put(__brev(a32));
    put(__byte_perm(a32, b32, static_cast<uint32_t>(b >> 32)));
    put(min(a32, b32));
    put(static_cast<uint32_t>(max(static_cast<int>(a32), static_cast<int>(b32))));
    put(min(static_cast<int>(a32), b32));
    put(__float_as_uint(__uint_as_float(a32)));
}
