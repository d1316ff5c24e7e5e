// Convolution on tensor cores without im2col: a block stages the input box that its outputs need once per chunk of
// channels, and every filter tap reads the same box at another offset.
//
//     box of outputs            halo in shared memory, per chunk of channels
//     +----------+              plane 0  [position][16 bytes]      4 fp32 or 8 half channels of a position
//     | D x H x W|   taps       plane 1  [position][16 bytes]      the next ones: two planes are the k of a product
//     +----------+  ------>     ... STEPS such pairs, for each part (hi, lo) of a split value
//
// The product is D[channel][position] += W[channel][k] X[k][position] with weights as operand A, packed in the
// order in which a warp reads them (templates/pack_weights.cu.j2), and positions as the rows that load_matrices
// gathers: their addresses are free, so strides and dilations cost nothing. Two halo buffers: the next chunk is loaded
// and stored in slices between the taps of this one. One barrier per chunk.
//
//     warps:  CHANNEL_WARPS x POSITION_WARPS, each with CHANNEL_TILES x 16 channels by POSITION_TILES x 8 positions
#pragma once

#include "device/math.cuh"
#include "device/mma.cuh"
#include "device/platform.cuh"

namespace jitconv {

// Whether one of the two is a multiple of the other.
__device__ constexpr bool divides(int a, int b) { return a % b == 0 || b % a == 0; }

template <
    int D_, int H_, int W_, int HALO_D_, int HALO_H_, int HALO_W_, int CHANNEL_WARPS_, int POSITION_WARPS_,
    int CHANNEL_TILES_, int POSITION_TILES_, int STEPS_, Math MATH_>
struct HaloTile {
    static constexpr int D = D_, H = H_, W = W_;
    static constexpr int HALO_D = HALO_D_, HALO_H = HALO_H_, HALO_W = HALO_W_;
    static constexpr int CHANNEL_WARPS = CHANNEL_WARPS_, POSITION_WARPS = POSITION_WARPS_;
    static constexpr int CHANNEL_TILES = CHANNEL_TILES_, POSITION_TILES = POSITION_TILES_;
    static constexpr int STEPS = STEPS_;  // products along k that a chunk holds
    static constexpr Math MATH = MATH_;
    static constexpr int THREADS = 32 * CHANNEL_WARPS * POSITION_WARPS;
    static constexpr int POSITIONS = D * H * W;
    static constexpr int CHANNELS = 16 * CHANNEL_TILES * CHANNEL_WARPS;
    static constexpr int WARP_POSITIONS = 8 * POSITION_TILES;
    static constexpr int WARP_CHANNELS = 16 * CHANNEL_TILES;
    static constexpr int HALO = HALO_D * HALO_H * HALO_W;
    // 4 mod 8 positions: stores that alternate between two planes then meet no bank twice.
    static constexpr int PLANE = (HALO + 3) / 8 * 8 + 4;
    static constexpr int PARTS = parts_of(MATH);
    static constexpr int UNIT = elements_in_16_bytes(MATH);  // channels in 16 bytes
    static constexpr int PLANES = 2 * STEPS;
    static constexpr int CHUNK = PLANES * UNIT;  // channels in a chunk
    // A thread stages a position's channels of one product at a time: 32 bytes, both planes.
    static constexpr int UNITS = (STEPS * HALO + THREADS - 1) / THREADS;

    static_assert(POSITIONS == POSITION_WARPS * WARP_POSITIONS, "warps share the box evenly");
    static_assert(POSITION_TILES % 2 == 0, "load_matrices fetches two position tiles at a time");
    static_assert(HALO <= PLANE, "a plane holds the halo");
    // So that the 16 positions of a pair of tiles lie at the same distance from a warp's first ones in every warp.
    static_assert(W % 16 == 0 && divides(W, WARP_POSITIONS) && divides(H * W, WARP_POSITIONS), "warps own whole rows");
};

template <class Tile>
struct alignas(16) HaloStorage {
    uint4 halo[2][Tile::PARTS][Tile::PLANES][Tile::PLANE];
};

// Position inside the box -> position inside the halo, before taps shift it.
template <class Tile, int STRIDE_D, int STRIDE_H, int STRIDE_W>
__device__ constexpr int halo_position(int position) {
    const int d = position / (Tile::H * Tile::W);
    const int h = position / Tile::W % Tile::H;
    const int w = position % Tile::W;
    return (d * STRIDE_D * Tile::HALO_H + h * STRIDE_H) * Tile::HALO_W + w * STRIDE_W;
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

// acc += the whole reduction. `position` is where this lane's row of the warp's first pair of position tiles lies in
// the halo; a tap shifts it by SHIFT_D, SHIFT_H, SHIFT_W. `weights` points to this warp's lane in the packed stream of its channels, which holds
// [k step][tap][channel warp][channel tile][part][lane] and one round of padding behind it; `stage.load(unit, chunk)`
// fetches a unit of the halo and `stage.store(loaded, buffer, unit, chunk)` converts and writes it, behind a row of
// taps, when it has arrived. PROMOTE_ROWS > 0: the tensor core accumulates that many rows of taps, and their sum is
// added in fp32, because its own additions truncate.
template <
    class Tile, int TAPS_D, int TAPS_H, int TAPS_W, int STRIDE_D, int STRIDE_H, int STRIDE_W, int SHIFT_D, int SHIFT_H,
    int SHIFT_W, int PROMOTE_ROWS, class Stage>
__device__ __forceinline__ void accumulate_halo(
    float (&acc)[Tile::CHANNEL_TILES][Tile::POSITION_TILES][4], HaloStorage<Tile>& storage,
    int position, int chunks, const uint4* weights, const Stage& stage) {
    constexpr int ROWS = Tile::STEPS * TAPS_D * TAPS_H;  // rows of taps along w, per chunk
    constexpr int SLICE = (Tile::UNITS + ROWS - 1) / ROWS;  // units staged per row
    constexpr int PROMOTE = PROMOTE_ROWS > 0 ? PROMOTE_ROWS : 1;
    constexpr int FRAGMENTS = Tile::CHANNEL_TILES * Tile::PARTS;
    constexpr int TAP_STRIDE = Tile::CHANNEL_WARPS * FRAGMENTS * 32;
    constexpr int PART_STRIDE = Tile::PLANES * Tile::PLANE;
    const int plane = static_cast<int>(threadIdx.x) / 8 % 2;
#pragma unroll 1
    for (int u = 0; u < Tile::UNITS; ++u) {
        stage.store(stage.load(u, 0), 0, u, 0);
    }
    uint4 a[2][FRAGMENTS];
#pragma unroll
    for (int i = 0; i < FRAGMENTS; ++i) {
        a[0][i] = weights[i * 32];
    }
    float sum[Tile::CHANNEL_TILES][Tile::POSITION_TILES][4];
    __syncthreads();
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int buffer = chunk & 1;
        const bool more = chunk + 1 < chunks;
        int step = 0, tap_d = 0, tap_h = 0;
#pragma unroll 1
        for (int row = 0; row < ROWS; ++row) {
            typename Stage::Loaded loaded[SLICE];
#pragma unroll
            for (int s = 0; s < SLICE; ++s) {
                if (more && row * SLICE + s < Tile::UNITS) {
                    loaded[s] = stage.load(row * SLICE + s, chunk + 1);
                }
            }
            if (PROMOTE_ROWS > 0 && row % PROMOTE == 0) {
#pragma unroll
                for (int i = 0; i < Tile::CHANNEL_TILES * Tile::POSITION_TILES * 4; ++i) {
                    (&sum[0][0][0])[i] = 0.0f;
                }
            }
            const uint4* halo = &storage.halo[buffer][0][2 * step + plane][position + tap_d * SHIFT_D + tap_h * SHIFT_H];
#pragma unroll
            for (int tap = 0; tap < TAPS_W; ++tap) {
                weights += TAP_STRIDE;
#pragma unroll
                for (int i = 0; i < FRAGMENTS; ++i) {
                    a[(tap + 1) % 2][i] = weights[i * 32];
                }
#pragma unroll
                for (int pair = 0; pair < Tile::POSITION_TILES / 2; ++pair) {
                    uint32_t b[Tile::PARTS][4];
                    const int apart = halo_position<Tile, STRIDE_D, STRIDE_H, STRIDE_W>(pair * 16);
#pragma unroll
                    for (int part = 0; part < Tile::PARTS; ++part) {
                        load_matrices(b[part], halo + apart + tap * SHIFT_W + part * PART_STRIDE);
                    }
#pragma unroll
                    for (int m = 0; m < Tile::CHANNEL_TILES; ++m) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            float(&c)[4] = PROMOTE_ROWS > 0 ? sum[m][2 * pair + half] : acc[m][2 * pair + half];
                            const uint4* left = a[tap % 2];
                            if constexpr (Tile::PARTS == 2) {
                                // Small terms first.
                                multiply<Tile::MATH>(c, left[2 * m + 1], b[0][2 * half], b[0][2 * half + 1]);
                                multiply<Tile::MATH>(c, left[2 * m], b[1][2 * half], b[1][2 * half + 1]);
                                multiply<Tile::MATH>(c, left[2 * m], b[0][2 * half], b[0][2 * half + 1]);
                            } else {
                                multiply<Tile::MATH>(c, left[m], b[0][2 * half], b[0][2 * half + 1]);
                            }
                        }
                    }
                }
            }
            if constexpr (TAPS_W % 2 == 1) {
#pragma unroll
                for (int i = 0; i < FRAGMENTS; ++i) {
                    a[0][i] = a[1][i];
                }
            }
            if (PROMOTE_ROWS > 0 && (row == ROWS - 1 || (row + 1) % PROMOTE == 0)) {
#pragma unroll
                for (int i = 0; i < Tile::CHANNEL_TILES * Tile::POSITION_TILES * 4; ++i) {
                    (&acc[0][0][0])[i] += (&sum[0][0][0])[i];
                }
            }
#pragma unroll
            for (int s = 0; s < SLICE; ++s) {
                if (more && row * SLICE + s < Tile::UNITS) {
                    stage.store(loaded[s], buffer ^ 1, row * SLICE + s, chunk + 1);
                }
            }
            if (++tap_h == TAPS_H) {
                tap_h = 0;
                if (++tap_d == TAPS_D) {
                    tap_d = 0;
                    ++step;
                }
            }
        }
        __syncthreads();
    }
}

}  // namespace jitconv
