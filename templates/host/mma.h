// Host twins of templates/device/mma.cuh: lanes meet, lay their words open, and each computes its own part.
//
// Products are exact and their sum is rounded once, where the hardware truncates as it adds; operands are cut to
// tf32 as the hardware cuts them.
#pragma once

#include "device/numeric.cuh"
#include "host/platform.h"

namespace jitconv {
namespace host {

// What each lane of each warp shows the others during one collective operation.
struct WarpBoard {
    uint32_t words[32][8];
    const void* address[32];
};
inline WarpBoard warp_boards[32];

inline WarpBoard& warp_board() { return warp_boards[threadIdx.x / 32]; }

// c += a b, `product(a_word, b_word)` being the sum of products that one pair of words holds.
template <class Product>
inline void multiply(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1, const Product& product,
                     const Here& here) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    WarpBoard& board = warp_board();
    const uint32_t mine[6] = {a.x, a.y, a.z, a.w, b0, b1};
    memcpy(board.words[lane], mine, sizeof mine);
    __syncwarp(0xffffffffu, here);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
        const int row = i / 2, column = 2 * t + i % 2;
        double sum = c[i];
        for (int k = 0; k < 8; ++k) {
            const uint32_t left = board.words[4 * g + k % 4][row + 2 * (k / 4)];
            const uint32_t right = board.words[4 * column + k % 4][4 + k / 4];
            sum += product(left, right);
        }
        c[i] = static_cast<float>(sum);
    }
    // Nobody may show the next words before all have read these.
    __syncwarp(0xffffffffu, here);
}

}  // namespace host

inline void load_matrices(uint32_t (&words)[4], const void* row, JITCONV_HERE) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    host::WarpBoard& board = host::warp_board();
    board.address[lane] = row;
    __syncwarp(0xffffffffu, here);
    for (int matrix = 0; matrix < 4; ++matrix) {
        const uint32_t* source = static_cast<const uint32_t*>(board.address[8 * matrix + lane / 4]);
        words[matrix] = source[lane % 4];
    }
    __syncwarp(0xffffffffu, here);
}

inline uint4 load_again(const uint4* source) { return *source; }

inline void multiply_tf32(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1, JITCONV_HERE) {
    host::multiply(
        c, a, b0, b1,
        [](uint32_t left, uint32_t right) {
            return static_cast<double>(host::tf32_operand(left)) * host::tf32_operand(right);
        },
        here);
}

inline void multiply_half(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1, JITCONV_HERE) {
    host::multiply(
        c, a, b0, b1,
        [](uint32_t left, uint32_t right) {
            return static_cast<double>(half_bits_to_float(static_cast<uint16_t>(left))) *
                       half_bits_to_float(static_cast<uint16_t>(right)) +
                   static_cast<double>(half_bits_to_float(static_cast<uint16_t>(left >> 16))) *
                       half_bits_to_float(static_cast<uint16_t>(right >> 16));
        },
        here);
}

inline void multiply_bfloat16(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1, JITCONV_HERE) {
    host::multiply(
        c, a, b0, b1,
        [](uint32_t left, uint32_t right) {
            return static_cast<double>(__uint_as_float(left << 16)) * __uint_as_float(right << 16) +
                   static_cast<double>(__uint_as_float(left & 0xffff0000u)) * __uint_as_float(right & 0xffff0000u);
        },
        here);
}

}  // namespace jitconv
