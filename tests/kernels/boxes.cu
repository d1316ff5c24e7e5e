// Tensor copies: each block loads one box, at its five coordinates (as many as the map has axes count), and writes out
// what then lies in shared memory.
#include "device/async_copy.cuh"
#include "device/platform.cuh"
#include "device/tensor_copy.cuh"

struct Arguments {
    const int32_t* corners;  // [boxes][5]
    uint32_t* y;             // [boxes][words]
    int32_t rank;
    int32_t words;
    jitconv::TensorMap map;
};
static_assert(sizeof(Arguments) == 192, "a map is aligned to 64 bytes, also behind other members");

using namespace jitconv;

template <int RANK>
__device__ void load(const Arguments& arguments, uint64_t* barrier) {
    int32_t coordinates[RANK];
    for (int axis = 0; axis < RANK; ++axis) {
        coordinates[axis] = arguments.corners[5 * blockIdx.x + axis];
    }
    tensor_load(shared_memory(), &arguments.map, coordinates, barrier);
}

extern "C" __global__ void __launch_bounds__(64) boxes(const __grid_constant__ Arguments arguments) {
    uint32_t* const box = reinterpret_cast<uint32_t*>(shared_memory());
    uint64_t* const barrier = reinterpret_cast<uint64_t*>(box + (arguments.words + 1) / 2 * 2);
    if (threadIdx.x == 0) {
        prefetch_tensor_map(&arguments.map);
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, 4 * static_cast<uint32_t>(arguments.words));
        switch (arguments.rank) {
            case 2: load<2>(arguments, barrier); break;
            case 3: load<3>(arguments, barrier); break;
            case 4: load<4>(arguments, barrier); break;
            default: load<5>(arguments, barrier); break;
        }
    }
    __syncthreads();
    mbarrier_wait(barrier, 0);
    for (int i = static_cast<int>(threadIdx.x); i < arguments.words; i += 64) {
        arguments.y[blockIdx.x * static_cast<unsigned>(arguments.words) + i] = box[i];
    }
}
