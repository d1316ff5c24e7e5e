// Warpgroup products (wgmma).
//
// The lanes of a warp execute one sequence of operations. The lane that comes last to one performs it for its warp, and
// where they issue and wait the others wait for it; nobody waits for another warp, as none is promised to.
//
//     lane 0    fence  product ...........|  commit  wait ..........|
//     lane 1           fence  product ....|          commit wait ...|
//     lane 31                 fence product        commit       wait|
//                                      issued                   retired
//
// From a lane's issue to the wait that retires the product its accumulators hold poison, which a kernel that reads
// them computes with, and which must still be there at the end. The operands are read when the product is issued
// (copies land early) or retired (late). What may be overwritten by then, or is not visible to the async proxy at the
// issue, is read as poison: products may reach rows that nobody uses, so it takes a wrong result to tell.
#include <string.h>

#include <deque>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "host/block.h"
#include "host/platform.h"
#include "host/numeric.h"
#include "host/races.h"
#include "host/report.h"

namespace jitconv::host {

namespace {

constexpr int WARPS = MAXIMUM_THREADS / WARP;
constexpr int WARPGROUP = 4 * WARP;
constexpr int WARP_ROWS = 16;  // of A and D
constexpr int CHUNK = 16;      // bytes of a row that lie together
constexpr int ROW_BYTES = 2 * CHUNK;
constexpr int MAXIMUM_N = 256;
constexpr int MAXIMUM_K = 16;
constexpr uint32_t ADDRESS_MASK = (1u << 18) - 1;
// Start, leading and stride; everything else means a swizzle or nothing.
constexpr uint64_t DESCRIPTOR_MASK = 0x00003fff3fff3fffull;

using Bytes = std::vector<unsigned char>;

// One array of accumulators of one thread.
struct Accumulators {
    float* registers;
    int count;
    int in_flight = 0;           // products on them that have not been retired
    std::vector<float> value;    // while in flight: what the registers will hold
    uint64_t idle_since = 0;     // the thread's fences when the last product was retired
    uint64_t fenced = 0;         // checksum of the registers at the thread's last fence
};

struct Issue {
    WarpgroupProduct product;
    Here here;
    Accumulators* lanes[WARP] = {};
    Bytes operands;  // rows of A, then of B, as they were when the product was issued
    Clock clock;     // what the lanes knew
    uint32_t time = 0;
};

enum class Operation { fence, product, commit, wait, registers };

// One operation of a warp.
struct Step {
    Operation operation;
    int operand;
    Here here;
    int first;  // the lane's thread that came first
    int arrived = 0;
    std::shared_ptr<Issue> issue;
};

struct Warp {
    std::deque<Step> steps;  // that some lane has not come to
    uint64_t first_step = 0;
    std::vector<std::shared_ptr<Issue>> open;
    std::deque<std::vector<std::shared_ptr<Issue>>> committed;
};

// One product of a warpgroup.
struct Shared {
    WarpgroupProduct product;
    Here here;
    int first;
    int arrived = 0;
};

struct Warpgroup {
    std::deque<Shared> products;  // that some thread has not issued
    uint64_t first_product = 0;
};

Warp warps[WARPS];
Warpgroup warpgroups[WARPS / 4];

struct {
    std::list<Accumulators> accumulators;
    uint64_t steps = 0;     // operations that the thread has come to
    uint64_t products = 0;  // of them, products
    uint64_t fences = 0;
    uint64_t idle_since = 0;  // fences when a product of the thread was last retired
} threads[MAXIMUM_THREADS];

// ---- Operands ------------------------------------------------------------------------------------------------------

// Where 16 bytes of a row lie, as an offset in shared memory.
size_t chunk_offset(const Issue& issue, char matrix, int row, int half) {
    const uint64_t descriptor = matrix == 'A' ? issue.product.a : issue.product.b;
    const auto field = [&](int bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3fffu) << 4; };
    const uint32_t address = (field(0) + static_cast<uint32_t>(row / 8) * field(32) +
                              static_cast<uint32_t>(row % 8) * CHUNK + static_cast<uint32_t>(half) * field(16)) &
                             ADDRESS_MASK;
    const int64_t offset = static_cast<int64_t>(address) - SHARED_START;
    if (offset < 0 || offset + CHUNK > static_cast<int64_t>(block.shared_bytes)) {
        fail(text("wgmma: row %d of %c, 16 bytes at shared memory + %lld, is out of bounds: it has %u bytes (%s)", row,
                  matrix, static_cast<long long>(offset), block.shared_bytes, place(issue.here).c_str()));
    }
    return static_cast<size_t>(offset);
}

// Visits every 16 bytes that a warp reads: where they lie in shared memory and in Issue::operands.
template <class Visit>
void each_chunk(const Issue& issue, int warp, Visit visit) {
    size_t position = 0;
    const auto rows = [&](char matrix, int first, int count) {
        for (int row = first; row < first + count; ++row) {
            for (int half = 0; half < 2; ++half, position += CHUNK) {
                visit(chunk_offset(issue, matrix, row, half), position);
            }
        }
    };
    rows('A', warp % 4 * WARP_ROWS, WARP_ROWS);
    rows('B', 0, issue.product.n);
}

void mark_unreadable(Issue& issue, size_t offset, size_t position, const char* why) {
    remark(text("wgmma issued at %s: 16 bytes of an operand, at shared memory + %zu, %s", place(issue.here).c_str(),
                offset, why));
    fill_poison(&issue.operands[position], CHUNK, block.schedule->poison);
}

void read_operands(Issue& issue, int warp) {
    const unsigned char* visible = async_proxy_view();
    issue.operands.resize(static_cast<size_t>(WARP_ROWS + issue.product.n) * ROW_BYTES);
    each_chunk(issue, warp, [&](size_t offset, size_t position) {
        memcpy(&issue.operands[position], block.shared + offset, CHUNK);
        if (visible != nullptr && memcmp(block.shared + offset, visible + offset, CHUNK) != 0) {
            mark_unreadable(issue, offset, position, "were written with no fence_proxy_async() since");
        }
        issue.time = races_product_read(warp, issue.clock, block.shared + offset, CHUNK);
    });
}

void check_operands(Issue& issue, int warp) {
    each_chunk(issue, warp, [&](size_t offset, size_t position) {
        if (memcmp(&issue.operands[position], block.shared + offset, CHUNK) != 0) {
            mark_unreadable(issue, offset, position, "were written before the wait for it, or not fenced");
        }
    });
}

// ---- Products ------------------------------------------------------------------------------------------------------

double element(Operand operand, const unsigned char* row, int k) {
    if (operand == Operand::tf32) {
        uint32_t word = 0;
        memcpy(&word, row + 4 * k, sizeof word);
        return tf32_operand(word);
    }
    uint16_t bits = 0;
    memcpy(&bits, row + 2 * k, sizeof bits);
    return operand == Operand::half ? half_bits_to_float(bits) : __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// The 16 rows of one warp. Products are exact and their sum is rounded once, where the hardware truncates as it adds.
void multiply(Issue& issue) {
    static double a[WARP_ROWS][MAXIMUM_K];
    static double b[MAXIMUM_K][MAXIMUM_N];  // k first: eight columns are eight neighbours
    const WarpgroupProduct& product = issue.product;
    const int depth = product.operand == Operand::tf32 ? 8 : 16;
    const unsigned char* row = issue.operands.data();
    for (int i = 0; i < WARP_ROWS + product.n; ++i, row += ROW_BYTES) {
        for (int k = 0; k < depth; ++k) {
            (i < WARP_ROWS ? a[i][k] : b[k][i - WARP_ROWS]) = element(product.operand, row, k);
        }
    }
    for (int g = 0; g < WARP_ROWS; ++g) {
        // The four lanes that hold this row of D, two neighbours of every eight columns each.
        float* values[4];
        for (int t = 0; t < 4; ++t) {
            values[t] = issue.lanes[4 * (g % 8) + t]->value.data() + 2 * (g / 8);
        }
        for (int j = 0; j < product.n / 8; ++j) {
            double sum[8] = {};
            if (product.accumulate) {
                for (int column = 0; column < 8; ++column) {
                    sum[column] = values[column / 2][4 * j + column % 2];
                }
            }
            for (int k = 0; k < depth; ++k) {
                for (int column = 0; column < 8; ++column) {
                    sum[column] += a[g][k] * b[k][8 * j + column];
                }
            }
            for (int column = 0; column < 8; ++column) {
                values[column / 2][4 * j + column % 2] = static_cast<float>(sum[column]);
            }
        }
    }
}

// ---- Accumulators --------------------------------------------------------------------------------------------------

// Not memcmp and memcpy: registers whose scope has ended are looked at too, and the sanitizer intercepts those.
bool hold_poison(const Accumulators& accumulators) {
    for (int i = 0; i < accumulators.count; ++i) {
        if (__float_as_uint(accumulators.registers[i]) != block.schedule->poison) {
            return false;
        }
    }
    return true;
}

uint64_t checksum(const Accumulators& accumulators) {
    uint64_t result = 0xcbf29ce484222325ull;
    for (int i = 0; i < accumulators.count; ++i) {
        result = (result ^ __float_as_uint(accumulators.registers[i])) * 0x100000001b3ull;
    }
    return result;
}

void require_untouched(const Accumulators& accumulators, int thread, const Here& here) {
    if (!hold_poison(accumulators)) {
        fail(text("wgmma: thread %d has written its accumulators, or they have gone out of scope, before the "
                  "wgmma_wait_group() for the product on them (%s)",
                  thread, place(here).c_str()));
    }
}

[[noreturn]] void fail_unfenced(const char* why, const Here& here) {
    fail(text("wgmma: no wgmma_fence() by the thread %s (%s)", why, place(here).c_str()));
}

bool overlap(const Accumulators& accumulators, const float* registers, int count) {
    return accumulators.registers < registers + count && registers < accumulators.registers + accumulators.count;
}

// The record of the current thread's registers, fit for a product. Products on the same registers in one go need no
// fence between them; whatever else happens between two of them may be an access to the registers.
Accumulators& accumulators_for(float* registers, const WarpgroupProduct& product, const Here& here) {
    auto& thread = threads[block.current];
    const int count = product.n / 2;
    for (auto found = thread.accumulators.begin(); found != thread.accumulators.end();) {
        if (!overlap(*found, registers, count)) {
            ++found;
        } else if (found->registers == registers && found->count == count) {
            if (found->in_flight > 0) {
                require_untouched(*found, block.current, here);
            } else if (thread.fences <= found->idle_since) {
                fail_unfenced("since the wait that gave it these accumulators", here);
            } else if (product.accumulate && found->fenced != checksum(*found)) {
                fail_unfenced("since it has written these accumulators", here);
            }
            return *found;
        } else if (found->in_flight > 0) {
            fail(text("wgmma: its accumulators overlap those of a product of another N in flight (%s)",
                      place(here).c_str()));
        } else {
            found = thread.accumulators.erase(found);
        }
    }
    if (thread.fences <= thread.idle_since) {
        fail_unfenced(thread.fences == 0 ? "before its first product" : "since its last wait", here);
    }
    thread.accumulators.push_back({registers, count, 0, {}, 0, 0});
    return thread.accumulators.back();
}

void take_registers(Accumulators& accumulators) {
    if (accumulators.in_flight++ == 0) {
        accumulators.value.assign(accumulators.registers, accumulators.registers + accumulators.count);
        fill_poison(accumulators.registers, sizeof(float) * static_cast<size_t>(accumulators.count),
                    block.schedule->poison);
    }
}

void give_registers_back(Accumulators& accumulators, int thread, const Here& here) {
    if (--accumulators.in_flight != 0) {
        return;
    }
    require_untouched(accumulators, thread, here);
    memcpy(accumulators.registers, accumulators.value.data(), sizeof(float) * accumulators.value.size());
    accumulators.idle_since = threads[thread].fences;
    threads[thread].idle_since = threads[thread].fences;
}

void retire(Issue& issue, int warp) {
    if (lands_late()) {
        check_operands(issue, warp);
        multiply(issue);
    }
    for (int lane = 0; lane < WARP; ++lane) {
        races_product_done(warp, issue.time, WARP * warp + lane);
        give_registers_back(*issue.lanes[lane], WARP * warp + lane, issue.here);
    }
}

// ---- The sequence of a warp ----------------------------------------------------------------------------------------

bool same_place(const Here& a, const Here& b) {
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

bool same(const WarpgroupProduct& a, const WarpgroupProduct& b) {
    return a.operand == b.operand && a.n == b.n && a.a == b.a && a.b == b.b && a.accumulate == b.accumulate;
}

std::string describe(const WarpgroupProduct& product) {
    const char* names[] = {"tf32", "half", "bfloat16"};
    return text("wgmma of %s, N %d, A 0x%llx, B 0x%llx, %s", names[static_cast<int>(product.operand)], product.n,
                static_cast<unsigned long long>(product.a), static_cast<unsigned long long>(product.b),
                product.accumulate ? "accumulating" : "not accumulating");
}

std::string describe(Operation operation, int operand) {
    switch (operation) {
        case Operation::fence: return "wgmma_fence()";
        case Operation::product: return "a wgmma";
        case Operation::commit: return "wgmma_commit_group()";
        case Operation::wait: return text("wgmma_wait_group<%d>()", operand);
        default: return text("a change to %d registers", operand);
    }
}

void require_warpgroup(const char* what, const Here& here) {
    const int first = block.current / WARPGROUP * WARPGROUP;
    if (first + WARPGROUP > block.threads) {
        fail(text("%s: the warpgroup of thread %d lacks threads: the block has %d, expected a multiple of 128 (%s)",
                  what, block.current, block.threads, place(here).c_str()));
    }
}

// The current thread comes to the next operation of its warp.
Step& come_to(Operation operation, int operand, const Here& here) {
    Warp& warp = warps[block.current / WARP];
    const size_t index = threads[block.current].steps++ - warp.first_step;
    if (index == warp.steps.size()) {
        warp.steps.push_back({operation, operand, here, block.current, 0, nullptr});
    }
    Step& step = warp.steps[index];
    if (step.operation != operation || step.operand != operand || !same_place(step.here, here)) {
        fail(text("the lanes of a warp diverge: thread %d comes to %s at %s, thread %d to %s at %s", step.first,
                  describe(step.operation, step.operand).c_str(), place(step.here).c_str(), block.current,
                  describe(operation, operand).c_str(), place(here).c_str()));
    }
    ++step.arrived;
    return step;
}

// Whether the current thread is the last lane to come to the oldest operation, which then is forgotten.
bool is_last(const Step& step) {
    if (step.arrived < WARP) {
        return false;
    }
    Warp& warp = warps[block.current / WARP];
    warp.steps.pop_front();
    ++warp.first_step;
    return true;
}

// All threads of the warpgroup issue the same products.
void compare_with_warpgroup(const WarpgroupProduct& product, const Here& here) {
    Warpgroup& group = warpgroups[block.current / WARPGROUP];
    const size_t index = threads[block.current].products++ - group.first_product;
    if (index == group.products.size()) {
        group.products.push_back({product, here, block.current, 0});
    }
    Shared& shared = group.products[index];
    if (!same(shared.product, product) || !same_place(shared.here, here)) {
        fail(text("the threads of a warpgroup diverge: thread %d issues %s at %s, thread %d %s at %s", shared.first,
                  describe(shared.product).c_str(), place(shared.here).c_str(), block.current,
                  describe(product).c_str(), place(here).c_str()));
    }
    if (++shared.arrived == WARPGROUP) {
        group.products.pop_front();
        ++group.first_product;
    }
}

std::string describe_product(int) { return "wgmma for the other lanes of its warp"; }
std::string describe_wait(int) { return "wgmma_wait_group() for the other lanes of its warp"; }

// Every lane of the warp goes on.
void release(int warp) {
    for (int lane = 0; lane < WARP; ++lane) {
        make_ready(WARP * warp + lane);
    }
}

}  // namespace

void warpgroup_fence(const Here& here) {
    require_warpgroup("wgmma_fence()", here);
    auto& thread = threads[block.current];
    ++thread.fences;
    for (Accumulators& accumulators : thread.accumulators) {
        accumulators.fenced = checksum(accumulators);
    }
    is_last(come_to(Operation::fence, 0, here));
}

void warpgroup_product(float* registers, const WarpgroupProduct& product, const Here& here) {
    require_warpgroup("wgmma", here);
    for (const uint64_t descriptor : {product.a, product.b}) {
        if ((descriptor & ~DESCRIPTOR_MASK) != 0) {
            fail(text("wgmma: the descriptor 0x%llx has bits beside start, leading and stride, which are below 2^18 "
                      "(%s)",
                      static_cast<unsigned long long>(descriptor), place(here).c_str()));
        }
    }
    compare_with_warpgroup(product, here);
    Accumulators& accumulators = accumulators_for(registers, product, here);
    take_registers(accumulators);
    const int warp = block.current / WARP;
    Step& step = come_to(Operation::product, 0, here);
    if (step.issue == nullptr) {
        step.issue = std::make_shared<Issue>();
        step.issue->product = product;
        step.issue->here = here;
    }
    const std::shared_ptr<Issue> issue = step.issue;
    issue->lanes[block.current % WARP] = &accumulators;
    clock_release(block.current, issue->clock);
    mark_waiting(here, describe_product);
    if (is_last(step)) {
        read_operands(*issue, warp);
        if (!lands_late()) {
            multiply(*issue);
        }
        warps[warp].open.push_back(issue);
        release(warp);
    }
    give_way();
}

void warpgroup_commit(const Here& here) {
    require_warpgroup("wgmma_commit_group()", here);
    if (is_last(come_to(Operation::commit, 0, here))) {
        Warp& warp = warps[block.current / WARP];
        warp.committed.push_back(std::move(warp.open));
        warp.open.clear();
    }
}

void warpgroup_wait(int groups_left, const Here& here) {
    require_warpgroup("wgmma_wait_group()", here);
    const int warp = block.current / WARP;
    Step& step = come_to(Operation::wait, groups_left, here);
    mark_waiting(here, describe_wait);
    if (is_last(step)) {
        auto& committed = warps[warp].committed;
        for (; committed.size() > static_cast<size_t>(groups_left); committed.pop_front()) {
            for (const auto& issue : committed.front()) {
                retire(*issue, warp);
            }
        }
        release(warp);
    }
    give_way();
}

void warpgroup_registers(int count, const Here& here) {
    require_warpgroup("setmaxnreg", here);
    is_last(come_to(Operation::registers, count, here));
}

// ---- The turns of a block's life -----------------------------------------------------------------------------------

void warpgroups_begin_block() {
    for (Warp& warp : warps) {
        warp = {};
    }
    for (Warpgroup& group : warpgroups) {
        group = {};
    }
    for (auto& thread : threads) {
        thread = {};
    }
}

void warpgroups_exit_thread() {
    for (const Accumulators& accumulators : threads[block.current].accumulators) {
        if (accumulators.in_flight != 0) {
            fail("wgmma: the thread exits with a product in flight; it needs wgmma_commit_group() and "
                 "wgmma_wait_group() behind it");
        }
    }
}

void warpgroups_end_block() {
    for (int first = 0; first + WARPGROUP <= block.threads; first += WARPGROUP) {
        const Warpgroup& group = warpgroups[first / WARPGROUP];
        if (group.products.empty()) {
            continue;
        }
        std::vector<int> missing;
        for (int thread = first; thread < first + WARPGROUP; ++thread) {
            if (threads[thread].products <= group.first_product) {
                missing.push_back(thread);
            }
        }
        fail(text("wgmma: threads %s of the warpgroup have not issued the product that thread %d has issued at %s",
                  ranges(missing).c_str(), group.products.front().first, place(group.products.front().here).c_str()));
    }
    for (int warp = 0; warp < block.threads / WARP; ++warp) {
        if (!warps[warp].steps.empty()) {
            const Step& step = warps[warp].steps.front();
            fail(text("the lanes of warp %d diverge: %d of 32 have come to %s at %s", warp, step.arrived,
                      describe(step.operation, step.operand).c_str(), place(step.here).c_str()));
        }
    }
}

}  // namespace jitconv::host
