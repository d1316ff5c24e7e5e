// What the host twins of waiting instructions call. One block runs at a time; its threads are fibers.
#pragma once

#include <stdint.h>

namespace jitconv::host {

// Where in a template or header a thread waits; named in every report.
struct Here {
    const char* file;
    int line;
};

// As the last parameter of a function: its caller's place.
#define JITCONV_HERE                                                                                       \
    const jitconv::host::Here& here = { __builtin_FILE(), __builtin_LINE() }

enum class WarpOperation { sync, vote, shuffle, shuffle_up, shuffle_down, shuffle_xor };

// Base of the block's dynamic shared memory.
unsigned char* shared_base();

// Where that begins in the 32-bit addresses of shared memory; what is below belongs to the system.
constexpr uint32_t SHARED_START = 1024;

uint32_t shared_address(const void* pointer, const Here& here);

// __syncthreads: all threads of the block, all at the same place in the source.
void block_barrier(const Here& here);

// bar.sync / bar.arrive: `threads` threads, wherever they come from.
void named_barrier(int id, int threads, bool wait, const Here& here);

// Waits until every lane in `mask` has come to the same operation with the same mask. Returns, for a vote, the
// lanes whose value is not 0; for a shuffle, the value of lane `source`.
uint64_t warp_exchange(WarpOperation operation, unsigned mask, uint64_t value, int source, const Here& here);

// cp.async: lands when the issuing thread waits for its group (late) or at once (early). No source: zeros.
void asynchronous_copy(void* shared, const void* source, int bytes, const Here& here);
void asynchronous_copy_commit();
void asynchronous_copy_wait(int groups_left);

// mbarrier objects, kept beside the 8 bytes of shared memory that name them.
void mbarrier_init(uint64_t* barrier, unsigned arrivals, const Here& here);
void mbarrier_arrive(uint64_t* barrier, unsigned expected_bytes, const Here& here);
void mbarrier_wait(uint64_t* barrier, unsigned parity, const Here& here);
void mbarrier_init_fence();

// The async proxy sees ordinary writes to shared memory only after this.
void async_proxy_fence();

// cp.async.bulk: lands when no thread of the block can go on without it (late) or at once (early).
void bulk_load(void* shared, const void* global, unsigned bytes, uint64_t* barrier, const Here& here);
void bulk_store(void* global, const void* shared, unsigned bytes, const Here& here);
void bulk_commit();
void bulk_wait(int groups_left);

// cp.async.bulk.tensor: the box at `coordinates` of the tensor that the map describes; lands like a bulk load.
void tensor_load(void* shared, const void* map, const int32_t* coordinates, int rank, uint64_t* barrier,
                 const Here& here);
void tensor_map_prefetch(const void* map, const Here& here);

// wgmma: D[64][n] = A[64][k] B[n][k]^T, plus D if `accumulate`; the operands by their descriptors.
enum class Operand { tf32, half, bfloat16 };
struct WarpgroupProduct {
    Operand operand;
    int n;
    uint64_t a, b;
    bool accumulate;
};
void warpgroup_fence(const Here& here);
void warpgroup_product(float* registers, const WarpgroupProduct& product, const Here& here);
void warpgroup_commit(const Here& here);
void warpgroup_wait(int groups_left, const Here& here);
void warpgroup_registers(int count, const Here& here);

}  // namespace jitconv::host
