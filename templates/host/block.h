// Between the program (job.cpp) and the block that it runs (runtime.cpp).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>

namespace jitconv::host {

constexpr int MAXIMUM_THREADS = 1024;
constexpr int EXIT_EMULATION_ERROR = 3;

enum class Order : uint64_t { forward, reversed, random };
enum class Landing : uint64_t { late, early };

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
    size_t argument_bytes;
    void run() const { invoke(arguments); }
};

void run_grid(Kernel& kernel, const Schedule& schedule, unsigned grid, unsigned block, unsigned char* shared,
              unsigned shared_bytes);

// Block, thread and schedule that run at this moment, to stderr.
void print_position();

void fill_poison(void* memory, size_t bytes, uint32_t pattern);

// Whether the bytes lie within one of the job's global buffers; and how to name an address in a report.
bool is_global(const void* pointer, unsigned bytes);
std::string describe_global(const void* pointer);

}  // namespace jitconv::host
