// cp.async in a ring of STAGES: every stage holds a tile of 4 floats per thread; the tile in front of the ring is
// reversed within the block and stored while the others are in flight. The last tile may be cut short: what lies
// beyond x is read as zero.
#include "device/async_copy.cuh"
#include "device/platform.cuh"

constexpr int THREADS = 64;
constexpr int STAGES = 3;
constexpr int TILE = 4 * THREADS;

struct Arguments {
    const float* x;
    float* y;
    int32_t count;  // a multiple of 4
};

extern "C" __global__ void __launch_bounds__(THREADS) pipeline(const Arguments arguments) {
    using namespace jitconv;
    float* ring = reinterpret_cast<float*>(shared_memory());
    const int thread = static_cast<int>(threadIdx.x);
    const int tiles = (arguments.count + TILE - 1) / TILE;

    const auto fetch = [&](int tile) {
        const int first = tile * TILE + 4 * thread;
        const bool inside = first < arguments.count;
        cp_async_zero_fill<16>(&ring[tile % STAGES * TILE + 4 * thread], arguments.x + (inside ? first : 0), inside);
    };
    for (int tile = 0; tile < STAGES - 1; ++tile) {
        if (tile < tiles) {
            fetch(tile);
        }
        cp_async_commit_group();
    }
    for (int tile = 0; tile < tiles; ++tile) {
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        // The slot of the tile before is free: every thread has passed the barrier after reading it.
        if (tile + STAGES - 1 < tiles) {
            fetch(tile + STAGES - 1);
        }
        cp_async_commit_group();
        for (int i = thread; i < TILE; i += THREADS) {
            arguments.y[tile * TILE + i] = ring[tile % STAGES * TILE + TILE - 1 - i];
        }
    }
}
