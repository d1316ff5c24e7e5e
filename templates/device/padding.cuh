// Padding while x is staged: where a coordinate outside of x reads from.
//
//     x:                      a b c d
//     ZEROS      . . .  | 0 0 a b c d 0 0 |      the element does not exist; zero is staged
//     REPLICATE         | a a a b c d d d |      the nearest edge
//     REFLECT           | c b a b c d c b |      mirrored at the edge element, which is not repeated
//     CIRCULAR          | c d a b c d a b |      modulo the extent
#pragma once

#include "device/platform.cuh"

namespace jitconv {

enum class PaddingMode { ZEROS, REPLICATE, REFLECT, CIRCULAR };

// Maps coordinate `at` of an axis of `extent` into the axis. False: the element is a zero of the padding, or lies
// further out than any output reaches (the host has checked that one reflection or one turn suffices for those).
template <PaddingMode MODE, class Index>
__device__ __forceinline__ bool map_into(Index& at, Index extent) {
    if constexpr (MODE == PaddingMode::REPLICATE) {
        at = at < 0 ? 0 : (at >= extent ? extent - 1 : at);
    } else if constexpr (MODE == PaddingMode::REFLECT) {
        at = at < 0 ? -at : (at >= extent ? 2 * (extent - 1) - at : at);
    } else if constexpr (MODE == PaddingMode::CIRCULAR) {
        at = at < 0 ? at + extent : (at >= extent ? at - extent : at);
    }
    return at >= 0 && at < extent;
}

}  // namespace jitconv
