// Outputs side by side: reading and writing COUNT elements along one axis of a tensor, as one access where they lie so.
#pragma once

#include "device/index.cuh"
#include "device/numeric.cuh"
#include "device/platform.cuh"

namespace jitconv {

// Whether every COUNT elements along AXIS that start at a multiple of COUNT are one aligned vector: AXIS is dense, and
// the address and all other strides are multiples of the vector.
template <int COUNT, int AXIS, class T, class Index>
__device__ __forceinline__ bool is_vector(const T* tensor, const Index (&stride)[5]) {
    if constexpr (COUNT * sizeof(T) > 16 && COUNT * sizeof(T) % 16 != 0) {
        return false;
    }
    constexpr int ALIGNED = COUNT * sizeof(T) > 16 ? 16 / sizeof(T) : COUNT;
    Index others = 0;
#pragma unroll
    for (int axis = 0; axis < 5; ++axis) {
        others |= axis == AXIS ? 0 : stride[axis];
    }
    return stride[AXIS] == 1 && others % ALIGNED == 0 &&
           reinterpret_cast<uintptr_t>(tensor) % (ALIGNED * sizeof(T)) == 0;
}

// COUNT elements from `first` on, as floats. `vector`: what is_vector says, and first is at a multiple of COUNT. Of a
// run that is only partly `inside`, the last element that is stands for those that are not.
template <int COUNT, int AXIS, class T, class Index>
__device__ __forceinline__ void load_run(
    float (&values)[COUNT], const T* tensor, const Coordinate<Index>& first, const Index (&stride)[5], int inside,
    bool vector) {
    const T* source = tensor + offset_of(first, stride);
    constexpr int PIECE = COUNT * sizeof(T) > 16 ? 16 / sizeof(T) : COUNT;
    if (vector && inside == COUNT) {
#pragma unroll
        for (int i = 0; i < COUNT; i += PIECE) {
            const Vector<T, PIECE> piece = load_vector<PIECE>(source + i);
#pragma unroll
            for (int j = 0; j < PIECE; ++j) {
                values[i + j] = to_float(piece.element[j]);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            values[i] = to_float(source[min(i, inside - 1) * stride[AXIS]]);
        }
    }
}

// Writes the elements that are `inside`, each rounded once.
template <int COUNT, int AXIS, class T, class Index>
__device__ __forceinline__ void store_run(
    const float (&values)[COUNT], T* tensor, const Coordinate<Index>& first, const Index (&stride)[5], int inside,
    bool vector) {
    T* target = tensor + offset_of(first, stride);
    constexpr int PIECE = COUNT * sizeof(T) > 16 ? 16 / sizeof(T) : COUNT;
    if (vector && inside == COUNT) {
#pragma unroll
        for (int i = 0; i < COUNT; i += PIECE) {
            Vector<T, PIECE> piece;
#pragma unroll
            for (int j = 0; j < PIECE; ++j) {
                piece.element[j] = from_float<T>(values[i + j]);
            }
            store_vector(target + i, piece);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i < inside) {
                target[i * stride[AXIS]] = from_float<T>(values[i]);
            }
        }
    }
}

}  // namespace jitconv
