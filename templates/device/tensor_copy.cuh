// Tensor copies (TMA, sm_90 and up): one thread moves a box of a tensor from global to shared memory.
//
//     tensor, extents 7 x 5                box 4 x 3 at (-1, 3)     in shared memory, innermost first
//     (0,4) . . . . . . .   rows            + + + +                  0 0 0 0     elements outside of the tensor
//     (0,3) x x x . . . .   innermost       + x x x                  0 x x x     are zeros, at either end of
//      ...                  first           + x x x                  0 x x x     every axis
//
// What tensor and which box is the map's, made on the host (jitconv/tensor_map.py) and handed over in the kernel's
// argument, which must be __grid_constant__. Coordinates are signed, in elements, innermost first;
// the first of them is a multiple of 16 bytes, or the hardware raises an illegal instruction. The bytes of the
// whole box, zeros included, count against the mbarrier as they land; shared memory is aligned to 128 bytes. An axis
// with an element stride s takes every s-th element of its box.
#pragma once

#include "device/platform.cuh"

namespace jitconv {

struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

}  // namespace jitconv

#if defined(JITCONV_HOST)
#include "host/tensor_copy.h"
#else

namespace jitconv {

#if JITCONV_ARCH >= 900

template <int RANK>
__device__ __forceinline__ void tensor_load(void* shared, const TensorMap* map, const int32_t (&coordinates)[RANK],
                                            uint64_t* barrier) {
    static_assert(RANK >= 2 && RANK <= 5, "a tensor map has 2 to 5 axes here");
    const int32_t* const c = coordinates;
    if constexpr (RANK == 2) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
                "r"(shared_address(shared)),
            "l"(map), "r"(shared_address(barrier)), "r"(c[0]), "r"(c[1])
            : "memory");
    } else if constexpr (RANK == 3) {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
            "[%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(shared)),
            "l"(map), "r"(shared_address(barrier)), "r"(c[0]), "r"(c[1]), "r"(c[2])
            : "memory");
    } else if constexpr (RANK == 4) {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
            "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
            "l"(map), "r"(shared_address(barrier)), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3])
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
            "[%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(shared)),
            "l"(map), "r"(shared_address(barrier)), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]), "r"(c[4])
            : "memory");
    }
}

// Lets the first copy find its map at hand.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

#endif  // JITCONV_ARCH >= 900

}  // namespace jitconv

#endif
