// The block: its threads, what they wait for, and the order in which they run.
#include "host/runtime.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "host/block.h"
#include "host/fiber.h"
#include "host/platform.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace jitconv::host {

namespace {

constexpr int WARP = 32;
constexpr int NAMED_BARRIERS = 16;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t STACK_BYTES = 512 << 10;
#else
constexpr size_t STACK_BYTES = 256 << 10;
#endif

struct Copy {
    void* destination;
    const void* source;  // null: zeros
    unsigned bytes;
    uint64_t* barrier;  // bulk loads only
    Here here;
    std::vector<unsigned char> snapshot;  // bulk stores only: the source when the copy was issued
};

enum class Waiting { nothing, block, named, warp, mbarrier };

// Asynchronous copies of one thread, oldest first; a group is what lies between two commits.
struct CopyQueue {
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
};

struct Thread {
    Fiber fiber;
    bool exited = false;
    Waiting waiting = Waiting::nothing;
    Here here = {nullptr, 0};
    // named barrier
    int barrier_id = 0;
    int barrier_threads = 0;
    // warp operation
    WarpOperation operation = WarpOperation::sync;
    unsigned mask = 0;
    uint64_t value = 0;
    int source = 0;
    uint64_t result = 0;
    // mbarrier
    uint64_t* mbarrier = nullptr;
    unsigned parity = 0;

    CopyQueue copies;
    CopyQueue stores;
};

struct Barrier {
    int threads = 0;  // how many it takes; 0 while nobody is there
    int arrived = 0;
    std::vector<int> waiting;
};

struct MBarrier {
    unsigned count = 0;
    unsigned pending = 0;
    int64_t bytes = 0;  // expected and not yet landed; negative when a copy lands before it is announced
    unsigned parity = 0;
    bool visible = false;  // fenced since its initialisation
    std::vector<int> waiting;
};

// Every 8 bytes of an initialised mbarrier hold this, so that a stray write to it is noticed.
constexpr uint64_t MBARRIER_COOKIE = 0x7fe1ba44'1e4ba9e5ull;

const Schedule* schedule = nullptr;
Kernel* kernel = nullptr;
Fiber scheduler;
std::vector<Thread> threads(MAXIMUM_THREADS);
int block_threads = 0;
int current = -1;
int running = 0;  // threads that have not exited
uint64_t random_state = 0;
std::vector<uint64_t> ready;
Barrier barriers[NAMED_BARRIERS];
std::map<uint64_t*, MBarrier> mbarriers;
std::deque<Copy> bulk_loads;
unsigned char* shared = nullptr;
unsigned shared_bytes = 0;
std::vector<unsigned char> async_view;  // shared memory as the async proxy sees it

// ---- Reports ---------------------------------------------------------------------------------------------------

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

std::string text(const char* format, ...) {
    char buffer[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    return buffer;
}

std::string place(const Here& here) { return text("%s:%d", here.file, here.line); }

const char* name(WarpOperation operation) {
    switch (operation) {
        case WarpOperation::sync: return "__syncwarp";
        case WarpOperation::vote: return "__ballot_sync/__any_sync/__all_sync";
        case WarpOperation::shuffle: return "__shfl_sync";
        case WarpOperation::shuffle_up: return "__shfl_up_sync";
        case WarpOperation::shuffle_down: return "__shfl_down_sync";
        default: return "__shfl_xor_sync";
    }
}

std::string mbarrier_name(const uint64_t* barrier) {
    return text("mbarrier at shared memory + %td",
                reinterpret_cast<const unsigned char*>(barrier) - shared);
}

std::string describe_wait(const Thread& thread) {
    if (thread.exited) {
        return "exited";
    }
    switch (thread.waiting) {
        case Waiting::block: return "wait at __syncthreads() (" + place(thread.here) + ")";
        case Waiting::named:
            return text("wait at named barrier %d for %d threads, %d there (%s)", thread.barrier_id,
                        thread.barrier_threads, barriers[thread.barrier_id].arrived, place(thread.here).c_str());
        case Waiting::warp:
            return text("wait at %s with mask 0x%08x (%s)", name(thread.operation), thread.mask,
                        place(thread.here).c_str());
        case Waiting::mbarrier: {
            const MBarrier& barrier = mbarriers[thread.mbarrier];
            return text("wait at %s for its phase of parity %u: %u of %u arrivals and %lld bytes outstanding (%s)",
                        mbarrier_name(thread.mbarrier).c_str(), thread.parity, barrier.pending, barrier.count,
                        static_cast<long long>(barrier.bytes), place(thread.here).c_str());
        }
        default: return "runnable";
    }
}

// "0-31, 64": consecutive thread numbers as ranges.
std::string ranges(const std::vector<int>& numbers) {
    std::string result;
    for (size_t i = 0; i < numbers.size();) {
        size_t last = i;
        while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) {
            ++last;
        }
        result += text(last > i ? "%s%d-%d" : "%s%d", result.empty() ? "" : ", ", numbers[i], numbers[last]);
        i = last + 1;
    }
    return result;
}

[[noreturn]] void fail(const std::string& message) {
    fprintf(stderr, "emulator: %s\n", message.c_str());
    print_position();
    _exit(EXIT_EMULATION_ERROR);
}

[[noreturn]] void report_deadlock() {
    std::map<std::string, std::vector<int>> groups;
    for (int i = 0; i < block_threads; ++i) {
        groups[describe_wait(threads[i])].push_back(i);
    }
    std::string message = "no thread of the block can go on (divergent or missing barrier):";
    for (const auto& [what, who] : groups) {
        message += text("\n  %zu thread%s %s: ", who.size(), who.size() == 1 ? "" : "s", what.c_str()) + ranges(who);
    }
    current = -1;
    fail(message);
}

// ---- The order of running ----------------------------------------------------------------------------------------

uint64_t next_random() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

void make_ready(int thread) {
    threads[thread].waiting = Waiting::nothing;
    ready[thread / 64] |= 1ull << (thread % 64);
}

int lowest_ready(int from) {
    for (size_t word = static_cast<size_t>(from) / 64; word < ready.size(); ++word) {
        uint64_t bits = ready[word];
        if (word == static_cast<size_t>(from) / 64) {
            bits &= ~0ull << (from % 64);
        }
        if (bits != 0) {
            return static_cast<int>(word * 64) + __builtin_ctzll(bits);
        }
    }
    return -1;
}

int highest_ready() {
    for (size_t word = ready.size(); word-- > 0;) {
        if (ready[word] != 0) {
            return static_cast<int>(word * 64) + 63 - __builtin_clzll(ready[word]);
        }
    }
    return -1;
}

int choose_ready() {
    switch (schedule->order) {
        case Order::forward: return lowest_ready(0);
        case Order::reversed: return highest_ready();
        default: {
            const int found = lowest_ready(static_cast<int>(next_random() % static_cast<unsigned>(block_threads)));
            return found >= 0 ? found : lowest_ready(0);
        }
    }
}

void run_thread(int thread) {
    current = thread;
    threadIdx = {static_cast<unsigned>(thread), 0, 0};
}

bool land_one_bulk_load();

// Leaves the current fiber for the next thread that can run; comes back when this one may go on.
void leave() {
    const int self = current;
    int next = choose_ready();
    while (next < 0 && land_one_bulk_load()) {
        next = choose_ready();
    }
    if (next < 0) {
        if (running > 0) {
            report_deadlock();
        }
        current = -1;
        fiber_switch(threads[self].fiber, scheduler);
        return;
    }
    ready[next / 64] &= ~(1ull << (next % 64));
    if (next != self) {
        run_thread(next);
        fiber_switch(threads[self].fiber, threads[next].fiber);
        run_thread(self);
    }
}

void wait(Waiting what, const Here& here) {
    threads[current].waiting = what;
    threads[current].here = here;
    leave();
}

// ---- Asynchronous copies -----------------------------------------------------------------------------------------

bool late() { return schedule->landing == Landing::late; }

bool in_shared(const void* pointer, unsigned bytes) {
    const auto* address = static_cast<const unsigned char*>(pointer);
    return address >= shared && address + bytes <= shared + shared_bytes;
}

void require_shared(const void* pointer, unsigned bytes, const char* what, const Here& here) {
    if (!in_shared(pointer, bytes)) {
        fail(text("%s: %u bytes at shared memory + %td lie outside the %u bytes of shared memory (%s)", what, bytes,
                  static_cast<const unsigned char*>(pointer) - shared, shared_bytes, place(here).c_str()));
    }
}

void require_aligned(const void* pointer, unsigned alignment, const char* what, const Here& here) {
    if (reinterpret_cast<uintptr_t>(pointer) % alignment != 0) {
        fail(text("%s: address %p is not a multiple of %u (%s)", what, pointer, alignment, place(here).c_str()));
    }
}

// An out-of-bounds copy is reported where it is issued, not where it lands.
void require_global(const void* pointer, unsigned bytes, const char* what, const Here& here) {
    if (!is_global(pointer, bytes)) {
        fail(text("%s: %u bytes at %s are out of bounds (%s)", what, bytes, describe_global(pointer).c_str(),
                  place(here).c_str()));
    }
}

size_t shared_offset(const void* pointer) {
    return static_cast<size_t>(static_cast<const unsigned char*>(pointer) - shared);
}

std::vector<unsigned char> snapshot(const void* source, unsigned bytes) {
    const auto* begin = static_cast<const unsigned char*>(source);
    return {begin, begin + bytes};
}

void land(const Copy& copy) {
    if (!copy.snapshot.empty() && memcmp(copy.snapshot.data(), copy.source, copy.bytes) != 0) {
        fail(text("cp.async.bulk to global memory: the source was overwritten before the copy had read it (issued at %s)",
                  place(copy.here).c_str()));
    }
    if (copy.source == nullptr) {
        memset(copy.destination, 0, copy.bytes);
    } else {
        memcpy(copy.destination, copy.source, copy.bytes);
    }
}

void land_oldest_group(CopyQueue& queue) {
    for (const Copy& copy : queue.groups.front()) {
        land(copy);
    }
    queue.groups.pop_front();
}

void land_all(CopyQueue& queue) {
    while (!queue.groups.empty()) {
        land_oldest_group(queue);
    }
    for (const Copy& copy : queue.open) {
        land(copy);
    }
    queue.open.clear();
}

// ---- mbarrier ------------------------------------------------------------------------------------------------------

MBarrier& find_mbarrier(uint64_t* barrier, const char* what, const Here& here) {
    const auto found = mbarriers.find(barrier);
    if (found == mbarriers.end()) {
        fail(text("%s: no mbarrier has been initialised at shared memory + %td (%s)", what,
                  reinterpret_cast<unsigned char*>(barrier) - shared, place(here).c_str()));
    }
    if (*barrier != MBARRIER_COOKIE) {
        fail(text("%s: the %s was overwritten by an ordinary write (%s)", what, mbarrier_name(barrier).c_str(),
                  place(here).c_str()));
    }
    return found->second;
}

void complete_phase_if_due(MBarrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) {
        return;
    }
    barrier.pending = barrier.count;
    barrier.parity ^= 1u;
    for (const int thread : barrier.waiting) {
        make_ready(thread);
    }
    barrier.waiting.clear();
}

void land_bulk_load(const Copy& copy) {
    land(copy);
    if (late()) {
        memcpy(&async_view[shared_offset(copy.destination)], copy.destination, copy.bytes);
    }
    MBarrier& barrier = find_mbarrier(copy.barrier, "cp.async.bulk", copy.here);
    barrier.bytes -= copy.bytes;
    complete_phase_if_due(barrier);
}

bool land_one_bulk_load() {
    if (bulk_loads.empty()) {
        return false;
    }
    size_t index = 0;
    if (schedule->order == Order::reversed) {
        index = bulk_loads.size() - 1;
    } else if (schedule->order == Order::random) {
        index = next_random() % bulk_loads.size();
    }
    const Copy copy = bulk_loads[index];
    bulk_loads.erase(bulk_loads.begin() + static_cast<std::ptrdiff_t>(index));
    land_bulk_load(copy);
    return true;
}

// ---- Threads ---------------------------------------------------------------------------------------------------------

void exit_thread() {
    Thread& self = threads[current];
    land_all(self.copies);
    land_all(self.stores);
    self.exited = true;
    --running;
    leave();
}

void thread_main() {
    fiber_entered(threads[current].fiber);
    // A thread begins anew for every block: its frames are left in the ordinary way, so the sanitizer's record
    // of this stack is clean without any help.
    for (;;) {
        kernel->run();
        exit_thread();
    }
}

void create_threads(int count) {
    for (int i = 0; i < count; ++i) {
        if (threads[i].fiber.stack == nullptr) {
            fiber_create(threads[i].fiber, STACK_BYTES, thread_main);
        }
    }
}

void begin_block() {
    fill_poison(shared, shared_bytes, schedule->poison);
    async_view.assign(late() ? shared_bytes : 0, 0);
    fill_poison(async_view.data(), async_view.size(), schedule->poison);
    mbarriers.clear();
    ready.assign(static_cast<size_t>(block_threads + 63) / 64, 0);
    for (int i = 0; i < block_threads; ++i) {
        threads[i].exited = false;
        make_ready(i);
    }
    running = block_threads;
}

void end_block() {
    if (!bulk_loads.empty()) {
        fail(text("%zu bulk copies to shared memory are still in flight when the block ends", bulk_loads.size()));
    }
    for (int id = 0; id < NAMED_BARRIERS; ++id) {
        if (barriers[id].arrived != 0) {
            fail(text("%d of %d threads have arrived at named barrier %d when the block ends", barriers[id].arrived,
                      barriers[id].threads, id));
        }
    }
}

void run_block() {
    begin_block();
    const int first = choose_ready();
    ready[first / 64] &= ~(1ull << (first % 64));
    run_thread(first);
    fiber_switch(scheduler, threads[first].fiber);
    end_block();
}

// The lanes of the current warp that wait at the same operation with the same mask as the current thread.
unsigned lanes_together(int warp, const Thread& self) {
    unsigned lanes = 0;
    for (int lane = 0; lane < WARP && warp + lane < block_threads; ++lane) {
        const Thread& other = threads[warp + lane];
        if (other.waiting == Waiting::warp && other.operation == self.operation && other.mask == self.mask) {
            lanes |= 1u << lane;
        }
    }
    return lanes;
}

void complete_warp_operation(int warp, unsigned mask, WarpOperation operation) {
    unsigned voted = 0;
    for (int lane = 0; lane < WARP; ++lane) {
        if ((mask >> lane & 1u) != 0 && threads[warp + lane].value != 0) {
            voted |= 1u << lane;
        }
    }
    for (int lane = 0; lane < WARP; ++lane) {
        if ((mask >> lane & 1u) == 0) {
            continue;
        }
        Thread& thread = threads[warp + lane];
        if (operation == WarpOperation::vote) {
            thread.result = voted;
        } else if (operation != WarpOperation::sync) {
            if ((mask >> thread.source & 1u) == 0) {
                fail(text("%s: thread %d reads lane %d, which is not in the mask 0x%08x (%s)", name(operation),
                          warp + lane, thread.source, mask, place(thread.here).c_str()));
            }
            thread.result = threads[warp + thread.source].value;
        }
        make_ready(warp + lane);
    }
}

void release(Barrier& barrier) {
    for (const int thread : barrier.waiting) {
        make_ready(thread);
    }
    barrier.waiting.clear();
    barrier.arrived = 0;
    barrier.threads = 0;
}

// __syncthreads in two places at once is undefined even where all threads reach one of them.
void require_one_place(const Barrier& barrier) {
    const Thread& first = threads[barrier.waiting.front()];
    for (const int thread : barrier.waiting) {
        const Here& here = threads[thread].here;
        if (here.line != first.here.line || strcmp(here.file, first.here.file) != 0) {
            fail(text("the threads meet at different __syncthreads(): thread %d at %s, thread %d at %s",
                      barrier.waiting.front(), place(first.here).c_str(), thread, place(here).c_str()));
        }
    }
}

void arrive_at(int id, int count, Waiting kind, bool waits, const Here& here) {
    Barrier& barrier = barriers[id];
    if (barrier.arrived != 0 && barrier.threads != count) {
        fail(text("barrier %d: one thread counts on %d threads, another on %d (%s)", id, barrier.threads, count,
                  place(here).c_str()));
    }
    Thread& self = threads[current];
    barrier.threads = count;
    barrier.arrived += 1;
    if (waits) {
        self.waiting = kind;
        self.here = here;
        self.barrier_id = id;
        self.barrier_threads = count;
        barrier.waiting.push_back(current);
    }
    if (barrier.arrived == count) {
        if (kind == Waiting::block) {
            require_one_place(barrier);
        }
        release(barrier);
    }
    if (waits) {
        leave();
    }
}

}  // namespace

// ---- What a kernel calls -------------------------------------------------------------------------------------------

unsigned char* shared_base() { return shared; }

void block_barrier(const Here& here) { arrive_at(0, block_threads, Waiting::block, true, here); }

void named_barrier(int id, int count, bool waits, const Here& here) {
    if (id < 1 || id >= NAMED_BARRIERS) {
        fail(text("named barrier %d: the number must be 1 to 15; 0 is __syncthreads (%s)", id, place(here).c_str()));
    }
    if (count <= 0 || count % WARP != 0) {
        fail(text("named barrier %d: %d threads is not a multiple of 32 (%s)", id, count, place(here).c_str()));
    }
    arrive_at(id, count, Waiting::named, waits, here);
}

uint64_t warp_exchange(WarpOperation operation, unsigned mask, uint64_t value, int source, const Here& here) {
    Thread& self = threads[current];
    const int warp = current / WARP * WARP;
    const int lane = current % WARP;
    if ((mask >> lane & 1u) == 0) {
        fail(text("%s: thread %d is lane %d, which its own mask 0x%08x leaves out (%s)", name(operation), current,
                  lane, mask, place(here).c_str()));
    }
    self.waiting = Waiting::warp;
    self.here = here;
    self.operation = operation;
    self.mask = mask;
    self.value = value;
    self.source = source;
    if (lanes_together(warp, self) == mask) {
        complete_warp_operation(warp, mask, operation);
    }
    leave();
    return self.result;
}

void asynchronous_copy(void* destination, const void* source, int bytes, const Here& here) {
    const auto size = static_cast<unsigned>(bytes);
    require_shared(destination, size, "cp.async", here);
    require_aligned(destination, size, "cp.async", here);
    if (source != nullptr) {
        require_aligned(source, size, "cp.async", here);
        require_global(source, size, "cp.async", here);
    }
    const Copy copy = {destination, source, size, nullptr, here, {}};
    if (late()) {
        threads[current].copies.open.push_back(copy);
    } else {
        land(copy);
    }
}

void asynchronous_copy_commit() {
    CopyQueue& queue = threads[current].copies;
    queue.groups.push_back(std::move(queue.open));
    queue.open.clear();
}

void asynchronous_copy_wait(int groups_left) {
    CopyQueue& queue = threads[current].copies;
    while (queue.groups.size() > static_cast<size_t>(groups_left)) {
        land_oldest_group(queue);
    }
}

void mbarrier_init(uint64_t* barrier, unsigned count, const Here& here) {
    require_shared(barrier, sizeof *barrier, "mbarrier.init", here);
    require_aligned(barrier, sizeof *barrier, "mbarrier.init", here);
    if (count == 0) {
        fail(text("mbarrier.init: a count of 0 can never complete (%s)", place(here).c_str()));
    }
    if (mbarriers.count(barrier) != 0) {
        fail(text("mbarrier.init: the %s is initialised a second time (%s)", mbarrier_name(barrier).c_str(),
                  place(here).c_str()));
    }
    *barrier = MBARRIER_COOKIE;
    mbarriers[barrier] = {count, count, 0, 0, false, {}};
}

void mbarrier_invalidate(uint64_t* barrier, const Here& here) {
    if (!find_mbarrier(barrier, "mbarrier.inval", here).waiting.empty()) {
        fail(text("mbarrier.inval: threads wait at the %s (%s)", mbarrier_name(barrier).c_str(),
                  place(here).c_str()));
    }
    mbarriers.erase(barrier);
}

void mbarrier_arrive(uint64_t* barrier, unsigned arrivals, unsigned expected_bytes, const Here& here) {
    MBarrier& state = find_mbarrier(barrier, "mbarrier.arrive", here);
    if (arrivals > state.pending) {
        fail(text("mbarrier.arrive: more than the %u arrivals that the %s counts on (%s)", state.count,
                  mbarrier_name(barrier).c_str(), place(here).c_str()));
    }
    state.bytes += expected_bytes;
    state.pending -= arrivals;
    complete_phase_if_due(state);
}

void mbarrier_wait(uint64_t* barrier, unsigned parity, const Here& here) {
    if (parity > 1) {
        fail(text("mbarrier wait: parity %u is neither 0 nor 1 (%s)", parity, place(here).c_str()));
    }
    // Asked again after every wake: a thread that comes late finds the phase it waited for gone by, as on the GPU.
    while (find_mbarrier(barrier, "mbarrier wait", here).parity == parity) {
        threads[current].mbarrier = barrier;
        threads[current].parity = parity;
        mbarriers[barrier].waiting.push_back(current);
        wait(Waiting::mbarrier, here);
    }
}

void mbarrier_init_fence() {
    for (auto& entry : mbarriers) {
        entry.second.visible = true;
    }
}

void async_proxy_fence() {
    mbarrier_init_fence();
    if (late() && shared_bytes != 0) {
        memcpy(async_view.data(), shared, shared_bytes);
    }
}

void bulk_load(void* destination, const void* source, unsigned bytes, uint64_t* barrier, const Here& here) {
    const char* what = "cp.async.bulk to shared memory";
    require_shared(destination, bytes, what, here);
    require_global(source, bytes, what, here);
    require_aligned(destination, 16, what, here);
    require_aligned(source, 16, what, here);
    if (bytes % 16 != 0) {
        fail(text("%s: %u bytes is not a multiple of 16 (%s)", what, bytes, place(here).c_str()));
    }
    if (!find_mbarrier(barrier, what, here).visible && late()) {
        fail(text("%s: no fence_mbarrier_init() since the %s was initialised (%s)", what,
                  mbarrier_name(barrier).c_str(), place(here).c_str()));
    }
    const Copy copy = {destination, source, bytes, barrier, here, {}};
    if (late()) {
        bulk_loads.push_back(copy);
    } else {
        land_bulk_load(copy);
    }
}

void bulk_store(void* destination, const void* source, unsigned bytes, const Here& here) {
    const char* what = "cp.async.bulk to global memory";
    require_shared(source, bytes, what, here);
    require_global(destination, bytes, what, here);
    require_aligned(destination, 16, what, here);
    require_aligned(source, 16, what, here);
    if (bytes % 16 != 0) {
        fail(text("%s: %u bytes is not a multiple of 16 (%s)", what, bytes, place(here).c_str()));
    }
    if (late()) {
        if (memcmp(source, &async_view[shared_offset(source)], bytes) != 0) {
            fail(text("%s: the source holds ordinary writes with no fence_proxy_async() since (%s)", what,
                      place(here).c_str()));
        }
        threads[current].stores.open.push_back({destination, source, bytes, nullptr, here, snapshot(source, bytes)});
    } else {
        memcpy(destination, source, bytes);
    }
}

void bulk_commit() {
    CopyQueue& queue = threads[current].stores;
    queue.groups.push_back(std::move(queue.open));
    queue.open.clear();
}

void bulk_wait(int groups_left, bool) {
    CopyQueue& queue = threads[current].stores;
    while (queue.groups.size() > static_cast<size_t>(groups_left)) {
        land_oldest_group(queue);
    }
}

// ---- What the program calls ------------------------------------------------------------------------------------------

void fill_poison(void* memory, size_t bytes, uint32_t pattern) {
    auto* target = static_cast<unsigned char*>(memory);
    for (size_t i = 0; i < bytes; ++i) {
        target[i] = static_cast<unsigned char>(pattern >> (8 * (i % 4)));
    }
}

void print_position() {
    if (schedule == nullptr) {
        return;
    }
    fprintf(stderr, "emulator: in block %u of %u, ", blockIdx.x, gridDim.x);
    if (current >= 0) {
        fprintf(stderr, "thread %d of %d, ", current, block_threads);
    }
    fprintf(stderr, "schedule %s\n", schedule->name);
}

void run_grid(Kernel& the_kernel, const Schedule& the_schedule, unsigned grid, unsigned block, unsigned char* memory,
              unsigned memory_bytes) {
    kernel = &the_kernel;
    schedule = &the_schedule;
    shared = memory;
    shared_bytes = memory_bytes;
    block_threads = static_cast<int>(block);
    random_state = the_schedule.seed * 0x9e3779b97f4a7c15ull | 1u;
    gridDim = {grid, 1, 1};
    blockDim = {block, 1, 1};
    create_threads(block_threads);
    for (unsigned i = 0; i < grid; ++i) {
        blockIdx = {the_schedule.order == Order::reversed ? grid - 1 - i : i, 0, 0};
        run_block();
    }
    schedule = nullptr;
}

}  // namespace jitconv::host
