"""Small problems of every kernel family, for compute-sanitizer: ``python small_shapes.py COUNT SEED``."""

from __future__ import annotations

import dataclasses
import sys

import torch
from random_calls import Generator, describe, error, exact, rounded

from jitconv import launch, program, runtime
from jitconv.compilation import compiled_kernel
from jitconv.problem import PRECISIONS


def main(count: int, seed: int) -> int:
    """Run ``count`` random calls and check each; the number of wrong results."""
    generator = Generator(seed)
    families: set[str] = set()
    wrong = 0
    arch = launch.device_info(0).arch
    for i in range(count):
        call = dataclasses.replace(generator.call(), precision=PRECISIONS[i % len(PRECISIONS)])
        for step in program.build(call, arch).launches:
            compiled_kernel(step.kernel, arch)
            families.add(step.kernel.family)
        result = runtime.run(call)
        torch.cuda.synchronize()
        expected = exact(call)
        limit = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[call.x.dtype]
        if call.x.dtype == torch.float32 and call.operator == "conv" and call.precision == "tf32":
            limit = max(limit, 1.1 * error(rounded(call), expected))
        reached = error(result, expected)
        if reached > limit:
            wrong += 1
            print(f"error {reached:.2e}: {describe(call)}")
    print(f"{count} problems, families {sorted(families)}, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(1 if main(int(sys.argv[1]), int(sys.argv[2])) else 0)
