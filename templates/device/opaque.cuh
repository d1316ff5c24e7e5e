// Values of which the compiler knows nothing.
//
// What is worked out from one stays where it is needed, an instruction or two each time, instead of in registers from
// before the loop. Offsets, not pointers: of an opaque pointer nobody knows that it is one to global memory.
#pragma once

#include "device/platform.cuh"

namespace jitconv {

#if defined(JITCONV_HOST)

inline uint32_t opaque(uint32_t value) { return value; }
inline int32_t opaque(int32_t value) { return value; }
inline int64_t opaque(int64_t value) { return value; }
inline float opaque(float value) { return value; }

#else

__device__ __forceinline__ uint32_t opaque(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

__device__ __forceinline__ int32_t opaque(int32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

__device__ __forceinline__ int64_t opaque(int64_t value) {
    asm volatile("" : "+l"(value));
    return value;
}

__device__ __forceinline__ float opaque(float value) {
    asm volatile("" : "+f"(value));
    return value;
}

#endif

}  // namespace jitconv
