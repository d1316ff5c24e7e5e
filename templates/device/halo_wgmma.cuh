// Convolution on Hopper's tensor cores without im2col: warps of one kind fetch, warps of another multiply.
//
//     producer warps     x -> halo ring: the input box that the outputs of a block need, one chunk of channels and
//                        one plane d of the filter at a time (a unit), rounded or split once, as it is stored. Where
//                        x is made of aligned vectors, tensor copies (TMA) fetch it: straight into the halo ring if it
//                        needs no conversion, else into a ring of raw boxes that the producers convert
//     one loader warp    packed weights -> weight ring, a few taps at a time (a stage)
//     consumers          warpgroups that multiply: every tap of the filter reads the same unit from another start
//
//     unit   [part][plane][cell][16 bytes]     two planes are the k of a product; STEPS such pairs are a chunk
//     stage  [tap][part][plane][channel][16 bytes]
//
// A cell is a position of the halo. Rows (and columns) that no tap reads are not staged; columns are sorted into classes
// by their remainder modulo the stride, so that outputs side by side read cells side by side:
//
//     stride 2, columns 0 1 2 3 4 5 6   ->   class 0, all rows: 0 2 4 6    class 1, all rows: 1 3 5 .
//
// A unit may serve several outputs: a block that marches along d (stride and dilation 1) keeps the planes of x that its
// next outputs read too, so that each is fetched once. All chunks of the filter's planes are then in the ring at once:
//
//     output plane 5 reads planes 5 6 7 of x, plane 6 reads 6 7 8:   fetched for plane 6: plane 8, released: plane 5
//
// A product takes 64 rows and N columns: channels are rows and positions columns, or the other way round. Its
// positions are a strip of 8-cell groups at a constant distance: side by side in one row, or one below the other.
#pragma once

#include "device/async_copy.cuh"
#include "device/math.cuh"
#include "device/platform.cuh"
#include "device/wgmma.cuh"

namespace jitconv {

__device__ constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

// One axis of the filter as the halo sees it.
struct HaloAxis {
    int step;    // distance of staged coordinates in x
    int stride;  // cells from one output to the next
    int shift;   // cells from one tap to the next
};

__device__ constexpr HaloAxis halo_axis(int kernel, int stride, int dilation) {
    const int step = kernel == 1 ? stride : greatest_common_divisor(stride, dilation);
    return {step, stride / step, kernel == 1 ? 0 : dilation / step};
}

// How tensor copies take part.
enum class Copies { NONE, DIRECT, RAW };

template <
    int H_, int W_, int CHANNELS_, bool CHANNEL_ROWS_, int STRIP_H_, int STRIP_W_, int CHANNEL_GROUPS_, int POSITION_GROUPS_,
    int KERNEL_H_, int KERNEL_W_, int STRIDE_H_, int STRIDE_W_, int DILATION_H_, int DILATION_W_, int PADDING_W_, int STEPS_,
    int STAGE_TAPS_, int STAGES_, int UNITS_, int PRODUCERS_, Copies COPIES_,
    int RAWS_, bool X_CHANNELS_LAST_, Math MATH_>
struct WgmmaTile {
    static constexpr int H = H_, W = W_;  // box of outputs
    static constexpr int CHANNELS = CHANNELS_;
    static constexpr bool CHANNEL_ROWS = CHANNEL_ROWS_;  // channels are the 64 rows of a product
    static constexpr int STRIP_H = STRIP_H_, STRIP_W = STRIP_W_;
    static constexpr int KERNEL_H = KERNEL_H_, KERNEL_W = KERNEL_W_;
    static constexpr int STEPS = STEPS_, STAGE_TAPS = STAGE_TAPS_, STAGES = STAGES_, UNITS = UNITS_;
    static constexpr Math MATH = MATH_;

    static constexpr int PARTS = parts_of(MATH);
    static constexpr int UNIT = elements_in_16_bytes(MATH);
    static constexpr int PLANES = 2 * STEPS;
    static constexpr int CHUNK = PLANES * UNIT;
    static constexpr int TAPS = KERNEL_H * KERNEL_W;  // of one plane d
    static constexpr int UNIT_STAGES = TAPS / STAGE_TAPS;
    static_assert(TAPS % STAGE_TAPS == 0, "a unit's taps fill whole stages");

    static constexpr HaloAxis AXIS_H = halo_axis(KERNEL_H, STRIDE_H_, DILATION_H_);
    static constexpr HaloAxis AXIS_W = halo_axis(KERNEL_W, STRIDE_W_, DILATION_W_);
    static constexpr int ROWS = (H - 1) * AXIS_H.stride + (KERNEL_H - 1) * AXIS_H.shift + 1;
    static constexpr int COLUMNS = (W - 1) * AXIS_W.stride + (KERNEL_W - 1) * AXIS_W.shift + 1;
    static constexpr int CLASSES = AXIS_W.stride;
    static constexpr int PITCH = (COLUMNS + CLASSES - 1) / CLASSES;  // cells of a class in one row
    static constexpr int CLASS = (ROWS * PITCH + 7) / 8 * 8;  // cells of a class: tensor copies fill whole 128 bytes
    static constexpr int CELLS = CLASSES * CLASS;

    // Warps: producers and the loader in the first warpgroups, consumers behind them.
    static constexpr Copies COPIES = COPIES_;
    static constexpr int PRODUCER_GROUPS = PRODUCERS_;
    static constexpr int PRODUCER_WARPS = 4 * PRODUCERS_ - 1;
    static constexpr int PRODUCER_THREADS = 32 * PRODUCER_WARPS;
    static constexpr int CHANNEL_GROUPS = CHANNEL_GROUPS_, POSITION_GROUPS = POSITION_GROUPS_;
    static constexpr int CONSUMERS = CHANNEL_GROUPS * POSITION_GROUPS;
    static constexpr int CONSUMER_WARPS = 4 * CONSUMERS;
    static constexpr int THREADS = 128 * (PRODUCERS_ + CONSUMERS);

    // Products of a consumer.
    static constexpr int STRIP = STRIP_H * STRIP_W;
    static constexpr int CHANNEL_SPAN = CHANNELS / CHANNEL_GROUPS;  // channels of one consumer
    static constexpr int N = CHANNEL_ROWS ? STRIP : CHANNEL_SPAN;
    static constexpr int CHANNEL_TILES = CHANNEL_ROWS ? CHANNEL_SPAN / 64 : 1;
    static constexpr int STRIPS_W = W / STRIP_W;
    static constexpr int STRIPS = H / STRIP_H * STRIPS_W / POSITION_GROUPS;  // of one consumer
    static constexpr int TILES = CHANNEL_TILES * STRIPS;
    static_assert(CHANNELS % CHANNEL_GROUPS == 0, "consumers share the channels evenly");
    static_assert(!CHANNEL_ROWS || CHANNEL_SPAN % 64 == 0, "64 channels are the rows of a product");
    static_assert(CHANNEL_ROWS || STRIP == 64, "64 positions are the rows of a product");
    static_assert(H % STRIP_H == 0 && W % STRIP_W == 0 && H / STRIP_H * STRIPS_W % POSITION_GROUPS == 0, "consumers share the strips evenly");
    static_assert(STRIPS % STRIPS_W == 0 || STRIPS_W % STRIPS == 0, "consumers share the strips of a row evenly");
    static_assert(STRIP_W == 8 || (STRIP_H == 1 && STRIP_W % 8 == 0), "groups of 8 cells lie at a constant distance");

    static constexpr uint32_t PLANE_BYTES = CELLS * 16;
    static constexpr uint32_t PART_BYTES = PLANES * PLANE_BYTES;
    static constexpr uint32_t UNIT_BYTES = PARTS * PART_BYTES;
    static constexpr uint32_t WEIGHT_PLANE_BYTES = CHANNELS * 16;
    static constexpr uint32_t WEIGHT_PART_BYTES = PLANES * WEIGHT_PLANE_BYTES;
    static constexpr uint32_t TAP_BYTES = PARTS * WEIGHT_PART_BYTES;
    static constexpr uint32_t STAGE_BYTES = STAGE_TAPS * TAP_BYTES;
    // A raw box of channels_last x is what the unit will be, one part of it; of channels_first x it is rows along w, in
    // pieces that a copy can take: [piece][channel][row][element].
    // A copy starts at a multiple of 16 bytes, so SHIFT elements may come before the first column.
    static constexpr int RAWS = RAWS_;
    static constexpr int SHIFT = (UNIT - PADDING_W_ % UNIT) % UNIT;
    static constexpr int SPAN = SHIFT + (COLUMNS - 1) * AXIS_W.step + 1;
    static constexpr int PIECES = X_CHANNELS_LAST_ ? 1 : (SPAN + 255) / 256;
    static constexpr int PIECE = ((SPAN + PIECES - 1) / PIECES + UNIT - 1) / UNIT * UNIT;
    static constexpr uint32_t PIECE_BYTES = (CHUNK * ROWS * PIECE * (16 / UNIT) + 127) / 128 * 128;
    static constexpr uint32_t RAW_BYTES = X_CHANNELS_LAST_ ? PART_BYTES : PIECES * PIECE_BYTES;
    // From one group of 8 cells of a strip to the next.
    static constexpr uint32_t GROUP_BYTES = STRIP_W == 8 ? AXIS_H.stride * PITCH * 16 : 128;

    // Cell of the first position of strip `strip` of consumer `group` for a tap.
    static __device__ constexpr int strip_cell(int group, int strip) {
        const int index = group * STRIPS + strip;
        return index / STRIPS_W * STRIP_H * AXIS_H.stride * PITCH + index % STRIPS_W * STRIP_W;
    }
    static __device__ constexpr int tap_cell(int tap) {
        const int column = tap % KERNEL_W * AXIS_W.shift;
        return column % CLASSES * CLASS + tap / KERNEL_W * AXIS_H.shift * PITCH + column / CLASSES;
    }
    // Row and column of x, in steps from the first ones, that a cell holds; they may lie beyond the last.
    static __device__ constexpr int row_of(int cell) { return cell % CLASS / PITCH; }
    static __device__ constexpr int column_of(int cell) { return cell % CLASS % PITCH * CLASSES + cell / CLASS; }
};

template <class Tile>
struct alignas(128) WgmmaStorage {
    unsigned char unit[Tile::UNITS][Tile::UNIT_BYTES];
    unsigned char stage[Tile::STAGES][Tile::STAGE_BYTES];
    alignas(128) unsigned char raw[Tile::COPIES == Copies::RAW ? Tile::RAWS : 1][Tile::COPIES == Copies::RAW ? Tile::RAW_BYTES : 128];
    uint64_t raw_full[Tile::COPIES == Copies::RAW ? Tile::RAWS : 1];
    uint64_t unit_full[Tile::UNITS], unit_empty[Tile::UNITS];
    uint64_t stage_full[Tile::STAGES], stage_empty[Tile::STAGES];
};

// A place in a ring of LENGTH buffers, and the parity of its round.
template <int LENGTH>
struct RingPlace {
    int slot = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(int count = 1) {
        slot += count;
        if (slot >= LENGTH) {
            slot -= LENGTH;
            parity ^= 1u;
        }
    }
};

template <class Tile>
__device__ __forceinline__ void initialise_barriers(WgmmaStorage<Tile>& storage) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < Tile::UNITS; ++i) {
            mbarrier_init(&storage.unit_full[i], Tile::COPIES == Copies::DIRECT ? 1 : Tile::PRODUCER_WARPS);
            mbarrier_init(&storage.unit_empty[i], Tile::CONSUMER_WARPS);
        }
        for (int i = 0; i < (Tile::COPIES == Copies::RAW ? Tile::RAWS : 0); ++i) {
            mbarrier_init(&storage.raw_full[i], 1);
        }
        for (int i = 0; i < Tile::STAGES; ++i) {
            mbarrier_init(&storage.stage_full[i], 1);
            mbarrier_init(&storage.stage_empty[i], Tile::CONSUMER_WARPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
}

// One lane of the loader warp streams the weights of a block of channels, `stages` stages, through the ring.
template <class Tile>
__device__ __forceinline__ void load_weights(
    WgmmaStorage<Tile>& storage, RingPlace<Tile::STAGES>& place, const unsigned char* packed, int stages) {
    for (int i = 0; i < stages; ++i) {
        mbarrier_wait(&storage.stage_empty[place.slot], place.parity ^ 1u);
        mbarrier_arrive_expect_tx(&storage.stage_full[place.slot], Tile::STAGE_BYTES);
        bulk_load(storage.stage[place.slot], packed, Tile::STAGE_BYTES, &storage.stage_full[place.slot]);
        packed += Tile::STAGE_BYTES;
        place.advance();
    }
}

// The products of one stage, into the accumulators of COUNT tiles from `first_tile` on. `cells` and `weights` are the
// descriptors of this consumer's first strip in the unit and of its first channel in the stage.
template <class Tile, int COUNT>
__device__ __forceinline__ void multiply_stage(
    float (&d)[COUNT][Tile::N / 2], uint64_t cells, uint64_t weights, int first_tile, int first_tap, bool accumulate) {
    // Small terms first: lo hi, hi lo, hi hi. The tensor core truncates whenever it adds, so that as few products as can be
    // are added to sums that have grown.
    constexpr int FIRST_TERM = Tile::PARTS == 1 ? 2 : 0;
#pragma unroll
    for (int term = FIRST_TERM; term < 3; ++term) {
#pragma unroll
        for (int tap = 0; tap < Tile::STAGE_TAPS; ++tap) {
#pragma unroll
            for (int step = 0; step < Tile::STEPS; ++step) {
                const uint32_t cell = Tile::tap_cell(first_tap + tap) * 16 + 2 * step * Tile::PLANE_BYTES +
                                      (term == 0 ? Tile::PART_BYTES : 0);
                const uint32_t weight = tap * Tile::TAP_BYTES + 2 * step * Tile::WEIGHT_PLANE_BYTES +
                                        (term == 1 ? Tile::WEIGHT_PART_BYTES : 0);
                const bool first = tap == 0 && step == 0 && term == FIRST_TERM;
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    const int strip = (first_tile + i) % Tile::STRIPS, channels = (first_tile + i) / Tile::STRIPS * 64;
                    const uint64_t x = advance_descriptor(cells, cell + Tile::strip_cell(0, strip) * 16);
                    const uint64_t w = advance_descriptor(weights, weight + channels * 16);
                    wgmma<Tile::MATH, Tile::N>(
                        d[i], Tile::CHANNEL_ROWS ? w : x, Tile::CHANNEL_ROWS ? x : w, accumulate || !first);
                }
            }
        }
    }
}

// Tells the producers (or the loader) that this warp has read a buffer.
__device__ __forceinline__ void release(uint64_t* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(empty);
    }
}

// Which units make up the reduction of one plane of outputs, and which of them nobody needs after it. Units come in
// chunks of channels, the filter's planes inside; a block that marches fetches them plane by plane.
template <class Tile, int CHUNKS, int KERNEL_D, bool MARCH>
struct UnitWalk {
    static constexpr int UNITS = CHUNKS * KERNEL_D;
    static_assert(!MARCH || Tile::UNITS > UNITS, "the ring holds the filter's planes, and one unit that is fetched");

    RingPlace<Tile::UNITS> place;  // of the first unit
    bool last;                     // plane of the march
    int chunk = 0, plane = 0;

    __device__ __forceinline__ RingPlace<Tile::UNITS> here() const {
        RingPlace<Tile::UNITS> at = place;
        if constexpr (MARCH) {
            at.advance(plane * CHUNKS + chunk);
        }
        return at;
    }
    __device__ __forceinline__ bool released() const { return !MARCH || plane == 0 || last; }

    __device__ __forceinline__ void advance() {
        if constexpr (!MARCH) {
            place.advance();
        }
        if (++plane == KERNEL_D) {
            plane = 0;
            ++chunk;
        }
    }
    // Behind the last unit: to where the next plane of outputs begins.
    __device__ __forceinline__ RingPlace<Tile::UNITS> next() const {
        RingPlace<Tile::UNITS> at = place;
        if constexpr (MARCH) {
            at.advance(last ? UNITS : CHUNKS);
        }
        return at;
    }
};

// acc += the whole reduction of one plane of outputs, by one consumer: warpgroup `channel_group` x `position_group`.
// PROMOTE_STAGES > 0: the tensor core accumulates that many stages, and their sum is added in fp32, because its own
// additions truncate. `visit(slot)` is called when a unit has come.
template <class Tile, int PROMOTE_STAGES, class Walk, class Visit>
__device__ __forceinline__ void accumulate_units(
    float (&acc)[Tile::TILES][Tile::N / 2], WgmmaStorage<Tile>& storage, Walk& walk, RingPlace<Tile::STAGES>& stage,
    int channel_group, int position_group, const Visit& visit) {
    constexpr uint64_t CELLS = matrix_descriptor(Tile::PLANE_BYTES, Tile::GROUP_BYTES);
    constexpr uint64_t WEIGHTS = matrix_descriptor(Tile::WEIGHT_PLANE_BYTES, 128);
    const uint32_t first_cell = shared_address(storage.unit[0]) + Tile::strip_cell(position_group, 0) * 16;
    const uint32_t first_weight = shared_address(storage.stage[0]) + channel_group * Tile::CHANNEL_SPAN * 16;
    if constexpr (PROMOTE_STAGES > 0) {
        static_assert(Tile::UNIT_STAGES % PROMOTE_STAGES == 0, "sums are promoted within a unit");
        static_assert(Tile::STAGES >= PROMOTE_STAGES, "the stages of a sum are in shared memory at once");
#pragma unroll 1
        for (int u = 0; u < Walk::UNITS; ++u) {
            const RingPlace<Tile::UNITS> unit = walk.here();
            mbarrier_wait(&storage.unit_full[unit.slot], unit.parity);
            visit(unit.slot);
            const uint64_t cells = descriptor_at(CELLS, opaque(first_cell + unit.slot * Tile::UNIT_BYTES));
#pragma unroll 1
            for (int s = 0; s < Tile::UNIT_STAGES; s += PROMOTE_STAGES) {
                int slots[PROMOTE_STAGES];
#pragma unroll
                for (int i = 0; i < PROMOTE_STAGES; ++i) {
                    mbarrier_wait(&storage.stage_full[stage.slot], stage.parity);
                    slots[i] = stage.slot;
                    stage.advance();
                }
#pragma unroll
                for (int tile = 0; tile < Tile::TILES; ++tile) {
                    float sum[1][Tile::N / 2];
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < PROMOTE_STAGES; ++i) {
                        multiply_stage<Tile>(
                            sum, cells, descriptor_at(WEIGHTS, opaque(first_weight + slots[i] * Tile::STAGE_BYTES)), tile,
                            (s + i) * Tile::STAGE_TAPS, i > 0);
                    }
                    wgmma_commit_group();
                    wgmma_wait_group<0>();
#pragma unroll
                    for (int i = 0; i < Tile::N / 2; ++i) {
                        acc[tile][i] += sum[0][i];
                    }
                }
#pragma unroll
                for (int i = 0; i < PROMOTE_STAGES; ++i) {
                    release(&storage.stage_empty[slots[i]]);
                }
            }
            if (walk.released()) {
                release(&storage.unit_empty[unit.slot]);
            }
            walk.advance();
        }
    } else {
        int last_unit = -1, last_stage = -1;  // read by products that may be going on; -1: none, or none to release
#pragma unroll 1
        for (int u = 0; u < Walk::UNITS; ++u) {
            const RingPlace<Tile::UNITS> unit = walk.here();
            mbarrier_wait(&storage.unit_full[unit.slot], unit.parity);
            visit(unit.slot);
            const uint64_t cells = descriptor_at(CELLS, opaque(first_cell + unit.slot * Tile::UNIT_BYTES));
#pragma unroll(Tile::TAPS <= 9 ? Tile::UNIT_STAGES : 1)
            for (int s = 0; s < Tile::UNIT_STAGES; ++s) {
                mbarrier_wait(&storage.stage_full[stage.slot], stage.parity);
                wgmma_fence();
                multiply_stage<Tile>(
                    acc, cells, descriptor_at(WEIGHTS, opaque(first_weight + stage.slot * Tile::STAGE_BYTES)), 0,
                    s * Tile::STAGE_TAPS, true);
                wgmma_commit_group();
                // The products of the stage before this one have read their operands.
                wgmma_wait_group<1>();
                if (last_stage >= 0) {
                    release(&storage.stage_empty[last_stage]);
                }
                if (s == 0 && last_unit >= 0) {
                    release(&storage.unit_empty[last_unit]);
                }
                last_stage = stage.slot;
                stage.advance();
            }
            last_unit = walk.released() ? unit.slot : -1;
            walk.advance();
        }
        wgmma_wait_group<0>();
        release(&storage.stage_empty[last_stage]);
        if (last_unit >= 0) {
            release(&storage.unit_empty[last_unit]);
        }
    }
}

}  // namespace jitconv
