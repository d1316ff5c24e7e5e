// What the kinds of bulk loads have in common.
#pragma once

#include <stdint.h>

#include <vector>

#include "host/runtime.h"

namespace jitconv::host {

struct Piece {
    void* destination;
    const void* source;  // null: zeros
    unsigned bytes;
};

// A load of `bytes` bytes to `shared`, which the pieces fill: they land together and count against `barrier`.
void bulk_load_pieces(std::vector<Piece> pieces, void* shared, unsigned bytes, uint64_t* barrier, const char* what,
                      const Here& here);

void require_shared(const void* pointer, unsigned bytes, const char* what, const Here& here);
void require_global(const void* pointer, unsigned bytes, const char* what, const Here& here);
void require_aligned(const void* pointer, unsigned alignment, const char* what, const Here& here);

}  // namespace jitconv::host
