// Bulk copies with mbarriers: one warp loads rows into a ring, three warps reverse them within the row and leave the
// result in a second ring, from where one thread stores it.
//
//     loader     wait empty[slot]   expect + bulk_load -> full[slot]
//     workers    wait full[slot]    read in[slot], write out[slot]   arrive empty[slot]
//                fence, barrier among the workers; thread 32: bulk_store(out[slot]), commit
#include "device/async_copy.cuh"
#include "device/platform.cuh"

constexpr int WORKERS = 96;
constexpr int SLOTS = 2;
constexpr int ROW = 96;  // floats
constexpr int ROW_BYTES = 4 * ROW;

struct Shared {
    float in[SLOTS][ROW];
    float out[SLOTS][ROW];
    uint64_t full[SLOTS];
    uint64_t empty[SLOTS];
};

struct Arguments {
    const float* x;
    float* y;
    int32_t rows;
};

extern "C" __global__ void __launch_bounds__(32 + WORKERS) bulk(const Arguments arguments) {
    using namespace jitconv;
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
        for (int slot = 0; slot < SLOTS; ++slot) {
            mbarrier_init(&shared.full[slot], 1);
            mbarrier_init(&shared.empty[slot], WORKERS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (thread < 32) {
        for (int row = 0; row < arguments.rows && thread == 0; ++row) {
            const int slot = row % SLOTS;
            // A fresh barrier counts as having completed a phase of parity 1: the first lap does not wait.
            mbarrier_wait(&shared.empty[slot], (row / SLOTS + 1) % 2);
            mbarrier_arrive_expect_tx(&shared.full[slot], ROW_BYTES);
            bulk_load(shared.in[slot], arguments.x + row * ROW, ROW_BYTES, &shared.full[slot]);
        }
        return;
    }
    const int worker = thread - 32;
    for (int row = 0; row < arguments.rows; ++row) {
        const int slot = row % SLOTS;
        mbarrier_wait(&shared.full[slot], row / SLOTS % 2);
        if (worker == 0) {
            bulk_wait_group_read<SLOTS - 1>();
        }
        named_barrier_sync(1, WORKERS);
        shared.out[slot][worker] = shared.in[slot][ROW - 1 - worker];
        mbarrier_arrive(&shared.empty[slot]);
        fence_proxy_async();
        named_barrier_sync(2, WORKERS);
        if (worker == 0) {
            bulk_store(arguments.y + row * ROW, shared.out[slot], ROW_BYTES);
            bulk_commit_group();
        }
    }
    if (worker == 0) {
        bulk_wait_group_read<0>();
    }
}
