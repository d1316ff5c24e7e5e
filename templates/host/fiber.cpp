#include "host/fiber.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(JITCONV_ASAN)
#include <sanitizer/common_interface_defs.h>
#endif

// void jitconv_switch_stack(void** save, void* load)
#if defined(__x86_64__)
asm(R"(
.text
.globl jitconv_switch_stack
.type jitconv_switch_stack, @function
jitconv_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size jitconv_switch_stack, .-jitconv_switch_stack
.section .note.GNU-stack,"",@progbits
.text
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl jitconv_switch_stack
.type jitconv_switch_stack, %function
jitconv_switch_stack:
    stp x29, x30, [sp, #-160]!
    stp x19, x20, [sp, #16]
    stp x21, x22, [sp, #32]
    stp x23, x24, [sp, #48]
    stp x25, x26, [sp, #64]
    stp x27, x28, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #16]
    ldp x21, x22, [sp, #32]
    ldp x23, x24, [sp, #48]
    ldp x25, x26, [sp, #64]
    ldp x27, x28, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    ldp x29, x30, [sp], #160
    ret
.size jitconv_switch_stack, .-jitconv_switch_stack
.section .note.GNU-stack,"",%progbits
.text
)");
#else
#error "the emulator switches stacks on x86-64 and aarch64 only"
#endif

extern "C" void jitconv_switch_stack(void** save, void* load);

namespace jitconv::host {

namespace {

// What the first switch to a fresh stack finds there: zeroed registers and the entry as return address.
void* initial_stack_pointer(unsigned char* top, void (*entry)()) {
#if defined(__x86_64__)
    // After "ret" the stack pointer must be 8 below a multiple of 16, as if `entry` had been called.
    void** slot = reinterpret_cast<void**>(top) - 1;
    *--slot = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) {
        *--slot = nullptr;
    }
#else
    void** slot = reinterpret_cast<void**>(top - 160);
    for (int i = 0; i < 20; ++i) {
        slot[i] = nullptr;
    }
    slot[1] = reinterpret_cast<void*>(entry);
#endif
    return slot;
}

#if defined(JITCONV_ASAN)
// The stack that ran before: the sanitizer tells its bounds, which for the OS thread's own stack nobody else knows.
Fiber* switched_from = nullptr;

void finish_switch(Fiber& self) {
    const void* bottom = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(self.fake_stack, &bottom, &size);
    switched_from->stack = static_cast<unsigned char*>(const_cast<void*>(bottom));
    switched_from->stack_size = size;
}
#endif

}  // namespace

void fiber_create(Fiber& fiber, size_t stack_size, void (*entry)()) {
    const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, guard + stack_size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) {
        perror("emulator: cannot map the stack of a thread");
        exit(EXIT_FAILURE);
    }
    // Stacks that all begin at the same place in a page would compete for the same few cache lines.
    static size_t colour = 0;
    colour = (colour + 320) % 4096;
    fiber.stack = static_cast<unsigned char*>(memory) + guard;
    fiber.stack_size = stack_size;
    fiber.stack_pointer = initial_stack_pointer(fiber.stack + stack_size - colour, entry);
}

void fiber_switch(Fiber& from, Fiber& to) {
#if defined(JITCONV_ASAN)
    switched_from = &from;
    __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_size);
    jitconv_switch_stack(&from.stack_pointer, to.stack_pointer);
    finish_switch(from);
#else
    jitconv_switch_stack(&from.stack_pointer, to.stack_pointer);
#endif
}

void fiber_entered(Fiber& self) {
#if defined(JITCONV_ASAN)
    finish_switch(self);
#else
    static_cast<void>(self);
#endif
}

}  // namespace jitconv::host
