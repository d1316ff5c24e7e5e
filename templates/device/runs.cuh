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

// COUNT elements of the tensor that a POINTER points to, on their way.
template <class POINTER, int COUNT>
struct AheadRun;

template <class T, int COUNT>
struct AheadRun<const T*, COUNT> {
    static constexpr int PIECE = COUNT * sizeof(T) > 16 ? 16 / sizeof(T) : COUNT;
    static constexpr int WORDS = (COUNT * sizeof(T) + 3) / 4;
    static_assert(COUNT % PIECE == 0, "a run is whole vectors");
    Vector<T, PIECE> piece[COUNT / PIECE];

    __device__ __forceinline__ float operator[](int i) const { return to_float(piece[i / PIECE].element[i % PIECE]); }
};

// Loads the elements from `first` on. `vector`: what is_vector says, and first is at a multiple of COUNT. Of a run that
// is only partly `inside`, the last element that is stands for those that are not.
template <int AXIS, class T, class Index, int COUNT>
__device__ __forceinline__ void load_ahead(
    AheadRun<const T*, COUNT>& ahead, const T* tensor, const Coordinate<Index>& first, const Index (&stride)[5], int inside,
    bool vector) {
    constexpr int PIECE = AheadRun<const T*, COUNT>::PIECE;
    const T* source = tensor + offset_of(first, stride);
    if (vector && inside == COUNT) {
#pragma unroll
        for (int i = 0; i < COUNT / PIECE; ++i) {
            ahead.piece[i] = load_vector<PIECE>(source + i * PIECE);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            ahead.piece[i / PIECE].element[i % PIECE] = source[min(i, inside - 1) * stride[AXIS]];
        }
    }
}

// Outputs that one block works out together: `extent` (channels, rows, columns) from `first` on, those beyond `end`
// left out.
template <class Index>
struct OutputBox {
    Coordinate<Index> first;
    int extent[3];
    Index end[3];
};

// Asks for the lines of `box` in a tensor that is dense along AXIS; the lanes of a warp take its rows in turns.
template <int AXIS, class T, class Index>
__device__ __forceinline__ void prefetch_box(
    const T* tensor, const Index (&stride)[5], const OutputBox<Index>& box, int lane) {
    if (stride[AXIS] != 1) {
        return;
    }
    constexpr int LINE = 128 / sizeof(T);
    const int across = AXIS == 1 ? box.extent[2] : box.extent[0];
    const int dense = static_cast<int>(
        AXIS == 1 ? min(static_cast<Index>(box.extent[0]), box.end[0] - box.first.channel)
                  : min(static_cast<Index>(box.extent[2]), box.end[2] - box.first.w));
#pragma unroll 1
    for (int i = lane; i < across * box.extent[1]; i += 32) {
        Coordinate<Index> at = box.first;
        at.h += i / across;
        (AXIS == 1 ? at.w : at.channel) += i % across;
        if (at.channel < box.end[0] && at.h < box.end[1] && at.w < box.end[2]) {
            const T* row = tensor + offset_of(at, stride);
#pragma unroll 1
            for (int j = 0; j < dense; j += LINE) {
                prefetch_l2(row + j);
            }
            // A row may begin within a line.
            prefetch_l2(row + (dense - 1));
        }
    }
}

// Writes the elements that are `inside`, each rounded once; they lie `step` apart from `target` on. `vector`: what
// is_vector says.
template <int COUNT, class T, class Index>
__device__ __forceinline__ void store_run(const float (&values)[COUNT], T* target, Index step, int inside, bool vector) {
    constexpr int PIECE = COUNT * sizeof(T) > 16 ? 16 / sizeof(T) : COUNT;
    const bool whole = vector && inside == COUNT;
    if (whole) {
#pragma unroll
        for (int i = 0; i < COUNT; i += PIECE) {
            Vector<T, PIECE> piece;
#pragma unroll
            for (int j = 0; j < PIECE; ++j) {
                piece.element[j] = from_float<T>(values[i + j]);
            }
            store_vector(target + i, piece);
        }
    }
    // Of a short run each store has a condition of its own, which costs less than to branch around them.
    if (COUNT <= 2 || !whole) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if ((COUNT > 2 || !whole) && i < inside) {
                target[i * step] = from_float<T>(values[i]);
            }
        }
    }
}

}  // namespace jitconv
