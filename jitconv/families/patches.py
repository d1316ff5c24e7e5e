"""Patches: what a filter whose outputs share no x reads for each of them, as tensor copies fetch it.

A patch is made of rows that lie densely in memory (``Problem.x_patches``): of one where x is a matrix of positions by
patches. The reduction runs over these rows, each filled up to whole 16-byte vectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jitconv.families import Extents, WgmmaTile, common
from jitconv.problem import Problem
from jitconv.tensor_map import TensorMap

#: Elements that a tensor copy spans along an axis.
_MOST_ELEMENTS = 256


def vector(problem: Problem) -> int:
    """Elements of x in 16 bytes."""
    return 4 if problem.dtype == "float32" else 8


def row(problem: Problem, kind: str) -> int:
    """Elements of a patch of a kind (``Problem.x_patches``) that lie side by side."""
    if kind == "matrix":
        return problem.in_channels * problem.taps
    return problem.kernel_size[-1] * _width(problem)


def row_vectors(problem: Problem, kind: str) -> int:
    """Vectors that a row is filled up to: for copies of lines, as many as make up whole products."""
    vectors = -(-row(problem, kind) // vector(problem))
    if kind == "lines" and vectors > 1:
        vectors += vectors % 2
    return vectors


def _width(problem: Problem) -> int:
    """Elements from one column of x to the next, where they are dense."""
    return problem.in_channels if problem.x_memory_format == "channels_last" else 1


def reduction(problem: Problem, tile: WgmmaTile) -> int:
    """What the chunks of a product are cut from: elements of a patch, rows filled up."""
    elements = problem.in_channels // problem.groups * problem.taps
    if not tile.patches:
        return elements
    return elements // row(problem, tile.patches) * row_vectors(problem, tile.patches) * vector(problem)


def steps(problem: Problem) -> int:
    """Products along k in a chunk."""
    if problem.x_patches != "lines":
        return 4
    vectors = row_vectors(problem, problem.x_patches)
    return max(1, 8 // vectors) * vectors // 2


def piece(problem: Problem, tile: WgmmaTile) -> int:
    """Elements of a patch that one tensor copy takes for each position; not for copies of lines."""
    if tile.copies == "direct":
        return vector(problem)  # as products read them
    # Up to 128 bytes: a chunk and a row are made of whole pieces, but for the end of a dense patch.
    vectors = 0 if tile.patches == "matrix" else row_vectors(problem, tile.patches)
    return math.gcd(vectors, 2 * tile.steps, 8) * vector(problem)


@dataclass(frozen=True)
class Line:
    """How copies of lines take the columns of a tile: ``pieces`` of so many ``positions``, ``span`` elements each."""

    pieces: int
    positions: int
    span: int


def line(problem: Problem, tile: WgmmaTile) -> Line | None:
    """The pieces of a line, or None if none start at multiples of 16 bytes or if they are too long."""
    step = problem.stride[-1] * _width(problem)
    for pieces in range(1, tile.box[1] + 1):
        positions = tile.box[1] // pieces
        if tile.box[1] % pieces == 0 and positions * step % vector(problem) == 0 and positions * step <= _MOST_ELEMENTS:
            found = Line(pieces, positions, positions * step)
            # A raw buffer is as large as what it is converted into.
            most = row_vectors(problem, tile.patches) * 16 * math.prod(tile.box)
            return found if line_bytes(problem, tile, found) <= most else None
    return None


def line_bytes(problem: Problem, tile: WgmmaTile, line: Line) -> int:
    """Shared memory of one row of the patches of a tile."""
    return line.pieces * (-(-tile.box[0] * line.span * 16 // vector(problem) // 128) * 128)


def tensor_map(problem: Problem, tile: WgmmaTile, extents: Extents, strides: tuple[int, ...]) -> TensorMap:
    """The map of x whose boxes are a piece of the patch of every position of a tile."""
    unit = vector(problem)
    n, c, d, h, w = strides

    def apart(*elements: int) -> tuple[int, ...]:
        # An axis of one element has no stride; the map wants one all the same.
        return tuple((count or unit) * 16 // unit for count in elements)

    _, height, width = extents.value[0]
    if tile.flat:
        # Samples, or pixels, where all axes are one.
        pitch = n if problem.taps > 1 else next((stride for stride in (w, h, d, n) if stride), 0)
        matrix = (row(problem, tile.patches), extents.batch * math.prod(extents.value[0]))
        return TensorMap(problem.dtype, matrix, apart(pitch), (piece(problem, tile), tile.box[1]))
    # The last axis goes to any row of any patch, 16 bytes a step: samples, channels, planes and rows all lie along it.
    counts = (extents.batch, problem.in_channels, *extents.x[:2])
    last = sum((count - 1) * step for count, step in zip(counts, (n, c, d, h), strict=True)) // unit + 1
    _, down, across = common.padded(problem.stride, 1)
    if tile.patches == "lines":
        taken = line(problem, tile)
        assert taken is not None
        lines = (extents.x[2] * _width(problem), height, last)
        return TensorMap(problem.dtype, lines, apart(down * h, unit), (taken.span, tile.box[0], 1))
    return TensorMap(
        problem.dtype,
        (row(problem, tile.patches), width, height, last),
        apart(across * w, down * h, unit),
        (piece(problem, tile), tile.box[1], tile.box[0], 1),
    )
