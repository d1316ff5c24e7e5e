// The CUDA language for a C++ compiler: what NVRTC knows by itself and a kernel's text relies on.
//
// Names that wait (barriers, shuffles, votes) call into the runtime, which switches to another thread of the
// block; all others are ordinary functions. Threads of a block share one OS thread, so atomics are plain code.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "host/runtime.h"

#if !defined(JITCONV_ARCH)
#define JITCONV_ARCH 900
#endif

// ---- Language ------------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
// Empty, so that library headers that spell __attribute__((__noinline__)) still compile behind it.
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
// Shared memory is dynamic in these kernels; only that can be poisoned and fenced off here.
#define __shared__ static_assert(false, "use jitconv::shared_memory(): the emulator has no static shared memory");

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
};

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
constexpr int warpSize = 32;

// ---- Vector types, aligned as on the device ------------------------------------------------------------------

#define JITCONV_VECTOR_TYPES(T, NAME)                                                                      \
    struct alignas(2 * sizeof(T)) NAME##2 { T x, y; };                                                    \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) NAME##4 { T x, y, z, w; };                    \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                                            \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }

JITCONV_VECTOR_TYPES(float, float)
JITCONV_VECTOR_TYPES(int, int)
JITCONV_VECTOR_TYPES(unsigned, uint)
JITCONV_VECTOR_TYPES(short, short)
JITCONV_VECTOR_TYPES(unsigned short, ushort)
JITCONV_VECTOR_TYPES(signed char, char)
JITCONV_VECTOR_TYPES(unsigned char, uchar)
#undef JITCONV_VECTOR_TYPES

struct alignas(16) double2 {
    double x, y;
};
inline double2 make_double2(double x, double y) { return {x, y}; }

// ---- Arithmetic ----------------------------------------------------------------------------------------------

namespace jitconv::host {
template <class To, class From>
inline To bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
}  // namespace jitconv::host

inline unsigned __float_as_uint(float value) { return jitconv::host::bit_cast<unsigned>(value); }
inline int __float_as_int(float value) { return jitconv::host::bit_cast<int>(value); }
inline float __uint_as_float(unsigned bits) { return jitconv::host::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return jitconv::host::bit_cast<float>(bits); }
inline long long __double_as_longlong(double value) { return jitconv::host::bit_cast<long long>(value); }
inline double __longlong_as_double(long long bits) { return jitconv::host::bit_cast<double>(bits); }

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float rsqrtf(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }

inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<long long>(a) * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
inline long long __mul64hi(long long a, long long b) {
    return static_cast<long long>((static_cast<__int128>(a) * b) >> 64);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}

inline int __clz(int a) { return a == 0 ? 32 : __builtin_clz(static_cast<unsigned>(a)); }
inline int __clzll(long long a) { return a == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(a)); }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline int __ffsll(long long a) { return __builtin_ffsll(a); }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
inline unsigned __brev(unsigned a) {
    unsigned result = 0;
    for (int bit = 0; bit < 32; ++bit) {
        result |= ((a >> bit) & 1u) << (31 - bit);
    }
    return result;
}

// Byte i of the result is byte (selector nibble i & 7) of the 64 bits b:a. Bit 3 of a nibble is ignored: the sign that
// the PRMT instruction would spread for it is not within reach of the intrinsic.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = (static_cast<unsigned long long>(b) << 32) | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned nibble = (selector >> (4 * i)) & 0xfu;
        const unsigned byte = static_cast<unsigned>(bytes >> (8 * (nibble & 7u))) & 0xffu;
        result |= byte << (8 * i);
    }
    return result;
}

// The hardware's minimum and maximum ignore NaN of either kind; the C library's let a signalling one through.
namespace jitconv::host {
inline float minimum_number(float a, float b) { return isnan(a) ? b : isnan(b) || a < b ? a : b; }
inline float maximum_number(float a, float b) { return isnan(a) ? b : isnan(b) || a > b ? a : b; }
}  // namespace jitconv::host
#define fminf(a, b) jitconv::host::minimum_number(a, b)
#define fmaxf(a, b) jitconv::host::maximum_number(a, b)

inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// As on the device, a mixed pair is compared as unsigned.
#define JITCONV_MIN_MAX(RESULT, A, B)                                                                      \
    inline RESULT min(A a, B b) {                                                                          \
        return static_cast<RESULT>(a) < static_cast<RESULT>(b) ? static_cast<RESULT>(a)                    \
                                                               : static_cast<RESULT>(b);                   \
    }                                                                                                      \
    inline RESULT max(A a, B b) {                                                                          \
        return static_cast<RESULT>(a) > static_cast<RESULT>(b) ? static_cast<RESULT>(a)                    \
                                                               : static_cast<RESULT>(b);                   \
    }
JITCONV_MIN_MAX(int, int, int)
JITCONV_MIN_MAX(unsigned, unsigned, unsigned)
JITCONV_MIN_MAX(unsigned, int, unsigned)
JITCONV_MIN_MAX(unsigned, unsigned, int)
JITCONV_MIN_MAX(long, long, long)
JITCONV_MIN_MAX(unsigned long, unsigned long, unsigned long)
JITCONV_MIN_MAX(long long, long long, long long)
JITCONV_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef JITCONV_MIN_MAX

// ---- Memory --------------------------------------------------------------------------------------------------

template <class T>
inline T __ldg(const T* pointer) {
    return *pointer;
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

namespace jitconv::host {

// An atomic never races with another: the compiler must not report it as an ordinary read and write.
template <class T, class Update>
__attribute__((noinline, no_sanitize("thread"))) T atomic_update(T* address, Update update) {
    const T old = *address;
    *address = update(old);
    return old;
}

// As on the device, signed sums wrap.
inline int wrapping_sum(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)); }
template <class T>
inline T wrapping_sum(T a, T b) {
    return a + b;
}

}  // namespace jitconv::host

#define JITCONV_ATOMIC(T, NAME, RESULT)                                                                    \
    inline T NAME(T* address, T value) {                                                                   \
        return jitconv::host::atomic_update(address, [value]([[maybe_unused]] T old) { return RESULT; });  \
    }
#define JITCONV_ATOMICS(T)                                                                                 \
    JITCONV_ATOMIC(T, atomicExch, value)                                                                   \
    JITCONV_ATOMIC(T, atomicAdd, jitconv::host::wrapping_sum(old, value))
#define JITCONV_INTEGER_ATOMICS(T)                                                                         \
    JITCONV_ATOMICS(T)                                                                                     \
    JITCONV_ATOMIC(T, atomicMax, (old > value ? old : value))                                              \
    JITCONV_ATOMIC(T, atomicMin, (old < value ? old : value))                                              \
    inline T atomicCAS(T* address, T compare, T value) {                                                   \
        return jitconv::host::atomic_update(                                                               \
            address, [compare, value](T old) { return old == compare ? value : old; });                    \
    }

JITCONV_ATOMICS(float)
JITCONV_INTEGER_ATOMICS(int)
JITCONV_INTEGER_ATOMICS(unsigned)
JITCONV_INTEGER_ATOMICS(unsigned long long)
JITCONV_INTEGER_ATOMICS(unsigned long)  // uint64_t, which is unsigned long long on the device
#undef JITCONV_INTEGER_ATOMICS
#undef JITCONV_ATOMICS
#undef JITCONV_ATOMIC

// ---- Barriers ------------------------------------------------------------------------------------------------

inline void __syncthreads(JITCONV_HERE) {
    jitconv::host::block_barrier(here);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, JITCONV_HERE) {
    jitconv::host::warp_exchange(jitconv::host::WarpOperation::sync, mask, 0, 0, here);
}

// ---- Shuffles and votes --------------------------------------------------------------------------------------

namespace jitconv::host {

// The lane that `lane` reads from, by the rule of PTX shfl: a source outside the group of `width` lanes means
// the lane's own value.
inline int shuffle_source(WarpOperation operation, int lane, unsigned operand, int width) {
    const int low = lane & ~(width - 1);
    const int high = low + width - 1;
    const int distance = static_cast<int>(operand & 31u);
    switch (operation) {
        case WarpOperation::shuffle_up: return lane - distance >= low ? lane - distance : lane;
        case WarpOperation::shuffle_down: return lane + distance <= high ? lane + distance : lane;
        case WarpOperation::shuffle_xor: return (lane ^ distance) <= high ? lane ^ distance : lane;
        default: return low | (distance & (width - 1));
    }
}

template <class T>
inline T shuffle(WarpOperation operation, unsigned mask, T value, unsigned operand, int width, const Here& here) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 32 or 64 bits");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const uint64_t received =
        warp_exchange(operation, mask, bits, shuffle_source(operation, lane, operand, width), here);
    memcpy(&value, &received, sizeof value);
    return value;
}

}  // namespace jitconv::host

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, JITCONV_HERE) {
    return jitconv::host::shuffle(jitconv::host::WarpOperation::shuffle, mask, value,
                                  static_cast<unsigned>(source), width, here);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, JITCONV_HERE) {
    return jitconv::host::shuffle(jitconv::host::WarpOperation::shuffle_up, mask, value, delta, width, here);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, JITCONV_HERE) {
    return jitconv::host::shuffle(jitconv::host::WarpOperation::shuffle_down, mask, value, delta, width, here);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, JITCONV_HERE) {
    return jitconv::host::shuffle(jitconv::host::WarpOperation::shuffle_xor, mask, value,
                                  static_cast<unsigned>(lane_mask), width, here);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, JITCONV_HERE) {
    return static_cast<unsigned>(jitconv::host::warp_exchange(jitconv::host::WarpOperation::vote, mask,
                                                              predicate != 0, 0, here));
}
inline int __any_sync(unsigned mask, int predicate, JITCONV_HERE) {
    return __ballot_sync(mask, predicate, here) != 0;
}
inline int __all_sync(unsigned mask, int predicate, JITCONV_HERE) {
    return __ballot_sync(mask, predicate, here) == mask;
}

// Which lanes have converged is the hardware's choice; the least it may promise is the caller alone.
inline unsigned __activemask() { return 1u << (threadIdx.x & 31u); }

namespace jitconv {

inline unsigned char* shared_memory() { return host::shared_base(); }
inline uint32_t shared_address(const void* pointer, JITCONV_HERE) { return host::shared_address(pointer, here); }

inline void named_barrier_sync(int id, int threads, JITCONV_HERE) { host::named_barrier(id, threads, true, here); }
inline void named_barrier_arrive(int id, int threads, JITCONV_HERE) {
    host::named_barrier(id, threads, false, here);
}

// Nothing comes sooner here; but what is asked for must exist.
inline void prefetch_l2(const void* address) { static_cast<void>(*static_cast<const volatile unsigned char*>(address)); }

}  // namespace jitconv
