// Block-wide and named barriers.
#include <string.h>

#include <string>
#include <vector>

#include "host/block.h"
#include "host/races.h"
#include "host/report.h"

namespace jitconv::host {

namespace {

constexpr int NAMED_BARRIERS = 16;

struct Barrier {
    int threads = 0;  // how many it takes
    int arrived = 0;
    std::vector<int> waiting;
    Clock clock;
};

Barrier barriers[NAMED_BARRIERS];
int waits_at[MAXIMUM_THREADS];  // which barrier, for a thread that waits at one

std::string describe_block_barrier(int) { return "__syncthreads()"; }

std::string describe_named_barrier(int thread) {
    const Barrier& barrier = barriers[waits_at[thread]];
    return text("named barrier %d, where %d of %d threads have arrived", waits_at[thread], barrier.arrived,
                barrier.threads);
}

bool same_place(const Here& a, const Here& b) {
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

// __syncthreads in two places at once is undefined even where every thread reaches one of them.
void require_one_place(const Barrier& barrier) {
    const int first = barrier.waiting.front();
    for (const int thread : barrier.waiting) {
        if (!same_place(block.thread[thread].here, block.thread[first].here)) {
            fail(text("the threads meet at different __syncthreads(): thread %d at %s, thread %d at %s", first,
                      place(block.thread[first].here).c_str(), thread, place(block.thread[thread].here).c_str()));
        }
    }
}

void release(Barrier& barrier) {
    for (const int thread : barrier.waiting) {
        clock_acquire(thread, barrier.clock);
        make_ready(thread);
    }
    barrier.waiting.clear();
    barrier.clock.clear();
    barrier.arrived = 0;
}

void arrive(Barrier& barrier, int threads) {
    barrier.threads = threads;
    barrier.arrived += 1;
    clock_release(block.current, barrier.clock);
}

}  // namespace

void block_barrier(const Here& here) {
    Barrier& barrier = barriers[0];
    arrive(barrier, block.threads);
    barrier.waiting.push_back(block.current);
    mark_waiting(here, describe_block_barrier);
    if (barrier.arrived == barrier.threads) {
        require_one_place(barrier);
        release(barrier);
    }
    give_way();
}

void named_barrier(int id, int threads, bool waits, const Here& here) {
    if (id < 1 || id >= NAMED_BARRIERS) {
        fail(text("named barrier %d: its number must be 1 to 15; 0 is __syncthreads() (%s)", id,
                  place(here).c_str()));
    }
    if (threads <= 0 || threads % WARP != 0) {
        fail(text("named barrier %d: %d threads is not a multiple of 32 (%s)", id, threads, place(here).c_str()));
    }
    Barrier& barrier = barriers[id];
    if (barrier.arrived != 0 && barrier.threads != threads) {
        fail(text("named barrier %d: one thread counts on %d threads, another on %d (%s)", id, barrier.threads,
                  threads, place(here).c_str()));
    }
    arrive(barrier, threads);
    if (waits) {
        barrier.waiting.push_back(block.current);
        waits_at[block.current] = id;
        mark_waiting(here, describe_named_barrier);
    }
    if (barrier.arrived == threads) {
        release(barrier);
    }
    if (waits) {
        give_way();
    }
}

void barriers_end_block() {
    for (int id = 1; id < NAMED_BARRIERS; ++id) {
        if (barriers[id].arrived != 0) {
            fail(text("the block ends while %d of %d threads have arrived at named barrier %d", barriers[id].arrived,
                      barriers[id].threads, id));
        }
    }
}

}  // namespace jitconv::host
