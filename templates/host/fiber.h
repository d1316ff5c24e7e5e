// A fiber: a stack of its own that runs until it hands over to another one.
//
//     low address                                     high address
//     | guard page | ............ stack ............ | sp: saved registers, return address |
//
// The switch saves what the calling convention says a callee must keep, swaps stack pointers, and returns on the
// other stack. Nothing else of ucontext (signal masks, system calls) is wanted: a block of 128 threads switches
// thousands of times per barrier-rich tile.
#pragma once

#include <stddef.h>

namespace jitconv::host {

struct Fiber {
    void* stack_pointer = nullptr;
    unsigned char* stack = nullptr;  // lowest usable byte, above the guard page
    size_t stack_size = 0;
    void* fake_stack = nullptr;  // AddressSanitizer's own record of this stack
};

// Maps a stack and prepares `fiber` to begin at `entry`, which must never return.
void fiber_create(Fiber& fiber, size_t stack_size, void (*entry)());

// Runs `to` from where it left off; returns when somebody switches back to `from`.
void fiber_switch(Fiber& from, Fiber& to);

// The first thing that `entry` must do: tells the sanitizer that the switch has happened.
void fiber_entered(Fiber& self);

}  // namespace jitconv::host
