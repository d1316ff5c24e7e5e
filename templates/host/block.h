// One block of threads: who can run, who waits for what, and the order in which they run.
//
//     job.cpp ──► run_grid ──► for each block: begin, run every thread to its end, end
//                                  │ a thread that must wait: wait_for(...)      ┌── barrier.cpp
//                                  ▼                                             ├── warp.cpp
//                              the next thread that can run ◄── make_ready(...) ─┼── async.cpp
//                                                                                └── wgmma.cpp
//
// A thread runs until it waits; nothing else interrupts it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>

#include "host/fiber.h"
#include "host/runtime.h"

namespace jitconv::host {

constexpr int MAXIMUM_THREADS = 1024;
constexpr int WARP = 32;

enum class Order : uint64_t { forward, reversed, random };
enum class Landing : uint64_t { late, early };

// One way in which the hardware may run a launch.
struct Schedule {
    Order order;
    Landing landing;
    uint64_t seed;
    uint32_t poison;  // what shared memory holds when a block begins
    const char* name;
};

// One thread's run through the kernel.
struct Kernel {
    void (*invoke)(const void* arguments);
    const void* arguments;
};

struct Thread {
    Fiber fiber;
    bool exited = false;
    Here here = {nullptr, 0};                        // where it waits
    std::string (*waits_for)(int thread) = nullptr;  // what it waits for, in words; null: it can run
};

struct Block {
    const Schedule* schedule = nullptr;
    int threads = 0;
    int current = -1;  // the thread that runs
    unsigned char* shared = nullptr;
    unsigned shared_bytes = 0;
    Thread thread[MAXIMUM_THREADS];
};

extern Block block;

inline bool lands_late() { return block.schedule->landing == Landing::late; }

void run_grid(const Kernel& kernel, const Schedule& schedule, unsigned grid, unsigned threads, unsigned char* shared,
              unsigned shared_bytes);

// Block, thread and schedule that run at this moment, to stderr.
void print_position();

// For what makes threads wait: the current thread gives way until somebody makes it ready. It may already have
// been made ready, then it just takes its turn.
void mark_waiting(const Here& here, std::string (*waits_for)(int thread));
void give_way();
void make_ready(int thread);

// The schedule's random number, for a choice that the hardware leaves open.
uint64_t next_random();

void fill_poison(void* memory, size_t bytes, uint32_t pattern);

// Shared memory as the async proxy sees it; null when it sees every write at once (copies land early).
const unsigned char* async_proxy_view();

// What each kind of waiting does at the turns of a block's life.
void barriers_end_block();
void asynchronous_begin_block();
void asynchronous_end_block();
void asynchronous_exit_thread();
void warpgroups_begin_block();
void warpgroups_end_block();
void warpgroups_exit_thread();
// Called when no thread can run: lands one copy, if any is in flight.
bool asynchronous_progress();

}  // namespace jitconv::host
