// Shuffles, votes and __syncwarp: the lanes of a warp post what they bring; the last one hands out the results.
#include <string>

#include "host/block.h"
#include "host/races.h"
#include "host/report.h"

namespace jitconv::host {

namespace {

struct Post {
    bool waits = false;
    WarpOperation operation = WarpOperation::sync;
    unsigned mask = 0;
    uint64_t value = 0;
    int source = 0;
    uint64_t result = 0;
};

Post posts[MAXIMUM_THREADS];

const char* name(WarpOperation operation) {
    switch (operation) {
        case WarpOperation::sync: return "__syncwarp";
        case WarpOperation::vote: return "a vote (__ballot_sync, __any_sync, __all_sync)";
        case WarpOperation::shuffle: return "__shfl_sync";
        case WarpOperation::shuffle_up: return "__shfl_up_sync";
        case WarpOperation::shuffle_down: return "__shfl_down_sync";
        default: return "__shfl_xor_sync";
    }
}

std::string describe_warp_operation(int thread) {
    return text("%s with mask 0x%08x", name(posts[thread].operation), posts[thread].mask);
}

bool in_mask(unsigned mask, int lane) { return (mask >> lane & 1u) != 0; }

// Whether every lane of the mask waits at this operation with this mask.
bool all_there(int first, const Post& post) {
    for (int lane = 0; lane < WARP; ++lane) {
        const Post& other = posts[first + lane];
        if (in_mask(post.mask, lane) &&
            !(other.waits && other.operation == post.operation && other.mask == post.mask)) {
            return false;
        }
    }
    return true;
}

unsigned votes(int first, unsigned mask) {
    unsigned result = 0;
    for (int lane = 0; lane < WARP; ++lane) {
        if (in_mask(mask, lane) && posts[first + lane].value != 0) {
            result |= 1u << lane;
        }
    }
    return result;
}

// What the lane reads from its source; undefined on the GPU, and an error here, if that lane takes no part.
uint64_t shuffled(int first, int lane) {
    const Post& post = posts[first + lane];
    if (!in_mask(post.mask, post.source)) {
        fail(text("%s: thread %d reads lane %d, which is not in the mask 0x%08x (%s)", name(post.operation),
                  first + lane, post.source, post.mask, place(block.thread[first + lane].here).c_str()));
    }
    return posts[first + post.source].value;
}

// __syncwarp orders the memory accesses of its lanes; shuffles and votes do not.
void order_lanes(int first, unsigned mask) {
    Clock clock;
    for (int lane = 0; lane < WARP; ++lane) {
        if (in_mask(mask, lane)) {
            clock_release(first + lane, clock);
        }
    }
    for (int lane = 0; lane < WARP; ++lane) {
        if (in_mask(mask, lane)) {
            clock_acquire(first + lane, clock);
        }
    }
}

void complete(int first, const Post& post) {
    const unsigned mask = post.mask;
    const WarpOperation operation = post.operation;
    if (operation == WarpOperation::sync) {
        order_lanes(first, mask);
    }
    for (int lane = 0; lane < WARP; ++lane) {
        if (!in_mask(mask, lane)) {
            continue;
        }
        Post& own = posts[first + lane];
        if (operation == WarpOperation::vote) {
            own.result = votes(first, mask);
        } else if (operation != WarpOperation::sync) {
            own.result = shuffled(first, lane);
        }
        own.waits = false;
        make_ready(first + lane);
    }
}

}  // namespace

uint64_t warp_exchange(WarpOperation operation, unsigned mask, uint64_t value, int source, const Here& here) {
    const int self = block.current;
    const int first = self / WARP * WARP;
    if (!in_mask(mask, self - first)) {
        fail(text("%s: thread %d is lane %d, which its own mask 0x%08x leaves out (%s)", name(operation), self,
                  self - first, mask, place(here).c_str()));
    }
    Post& post = posts[self];
    post = {true, operation, mask, value, source, 0};
    mark_waiting(here, describe_warp_operation);
    if (all_there(first, post)) {
        complete(first, post);
    }
    give_way();
    return post.result;
}

}  // namespace jitconv::host
