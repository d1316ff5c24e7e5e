#include "host/block.h"

#include <stdio.h>

#include <map>
#include <string>
#include <vector>

#include "host/platform.h"
#include "host/races.h"
#include "host/report.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace jitconv::host {

Block block;

namespace {

#if defined(JITCONV_ASAN)
constexpr size_t STACK_BYTES = 512 << 10;
#else
constexpr size_t STACK_BYTES = 256 << 10;
#endif
constexpr int WORD = 64;

const Kernel* kernel = nullptr;
Fiber scheduler;
int running = 0;  // threads that have not exited
uint64_t random_state = 0;
uint64_t ready[MAXIMUM_THREADS / WORD];  // one bit for each thread that can run

// ---- Who runs next -----------------------------------------------------------------------------------------------

int lowest_ready(int from) {
    for (int word = from / WORD; word < MAXIMUM_THREADS / WORD; ++word) {
        const uint64_t bits = word == from / WORD ? ready[word] & (~0ull << (from % WORD)) : ready[word];
        if (bits != 0) {
            return word * WORD + __builtin_ctzll(bits);
        }
    }
    return -1;
}

int highest_ready() {
    for (int word = MAXIMUM_THREADS / WORD - 1; word >= 0; --word) {
        if (ready[word] != 0) {
            return word * WORD + WORD - 1 - __builtin_clzll(ready[word]);
        }
    }
    return -1;
}

int random_ready() {
    const int found = lowest_ready(static_cast<int>(next_random() % static_cast<unsigned>(block.threads)));
    return found >= 0 ? found : lowest_ready(0);
}

// Takes the next thread off the ready ones; -1 if there is none.
int take_ready() {
    const Order order = block.schedule->order;
    const int next = order == Order::forward    ? lowest_ready(0)
                     : order == Order::reversed ? highest_ready()
                                                : random_ready();
    if (next >= 0) {
        ready[next / WORD] &= ~(1ull << (next % WORD));
    }
    return next;
}

void set_current(int thread) {
    block.current = thread;
    threadIdx = {static_cast<unsigned>(thread), 0, 0};
}

[[noreturn]] void report_deadlock() {
    std::map<std::string, std::vector<int>> groups;
    for (int i = 0; i < block.threads; ++i) {
        const Thread& thread = block.thread[i];
        groups[thread.exited ? "exited" : "wait at " + thread.waits_for(i) + ", " + place(thread.here)].push_back(i);
    }
    std::string message = "no thread of the block can go on:";
    for (const auto& [what, who] : groups) {
        message += "\n  " + text(who.size() == 1 ? "thread " : "threads ") + ranges(who) + " " + what;
    }
    block.current = -1;
    fail(message);
}

// ---- The life of a block -------------------------------------------------------------------------------------------

void thread_main() {
    fiber_entered(block.thread[block.current].fiber);
    // A thread begins anew for every block. Its frames are left in the ordinary way, so the sanitizer's record of
    // this stack stays clean without any help.
    for (;;) {
        kernel->invoke(kernel->arguments);
        asynchronous_exit_thread();
        warpgroups_exit_thread();
        block.thread[block.current].exited = true;
        --running;
        give_way();
    }
}

void create_threads() {
    for (int i = 0; i < block.threads; ++i) {
        if (block.thread[i].fiber.stack == nullptr) {
            fiber_create(block.thread[i].fiber, STACK_BYTES, thread_main);
        }
    }
}

void run_block() {
    fill_poison(block.shared, block.shared_bytes, block.schedule->poison);
    asynchronous_begin_block();
    warpgroups_begin_block();
    races_begin_block();
    for (int i = 0; i < block.threads; ++i) {
        block.thread[i].exited = false;
        make_ready(i);
    }
    running = block.threads;
    set_current(take_ready());
    fiber_switch(scheduler, block.thread[block.current].fiber);
    barriers_end_block();
    warpgroups_end_block();
    asynchronous_end_block();
}

}  // namespace

uint64_t next_random() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

void make_ready(int thread) {
    block.thread[thread].waits_for = nullptr;
    ready[thread / WORD] |= 1ull << (thread % WORD);
}

void mark_waiting(const Here& here, std::string (*waits_for)(int thread)) {
    block.thread[block.current].here = here;
    block.thread[block.current].waits_for = waits_for;
}

void give_way() {
    const int self = block.current;
    int next = take_ready();
    while (next < 0 && running > 0 && asynchronous_progress()) {
        next = take_ready();
    }
    if (next == self) {
        return;
    }
    if (next >= 0) {
        set_current(next);
        fiber_switch(block.thread[self].fiber, block.thread[next].fiber);
    } else if (running > 0) {
        report_deadlock();
    } else {
        block.current = -1;
        fiber_switch(block.thread[self].fiber, scheduler);
    }
    // Somebody has switched back, and has set the current thread before.
}

void fill_poison(void* memory, size_t bytes, uint32_t pattern) {
    auto* target = static_cast<unsigned char*>(memory);
    for (size_t i = 0; i < bytes; ++i) {
        target[i] = static_cast<unsigned char>(pattern >> (8 * (i % 4)));
    }
}

void print_position() {
    if (block.schedule == nullptr) {
        return;
    }
    fprintf(stderr, "emulator: in block %u of %u, ", blockIdx.x, gridDim.x);
    if (block.current >= 0) {
        fprintf(stderr, "thread %d of %d, ", block.current, block.threads);
    }
    fprintf(stderr, "schedule %s\n", block.schedule->name);
}

void run_grid(const Kernel& the_kernel, const Schedule& schedule, unsigned grid, unsigned threads,
              unsigned char* shared, unsigned shared_bytes) {
    kernel = &the_kernel;
    block.schedule = &schedule;
    block.threads = static_cast<int>(threads);
    block.shared = shared;
    block.shared_bytes = shared_bytes;
    random_state = schedule.seed * 0x9e3779b97f4a7c15ull | 1u;
    gridDim = {grid, 1, 1};
    blockDim = {threads, 1, 1};
    create_threads();
    for (unsigned i = 0; i < grid; ++i) {
        blockIdx = {schedule.order == Order::reversed ? grid - 1 - i : i, 0, 0};
        run_block();
    }
    block.schedule = nullptr;
}

unsigned char* shared_base() { return block.shared; }

uint32_t shared_address(const void* pointer, const Here& here) {
    const ptrdiff_t offset = static_cast<const unsigned char*>(pointer) - block.shared;
    if (offset < 0 || offset > static_cast<ptrdiff_t>(block.shared_bytes)) {
        fail(text("shared_address: %p is not in shared memory (%s)", pointer, place(here).c_str()));
    }
    return SHARED_START + static_cast<uint32_t>(offset);
}

}  // namespace jitconv::host
