// Asynchronous copies and mbarriers.
//
// When copies land late, a cp.async lands in its thread's wait for the group, a bulk load when no thread can go on
// without it, a bulk store in its thread's wait. Whatever a thread reads before that is what was there before, and
// whatever is written over a source in the meantime is what the copy moves. When copies land early, all of that
// happens where the copy is issued.
#include <string.h>

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "host/block.h"
#include "host/buffers.h"
#include "host/bulk.h"
#include "host/races.h"
#include "host/report.h"

namespace jitconv::host {

namespace {

using Bytes = std::vector<unsigned char>;

struct Copy : Piece {
    Here here;
};

struct BulkLoad {
    std::vector<Piece> pieces;
    unsigned bytes;
    const char* what;
    Here here;
    uint64_t* barrier;
    Clock clock;  // when it was issued
};

struct BulkStore {
    Copy copy;
    Bytes issued;  // the source as it was when the copy was issued
};

// The copies of one thread, oldest first; a group is what lies between two commits.
template <class T>
struct Groups {
    std::vector<T> open;
    std::deque<std::vector<T>> committed;

    void commit() {
        committed.push_back(std::move(open));
        open.clear();
    }

    template <class Land>
    void land_until(size_t groups_left, Land land) {
        for (; committed.size() > groups_left; committed.pop_front()) {
            for (const T& copy : committed.front()) {
                land(copy);
            }
        }
    }
};

struct MBarrier {
    unsigned count = 0;    // arrivals in a phase
    unsigned pending = 0;  // of them, still to come in this phase
    int64_t bytes = 0;     // expected and not yet landed; negative when a copy lands before it is announced
    unsigned parity = 0;   // of the phase that runs
    bool visible = false;  // to the async proxy: fenced since its initialisation
    std::vector<int> waiting;
    Clock clock;
};

// What the 8 bytes of an initialised mbarrier hold, so that a stray write to it is noticed.
constexpr uint64_t MBARRIER_COOKIE = 0x7fe1ba441e4ba9e5ull;

Groups<Copy> copies[MAXIMUM_THREADS];
Groups<BulkStore> stores[MAXIMUM_THREADS];
std::deque<BulkLoad> loads;
std::map<const uint64_t*, MBarrier> mbarriers;
Bytes async_view;  // shared memory as the async proxy sees it, when copies land late
struct {
    const uint64_t* barrier;
    unsigned parity;
} waits_at[MAXIMUM_THREADS];

// ---- Checks --------------------------------------------------------------------------------------------------------

ptrdiff_t shared_offset(const void* pointer) { return static_cast<const unsigned char*>(pointer) - block.shared; }

void require_bulk(const void* shared, const void* global, unsigned bytes, const char* what, const Here& here) {
    require_shared(shared, bytes, what, here);
    require_global(global, bytes, what, here);
    require_aligned(shared, 16, what, here);
    require_aligned(global, 16, what, here);
    if (bytes % 16 != 0) {
        fail(text("%s: %u bytes is not a multiple of 16 (%s)", what, bytes, place(here).c_str()));
    }
}

// ---- mbarriers -----------------------------------------------------------------------------------------------------

std::string name(const uint64_t* barrier) { return text("mbarrier at shared memory + %td", shared_offset(barrier)); }

MBarrier& find(const uint64_t* barrier, const char* what, const Here& here) {
    const auto found = mbarriers.find(barrier);
    if (found == mbarriers.end()) {
        fail(text("%s: no mbarrier has been initialised at shared memory + %td (%s)", what, shared_offset(barrier),
                  place(here).c_str()));
    }
    if (*barrier != MBARRIER_COOKIE) {
        fail(text("%s: the %s was overwritten (%s)", what, name(barrier).c_str(), place(here).c_str()));
    }
    return found->second;
}

std::string describe_mbarrier(int thread) {
    const MBarrier& barrier = mbarriers[waits_at[thread].barrier];
    return text("the %s for its phase of parity %u, which lacks %u of %u arrivals and %lld bytes",
                name(waits_at[thread].barrier).c_str(), waits_at[thread].parity, barrier.pending, barrier.count,
                static_cast<long long>(barrier.bytes));
}

void complete_phase_if_due(MBarrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) {
        return;
    }
    barrier.pending = barrier.count;
    barrier.parity ^= 1u;
    for (const int thread : barrier.waiting) {
        make_ready(thread);
    }
    barrier.waiting.clear();
}

// ---- Landing -------------------------------------------------------------------------------------------------------

void land(const Piece& piece) {
    if (piece.source == nullptr) {
        memset(piece.destination, 0, piece.bytes);
    } else {
        memcpy(piece.destination, piece.source, piece.bytes);
    }
}

void land_load(const BulkLoad& load) {
    for (const Piece& piece : load.pieces) {
        land(piece);
        if (lands_late()) {
            memcpy(&async_view[static_cast<size_t>(shared_offset(piece.destination))], piece.destination, piece.bytes);
        }
    }
    MBarrier& barrier = find(load.barrier, load.what, load.here);
    barrier.bytes -= load.bytes;
    clock_join(barrier.clock, load.clock);
    complete_phase_if_due(barrier);
}

void land_store(const BulkStore& store) {
    if (memcmp(store.issued.data(), store.copy.source, store.copy.bytes) != 0) {
        fail(text("cp.async.bulk to global memory: its source was overwritten before the wait for it (issued at %s)",
                  place(store.copy.here).c_str()));
    }
    races_read(store.copy.source, store.copy.bytes, 0);
    land(store.copy);
}

size_t choose(size_t count) {
    switch (block.schedule->order) {
        case Order::forward: return 0;
        case Order::reversed: return count - 1;
        default: return next_random() % count;
    }
}

}  // namespace

void require_shared(const void* pointer, unsigned bytes, const char* what, const Here& here) {
    const ptrdiff_t offset = shared_offset(pointer);
    if (offset < 0 || offset + static_cast<ptrdiff_t>(bytes) > static_cast<ptrdiff_t>(block.shared_bytes)) {
        fail(text("%s: %u bytes at shared memory + %td are out of bounds: it has %u bytes (%s)", what, bytes, offset,
                  block.shared_bytes, place(here).c_str()));
    }
}

void require_global(const void* pointer, unsigned bytes, const char* what, const Here& here) {
    if (!is_global(pointer, bytes)) {
        fail(text("%s: %u bytes at %s are out of bounds (%s)", what, bytes, describe_address(pointer).c_str(),
                  place(here).c_str()));
    }
}

void require_aligned(const void* pointer, unsigned alignment, const char* what, const Here& here) {
    if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
        fail(text("%s: address %p is not a multiple of %u (%s)", what, pointer, alignment, place(here).c_str()));
    }
}

// ---- cp.async ------------------------------------------------------------------------------------------------------

void asynchronous_copy(void* shared, const void* source, int bytes, const Here& here) {
    const auto size = static_cast<unsigned>(bytes);
    require_shared(shared, size, "cp.async", here);
    require_aligned(shared, size, "cp.async", here);
    if (source != nullptr) {
        require_aligned(source, size, "cp.async", here);
        require_global(source, size, "cp.async", here);
    }
    const Copy copy = {{shared, source, size}, here};
    races_write(shared, size, 0);
    if (lands_late()) {
        copies[block.current].open.push_back(copy);
    } else {
        land(copy);
    }
}

void asynchronous_copy_commit() { copies[block.current].commit(); }

void asynchronous_copy_wait(int groups_left) {
    copies[block.current].land_until(static_cast<size_t>(groups_left), [](const Copy& copy) {
        // It may have been written at any time since it was issued.
        races_write(copy.destination, copy.bytes, 0);
        land(copy);
    });
}

// ---- mbarriers -----------------------------------------------------------------------------------------------------

void mbarrier_init(uint64_t* barrier, unsigned arrivals, const Here& here) {
    require_shared(barrier, sizeof *barrier, "mbarrier.init", here);
    require_aligned(barrier, sizeof *barrier, "mbarrier.init", here);
    if (arrivals == 0) {
        fail(text("mbarrier.init: a phase of 0 arrivals never completes (%s)", place(here).c_str()));
    }
    if (mbarriers.count(barrier) != 0) {
        fail(text("mbarrier.init: the %s is initialised a second time (%s)", name(barrier).c_str(),
                  place(here).c_str()));
    }
    *barrier = MBARRIER_COOKIE;
    mbarriers[barrier] = {arrivals, arrivals, 0, 0, false, {}, {}};
}

void mbarrier_init_fence() {
    for (auto& entry : mbarriers) {
        entry.second.visible = true;
    }
}

void mbarrier_arrive(uint64_t* barrier, unsigned expected_bytes, const Here& here) {
    MBarrier& state = find(barrier, "mbarrier.arrive", here);
    if (state.pending == 0) {
        fail(text("mbarrier.arrive: one more than the %u arrivals of a phase of the %s (%s)", state.count,
                  name(barrier).c_str(), place(here).c_str()));
    }
    state.bytes += expected_bytes;
    state.pending -= 1;
    clock_release(block.current, state.clock);
    complete_phase_if_due(state);
}

void mbarrier_wait(uint64_t* barrier, unsigned parity, const Here& here) {
    if (parity > 1) {
        fail(text("mbarrier wait: parity %u is neither 0 nor 1 (%s)", parity, place(here).c_str()));
    }
    // Asked again after every wake: for a thread that comes late, the phase it waited for may be gone, as on the GPU.
    while (find(barrier, "mbarrier wait", here).parity == parity) {
        waits_at[block.current] = {barrier, parity};
        mbarriers[barrier].waiting.push_back(block.current);
        mark_waiting(here, describe_mbarrier);
        give_way();
    }
    clock_acquire(block.current, mbarriers[barrier].clock);
}

// ---- cp.async.bulk -------------------------------------------------------------------------------------------------

void async_proxy_fence() {
    mbarrier_init_fence();
    if (lands_late() && block.shared_bytes != 0) {
        memcpy(async_view.data(), block.shared, block.shared_bytes);
    }
}

const unsigned char* async_proxy_view() { return lands_late() ? async_view.data() : nullptr; }

void bulk_load(void* shared, const void* source, unsigned bytes, uint64_t* barrier, const Here& here) {
    const char* what = "cp.async.bulk to shared memory";
    require_bulk(shared, source, bytes, what, here);
    bulk_load_pieces({{shared, source, bytes}}, shared, bytes, barrier, what, here);
}

void bulk_load_pieces(std::vector<Piece> pieces, void* shared, unsigned bytes, uint64_t* barrier, const char* what,
                      const Here& here) {
    if (!find(barrier, what, here).visible && lands_late()) {
        fail(text("%s: no fence_mbarrier_init() since the %s was initialised (%s)", what, name(barrier).c_str(),
                  place(here).c_str()));
    }
    BulkLoad load = {std::move(pieces), bytes, what, here, barrier, {}};
    races_write(shared, bytes, 0);
    clock_release(block.current, load.clock);
    if (lands_late()) {
        loads.push_back(std::move(load));
    } else {
        land_load(load);
    }
}

void bulk_store(void* destination, const void* shared, unsigned bytes, const Here& here) {
    const char* what = "cp.async.bulk to global memory";
    require_bulk(shared, destination, bytes, what, here);
    const Copy copy = {{destination, shared, bytes}, here};
    races_read(shared, bytes, 0);
    if (!lands_late()) {
        land(copy);
        return;
    }
    if (memcmp(shared, &async_view[static_cast<size_t>(shared_offset(shared))], bytes) != 0) {
        fail(text("%s: its source was written with no fence_proxy_async() since (%s)", what, place(here).c_str()));
    }
    const auto* begin = static_cast<const unsigned char*>(shared);
    stores[block.current].open.push_back({copy, Bytes(begin, begin + bytes)});
}

void bulk_commit() { stores[block.current].commit(); }

void bulk_wait(int groups_left) { stores[block.current].land_until(static_cast<size_t>(groups_left), land_store); }

// ---- The turns of a block's life -----------------------------------------------------------------------------------

void asynchronous_begin_block() {
    async_view.resize(lands_late() ? block.shared_bytes : 0);
    fill_poison(async_view.data(), async_view.size(), block.schedule->poison);
    mbarriers.clear();
}

bool asynchronous_progress() {
    if (loads.empty()) {
        return false;
    }
    const auto chosen = loads.begin() + static_cast<ptrdiff_t>(choose(loads.size()));
    const BulkLoad load = std::move(*chosen);
    loads.erase(chosen);
    land_load(load);
    return true;
}

// What a thread leaves in flight lands all the same. A bulk store whose source nobody has waited for is an error:
// the block's shared memory may be gone by then.
void asynchronous_exit_thread() {
    const int self = block.current;
    copies[self].commit();
    copies[self].land_until(0, land);
    if (!stores[self].open.empty() || !stores[self].committed.empty()) {
        fail("cp.async.bulk to global memory: the thread exits with no bulk_wait_group_read() for its store");
    }
}

void asynchronous_end_block() {
    if (!loads.empty()) {
        fail(text("the block ends with %zu bulk copies to shared memory in flight (the last issued at %s)",
                  loads.size(), place(loads.back().here).c_str()));
    }
}

}  // namespace jitconv::host
