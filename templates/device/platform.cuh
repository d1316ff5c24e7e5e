// The ground that every kernel stands on: integer types, dynamic shared memory, barriers.
//
// NVRTC has no header on its path, so the device branch declares the few types it needs itself. The host
// branch supplies the CUDA language (threadIdx, __syncthreads, shuffles, atomics, vector types) to an ordinary
// C++ compiler; everything that includes this header is the same text for both.
#pragma once

#if defined(JITCONV_HOST)

#include "host/platform.h"

#else

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
// "long long", not "long": atomicAdd and its kin are declared for the former only.
using int64_t = long long;
using uint64_t = unsigned long long;
using size_t = decltype(sizeof(0));
using uintptr_t = unsigned long long;

// Compute capability times ten (750, 800, 900, ...), 0 in the pass that has no architecture.
#if defined(__CUDA_ARCH__)
#define JITCONV_ARCH __CUDA_ARCH__
#else
#define JITCONV_ARCH 0
#endif

namespace jitconv {

// Base of the block's dynamic shared memory. 1024 bytes is the strictest alignment that anything in it needs
// (the 128-byte swizzle of bulk tensor copies); kernels have no static shared memory, so it costs nothing.
__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
    return dynamic_shared_memory;
}

// The 32-bit address that PTX instructions on shared memory take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Barrier `id` (1..15; 0 is __syncthreads) among `threads` threads, a multiple of 32. A thread that arrives does
// not wait; one that syncs waits until `threads` of them have arrived or synced.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Has the line of global memory at `address`, which must exist, brought to the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace jitconv

#endif
