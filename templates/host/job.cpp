// A job: one launch under several schedules, on buffers that end exactly where the tensors end.
//
// stdin, little endian, every number 64 bits:
//     grid, block, shared_bytes, argument_bytes, buffers, pointers, schedules
//     schedules x  order, landing, seed, poison
//     pointers  x  argument_offset, buffer, byte_offset
//     buffers   x  bytes, misalignment
//     the argument bytes, then the bytes of each buffer
// stdout: the bytes of each buffer after the run.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "host/block.h"
#include "host/buffers.h"
#include "host/main.h"
#include "host/races.h"
#include "host/report.h"

#if defined(JITCONV_ASAN)
#include <dlfcn.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#include <signal.h>
#endif

namespace jitconv::host {

namespace {

// Device allocations are at least this aligned; a tensor's first element has its storage offset's remainder.
constexpr size_t DEVICE_ALIGNMENT = 1024;

// How far from a buffer an address may be and still be named by it.
constexpr ptrdiff_t NEIGHBOURHOOD = 1 << 16;

void read_exactly(void* target, size_t bytes) {
    if (bytes != 0 && fread(target, 1, bytes, stdin) != bytes) {
        fail("the job ends too early");
    }
}

uint64_t read_number() {
    uint64_t number = 0;
    read_exactly(&number, sizeof number);
    return number;
}

// Memory of exactly `bytes` bytes, `misalignment` past a multiple of the device's alignment. What lies before
// and behind is out of bounds.
struct Buffer {
    unsigned char* data = nullptr;
    size_t bytes = 0;
    size_t misalignment = 0;

    void allocate() {
        void* memory = nullptr;
        if (posix_memalign(&memory, DEVICE_ALIGNMENT, misalignment + bytes) != 0) {
            fail("out of memory");
        }
        data = static_cast<unsigned char*>(memory) + misalignment;
#if defined(JITCONV_ASAN)
        __asan_poison_memory_region(memory, misalignment);
#endif
    }
};

struct Pointer {
    size_t argument_offset;
    size_t buffer;
    size_t byte_offset;
};

struct Job {
    uint64_t grid = 0, block = 0, shared_bytes = 0;
    std::vector<Schedule> schedules;
    std::vector<std::string> names;
    std::vector<Pointer> pointers;
    std::vector<Buffer> buffers;
    std::vector<unsigned char> arguments;
    std::vector<std::vector<unsigned char>> initial;
};

std::vector<Buffer>* global_buffers = nullptr;

std::string schedule_name(Order order, Landing landing, uint64_t seed) {
    std::string name = order == Order::forward    ? "forward"
                       : order == Order::reversed ? "reversed"
                                                  : "random " + std::to_string(seed);
    return name + (landing == Landing::late ? ", late landing" : ", early landing");
}

void read_job(Job& job, size_t argument_bytes) {
    job.grid = read_number();
    job.block = read_number();
    job.shared_bytes = read_number();
    if (read_number() != argument_bytes) {
        fail(text("the kernel's parameter has %zu bytes, not as many as the arguments", argument_bytes));
    }
    job.buffers.resize(read_number());
    job.pointers.resize(read_number());
    job.schedules.resize(read_number());
    job.names.reserve(job.schedules.size());
    for (Schedule& schedule : job.schedules) {
        schedule.order = static_cast<Order>(read_number());
        schedule.landing = static_cast<Landing>(read_number());
        schedule.seed = read_number();
        schedule.poison = static_cast<uint32_t>(read_number());
        job.names.push_back(schedule_name(schedule.order, schedule.landing, schedule.seed));
        schedule.name = job.names.back().c_str();
    }
    for (Pointer& pointer : job.pointers) {
        pointer.argument_offset = read_number();
        pointer.buffer = read_number();
        pointer.byte_offset = read_number();
    }
    for (Buffer& buffer : job.buffers) {
        buffer.bytes = read_number();
        buffer.misalignment = read_number();
        buffer.allocate();
    }
    job.arguments.resize(argument_bytes);
    read_exactly(job.arguments.data(), argument_bytes);
    for (const Buffer& buffer : job.buffers) {
        job.initial.emplace_back(buffer.bytes);
        read_exactly(job.initial.back().data(), buffer.bytes);
    }
}

void store_pointers(Job& job) {
    for (const Pointer& pointer : job.pointers) {
        const unsigned char* address = job.buffers[pointer.buffer].data + pointer.byte_offset;
        memcpy(&job.arguments[pointer.argument_offset], &address, sizeof address);
    }
}

void run_schedule(Job& job, const Schedule& schedule, void (*invoke)(const void*)) {
    for (size_t i = 0; i < job.buffers.size(); ++i) {
        if (job.buffers[i].bytes != 0) {
            memcpy(job.buffers[i].data, job.initial[i].data(), job.buffers[i].bytes);
        }
    }
    void* shared = nullptr;
    if (posix_memalign(&shared, DEVICE_ALIGNMENT, job.shared_bytes) != 0) {
        fail("out of memory");
    }
    const Kernel kernel = {invoke, job.arguments.data()};
    run_grid(kernel, schedule, static_cast<unsigned>(job.grid), static_cast<unsigned>(job.block),
             static_cast<unsigned char*>(shared), static_cast<unsigned>(job.shared_bytes));
    free(shared);
}

using Contents = std::vector<std::vector<unsigned char>>;

Contents contents(const Job& job) {
    Contents result;
    for (const Buffer& buffer : job.buffers) {
        result.emplace_back(buffer.data, buffer.data + buffer.bytes);
    }
    return result;
}

void require_same(const Job& job, const Contents& first, size_t schedule) {
    for (size_t i = 0; i < job.buffers.size(); ++i) {
        for (size_t byte = 0; byte < job.buffers[i].bytes; ++byte) {
            if (first[i][byte] != job.buffers[i].data[byte]) {
                fail(text("the result depends on the schedule: buffer %zu differs at byte %zu between schedule %s "
                          "and schedule %s",
                          i, byte, job.names[0].c_str(), job.names[schedule].c_str()));
            }
        }
    }
}

void write_contents(const Contents& all) {
    for (const auto& bytes : all) {
        if (!bytes.empty() && fwrite(bytes.data(), 1, bytes.size(), stdout) != bytes.size()) {
            fail("cannot write the result");
        }
    }
    fflush(stdout);
}

#if defined(JITCONV_ASAN)
void report_death() {
    if (__asan_report_present() != 0) {
        fprintf(stderr, "emulator: the address is %s\n", describe_address(__asan_get_report_address()).c_str());
    }
    print_position();
}
#else
void report_signal(int number) {
    fprintf(stderr, "emulator: %s\n", strsignal(number));
    print_position();
    _exit(EXIT_EMULATION_ERROR);
}
#endif

// An invalid access ends the program; say which thread it was.
void report_position_on_death() {
#if defined(JITCONV_ASAN)
    __sanitizer_set_death_callback(report_death);
    // Built as shared libraries, the two sanitizers have one such callback each.
    void* ubsan = dlopen("libubsan.so.1", RTLD_NOLOAD | RTLD_NOW);
    void* set = ubsan != nullptr ? dlsym(ubsan, "__sanitizer_set_death_callback") : nullptr;
    if (set != nullptr) {
        reinterpret_cast<void (*)(void (*)())>(set)(report_death);
    }
#else
    static unsigned char stack[64 << 10];
    stack_t alternate = {};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, nullptr);
    for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
        struct sigaction action = {};
        action.sa_handler = report_signal;
        action.sa_flags = SA_ONSTACK;
        sigaction(number, &action, nullptr);
    }
#endif
}

}  // namespace

bool is_global(const void* pointer, unsigned bytes) {
    const auto* address = static_cast<const unsigned char*>(pointer);
    for (const Buffer& buffer : *global_buffers) {
        if (address >= buffer.data && address + bytes <= buffer.data + buffer.bytes) {
            return true;
        }
    }
    return false;
}

std::string describe_address(const void* pointer) {
    const auto* address = static_cast<const unsigned char*>(pointer);
    std::string result = "in no buffer";
    ptrdiff_t nearest = NEIGHBOURHOOD;
    const auto consider = [&](const std::string& name, const unsigned char* data, size_t bytes) {
        const ptrdiff_t offset = address - data;
        const ptrdiff_t beyond = offset < 0 ? -offset : offset - static_cast<ptrdiff_t>(bytes);
        if (beyond < nearest) {
            nearest = beyond;
            result = text("%s of %zu bytes, offset %td", name.c_str(), bytes, offset);
        }
    };
    consider("shared memory", block.shared, block.shared_bytes);
    for (size_t i = 0; i < global_buffers->size(); ++i) {
        consider("buffer " + std::to_string(i), (*global_buffers)[i].data, (*global_buffers)[i].bytes);
    }
    return result;
}

int run_job(void (*invoke)(const void*), size_t argument_bytes, bool races) {
    races_enabled = races;
    Job job;
    read_job(job, argument_bytes);
    global_buffers = &job.buffers;
    report_position_on_death();
    store_pointers(job);
    Contents first;
    for (size_t i = 0; i < job.schedules.size(); ++i) {
        run_schedule(job, job.schedules[i], invoke);
        if (i == 0) {
            first = contents(job);
        } else {
            require_same(job, first, i);
        }
    }
    write_contents(first);
    return EXIT_SUCCESS;
}

}  // namespace jitconv::host
