// One warp loads tiles of 32 values into a ring of two slots, another doubles them and stores them.
//
//     producer   sync empty[slot]   write slot   arrive full[slot]
//     consumer   arrive empty[slot] (both, at the start)
//                sync full[slot]    read slot    arrive empty[slot]
#include "device/platform.cuh"

constexpr int SLOTS = 2;
constexpr int TILE = 32;
constexpr int FULL = 1;           // named barriers FULL + slot
constexpr int EMPTY = 1 + SLOTS;  // and EMPTY + slot

struct Arguments {
    const float* x;
    float* y;
    int32_t tiles;
};

extern "C" __global__ void __launch_bounds__(64) named_barriers(const Arguments arguments) {
    using namespace jitconv;
    float* shared = reinterpret_cast<float*>(shared_memory());
    const int lane = static_cast<int>(threadIdx.x) % TILE;
    const bool producer = threadIdx.x < TILE;
    const int tiles = arguments.tiles;
    if (producer) {
        for (int tile = 0; tile < tiles; ++tile) {
            const int slot = tile % SLOTS;
            if (tile >= SLOTS) {
                named_barrier_sync(EMPTY + slot, 64);
            }
            shared[slot * TILE + lane] = arguments.x[tile * TILE + lane];
            named_barrier_arrive(FULL + slot, 64);
        }
    } else {
        for (int tile = 0; tile < tiles; ++tile) {
            const int slot = tile % SLOTS;
            named_barrier_sync(FULL + slot, 64);
            arguments.y[tile * TILE + lane] = 2.0f * shared[slot * TILE + (lane + 1) % TILE];
            if (tile + SLOTS < tiles) {
                named_barrier_arrive(EMPTY + slot, 64);
            }
        }
    }
}
