// Convolution on tensor cores without im2col, sm_80 and up: some warps fetch, others multiply.
//
//     producer warps   x -> halo ring: the input box that the outputs of a block need, one chunk of channels at a time
//                      (a unit), rounded or split once, as it is stored
//     one loader warp  packed weights -> weight ring, a few taps at a time (a stage)
//     consumer warps   multiply: every tap of the filter reads the same unit from another start
//
//     box of outputs            unit of the halo ring
//     +----------+              plane 0  [cell][16 bytes]          4 fp32 or 8 half channels of a cell
//     | D x H x W|   taps       plane 1  [cell][16 bytes]          the next ones: two planes are the k of a product
//     +----------+  ------>     ... STEPS such pairs, for each part (hi, lo) of a split value
//
// A cell is a position of the halo. The rows that load_matrices gathers have free addresses, so strides and dilations cost
// nothing. Weights are packed in the order in which a warp reads them (templates/pack_weights.cu.j2). Either operand may be
// the rows of a product, for they are read alike: channels, so that a thread gets outputs side by side along w, or
// positions, so that it gets channels side by side.
//
// Items of a chunk are its products along k: all taps of the first 2 planes, then all of the next. A stage holds the
// weights of STAGE_TAPS of them, which are multiplied in unrolled runs of RUN_TAPS.
//
//     warps:  CHANNEL_WARPS x POSITION_WARPS consumers, each with CHANNEL_TILES x 16 channels by POSITION_TILES x 8
//             positions; PRODUCERS producers; the loader
#pragma once

#include "device/async_copy.cuh"
#include "device/math.cuh"
#include "device/mma.cuh"
#include "device/opaque.cuh"
#include "device/platform.cuh"

namespace jitconv {

// Whether one of the two is a multiple of the other.
__device__ constexpr bool divides(int a, int b) { return a % b == 0 || b % a == 0; }

template <
    int KERNEL_D_, int KERNEL_H_, int KERNEL_W_, int STRIDE_D_, int STRIDE_H_, int STRIDE_W_, int DILATION_D_, int DILATION_H_,
    int DILATION_W_>
struct HaloFilter {
    static constexpr int KERNEL_D = KERNEL_D_, KERNEL_H = KERNEL_H_, KERNEL_W = KERNEL_W_;
    static constexpr int STRIDE_D = STRIDE_D_, STRIDE_H = STRIDE_H_, STRIDE_W = STRIDE_W_;
    static constexpr int DILATION_D = DILATION_D_, DILATION_H = DILATION_H_, DILATION_W = DILATION_W_;
    static constexpr int TAPS = KERNEL_D * KERNEL_H * KERNEL_W;
};

template <
    class Filter_, int D_, int H_, int W_, int CHANNEL_WARPS_, int POSITION_WARPS_, int CHANNEL_TILES_, int POSITION_TILES_,
    bool POSITION_ROWS_, int STEPS_, int STAGE_TAPS_, int RUN_TAPS_, int STAGES_, int UNITS_, int PRODUCERS_,
    Math MATH_>
struct HaloTile {
    using Filter = Filter_;
    static constexpr int D = D_, H = H_, W = W_;  // box of outputs
    static constexpr int CHANNEL_WARPS = CHANNEL_WARPS_, POSITION_WARPS = POSITION_WARPS_;
    static constexpr int CHANNEL_TILES = CHANNEL_TILES_, POSITION_TILES = POSITION_TILES_;
    static constexpr bool POSITION_ROWS = POSITION_ROWS_;  // positions are the rows of a product
    static constexpr int STEPS = STEPS_;                   // products along k, but for taps, that a chunk holds
    static constexpr int STAGE_TAPS = STAGE_TAPS_, RUN_TAPS = RUN_TAPS_, STAGES = STAGES_, UNITS = UNITS_;
    static constexpr Math MATH = MATH_;
    static constexpr int CONSUMERS = CHANNEL_WARPS * POSITION_WARPS, PRODUCERS = PRODUCERS_;
    static constexpr int THREADS = 32 * (CONSUMERS + PRODUCERS + 1);
    static constexpr int POSITIONS = D * H * W;
    static constexpr int CHANNELS = 16 * CHANNEL_TILES * CHANNEL_WARPS;
    static constexpr int WARP_POSITIONS = 8 * POSITION_TILES;
    static constexpr int WARP_CHANNELS = 16 * CHANNEL_TILES;

    static constexpr int HALO_D = (D - 1) * Filter::STRIDE_D + (Filter::KERNEL_D - 1) * Filter::DILATION_D + 1;
    static constexpr int HALO_H = (H - 1) * Filter::STRIDE_H + (Filter::KERNEL_H - 1) * Filter::DILATION_H + 1;
    static constexpr int HALO_W = (W - 1) * Filter::STRIDE_W + (Filter::KERNEL_W - 1) * Filter::DILATION_W + 1;
    static constexpr int CELLS = HALO_D * HALO_H * HALO_W;
    // 4 mod 8 cells: stores that alternate between two planes then meet no bank twice.
    static constexpr int PLANE = (CELLS + 3) / 8 * 8 + 4;
    static constexpr int PARTS = parts_of(MATH);
    static constexpr int UNIT = elements_in_16_bytes(MATH);  // channels in 16 bytes
    static constexpr int PLANES = 2 * STEPS;
    static constexpr int CHUNK = PLANES * UNIT;              // channels in a chunk
    static constexpr int ITEMS = STEPS * Filter::TAPS;       // of a chunk
    static constexpr int FRAGMENTS = CHANNEL_TILES * PARTS;  // 16 bytes of a lane each: one warp's weights of an item
    // Of which a warp promotes sums at once: 32 of a thread, or those of one pair.
    static constexpr int PROMOTED_PAIRS = CHANNEL_TILES > 2                   ? 1
                                          : 4 / CHANNEL_TILES < POSITION_TILES / 2 ? 4 / CHANNEL_TILES
                                                                                   : POSITION_TILES / 2;
    static_assert(POSITION_TILES / 2 % PROMOTED_PAIRS == 0, "pairs are promoted in equal parts");
    static constexpr int STAGE_WORDS = STAGE_TAPS * CHANNEL_WARPS * FRAGMENTS * 32;  // of 16 bytes

    static_assert(POSITIONS == POSITION_WARPS * WARP_POSITIONS, "warps share the box evenly");
    static_assert(POSITION_TILES % 2 == 0, "load_matrices fetches two position tiles at a time");
    static_assert(CELLS <= PLANE, "a plane holds the halo");
    // So that the 16 positions of a pair of tiles lie at the same distance from a warp's first ones in every warp.
    static_assert(W % 16 == 0 && divides(W, WARP_POSITIONS) && divides(H * W, WARP_POSITIONS), "warps own whole rows");
    static constexpr int ROW = Filter::KERNEL_W, AREA = ROW * Filter::KERNEL_H;
    static_assert(ITEMS % STAGE_TAPS == 0 && STAGE_TAPS % RUN_TAPS == 0, "stages are whole runs, and chunks whole stages");
    static_assert(
        ROW % RUN_TAPS == 0 || (RUN_TAPS % ROW == 0 && AREA % RUN_TAPS == 0) ||
            (RUN_TAPS % AREA == 0 && Filter::TAPS % RUN_TAPS == 0) ||
            (RUN_TAPS % Filter::TAPS == 0 && ITEMS % RUN_TAPS == 0),
        "the items of every run lie at the same distances from its first one");

    // Position inside the box -> its cell for the first tap.
    static __device__ constexpr int cell_of(int position) {
        const int d = position / (H * W), h = position / W % H, w = position % W;
        return (d * Filter::STRIDE_D * HALO_H + h * Filter::STRIDE_H) * HALO_W + w * Filter::STRIDE_W;
    }
    // How far an item's cells are from those of the first one.
    static __device__ constexpr int item_distance(int item) {
        const int step = item / Filter::TAPS, kd = item % Filter::TAPS / AREA, kh = item % AREA / ROW, kw = item % ROW;
        return 2 * step * PLANE + (kd * Filter::DILATION_D * HALO_H + kh * Filter::DILATION_H) * HALO_W + kw * Filter::DILATION_W;
    }
};

template <class Tile>
struct alignas(16) HaloStorage {
    uint4 unit[Tile::UNITS][Tile::PARTS][Tile::PLANES][Tile::PLANE];
    uint4 stage[Tile::STAGES][Tile::STAGE_WORDS];
    uint64_t unit_full[Tile::UNITS], unit_empty[Tile::UNITS];
    uint64_t stage_full[Tile::STAGES], stage_empty[Tile::STAGES];
};

// A place in a ring of LENGTH buffers, and the parity of its round.
template <int LENGTH>
struct HaloRing {
    int slot = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == LENGTH) {
            slot = 0;
            parity ^= 1u;
        }
    }
};

template <class Tile>
__device__ __forceinline__ void initialise_rings(HaloStorage<Tile>& storage) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < Tile::UNITS; ++i) {
            mbarrier_init(&storage.unit_full[i], Tile::PRODUCERS);
            mbarrier_init(&storage.unit_empty[i], Tile::CONSUMERS);
        }
        for (int i = 0; i < Tile::STAGES; ++i) {
            mbarrier_init(&storage.stage_full[i], 1);
            mbarrier_init(&storage.stage_empty[i], Tile::CONSUMERS);
        }
    }
    __syncthreads();
}

// One warp says that all its lanes are done with a buffer: that they have filled it, or read it.
__device__ __forceinline__ void hand_over(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(barrier);
    }
}

// The loader warp streams the weights of a block of channels, `stages` stages, through the ring.
template <class Tile>
__device__ __forceinline__ void load_stages(
    HaloStorage<Tile>& storage, HaloRing<Tile::STAGES>& ring, const uint4* packed, int stages) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int s = 0; s < stages; ++s) {
        mbarrier_wait(&storage.stage_empty[ring.slot], ring.parity ^ 1u);
#pragma unroll 8
        for (int i = lane; i < Tile::STAGE_WORDS; i += 32) {
            cp_async<16>(&storage.stage[ring.slot][i], packed + i);
        }
        cp_async_commit_group();
        cp_async_wait_group<0>();
        hand_over(&storage.stage_full[ring.slot]);
        packed += Tile::STAGE_WORDS;
        ring.advance();
    }
}

template <Math MATH>
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    if constexpr (MATH == Math::HALF) {
        multiply_half(c, a, b0, b1);
    } else if constexpr (MATH == Math::BFLOAT16) {
        multiply_bfloat16(c, a, b0, b1);
    } else {
        multiply_tf32(c, a, b0, b1);
    }
}

// The products of 16 channels and 16 positions: those of `half` of the 16 that are not the rows. Of these `weights` or
// `cells` hold two times the words of operand B; the words of the rows are operand A.
template <class Tile>
__device__ __forceinline__ void multiply_half_of(float (&c)[4], const uint4& weights, const uint32_t (&cells)[4], int half) {
    if constexpr (Tile::POSITION_ROWS) {
        const uint4 rows = make_uint4(cells[0], cells[1], cells[2], cells[3]);
        multiply<Tile::MATH>(c, rows, half == 0 ? weights.x : weights.z, half == 0 ? weights.y : weights.w);
    } else {
        multiply<Tile::MATH>(c, weights, cells[2 * half], cells[2 * half + 1]);
    }
}

// Pairs that are promoted one after the other read the same weights. To keep them all there are no registers.
template <bool AGAIN>
__device__ __forceinline__ uint4 fragment(const uint4* source) {
    if constexpr (AGAIN) {
        return load_again(source);
    } else {
        return *source;
    }
}

// The products of COUNT items and of PAIRS pairs of position tiles from FIRST on. `cells` points to this lane's row for the
// first item, `weights` to this lane's first fragment. PROMOTE: the tensor core starts from zero, and its sum is added in
// fp32, because its own additions truncate.
template <class Tile, int COUNT, int FIRST, int PAIRS, bool PROMOTE>
__device__ __forceinline__ void multiply_pairs(
    float (&acc)[Tile::CHANNEL_TILES][Tile::POSITION_TILES][4], const uint4* cells, const uint4* weights) {
    constexpr int PART_STRIDE = Tile::PLANES * Tile::PLANE;
    constexpr int ITEM_STRIDE = Tile::CHANNEL_WARPS * Tile::FRAGMENTS * 32;
    constexpr int TERMS = Tile::PARTS == 2 ? 3 : 1;
    uint4 a[Tile::FRAGMENTS];
    uint32_t b[2][Tile::PARTS][4];  // of this pair, and of the next one, which is fetched ahead
    float sum[Tile::CHANNEL_TILES][2 * PAIRS][4] = {};
#pragma unroll
    for (int i = 0; i < Tile::FRAGMENTS; ++i) {
        a[i] = fragment<PROMOTE>(weights + i * 32);
    }
#pragma unroll
    for (int next = 0; next <= COUNT * PAIRS; ++next) {
        if (next < COUNT * PAIRS) {
            const uint4* row = cells + Tile::cell_of((FIRST + next % PAIRS) * 16) + Tile::item_distance(next / PAIRS);
#pragma unroll
            for (int part = 0; part < Tile::PARTS; ++part) {
                load_matrices(b[next % 2][part], row + part * PART_STRIDE);
            }
        }
        if (next == 0) {
            continue;
        }
        const int item = (next - 1) / PAIRS, pair = (next - 1) % PAIRS;
#pragma unroll
        for (int m = 0; m < Tile::CHANNEL_TILES; ++m) {
#pragma unroll
            for (int term = 0; term < TERMS; ++term) {
                // Small terms first: lo hi, hi lo, hi hi.
                const int left = TERMS == 3 && term == 0 ? 1 : 0, right = TERMS == 3 && term == 1 ? 1 : 0;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float(&c)[4] = PROMOTE ? sum[m][2 * pair + half] : acc[m][2 * (FIRST + pair) + half];
                    multiply_half_of<Tile>(c, a[m * Tile::PARTS + left], b[(next - 1) % 2][right], half);
                }
            }
            // Registers of the last pair's weights are free for those of the next item as soon as it is issued.
            if (pair == PAIRS - 1 && item + 1 < COUNT) {
#pragma unroll
                for (int part = 0; part < Tile::PARTS; ++part) {
                    const int i = m * Tile::PARTS + part;
                    a[i] = fragment<PROMOTE>(weights + (item + 1) * ITEM_STRIDE + i * 32);
                }
            }
        }
    }
    if constexpr (PROMOTE) {
#pragma unroll
        for (int m = 0; m < Tile::CHANNEL_TILES; ++m) {
#pragma unroll
            for (int n = 0; n < 2 * PAIRS; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    acc[m][2 * FIRST + n][i] += sum[m][n][i];
                }
            }
        }
    }
}

// The products of COUNT items. Sums that are promoted have a second set of registers: not all of them have it at once.
template <class Tile, int COUNT, bool PROMOTE, int FIRST = 0>
__device__ __forceinline__ void multiply_items(
    float (&acc)[Tile::CHANNEL_TILES][Tile::POSITION_TILES][4], const uint4* cells, const uint4* weights) {
    constexpr int PAIRS = PROMOTE ? Tile::PROMOTED_PAIRS : Tile::POSITION_TILES / 2;
    multiply_pairs<Tile, COUNT, FIRST, PAIRS, PROMOTE>(acc, cells, weights);
    if constexpr (FIRST + PAIRS < Tile::POSITION_TILES / 2) {
        multiply_items<Tile, COUNT, PROMOTE, FIRST + PAIRS>(acc, cells, weights);
    }
}

// acc += the whole reduction, by one consumer warp. `visit(slot)` is called when a unit has come.
template <class Tile, bool PROMOTE, class Visit>
__device__ __forceinline__ void accumulate_units(
    float (&acc)[Tile::CHANNEL_TILES][Tile::POSITION_TILES][4], HaloStorage<Tile>& storage, HaloRing<Tile::UNITS>& unit,
    HaloRing<Tile::STAGES>& stage, int chunks, int position_warp, int channel_warp, const Visit& visit) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    // Each 8 lanes address one of four matrices: two position tiles on two planes, in the order in which an operand's words
    // are wanted. As rows, both tiles of a plane are next to each other; as columns, both planes of a tile.
    const int second = Tile::POSITION_ROWS ? lane / 8 % 2 : lane / 16, plane = Tile::POSITION_ROWS ? lane / 16 : lane / 8 % 2;
    // Opaque, lest they be worked out anew for every run of taps.
    const int first_cell =
        opaque(plane * Tile::PLANE + Tile::cell_of(position_warp * Tile::WARP_POSITIONS + second * 8 + lane % 8));
    const int first_weight = opaque(channel_warp * Tile::FRAGMENTS * 32 + lane);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        mbarrier_wait(&storage.unit_full[unit.slot], unit.parity);
        visit(unit.slot);
        const uint4* cells = &storage.unit[unit.slot][0][0][0] + first_cell;
#pragma unroll 1
        for (int item = 0; item < Tile::ITEMS; item += Tile::STAGE_TAPS) {
            mbarrier_wait(&storage.stage_full[stage.slot], stage.parity);
            const uint4* weights = &storage.stage[stage.slot][first_weight];
#pragma unroll 1
            for (int i = 0; i < Tile::STAGE_TAPS; i += Tile::RUN_TAPS) {
                multiply_items<Tile, Tile::RUN_TAPS, PROMOTE>(
                    acc, cells + Tile::item_distance(item + i), weights + i * Tile::CHANNEL_WARPS * Tile::FRAGMENTS * 32);
            }
            hand_over(&storage.stage_empty[stage.slot]);
            stage.advance();
        }
        hand_over(&storage.unit_empty[unit.slot]);
        unit.advance();
    }
}

}  // namespace jitconv
