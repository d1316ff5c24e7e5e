// Tensor copies: a box of a tensor as a bulk load of its rows, zeros where the box leaves the tensor.
#include <string.h>

#include <algorithm>

#include "host/bulk.h"
#include "host/report.h"

namespace jitconv::host {

namespace {

constexpr int MAXIMUM_RANK = 5;
constexpr uint64_t MAP_COOKIE = 0x7fe1ba47e4504a9dull;

// What the 128 bytes of a map hold here, as jitconv/tensor_map.py writes them. Axes are innermost first.
struct Map {
    uint64_t cookie;
    unsigned char* address;
    uint64_t extents[MAXIMUM_RANK];
    uint64_t strides[MAXIMUM_RANK - 1];  // bytes, of all axes but the innermost
    uint16_t box[MAXIMUM_RANK];
    uint8_t element_strides[MAXIMUM_RANK];
    uint8_t rank;
    uint8_t element_bytes;
};
static_assert(sizeof(Map) <= 128);

Map read_map(const void* pointer, const char* what, const Here& here) {
    require_aligned(pointer, 64, what, here);
    Map map;
    memcpy(&map, pointer, sizeof map);
    if (map.cookie != MAP_COOKIE) {
        fail(text("%s: there is no tensor map at %p: expected one that the host has filled in (%s)", what, pointer,
                  place(here).c_str()));
    }
    return map;
}

// Elements of a box along an axis.
int64_t extent_of_box(const Map& map, int axis) {
    const int step = axis == 0 ? 1 : map.element_strides[axis];
    return (map.box[axis] + step - 1) / step;
}

// The innermost row of a box that begins at element `first`: what lies in the tensor, and zeros around it. `source`
// is the tensor's row, null for one outside of it.
void add_row(const Map& map, unsigned char* destination, const unsigned char* source, int64_t first,
             std::vector<Piece>& pieces, const char* what, const Here& here) {
    const int64_t count = map.box[0];
    const int64_t begin = source == nullptr ? count : std::clamp<int64_t>(-first, 0, count);
    const int64_t end =
        source == nullptr ? count : std::clamp<int64_t>(static_cast<int64_t>(map.extents[0]) - first, begin, count);
    const auto add = [&](int64_t from, int64_t to, const unsigned char* data) {
        const auto bytes = static_cast<unsigned>((to - from) * map.element_bytes);
        if (bytes == 0) {
            return;
        }
        if (data != nullptr) {
            require_global(data, bytes, what, here);
        }
        pieces.push_back({destination + from * map.element_bytes, data, bytes});
    };
    add(0, begin, nullptr);
    add(begin, end, source == nullptr ? nullptr : source + (first + begin) * map.element_bytes);
    add(end, count, nullptr);
}

}  // namespace

void tensor_map_prefetch(const void* map, const Here& here) { read_map(map, "prefetch.tensormap", here); }

void tensor_load(void* shared, const void* pointer, const int32_t* coordinates, int rank, uint64_t* barrier,
                 const Here& here) {
    const char* what = "cp.async.bulk.tensor";
    const Map map = read_map(pointer, what, here);
    if (map.rank != rank) {
        fail(text("%s: a copy of %d axes with a tensor map of %d (%s)", what, rank, map.rank, place(here).c_str()));
    }
    if (static_cast<int64_t>(coordinates[0]) * map.element_bytes % 16 != 0) {
        fail(text("%s: a box that starts at element %d of %d bytes: the hardware reads from multiples of 16 bytes (%s)",
                  what, static_cast<int>(coordinates[0]), static_cast<int>(map.element_bytes), place(here).c_str()));
    }
    int64_t rows = 1;
    for (int axis = 1; axis < rank; ++axis) {
        rows *= extent_of_box(map, axis);
    }
    const unsigned row_bytes = static_cast<unsigned>(map.box[0]) * map.element_bytes;
    const unsigned bytes = static_cast<unsigned>(rows) * row_bytes;
    require_shared(shared, bytes, what, here);
    require_aligned(shared, 128, what, here);
    require_aligned(map.address, 16, what, here);
    std::vector<Piece> pieces;
    for (int64_t row = 0; row < rows; ++row) {
        const unsigned char* source = map.address;
        int64_t rest = row;
        for (int axis = 1; axis < rank; ++axis) {
            const int64_t position = coordinates[axis] + rest % extent_of_box(map, axis) * map.element_strides[axis];
            rest /= extent_of_box(map, axis);
            const bool inside = position >= 0 && position < static_cast<int64_t>(map.extents[axis]);
            source = inside && source != nullptr ? source + position * static_cast<int64_t>(map.strides[axis - 1])
                                                 : nullptr;
        }
        add_row(map, static_cast<unsigned char*>(shared) + row * row_bytes, source, coordinates[0], pieces, what,
                here);
    }
    bulk_load_pieces(std::move(pieces), shared, bytes, barrier, what, here);
}

}  // namespace jitconv::host
