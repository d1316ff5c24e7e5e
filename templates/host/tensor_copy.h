// Host twins of templates/device/tensor_copy.cuh; included by it only.
#pragma once

namespace jitconv {

#if JITCONV_ARCH >= 900

template <int RANK>
inline void tensor_load(void* shared, const TensorMap* map, const int32_t (&coordinates)[RANK], uint64_t* barrier,
                        JITCONV_HERE) {
    static_assert(RANK >= 2 && RANK <= 5, "a tensor map has 2 to 5 axes here");
    host::tensor_load(shared, map, coordinates, RANK, barrier, here);
}

inline void prefetch_tensor_map(const TensorMap* map, JITCONV_HERE) { host::tensor_map_prefetch(map, here); }

#endif

}  // namespace jitconv
