#include "host/races.h"

#include <algorithm>

#include "host/block.h"
#include "host/report.h"

namespace jitconv::host {

bool races_enabled = false;

namespace {

struct Access {
    uint32_t time = 0;  // of the thread; 0: never
    uint32_t code = 0;  // where in the program
    uint16_t thread = 0;
};

// What has happened to one byte since it was last written.
struct Byte {
    Access write;
    Access read;                  // the latest
    std::vector<Access> readers;  // every thread that has read, once there is more than one
};

// Of the threads, and behind them of the warps' tensor cores.
Clock clocks[MAXIMUM_THREADS + MAXIMUM_THREADS / WARP];
std::vector<Byte> bytes_of_shared;

bool knows(int thread, const Access& access) {
    return access.time == 0 || access.thread == thread || clocks[thread][access.thread] >= access.time;
}

// "write by thread 3 at code 0x401234"; a copy that the thread has issued has no code of its own.
std::string describe(const char* what, const Access& access) {
    if (access.thread >= block.threads) {
        return text("%s by a wgmma of warp %d", what, access.thread - block.threads);
    }
    return access.code == 0 ? text("%s by an asynchronous copy of thread %d", what, access.thread)
                            : text("%s by thread %d at code 0x%x", what, access.thread, access.code);
}

[[noreturn]] void report(const char* what, const Access& earlier, size_t offset, const char* what_now,
                         const Access& now) {
    fail(text("race at shared memory + %zu: %s and %s, with no barrier between them", offset,
              describe(what, earlier).c_str(), describe(what_now, now).c_str()));
}

Access access_now(uintptr_t code) {
    return {clocks[block.current][static_cast<size_t>(block.current)], static_cast<uint32_t>(code),
            static_cast<uint16_t>(block.current)};
}

void remember_reader(Byte& byte, const Access& access) {
    if (byte.read.time == 0 || byte.read.thread == access.thread) {
        byte.read = access;
        if (byte.readers.empty()) {
            return;
        }
    } else if (byte.readers.empty()) {
        byte.readers.push_back(byte.read);
    }
    for (Access& reader : byte.readers) {
        if (reader.thread == access.thread) {
            reader = access;
            return;
        }
    }
    byte.readers.push_back(access);
}

bool inside_shared(const void* pointer) {
    const auto* address = static_cast<const unsigned char*>(pointer);
    return address >= block.shared && address < block.shared + block.shared_bytes;
}

template <class Visit>
void each_byte(const void* pointer, size_t count, Visit visit) {
    if (!races_enabled || block.current < 0 || !inside_shared(pointer)) {
        return;
    }
    const auto first = static_cast<size_t>(static_cast<const unsigned char*>(pointer) - block.shared);
    const size_t end = std::min(first + count, static_cast<size_t>(block.shared_bytes));
    for (size_t offset = first; offset < end; ++offset) {
        visit(bytes_of_shared[offset], offset);
    }
}

}  // namespace

void races_begin_block() {
    if (!races_enabled) {
        return;
    }
    const int timed = block.threads + (block.threads + WARP - 1) / WARP;
    for (int thread = 0; thread < timed; ++thread) {
        clocks[thread].assign(static_cast<size_t>(timed), 0);
        clocks[thread][static_cast<size_t>(thread)] = 1;
    }
    bytes_of_shared.assign(block.shared_bytes, {});
}

void clock_join(Clock& to, const Clock& from) {
    to.resize(std::max(to.size(), from.size()));
    for (size_t i = 0; i < from.size(); ++i) {
        to[i] = std::max(to[i], from[i]);
    }
}

void clock_release(int thread, Clock& clock) {
    if (races_enabled) {
        clock_join(clock, clocks[thread]);
        ++clocks[thread][static_cast<size_t>(thread)];
    }
}

void clock_acquire(int thread, const Clock& clock) {
    if (races_enabled) {
        clock_join(clocks[thread], clock);
    }
}

void races_read(const void* pointer, size_t bytes, uintptr_t code) {
    each_byte(pointer, bytes, [&](Byte& byte, size_t offset) {
        if (byte.write.time == 0) {
            fail(text("shared memory + %zu has not been written yet: %s", offset,
                      describe("read", access_now(code)).c_str()));
        }
        if (!knows(block.current, byte.write)) {
            report("write", byte.write, offset, "read", access_now(code));
        }
        remember_reader(byte, access_now(code));
    });
}

uint32_t races_product_read(int warp, const Clock& clock, const void* pointer, size_t bytes) {
    if (!races_enabled) {
        return 0;
    }
    const int reader = block.threads + warp;
    Clock& own = clocks[reader];
    clock_join(own, clock);
    const Access access = {++own[static_cast<size_t>(reader)], 0, static_cast<uint16_t>(reader)};
    each_byte(pointer, bytes, [&](Byte& byte, size_t offset) {
        if (!knows(reader, byte.write)) {
            report("write", byte.write, offset, "read", access);
        }
        remember_reader(byte, access);
    });
    return access.time;
}

void races_product_done(int warp, uint32_t time, int thread) {
    if (races_enabled) {
        clocks[thread][static_cast<size_t>(block.threads + warp)] = time;
    }
}

void races_write(const void* pointer, size_t bytes, uintptr_t code) {
    each_byte(pointer, bytes, [&](Byte& byte, size_t offset) {
        if (!knows(block.current, byte.write)) {
            report("write", byte.write, offset, "write", access_now(code));
        }
        if (!knows(block.current, byte.read)) {
            report("read", byte.read, offset, "write", access_now(code));
        }
        for (const Access& reader : byte.readers) {
            if (!knows(block.current, reader)) {
                report("read", reader, offset, "write", access_now(code));
            }
        }
        byte.readers.clear();
        byte.read = {};
        byte.write = access_now(code);
    });
}

}  // namespace jitconv::host

// Where the program begins in memory, by the linker: addresses of code are reported as addr2line takes them.
extern "C" const char __ehdr_start __attribute__((visibility("hidden")));

// What a compiler inserts for -fsanitize=thread, at every access to memory that may be shared.

#define JITCONV_CODE                                                                                       \
    (reinterpret_cast<uintptr_t>(__builtin_return_address(0)) - 1 - reinterpret_cast<uintptr_t>(&__ehdr_start))
#define JITCONV_ACCESS(BYTES)                                                                              \
    void __tsan_read##BYTES(void* address) { jitconv::host::races_read(address, BYTES, JITCONV_CODE); }    \
    void __tsan_write##BYTES(void* address) { jitconv::host::races_write(address, BYTES, JITCONV_CODE); }
#define JITCONV_UNALIGNED(BYTES)                                                                           \
    void __tsan_unaligned_read##BYTES(void* address) {                                                     \
        jitconv::host::races_read(address, BYTES, JITCONV_CODE);                                           \
    }                                                                                                      \
    void __tsan_unaligned_write##BYTES(void* address) {                                                    \
        jitconv::host::races_write(address, BYTES, JITCONV_CODE);                                          \
    }

extern "C" {

JITCONV_ACCESS(1)
JITCONV_ACCESS(2)
JITCONV_ACCESS(4)
JITCONV_ACCESS(8)
JITCONV_ACCESS(16)
JITCONV_UNALIGNED(2)
JITCONV_UNALIGNED(4)
JITCONV_UNALIGNED(8)
JITCONV_UNALIGNED(16)

void __tsan_read_range(void* address, size_t bytes) { jitconv::host::races_read(address, bytes, JITCONV_CODE); }
void __tsan_write_range(void* address, size_t bytes) { jitconv::host::races_write(address, bytes, JITCONV_CODE); }

void* __tsan_memcpy(void* destination, const void* source, size_t bytes) {
    jitconv::host::races_read(source, bytes, JITCONV_CODE);
    jitconv::host::races_write(destination, bytes, JITCONV_CODE);
    return __builtin_memcpy(destination, source, bytes);
}

void* __tsan_memset(void* destination, int value, size_t bytes) {
    jitconv::host::races_write(destination, bytes, JITCONV_CODE);
    return __builtin_memset(destination, value, bytes);
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

}  // extern "C"
