// Convolution as a matrix product whose left operand is never stored: the main loop shared by all families.
//
//     acc[channel][position] += weight[channel][k] * x[k][position],      k = (input channel, filter tap)
//
// One block owns CHANNELS output channels of POSITIONS output positions (flattened over batch and space, so a
// tile may cross image borders) and walks the reduction in slices of DEPTH. Each slice is gathered into shared
// memory by the two loaders of the family; the next slice travels in registers while this one is multiplied.
//
//                 POSITIONS                          thread (channel_lane, position_lane) holds
//            +----------------+                      acc[OC_TILE][PX]: OC_TILE adjacent channels,
//      DEPTH | x slice        |  2 stages            PX positions in groups of GROUP adjacent ones
//            +----------------+
//            +----------+
//      DEPTH | w slice  |        2 stages
//            +----------+
//              CHANNELS
//
// All arithmetic is fp32 FFMA in one fixed order per output, independent of the batch and of the grid.
#pragma once

#include "device/platform.cuh"

namespace jitconv {

template <int POSITIONS_, int CHANNELS_, int DEPTH_, int PX_, int OC_TILE_>
struct GemmTile {
    static constexpr int POSITIONS = POSITIONS_;
    static constexpr int CHANNELS = CHANNELS_;
    static constexpr int DEPTH = DEPTH_;
    static constexpr int PX = PX_;
    static constexpr int OC_TILE = OC_TILE_;
    static constexpr int POSITION_LANES = POSITIONS / PX;
    static constexpr int CHANNEL_LANES = CHANNELS / OC_TILE;
    static constexpr int THREADS = POSITION_LANES * CHANNEL_LANES;
    static constexpr int GROUP = PX < 4 ? PX : 4;
    // A pitch of 4 mod 32 words lets both gather orders store without bank conflicts and keeps rows 16-byte aligned.
    static constexpr int X_PITCH = POSITIONS + 4;
    static constexpr int W_PITCH = (CHANNELS + 3) / 4 * 4 + 4;

    static_assert(POSITIONS % PX == 0 && CHANNELS % OC_TILE == 0 && PX % GROUP == 0, "lanes divide the tile");
    static_assert(POSITIONS % 4 == 0, "rows of the x slice stay 16-byte aligned");
    static_assert(DEPTH * POSITIONS % THREADS == 0, "threads share the x slice evenly");
    static_assert(THREADS % 32 == 0, "a block is made of whole warps");

    // Tile-relative position of accumulator column j.
    static __device__ __forceinline__ int position(int j) {
        const int lane = static_cast<int>(threadIdx.x) % POSITION_LANES;
        return (j / GROUP * POSITION_LANES + lane) * GROUP + j % GROUP;
    }

    // Tile-relative channel of accumulator row i.
    static __device__ __forceinline__ int channel(int i) {
        return static_cast<int>(threadIdx.x) / POSITION_LANES * OC_TILE + i;
    }
};

template <class Tile>
struct alignas(16) GemmStorage {
    float x[2][Tile::DEPTH][Tile::X_PITCH];
    float w[2][Tile::DEPTH][Tile::W_PITCH];
};

// COUNT adjacent floats of shared memory, four at a time where they can be.
template <int COUNT>
__device__ __forceinline__ void load_fragment(float* fragment, const float* source) {
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(source + i);
            fragment[i] = four.x;
            fragment[i + 1] = four.y;
            fragment[i + 2] = four.z;
            fragment[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            fragment[i] = source[i];
        }
    }
}

// acc += the product over `reduction` values of k. `load_x(k, position)` and `load_w(k, channel)` return the
// operands at tile-relative indices and are only called with k < reduction; the rest of a slice is zero.
// X_ALONG_K: neighbouring threads gather along k (channels_last) instead of along positions (channels_first).
template <class Tile, bool X_ALONG_K, class LoadX, class LoadW>
__device__ __forceinline__ void accumulate(
    float (&acc)[Tile::OC_TILE][Tile::PX],
    GemmStorage<Tile>& storage,
    int reduction,
    const LoadX& load_x,
    const LoadW& load_w) {
    constexpr int X_PER_THREAD = Tile::DEPTH * Tile::POSITIONS / Tile::THREADS;
    constexpr int W_TOTAL = Tile::DEPTH * Tile::CHANNELS;
    constexpr int W_PER_THREAD = (W_TOTAL + Tile::THREADS - 1) / Tile::THREADS;
    const int thread = static_cast<int>(threadIdx.x);
    float x_next[X_PER_THREAD];
    float w_next[W_PER_THREAD];

    const auto x_row = [&](int e) {
        const int index = thread + e * Tile::THREADS;
        return X_ALONG_K ? index % Tile::DEPTH : index / Tile::POSITIONS;
    };
    const auto x_column = [&](int e) {
        const int index = thread + e * Tile::THREADS;
        return X_ALONG_K ? index / Tile::DEPTH : index % Tile::POSITIONS;
    };
    const auto gather = [&](int first) {
#pragma unroll
        for (int e = 0; e < X_PER_THREAD; ++e) {
            const int k = first + x_row(e);
            x_next[e] = k < reduction ? load_x(k, x_column(e)) : 0.0f;
        }
#pragma unroll
        for (int e = 0; e < W_PER_THREAD; ++e) {
            const int index = thread + e * Tile::THREADS;
            const int k = first + index % Tile::DEPTH;
            w_next[e] = index < W_TOTAL && k < reduction ? load_w(k, index / Tile::DEPTH) : 0.0f;
        }
    };
    const auto publish = [&](int stage) {
#pragma unroll
        for (int e = 0; e < X_PER_THREAD; ++e) {
            storage.x[stage][x_row(e)][x_column(e)] = x_next[e];
        }
#pragma unroll
        for (int e = 0; e < W_PER_THREAD; ++e) {
            const int index = thread + e * Tile::THREADS;
            if (index < W_TOTAL) {
                storage.w[stage][index % Tile::DEPTH][index / Tile::DEPTH] = w_next[e];
            }
        }
    };

    gather(0);
    publish(0);
    __syncthreads();
    int stage = 0;
    for (int first = 0; first < reduction; first += Tile::DEPTH) {
        const bool more = first + Tile::DEPTH < reduction;
        if (more) {
            gather(first + Tile::DEPTH);
        }
#pragma unroll
        for (int k = 0; k < Tile::DEPTH; ++k) {
            float x[Tile::PX];
            float w[Tile::OC_TILE];
#pragma unroll
            for (int group = 0; group < Tile::PX; group += Tile::GROUP) {
                load_fragment<Tile::GROUP>(x + group, &storage.x[stage][k][Tile::position(group)]);
            }
            load_fragment<Tile::OC_TILE>(w, &storage.w[stage][k][Tile::channel(0)]);
#pragma unroll
            for (int i = 0; i < Tile::OC_TILE; ++i) {
#pragma unroll
                for (int j = 0; j < Tile::PX; ++j) {
                    acc[i][j] = fmaf(w[i], x[j], acc[i][j]);
                }
            }
        }
        if (more) {
            // The other stage was last read before the previous barrier.
            publish(stage ^ 1);
            __syncthreads();
            stage ^= 1;
        }
    }
}

}  // namespace jitconv
