"""Tile candidates of the implicit-GEMM families and the choice among them.

A tile is chosen from the Problem alone: not from the batch, so that a sample's result has the same bits whatever
the batch is, and not from the extents, so that one kernel serves every size.
"""

from __future__ import annotations

from jitconv.families import RowTile, Tile
from jitconv.problem import Problem

#: (channels, positions, px, oc_tile), by rising channels: 64 accumulators a thread at the wide end, which leaves
#: registers for the slice in flight; few channels get many positions instead. depth is 8 throughout.
CANDIDATES = (
    Tile(positions=256, channels=1, depth=8, px=2, oc_tile=1),
    Tile(positions=256, channels=2, depth=8, px=2, oc_tile=2),
    Tile(positions=256, channels=4, depth=8, px=2, oc_tile=4),
    Tile(positions=256, channels=8, depth=8, px=2, oc_tile=8),
    Tile(positions=256, channels=16, depth=8, px=4, oc_tile=8),
    Tile(positions=256, channels=32, depth=8, px=8, oc_tile=8),
    Tile(positions=128, channels=64, depth=8, px=8, oc_tile=8),
    Tile(positions=64, channels=128, depth=8, px=8, oc_tile=8),
)

#: A row of the depthwise-separable pair costs a whole filter per staged element: wider channel tiles repay it.
_WIDEST = {"conv": 64, "conv_transpose": 64, "depthwise_separable": 128}

#: Threads of a block behind a convolution, and the widest row that one warp normalises: 32 values a lane, or 16 and
#: as many pools.
ROW_THREADS = 256
_WARP_ROW = 1024
_WARP_POOLED_ROW = 512

#: Widest row whose normalised values stay in shared memory for the pool behind them: 32 KiB, so that any
#: architecture holds two blocks or more. Narrower rows, several to a block, take less.
MAX_POOLED_ROW = 8192


def choose_tile(problem: Problem) -> Tile:
    """The tile with the fewest idle channels, wide ones first."""
    groups = 1 if problem.operator == "depthwise_separable" else problem.groups
    outputs = problem.out_channels // groups
    widest = _WIDEST[problem.operator]
    fitting = [tile for tile in CANDIDATES if tile.channels <= widest]
    for tile in fitting:
        if tile.channels >= outputs:
            return tile
    return fitting[-1]


def choose_row_tile(width: int, *, pooled: bool) -> RowTile:
    """Lanes on one row: up to a warp, or the whole block for long rows."""
    if width > (_WARP_POOLED_ROW if pooled else _WARP_ROW):
        return RowTile(ROW_THREADS, ROW_THREADS)
    lanes = 1
    while lanes < 32 and lanes * 2 < width:
        lanes *= 2
    return RowTile(ROW_THREADS, lanes)
