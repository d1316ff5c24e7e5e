// How the operands of a convolution on tensor cores become products.
#pragma once

#include "device/platform.cuh"

namespace jitconv {

enum class Math {
    TF32,       // one product of operands rounded to tf32
    TF32X3,     // hi hi + hi lo + lo hi of operands split in two tf32: fp32 accuracy
    HALF,       // fp16 operands
    BFLOAT16,
};

// Numbers that stand for one operand.
__device__ constexpr int parts_of(Math math) { return math == Math::TF32X3 ? 2 : 1; }

// Elements of an operand in 16 bytes.
__device__ constexpr int elements_in_16_bytes(Math math) {
    return math == Math::HALF || math == Math::BFLOAT16 ? 8 : 4;
}

}  // namespace jitconv
