"""Kernel families: one module each, all of the same shape.

A family says, for one :class:`KernelPlan`, which template it renders, which constants that template gets,
which arguments the kernel takes and how many blocks are launched. A new family is one new module here and one
new template. Families know nothing of NVRTC, of the store, or of addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from jitconv.layout import Layout
from jitconv.problem import Problem, StepSpec


@dataclass(frozen=True)
class Tile:
    """Tile of one block of the implicit-GEMM families (templates/device/implicit_gemm.cuh).

    ``positions`` × ``channels`` outputs, reduced in slices of ``depth``; each thread holds ``px`` positions of
    ``oc_tile`` output channels.
    """

    positions: int
    channels: int
    depth: int
    px: int
    oc_tile: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.positions // self.px) * (self.channels // self.oc_tile)


@dataclass(frozen=True)
class RowTile:
    """Tile of the kernels behind a convolution: ``threads`` of a block, ``lanes`` of them on one row."""

    threads: int
    lanes: int


@dataclass(frozen=True)
class HaloTile:
    """Tile of one block of the tensor-core family for sm_80 and up (templates/device/halo_gemm.cuh).

    ``box`` of output positions (d, h, w) × 16 · ``channel_tiles`` · ``channel_warps`` output channels;
    ``position_tiles`` groups of 8 positions a consumer warp, ``steps`` products along k per chunk of channels. ``math``
    is a value of ``Math``. Positions are the rows of a product if ``position_rows``, else output channels are. The
    weight ring holds ``stages`` of ``stage_taps`` taps, of which ``run_taps`` at a time are unrolled; of a split
    product their sum is added in fp32. The halo ring holds ``units``; ``producers`` warps fetch x, with ``depth`` items
    of a thread on their way. ``blocks`` share a multiprocessor.
    """

    box: tuple[int, int, int]
    channel_warps: int
    position_warps: int
    channel_tiles: int
    position_tiles: int
    math: str
    steps: int = 1
    position_rows: bool = False
    stage_taps: int = 1
    run_taps: int = 1
    stages: int = 2
    units: int = 2
    producers: int = 3
    depth: int = 4
    blocks: int = 1

    @property
    def consumers(self) -> int:
        """Warps that multiply."""
        return self.channel_warps * self.position_warps

    @property
    def threads(self) -> int:
        """Threads of a block: consumers, producers, and the warp that loads weights."""
        return 32 * (self.consumers + self.producers + 1)

    @property
    def channels(self) -> int:
        """Output channels of a block."""
        return 16 * self.channel_tiles * self.channel_warps

    @property
    def positions(self) -> int:
        """Output positions of a block."""
        return 8 * self.position_tiles * self.position_warps

    @property
    def parts(self) -> int:
        """Numbers that stand for one operand."""
        return 2 if self.math == "TF32X3" else 1

    @property
    def promoted_pairs(self) -> int:
        """Pairs of position tiles of a warp whose sums are promoted at once (HaloTile::PROMOTED_PAIRS), 0: none are."""
        if self.parts == 1:
            return 0
        return 1 if self.channel_tiles > 2 else min(4 // self.channel_tiles, self.position_tiles // 2)

    @property
    def sums(self) -> int:
        """fp32 sums that a consumer's thread holds at once; those that are being promoted have a second set."""
        return 4 * self.channel_tiles * (self.position_tiles + 2 * self.promoted_pairs)

    @property
    def step_channels(self) -> int:
        """Input channels of one product."""
        return 8 if self.math in ("TF32", "TF32X3") else 16

    def k_steps(self, channels: int) -> int:
        """Products along ``channels`` input channels, whole chunks."""
        return -(-channels // (self.step_channels * self.steps)) * self.steps


@dataclass(frozen=True)
class WgmmaTile:
    """Tile of one block of the Hopper family (templates/device/halo_wgmma.cuh).

    ``box`` of output positions (h, w) in one plane × ``channels`` output channels, computed by ``channel_groups`` ×
    ``position_groups`` consumer warpgroups. One product takes 64 rows by N columns: output channels are the rows if
    ``channel_rows``, else positions are; its positions are a ``strip`` (h, w). ``steps`` products along k make up a
    chunk of channels; the weight ring holds ``stages`` of ``stage_taps`` taps, the halo ring ``units``.
    ``promote_stages``: how many stages the tensor core accumulates before their sum is added in fp32 (0: all).
    ``blocks`` share a multiprocessor. ``producers`` warpgroups fetch x: with ``depth`` items of a thread on their way,
    or by tensor copies (``copies``), "direct" into the halo ring, or "raw" into a ring of ``raws`` buffers from which
    they convert. A block that marches computes one plane d of outputs after the other and keeps the planes of x that
    they share. A flat tile cuts its positions from the row of all of them, whatever sample they are of,
    and counts every tap of every input channel as a channel: a matrix product, for filters that share no x between
    outputs. ``patches``: tensor copies fetch such products: of "rows" of patches, for the positions of a box, or of
    a "matrix" of positions by patches, for a flat tile (``Problem.x_patches``).
    """

    box: tuple[int, int]
    channels: int
    channel_rows: bool
    strip: tuple[int, int]
    channel_groups: int
    position_groups: int
    math: str
    steps: int
    stage_taps: int
    stages: int
    units: int
    promote_stages: int = 0
    blocks: int = 2
    producers: int = 1
    depth: int = 4
    copies: str = ""
    raws: int = 0
    march: bool = False
    flat: bool = False
    patches: str = ""

    @property
    def product(self) -> bool:
        """Whether every tap of every input channel counts as a channel."""
        return self.flat or self.patches != ""

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.channel_groups * self.position_groups

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.producers + self.consumers)

    @property
    def parts(self) -> int:
        """Numbers that stand for one operand."""
        return 2 if self.math == "TF32X3" else 1

    @property
    def step_channels(self) -> int:
        """Input channels of one product."""
        return 8 if self.math in ("TF32", "TF32X3") else 16

    @property
    def columns(self) -> int:
        """N of a product."""
        return self.strip[0] * self.strip[1] if self.channel_rows else self.channels // self.channel_groups

    @property
    def accumulators(self) -> int:
        """fp32 sums that a consumer's thread holds."""
        positions = self.box[0] * self.box[1] // self.position_groups
        return positions * (self.channels // self.channel_groups) // 128

    @property
    def permuted(self) -> bool:
        """Whether the packed weights sort every 32 channels so that a thread holds 8 adjacent ones."""
        return not self.channel_rows and self.columns % 32 == 0

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer's and of a consumer's thread."""
        # What a block starts with, a multiple of 8 for every thread, is shared anew between its warpgroups.
        start = 65536 // (self.threads * self.blocks) // 8 * 8
        total = start * (self.producers + self.consumers)
        sums = self.accumulators + (self.columns // 2 if self.promote_stages else 0)
        # Splitting values takes more than rounding them, if the consumers can do without.
        least = {"direct": 24, "raw": 56 if self.parts == 2 and sums <= 144 else 40, "": 56}[self.copies]
        if self.patches and self.copies == "raw":
            # Two addresses of every item that a thread converts.
            most = 88 if self.parts == 2 or self.steps > 4 else 72
            least = most if (total - most * self.producers) // self.consumers >= sums + 56 else least
        consumer = min(240, (total - least * self.producers) // self.consumers // 8 * 8)
        if not self.copies:
            # What the consumers can do without, loads on their way can use.
            needs = sums + (48 if self.promote_stages else 56)
            consumer = min(consumer, max(start, 152, -(-needs // 8) * 8))
        producer = min(start, (total - consumer * self.consumers) // self.producers // 8 * 8)
        return producer, consumer

    def chunks(self, channels: int) -> int:
        """Chunks along ``channels`` input channels."""
        return -(-channels // (self.step_channels * self.steps))


@dataclass(frozen=True)
class KernelPlan:
    """One kernel launch of a plan: steps ``[first, last)`` of the epilogue of ``problem``.

    ``source_dtype`` is what it reads, ``target_dtype`` what it writes. ``conv_value``: a
    later step asks for the convolution's own value, which this kernel reads from the first workspace.
    """

    family: str
    problem: Problem
    tile: Tile | RowTile | HaloTile | WgmmaTile
    first: int
    last: int
    source_dtype: str
    target_dtype: str
    conv_value: bool = False

    @property
    def steps(self) -> tuple[StepSpec, ...]:
        """The epilogue steps that this kernel applies."""
        return self.problem.epilogue[self.first : self.last]

    def canonical(self) -> dict[str, Any]:
        """All of it except the Problem, as plain JSON values."""
        return {
            "family": self.family,
            "tile": asdict(self.tile),
            "first": self.first,
            "last": self.last,
            "source_dtype": self.source_dtype,
            "target_dtype": self.target_dtype,
            "conv_value": self.conv_value,
        }


@dataclass(frozen=True)
class Extents:
    """Sizes of one call, spatial extents padded in front to (D, H, W).

    ``x`` of the input, ``value[i]`` of what epilogue step i sees, ``value[-1]`` of the output; ``value[0]`` is
    the convolution's own.
    """

    batch: int
    x: tuple[int, int, int]
    value: tuple[tuple[int, int, int], ...]


class Family(Protocol):
    """What every module of this package provides."""

    TEMPLATE: str

    def constants(self, kernel: KernelPlan) -> dict[str, Any]:
        """What the template gets, as plain JSON values: all of it is part of the kernel's key."""

    def layout(self, kernel: KernelPlan) -> Layout:
        """The kernel's arguments."""

    def values(
        self, kernel: KernelPlan, extents: Extents, strides: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Any]:
        """Values of the arguments that are neither addresses nor numbers of a chain."""

    def grid(self, kernel: KernelPlan, extents: Extents) -> int:
        """Number of blocks."""

    def threads(self, kernel: KernelPlan) -> int:
        """Threads of a block."""

    # Families whose blocks take one tile after the other also say ``resident_blocks(kernel)``, how many of them a
    # multiprocessor holds: their grid counts tiles, and no more blocks are launched than run at once.

    def shared_bytes(self, kernel: KernelPlan) -> int:
        """Dynamic shared memory of a block, in bytes."""


def family(kernel: KernelPlan) -> Family:
    """The module that implements ``kernel.family``."""
    from jitconv.families import (
        conv,
        conv_mma,
        conv_transpose,
        conv_wgmma,
        depthwise_separable,
        layer_norm,
        pack_planes,
        pack_weights,
        pool,
    )

    modules: dict[str, Any] = {
        "conv": conv,
        "conv_mma": conv_mma,
        "conv_wgmma": conv_wgmma,
        "pack_planes": pack_planes,
        "pack_weights": pack_weights,
        "conv_transpose": conv_transpose,
        "depthwise_separable": depthwise_separable,
        "layer_norm": layer_norm,
        "pool": pool,
    }
    module: Family = modules[kernel.family]
    return module
