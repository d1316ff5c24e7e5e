// Included after the kernel's text: a program that runs it on the jobs that it is given.
#pragma once

#include <stddef.h>
#include <string.h>

#include <type_traits>

namespace jitconv::host {

// Reads a job from stdin, runs it under each of its schedules, writes the buffers to stdout. `races`: the kernel
// reports its accesses to memory.
int run_job(void (*invoke)(const void* arguments), size_t argument_bytes, bool races);

template <class Arguments, void (*KERNEL)(Arguments)>
void invoke(const void* bytes) {
    static_assert(std::is_trivially_copyable_v<Arguments>, "the kernel's parameter must be a plain struct");
    Arguments arguments;
    memcpy(static_cast<void*>(&arguments), bytes, sizeof arguments);
    KERNEL(arguments);
}

template <class Arguments>
struct Parameter;

template <class Arguments>
struct Parameter<void(Arguments)> {
    using type = Arguments;
};

}  // namespace jitconv::host

#if !defined(JITCONV_RACES)
#define JITCONV_RACES false
#endif

#define JITCONV_MAIN(KERNEL)                                                                               \
    int main() {                                                                                           \
        using Arguments = jitconv::host::Parameter<decltype(KERNEL)>::type;                                \
        return jitconv::host::run_job(&jitconv::host::invoke<Arguments, &KERNEL>, sizeof(Arguments),       \
                                      JITCONV_RACES);                                                      \
    }
