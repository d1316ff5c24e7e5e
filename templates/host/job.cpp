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
#include "host/main.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#include <signal.h>
#define ASAN_POISON_MEMORY_REGION(address, size) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(address, size) static_cast<void>(0)
#endif

namespace jitconv::host {

namespace {

// Device allocations are at least this aligned; a tensor's first element has its storage offset's remainder.
constexpr size_t DEVICE_ALIGNMENT = 1024;

[[noreturn]] void fail(const char* message) {
    fprintf(stderr, "emulator: %s\n", message);
    _exit(EXIT_EMULATION_ERROR);
}

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
    unsigned char* block = nullptr;
    unsigned char* data = nullptr;
    size_t bytes = 0;
    size_t misalignment = 0;

    void allocate() {
        void* memory = nullptr;
        if (posix_memalign(&memory, DEVICE_ALIGNMENT, misalignment + bytes) != 0) {
            fail("out of memory");
        }
        block = static_cast<unsigned char*>(memory);
        data = block + misalignment;
        ASAN_POISON_MEMORY_REGION(block, misalignment);
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
        fprintf(stderr, "emulator: the kernel's parameter has %zu bytes\n", argument_bytes);
        _exit(EXIT_EMULATION_ERROR);
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
    Kernel kernel = {invoke, job.arguments.data(), job.arguments.size()};
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
                fprintf(stderr,
                        "emulator: the result depends on the schedule: buffer %zu differs at byte %zu between "
                        "schedule %s and schedule %s\n",
                        i, byte, job.names[0].c_str(), job.names[schedule].c_str());
                _exit(EXIT_EMULATION_ERROR);
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

#if !defined(__SANITIZE_ADDRESS__)
void report_signal(int number) {
    fprintf(stderr, "emulator: %s\n", strsignal(number));
    print_position();
    _exit(EXIT_EMULATION_ERROR);
}
#endif

// An invalid access ends the program; say which thread it was.
void report_position_on_death() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_set_death_callback(print_position);
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

std::string describe_global(const void* pointer) {
    const auto* address = static_cast<const unsigned char*>(pointer);
    std::string result = "an address in no buffer";
    ptrdiff_t nearest = 1 << 20;
    for (size_t i = 0; i < global_buffers->size(); ++i) {
        const ptrdiff_t offset = address - (*global_buffers)[i].data;
        if (labs(offset) < nearest) {
            nearest = labs(offset);
            result = "buffer " + std::to_string(i) + " of " + std::to_string((*global_buffers)[i].bytes) +
                     " bytes, offset " + std::to_string(offset);
        }
    }
    return result;
}

int run_job(void (*invoke)(const void*), size_t argument_bytes) {
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
