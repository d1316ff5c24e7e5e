"""Inputs for the kernels of this folder, and what must come out.

A case is run by a *runner* with the signature of ``jitconv.emulate.execute``: the emulator, or the
GPU. Expected values come from torch in float64 or from Python's integers.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from jitconv.emulate import Launch, Schedule
from jitconv.tensor_map import TensorMap
from tests.kernels import Kernel, load

Runner = Callable[[Kernel, Launch, bytes, Mapping[int, torch.Tensor]], None]
Results = dict[str, torch.Tensor]

CUT_SHORT = 8  # floats missing from the last tile of the pipeline

# One schedule is enough where threads do not meet.
FORWARD = Schedule("forward", "late")


def _unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output that no kernel has written: NaN, or for integers a pattern that is no result."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype)
    return torch.full(shape, -0x0123456789ABCDEF, dtype=dtype)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- barriers.cu ------------------------------------------------------------------------------


def _rings(x: torch.Tensor, length: int, rounds: int) -> torch.Tensor:
    value = x.double().view(-1, length)
    for _ in range(rounds):
        value = value + 0.5 * value.roll(-1, 1)
    return value.reshape(-1)


def barriers(run: Runner, kernel: Kernel | None = None) -> tuple[Results, Results]:
    """Results and expectation of ``barriers.cu`` on three blocks."""
    rounds, blocks = 3, 3
    x = _random(128 * blocks)
    out = {name: _unwritten(128 * blocks) for name in ("ring", "warp_ring", "sums")}
    arguments = struct.pack("<4Qi4x", 0, 0, 0, 0, rounds)
    pointers = {0: x, 8: out["ring"], 16: out["warp_ring"], 24: out["sums"]}
    run(kernel or load("barriers"), Launch(blocks, 128, 4 * (128 + 4)), arguments, pointers)
    block = x.double().view(blocks, 128)
    sums = block.sum(1) + 2 * (block**2).sum(1) + 4 * block.amax(1) - 8 * block.amin(1)
    expected = {
        "ring": _rings(x, 128, rounds),
        "warp_ring": _rings(x, 32, rounds),
        "sums": sums.repeat_interleave(128),
    }
    return out, expected


# ---- named_barriers.cu ------------------------------------------------------------------------


def named_barriers(run: Runner, kernel: Kernel | None = None) -> tuple[Results, Results]:
    """Results and expectation of ``named_barriers.cu`` on seven tiles."""
    x = _random(7, 32)
    y = _unwritten(7, 32)
    arguments = struct.pack("<2Qi4x", 0, 0, 7)
    run(kernel or load("named_barriers"), Launch(1, 64, 2 * 128), arguments, {0: x, 8: y})
    return {"y": y}, {"y": 2 * x.double().roll(-1, 1)}


# ---- pipeline.cu ------------------------------------------------------------------------------


def pipeline(run: Runner, kernel: Kernel | None = None) -> tuple[Results, Results]:
    """Results and expectation of ``pipeline.cu`` on six tiles, the last one cut short."""
    tiles = 6
    x = _random(tiles * 256 - CUT_SHORT)
    y = _unwritten(tiles * 256)
    arguments = struct.pack("<2Qi4x", 0, 0, x.numel())
    run(kernel or load("pipeline"), Launch(1, 64, 3 * 1024), arguments, {0: x, 8: y})
    padded = torch.cat([x.double(), torch.zeros(CUT_SHORT, dtype=torch.float64)])
    return {"y": y}, {"y": padded.view(tiles, 256).flip(1).reshape(-1)}


# ---- bulk.cu ----------------------------------------------------------------------------------


def bulk(run: Runner, kernel: Kernel | None = None) -> tuple[Results, Results]:
    """Results and expectation of ``bulk.cu`` on seven rows."""
    x = _random(7, 96)
    y = _unwritten(7, 96)
    arguments = struct.pack("<2Qi4x", 0, 0, 7)
    run(kernel or load("bulk"), Launch(1, 128, 4 * 4 * 96 + 4 * 8), arguments, {0: x, 8: y})
    return {"y": y}, {"y": x.double().flip(1)}


# ---- warpgroups.cu, products.cu ----------------------------------------------------------------


def warpgroups(run: Runner, kernel: Kernel | None = None) -> tuple[Results, Results]:
    """Results and expectation of ``warpgroups.cu`` on five slices."""
    a, b = tf32(_random(128, 80)), tf32(_random(32, 80, seed=1))
    y = _unwritten(128, 32)
    arguments = struct.pack("<3Qi4x", 0, 0, 0, 5)
    shared_bytes = 2 * 4 * 16 * (128 + 32)
    run(kernel or load("warpgroups"), Launch(1, 256, shared_bytes), arguments, {0: a, 8: b, 16: y})
    return {"y": y}, {"y": a.double() @ b.double().T}


def tf32(x: torch.Tensor) -> torch.Tensor:
    """``x`` cut to what tensor cores read of it as tf32."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


MATHS = {"tf32": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Operand:
    """Where the rows of an operand of ``products.cu`` lie in shared memory, in bytes."""

    start: int
    leading: int
    stride: int
    advance: int = 0
    group: int = 0

    def rows(self, memory: torch.Tensor, count: int, group: int, step: int) -> torch.Tensor:
        """The rows as 32 bytes each, by the definition of a descriptor; ``memory`` is shared memory."""
        start = self.start + group * self.group + step * self.advance
        row, byte = torch.arange(count).view(-1, 1), torch.arange(32)
        return memory[start + row // 8 * self.stride + row % 8 * 16 + byte // 16 * self.leading + byte % 16]


def products(
    run: Runner,
    math: str,
    n: int,
    a: Operand,
    b: Operand,
    *,
    steps: int = 1,
    accumulate: bool = True,
    size: int = 65536,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and expectation of ``products.cu``, both [2, 64, n], on ``size`` bytes of shared memory."""
    x = _random(size // MATHS[math].itemsize, seed=n).to(MATHS[math])
    y = _random(2, 64, n, seed=n + 1)
    memory = x.view(torch.uint8)
    expected = y.double() if accumulate else torch.zeros(2, 64, n, dtype=torch.float64)
    for step in range(steps):
        for group in range(2):
            rows = [
                operand.rows(memory, count, group, step).contiguous().view(MATHS[math])
                for operand, count in ((a, 64), (b, n))
            ]
            left, right = (tf32(row).double() if math == "tf32" else row.double() for row in rows)
            expected[group] += left @ right.T
    numbers = (size // 4, list(MATHS).index(math), n, steps, accumulate)
    places = [p for o in (a, b) for p in (o.start, o.leading, o.stride, o.advance, o.group)]
    arguments = struct.pack("<2Q5i10I4x", 0, 0, *numbers, *places)
    run(load("products"), Launch(1, 256, size), arguments, {0: x, 8: y})
    return y, expected


# ---- boxes.cu ----------------------------------------------------------------------------------

#: Where the map stands in the argument of ``boxes.cu``.
BOX_MAP = 64


def tensor_map_of(x: torch.Tensor, box: tuple[int, ...], element_strides: tuple[int, ...] = ()) -> TensorMap:
    """The map of ``x``, whose last axis is dense; ``box`` and ``element_strides`` are innermost first."""
    dtype = str(x.dtype).removeprefix("torch.")
    strides = tuple(stride * x.element_size() for stride in x.stride()[-2::-1])
    return TensorMap(dtype, tuple(x.shape[::-1]), strides, box, element_strides)


def boxes(
    run: Runner,
    x: torch.Tensor,
    spec: TensorMap,
    corners: Sequence[tuple[int, ...]],
    encoded: bytes,
    pointers: Mapping[int, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Boxes of ``x`` by ``boxes.cu`` and by indexing. Axes of corners are innermost first, those of the results last.

    ``encoded`` is the map as the runner takes it, ``pointers`` what the runner has to fill in of it.
    """
    starts = torch.tensor([(*corner, *(5 - len(corner)) * (0,)) for corner in corners], dtype=torch.int32)
    y = torch.full((len(corners), *spec.box_extents[::-1]), torch.nan, dtype=x.dtype)
    words = spec.box_bytes // 4
    arguments = struct.pack("<2Q2i40x", 0, 0, spec.rank, words) + encoded
    launch = Launch(len(corners), 64, (words + 1) // 2 * 8 + 8)
    run(load("boxes"), launch, arguments, {0: starts, 8: y, **pointers})
    expected = torch.zeros_like(y)
    for i, corner in enumerate(corners):
        for position in itertools.product(*map(range, spec.box_extents[::-1])):
            steps = zip(corner[::-1], position, spec.element_strides[::-1], strict=True)
            place = tuple(start + step * at for start, at, step in steps)
            if all(0 <= at < extent for at, extent in zip(place, x.shape, strict=True)):
                expected[(i, *position)] = x[place]
    return y, expected


# ---- numeric.cu -------------------------------------------------------------------------------


def float_sweep(count: int, seed: int = 0) -> torch.Tensor:
    """Random bit patterns, ties of every 16-bit format, and the special values."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
    bits = patterns.to(torch.int32)
    everything = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    ties = []
    for dtype in (torch.float16, torch.bfloat16):
        value = everything.view(dtype).float().view(torch.int32)
        half_unit = 0x1000 if dtype == torch.float16 else 0x8000
        ties += [value + half_unit, value + half_unit - 1, value + half_unit + 1]
    # Halves of the unit 2^-24 of a subnormal half, and of the unit 2^-133 of a subnormal bfloat16.
    ties.append((torch.arange(0, 2050) * 0.5 * 2.0**-24).float().view(torch.int32))
    ties.append(torch.arange(0, 130, dtype=torch.int32) * 0x8000)
    special = torch.tensor([0, 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7F7FFFFF, 1])
    special = torch.cat([special, special - 2**31]).to(torch.int32)
    return torch.cat([bits, *ties, special]).view(torch.float32)


def numeric(run: Runner, count: int = 200_000) -> tuple[Results, torch.Tensor, torch.Tensor]:
    """Results of ``numeric.cu``, the floats that went in, and all 16-bit patterns."""
    x = float_sweep(count)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    out = {
        "to_half": torch.zeros(x.numel(), dtype=torch.float16),
        "to_bfloat16": torch.zeros(x.numel(), dtype=torch.bfloat16),
        "to_tf32": torch.zeros(x.numel()),
        "from_half": torch.zeros(65536),
        "from_bfloat16": torch.zeros(65536),
    }
    tensors = [x, patterns, patterns, *out.values()]
    arguments = struct.pack("<8Qi4x", *[0] * 8, x.numel())
    pointers = {8 * index: tensor for index, tensor in enumerate(tensors)}
    blocks = -(-max(x.numel(), 65536) // 256)
    run(load("numeric"), Launch(blocks, 256), arguments, pointers)
    return out, x, patterns


# ---- arithmetic.cu ----------------------------------------------------------------------------

ARITHMETIC = (
    "__fadd_rn", "__fsub_rn", "__fmul_rn", "__fdiv_rn", "__frcp_rn", "__fsqrt_rn", "__fmaf_rn",
    "fmaf", "fminf", "fmaxf", "min", "max", "rsqrtf",
)  # fmt: skip


def arithmetic(run: Runner, count: int = 20_000) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Results of ``arithmetic.cu`` ([13][count]) and its operands a, b, c.

    c is minus the rounded product of a and b: what fmaf leaves of it is the rounding error.
    """
    a, b = (float_sweep(count, seed)[:count] for seed in (1, 2))
    # Half of the pairs of like magnitude: random patterns hardly ever meet.
    b[::2] = a[::2] * (1 + _random(len(a[::2]), seed=3))
    c = -(a * b)
    results = _unwritten(len(ARITHMETIC), count)
    arguments = struct.pack("<4Qi4x", 0, 0, 0, 0, count)
    run(
        load("arithmetic"),
        Launch(-(-count // 256), 256),
        arguments,
        {0: a, 8: b, 16: c, 24: results},
    )
    return results, [a, b, c]


# ---- atomics.cu -------------------------------------------------------------------------------


def atomics(run: Runner) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Results and expectation of ``atomics.cu``, unsigned numbers as Python prints them."""
    integers = torch.tensor([0, -1000, 1000, 0, 0, 0], dtype=torch.int32)
    unsigneds = torch.tensor([0, 0, -1], dtype=torch.int32)
    wide = torch.tensor([0, 0, -1], dtype=torch.int64)
    total = torch.zeros(1)
    pointers = {0: integers, 8: unsigneds, 16: wide, 24: total}
    run(load("atomics"), Launch(1, 128, 12), bytes(32), pointers)
    values = [thread * 37 % 101 - 50 for thread in range(128)]
    bits = [value & 0xFFFFFFFF for value in values]
    long = [value * 0x10001 for value in bits]
    squares = sum(value * value for value in values)
    expected = {
        "integers": [sum(values), max(values), min(values), squares, 1, sum(range(129))],
        "unsigneds": [sum(bits) & 0xFFFFFFFF, max(bits), min(bits)],
        "wide": [sum(long), max(long), min(long)],
        "sum": [sum(values)],
    }
    results = {
        "integers": integers.tolist(),
        "unsigneds": [value & 0xFFFFFFFF for value in unsigneds.tolist()],
        "wide": wide.tolist(),
        "sum": total.tolist(),
    }
    return results, expected


# ---- integers.cu ------------------------------------------------------------------------------

INTEGERS = (
    "umulhi", "mulhi", "umul64hi", "mul64hi", "clz", "clzll", "ffs", "ffsll", "popc", "popcll",
    "brev", "byte_perm", "min", "max", "mixed min", "bits",
)  # fmt: skip


def integer_operands(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random 64-bit patterns of every magnitude, and all pairs of the extreme ones."""
    generator = torch.Generator().manual_seed(3)
    edge = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), -1]
    operands = []
    for pairs in ([a for a in edge for _ in edge], edge * len(edge)):
        wide = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
        shift = torch.randint(0, 64, (count,), generator=generator)
        operands.append(torch.cat([torch.tensor(pairs), wide >> shift]))
    return operands[0], operands[1]


def integers(run: Runner, count: int = 2000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results of ``integers.cu`` ([16][pairs], as signed 64 bits) and its operands."""
    a, b = integer_operands(count)
    results = _unwritten(len(INTEGERS), a.numel(), dtype=torch.int64)
    arguments = struct.pack("<3Qi4x", 0, 0, 0, a.numel())
    blocks = -(-a.numel() // 256)
    run(load("integers"), Launch(blocks, 256), arguments, {0: a, 8: b, 16: results})
    return results, a, b


# ---- warps.cu ---------------------------------------------------------------------------------

WARP_RESULTS = 18


def warps(run: Runner, operand: int, blocks: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of ``warps.cu`` ([18][blocks * 32]) and the values that went in."""
    x = _random(32 * blocks, seed=5)
    results = _unwritten(WARP_RESULTS, 32 * blocks)
    arguments = struct.pack("<2Qi4x", 0, 0, operand)
    run(load("warps"), Launch(blocks, 32), arguments, {0: x, 8: results})
    return results, x


def assert_close(results: Results, expected: Results) -> None:
    """Every result within a few float32 roundings of its float64 expectation."""
    for name, value in results.items():
        torch.testing.assert_close(
            value.double(), expected[name], rtol=2e-6, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
