"""The resource model: what a block of a convolution's kernel takes of a multiprocessor, known before it is compiled.

A tile that would not fit, or whose sums would leave too few registers for everything else so that ptxas spilled them,
is rejected here, in microseconds; the compiler would take seconds to say the same. Tests compare the model with what
NVRTC reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from jitconv.architectures import limits_of
from jitconv.families import HaloTile, KernelPlan, Tile, WgmmaTile, family

__all__ = ["Budget", "budget", "misfit"]

#: Largest number of threads of a block on every architecture.
_MAX_THREADS = 1024

#: Registers that a thread needs beside its sums: addresses, operands on their way, the steps of an epilogue. Split
#: products add up in shorter loops, one set of sums at a time.
_BESIDE_SUMS = 40
_BESIDE_PROMOTED_SUMS = 24

#: Beside the sums of one product at the start of a Hopper block, before its warpgroups share registers anew.
_BESIDE_PRODUCT = 26


@dataclass(frozen=True)
class Budget:
    """What one block takes.

    ``threads``, ``shared_bytes`` (all of it dynamic), the ``blocks`` that must fit on a multiprocessor at once by the
    kernel's launch bounds, the ``registers`` that those leave to a thread when it starts, and the most that one comes
    to hold (``multiplying``, the same where registers are not shared anew); ``sums``: fp32 sums in registers at once.
    """

    threads: int
    shared_bytes: int
    blocks: int
    registers: int
    multiplying: int
    sums: int


def budget(kernel: KernelPlan, arch: str) -> Budget:
    """The budget of the convolution's own kernel, the one that multiplies, on ``arch``."""
    tile = kernel.tile
    blocks, sums = _demand(kernel)
    limits = limits_of(arch)
    threads, shared = family(kernel).threads(kernel), family(kernel).shared_bytes(kernel)
    # Registers are handed out to a thread in eights.
    registers = min(limits.registers_thread, limits.registers_sm // (max(threads, 1) * blocks) // 8 * 8)
    multiplying = tile.registers[1] if isinstance(tile, WgmmaTile) else registers
    return Budget(threads, shared, blocks, registers, multiplying, sums)


def _demand(kernel: KernelPlan) -> tuple[int, int]:
    """Blocks that must fit at once, by the kernel's launch bounds, and fp32 sums of a thread."""
    tile = kernel.tile
    if isinstance(tile, WgmmaTile):
        return tile.blocks, tile.accumulators + (tile.columns // 2 if tile.promote_stages else 0)
    if isinstance(tile, HaloTile):
        return tile.blocks, tile.sums
    if isinstance(tile, Tile):
        sums = tile.px * tile.oc_tile
        return (3 if sums < 64 else 1), sums
    raise TypeError(f"kernel.tile={tile!r}: expected the tile of a convolution")


def misfit(kernel: KernelPlan, arch: str) -> str | None:
    """Why the kernel would not fit ``arch``, or would spill; None where it fits."""
    needs, limits, tile = budget(kernel, arch), limits_of(arch), kernel.tile
    if not 32 <= needs.threads <= min(_MAX_THREADS, limits.threads_sm // needs.blocks):
        return f"{needs.blocks} blocks of {needs.threads} threads do not fit a multiprocessor"
    if needs.shared_bytes > limits.shared_block:
        return f"{needs.shared_bytes} bytes of shared memory, and a block may have {limits.shared_block}"
    promoted = isinstance(tile, WgmmaTile) and tile.promote_stages
    if needs.sums + (_BESIDE_PROMOTED_SUMS if promoted else _BESIDE_SUMS) > needs.multiplying:
        return f"{needs.sums} sums leave too few of a thread's {needs.multiplying} registers"
    resident = isinstance(tile, (HaloTile, WgmmaTile))
    if resident and needs.blocks * (needs.shared_bytes + limits.shared_reserved) > limits.shared_sm:
        return f"{needs.blocks} blocks of {needs.shared_bytes} bytes of shared memory do not fit a multiprocessor"
    if isinstance(tile, WgmmaTile) and tile.columns // 2 + _BESIDE_PRODUCT > needs.registers:
        return f"a product of {tile.columns} columns does not fit the {needs.registers} registers of the start"
    return None
