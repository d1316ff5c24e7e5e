// Who is ordered before whom, accesses to shared memory that are not, and reads of what nobody has written.
//
// Every thread has a vector clock: what it knows of the time of each thread. Synchronisation passes clocks on:
//
//     arrive at a barrier    clock_release: the barrier's clock learns what the thread knows
//     leave it               clock_acquire: the thread learns what the barrier knows
//
// Two accesses to one byte, one of them a write, are a race unless the later thread knows the earlier one's time.
// __syncthreads, named barriers, __syncwarp and mbarriers pass clocks on; shuffles and votes do not, as they promise
// no order of memory accesses. Only programs built for it call in here (races_enabled); atomics are not looked at.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace jitconv::host {

using Clock = std::vector<uint32_t>;

extern bool races_enabled;

void races_begin_block();

void clock_release(int thread, Clock& clock);
void clock_acquire(int thread, const Clock& clock);

// All of `from` becomes known to `to`.
void clock_join(Clock& to, const Clock& from);

// An access by the current thread; bytes outside shared memory are ignored.
void races_read(const void* pointer, size_t bytes, uintptr_t code);
void races_write(const void* pointer, size_t bytes, uintptr_t code);

// The tensor cores of a warp read shared memory on their own, knowing what `clock` knows. Returns the time of the
// read, which a thread that has waited for it is told. Rows that nobody has written are no error: nobody may use them.
uint32_t races_product_read(int warp, const Clock& clock, const void* pointer, size_t bytes);
void races_product_done(int warp, uint32_t time, int thread);

}  // namespace jitconv::host
