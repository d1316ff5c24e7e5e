"""From a call to what has to be launched: problem, plan, grids and argument bytes, with no device in sight.

A :class:`Call` is a checked public call. :func:`build` turns it into a :class:`Program`: for each kernel the plan,
the grid and the argument bytes, complete except for addresses and numbers. The CUDA runtime and the emulator
both run Programs; warming and inspection stop before the launch.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jitconv import epilogue as E
from jitconv.architectures import arch_number, normalize_arch, splits_fp32
from jitconv.families import Extents, HaloTile, KernelPlan, WgmmaTile, common, family
from jitconv.layout import Layout
from jitconv.planning import ConvolutionTile, Plan, plan, plan_with_tile
from jitconv.problem import Problem, index_bits, size_class
from jitconv.tensor_map import TensorMap
from jitconv.validation import Geometry

if TYPE_CHECKING:
    from jitconv.frozen import FrozenWeights

_WEIGHTS = {
    "conv": (("weight", "bias"),),
    "conv_transpose": (("weight", "bias"),),
    "depthwise_separable": (("depthwise_weight", "depthwise_bias"), ("weight", "bias")),
}

_MULTIPLIED = frozenset({torch.float32, torch.float16, torch.bfloat16})

_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}

#: Families that lay out weights for the kernel behind them.
_PACKING = frozenset({"pack_weights", "pack_planes"})

#: What the emulator stands for: its vocabulary is that of this architecture (templates/host/platform.h).
EMULATED_ARCH = "sm_90a"

#: Largest grid of a launch (CUDA programming guide, technical specifications: maximum x-dimension of a grid).
MAX_GRID = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Call:
    """A public call whose arguments have been checked. ``x`` is batched; the output has ``memory_format``.

    ``frozen``: the weights are copies that do not change, and what packing kernels make of them is kept there.
    """

    function: str
    operator: str
    x: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    geometry: Geometry
    prologue: tuple[E.Step, ...]
    between: tuple[E.Step, ...]
    epilogue: tuple[E.Step, ...]
    memory_format: torch.memory_format
    precision: str = "ieee"
    frozen: FrozenWeights | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor argument by the name of the kernel argument that points to it."""
        named = {"x": self.x}
        for (weight, bias), w, b in zip(_WEIGHTS[self.operator], self.weights, self.biases, strict=True):
            named[weight] = w
            if b is not None:
                named[bias] = b
        for name, value in self._operands():
            if isinstance(value, Tensor):
                named[name] = value
        return named

    def numbers(self) -> dict[str, float]:
        """Every number of the chains by the name of its kernel argument, rounded to float32 as torch would."""
        return {
            name: ctypes.c_float(float(value.detach()) if isinstance(value, Tensor) else value).value
            for name, value in self._operands()
            if isinstance(value, float) or (isinstance(value, Tensor) and self._is_host_scalar(value))
        }

    def _is_host_scalar(self, value: Tensor) -> bool:
        return value.device.type == "cpu" and self.x.device.type == "cuda"

    def _operands(self) -> list[tuple[str, Any]]:
        return [
            (common.operand_name(phase, i, name), value)
            for phase, chain in self.chains().items()
            for i, step in enumerate(chain)
            for name, value in step.operands
        ]

    def chains(self) -> dict[str, tuple[E.Step, ...]]:
        """The three chains by name, in the order in which data meets them."""
        return {"prologue": self.prologue, "between": self.between, "epilogue": self.epilogue}

    def signature(self) -> tuple[Any, ...]:
        """A hashable value equal for calls that run the same Program: all but addresses and numbers."""
        tensors = (self.x, *self.weights, *self.biases)
        return (
            self.operator,
            self.geometry,
            self.memory_format,
            self.precision,
            self.x.dtype,
            self.x.device,
            _aligned(self.x),
            *(None if t is None else (t.shape, t.stride()) for t in tensors),
            *(tuple(step.signature() for step in chain) for chain in self.chains().values()),
        )


@dataclass(frozen=True)
class KernelLaunch:
    """One launch: everything but addresses and numbers.

    ``pointers`` and ``numbers`` are (offset in ``arguments``, name); names are those of :meth:`Call.tensors` and
    :meth:`Call.numbers`, ``workspace0`` … for what earlier kernels wrote, and ``y``. ``writes`` names what it
    produces, of ``shape`` and ``dtype``. ``resident`` > 0: blocks take one tile after the other, that many of them
    fit on a multiprocessor, and ``grid`` counts tiles.
    """

    kernel: KernelPlan
    grid: int
    block: int
    shared_bytes: int
    arguments: bytes
    pointers: tuple[tuple[int, str], ...]
    numbers: tuple[tuple[int, str], ...]
    writes: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory_format: torch.memory_format
    resident: int = 0
    #: (offset in ``arguments``, name of the tensor, the map but for its address).
    tensor_maps: tuple[tuple[int, str, TensorMap], ...] = ()

    @property
    def packs(self) -> bool:
        """Whether this launch lays out weights: all that it reads is them."""
        return self.writes == "packed"

    @property
    def written_bytes(self) -> int:
        """Memory of what it produces."""
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self, multiprocessors: int) -> int:
        """Blocks to launch on a device: all of ``grid``, or as many as run at once where each takes several tiles."""
        return min(self.grid, self.resident * multiprocessors) if self.resident else self.grid


@dataclass(frozen=True)
class Program:
    """The launches of one call, in order; the last one writes ``y``."""

    plan: Plan
    launches: tuple[KernelLaunch, ...]
    shape: tuple[int, ...]

    @property
    def problem(self) -> Problem:
        """What the launches compute, up to sizes."""
        return self.plan.problem

    @property
    def workspace_bytes(self) -> int:
        """Memory needed beside the output."""
        return sum(step.written_bytes for step in self.launches[:-1])

    @property
    def frozen_workspace_bytes(self) -> int:
        """The same where the weights are packed already."""
        return sum(step.written_bytes for step in self.launches[:-1] if not step.packs)


def output_format(x: Tensor, weights: Sequence[Tensor]) -> torch.memory_format:
    """channels_last(_3d) if x or a weight is that and not also contiguous, else contiguous (torch's own rule)."""
    last = _CHANNELS_LAST.get(x.dim() - 2)
    if last is None:
        return torch.contiguous_format
    for tensor in (x, *weights):
        if tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous():
            return last
    return torch.contiguous_format


def build(
    call: Call, arch: str = EMULATED_ARCH, gpu: str | None = None, *, tile: ConvolutionTile | None = None
) -> Program:
    """Check the chains of ``call`` against the shapes they meet, plan it for ``arch`` and lay out its launches.

    ``gpu`` is the model, as torch names it, whose tuned tiles count (none without); ``tile`` is taken as it is.
    """
    bound = bind_chains(call)
    problem = _problem(call, bound, normalize_arch(arch))
    chosen = plan_with_tile(problem, tile) if tile is not None else plan(problem, normalize_arch(arch), gpu)
    shapes = [*bound["epilogue"].shapes, bound["epilogue"].shape]
    extents = Extents(
        batch=call.x.shape[0],
        x=common.padded(call.x.shape[2:], 1),
        value=tuple(common.padded(shape[2:], 1) for shape in shapes),
    )
    strides = _input_strides(call, bound)
    launches = []
    chain = 0
    for kernel in chosen.kernels:
        if kernel.family in _PACKING:
            launches.append(_pack(_packing(kernel), extents, strides))
            continue
        final = kernel is chosen.kernels[-1]
        shape = shapes[kernel.last]
        memory_format = call.memory_format if final else torch.contiguous_format
        strides["y"] = _strides(_meta(shape, memory_format))
        launches.append(_launch(chain, final, kernel, extents, strides, shape, memory_format))
        strides["x"] = strides["y"]
        chain += 1
    return Program(chosen, tuple(launches), shapes[-1])


def _packing(kernel: KernelPlan) -> KernelPlan:
    """``kernel``, which packs weights, without what does not decide it, so that all that read them alike share it.

    It depends on how the weights lie in memory when they are multiplied, not on what they are multiplied by, when, and
    what follows.
    """
    p = kernel.problem
    problem = Problem(
        p.operator,
        p.in_channels,
        p.out_channels,
        p.kernel_size,
        stride=(1,) * p.rank,
        padding=((0, 0),) * p.rank,
        dilation=(1,) * p.rank,
        output_padding=(0,) * p.rank,
        groups=p.groups,
        dtype=p.dtype,
        x_memory_format=p.x_memory_format,
        precision=p.precision,
        index_bits=p.index_bits,
    )
    return replace(kernel, problem=problem, tile=_packed_tile(kernel.tile))


def _packed_tile(tile: Any) -> HaloTile | WgmmaTile:
    """The tile with the same packed weights as ``tile`` that stands for all of those."""
    if isinstance(tile, HaloTile):
        return HaloTile((1, 1, 1), 1, 1, tile.channels // 16, 1, tile.math, tile.steps, tile.position_rows)
    assert isinstance(tile, WgmmaTile)
    return WgmmaTile(
        box=(8, 8),
        channels=tile.channels,
        channel_rows=not tile.permuted,
        strip=(8, 8),
        channel_groups=1,
        position_groups=1,
        math=tile.math,
        steps=tile.steps,
        stage_taps=1,
        stages=1,
        units=1,
        flat=tile.flat,
        patches=tile.patches,
    )


def _meta(shape: Sequence[int], memory_format: torch.memory_format) -> Tensor:
    return torch.empty(tuple(shape), device="meta", memory_format=memory_format)


def _convolution_shape(call: Call) -> tuple[int, ...]:
    g, spatial = call.geometry, call.x.shape[2:]
    operator = "conv_transpose" if call.operator == "conv_transpose" else "conv"
    channels = (
        call.weights[0].shape[1] * g.groups if operator == "conv_transpose" else call.weights[-1].shape[0]
    )
    # Channel counts do not matter to the extents, so a Problem of one channel computes them.
    shape_only = Problem(
        operator, 1, 1, g.kernel_size, g.stride, g.padding, g.dilation, g.output_padding
    )
    return (call.x.shape[0], channels, *shape_only.convolution_extents(spatial))


def bind_chains(call: Call) -> dict[str, E.Bound]:
    """Check the chains of ``call`` against the shapes they meet; RuntimeError or ValueError for a misfit."""
    x = call.x
    out = _convolution_shape(call)
    mid = (out[0], call.weights[0].shape[0], *out[2:])
    shapes = {"prologue": tuple(x.shape), "between": mid, "epilogue": out}
    return {
        phase: E.bind(chain, shapes[phase], x.dtype, x.device, f"{call.function}(): {phase}")
        for phase, chain in call.chains().items()
    }


def _problem(call: Call, bound: Mapping[str, E.Bound], arch: str) -> Problem:
    g, x = call.geometry, call.x
    separable = call.operator == "depthwise_separable"
    channels_last = x.stride(1) == 1 and x.shape[1] > 1 and math.prod(x.shape[2:]) > 1
    values = [*bound["epilogue"].shapes, bound["epilogue"].shape]
    problem = Problem(
        operator=call.operator,
        in_channels=x.shape[1],
        out_channels=values[0][1],
        kernel_size=g.kernel_size,
        stride=g.stride,
        padding=g.padding,
        dilation=g.dilation,
        output_padding=g.output_padding,
        groups=g.groups,
        mid_channels=call.weights[0].shape[0] if separable else 0,
        padding_mode=g.padding_mode,
        dtype=str(x.dtype).removeprefix("torch."),
        memory_format="channels_first" if call.memory_format == torch.contiguous_format else "channels_last",
        x_memory_format="channels_last" if channels_last else "channels_first",
        # Rows are copied whole on Hopper only: elsewhere alignment would make two kernels of one.
        x_vector=_on_tensor_cores(call, arch)
        and (_vectors_of_channels(x, g.groups) if channels_last else arch == "sm_90a" and _vectors_of_rows(x)),
        sizes=_size_classes(call, values[0], arch),
        # Where precision changes nothing it is no part of the identity: one kernel serves every setting.
        precision=call.precision if call.operator == "conv" and x.dtype == torch.float32 else "ieee",
        index_bits=index_bits(
            *(_last_offset(t) for t in call.tensors().values()),
            # Coordinates too, padding included: an expanded x may be longer than its memory.
            *x.shape,
            *(size + before + after for size, (before, after) in zip(x.shape[2:], g.padding, strict=True)),
            *(math.prod(shape) for shape in values),
            math.prod(_class_grid(call, values[0])),
        ),
        bias=call.biases[-1] is not None,
        mid_bias=separable and call.biases[0] is not None,
        prologue=bound["prologue"].specs,
        between=bound["between"].specs,
        epilogue=bound["epilogue"].specs,
    )
    if arch != "sm_90a" or not _on_tensor_cores(call, arch) or problem.prologue or problem.is_padded:
        return problem
    return replace(problem, x_patches=_patches(x, problem))


def _on_tensor_cores(call: Call, arch: str) -> bool:
    """Whether tensor cores may serve the call: only their kernels read x by whole vectors."""
    if call.operator != "conv" or arch_number(arch) < 80 or call.x.dtype not in _MULTIPLIED:
        return False
    return call.x.dtype != torch.float32 or call.precision != "ieee" or splits_fp32(arch)


def _size_classes(call: Call, shape: Sequence[int], arch: str) -> tuple[int, int]:
    """Classes of the last two extents of the convolution's output, where tiles are chosen by them."""
    if arch != "sm_90a" or not _on_tensor_cores(call, arch) or len(shape) < 4:
        return Problem.sizes
    return size_class(shape[-2]), size_class(shape[-1])


def _vectors_of_channels(x: Tensor, groups: int) -> bool:
    """Whether 16 bytes of channels lie at a multiple of 16 bytes at every position of their own, within one group."""
    steps = (x.stride(0), *x.stride()[2:], x.shape[1] // groups)
    return _aligned(x) and not _expanded(x) and all(step * x.element_size() % 16 == 0 for step in steps)


def _vectors_of_rows(x: Tensor) -> bool:
    """Whether every row is dense along w and starts at a multiple of 16 bytes of its own."""
    *steps, last = x.stride()
    dense = last == 1 or x.shape[-1] == 1
    return _aligned(x) and dense and not _expanded(x) and all(step * x.element_size() % 16 == 0 for step in steps)


def _patches(x: Tensor, problem: Problem) -> str:
    """How the patches lie in memory that a filter reads whose outputs share no x (``Problem.x_patches``)."""
    if not _aligned(x) or _expanded(x):
        return ""
    last = problem.x_memory_format == "channels_last"
    item = x.element_size()
    sizes, steps = list(x.shape), _steps(x)
    columns, width = problem.kernel_size[-1], problem.in_channels if last else 1

    def whole_vectors(*elements: int) -> bool:
        return all(count * item % 16 == 0 for count in elements)

    # The axes of a patch and those of the positions, innermost first.
    order = [1, *range(x.dim() - 1, 1, -1), 0] if last else list(range(x.dim() - 1, -1, -1))
    covered = tuple(sizes[2:]) == problem.kernel_size and all(
        k == 1 or dilation == 1 for k, dilation in zip(problem.kernel_size, problem.dilation, strict=True)
    )
    pointwise = problem.taps == 1 and last and all(stride == 1 for stride in problem.stride)
    if problem.groups == 1 and (covered or pointwise):
        inner, outer = (order[:-1], order[-1:]) if covered else (order[:1], order[1:])
        pitch = next((steps[axis] for axis in outer if sizes[axis] > 1), 0)
        reduction = math.prod(sizes[axis] for axis in inner)
        if _joined(sizes, steps, inner, 1) and _joined(sizes, steps, outer, pitch) and whole_vectors(reduction, pitch):
            return "matrix"
    # Rows, of which the filter is made of several or a position of several columns; others are read as any filter's.
    if not problem.is_product or problem.taps == 1 or (last and problem.groups > 1):
        return ""
    line = steps[-1] == width and problem.dilation[-1] == 1
    apart = (steps[0], *steps[2:-1]) if last else steps[:-1]
    if (line or columns == 1) and whole_vectors(columns * width, problem.stride[-1] * steps[-1], *apart):
        return "rows"
    return "lines" if line and columns > 1 and whole_vectors(*apart) else ""


def _joined(sizes: Sequence[int], steps: Sequence[int], axes: Sequence[int], step: int) -> bool:
    """Whether ``axes``, innermost first, are one axis of that step."""
    for axis in axes:
        if sizes[axis] > 1 and steps[axis] != step:
            return False
        step *= sizes[axis]
    return True


def _expanded(x: Tensor) -> bool:
    """Whether entries of some axis share their memory."""
    return any(size > 1 and step == 0 for size, step in zip(x.shape, x.stride(), strict=True))


def _aligned(x: Tensor) -> bool:
    # A tensor without memory stands for one as an allocator gives it.
    return x.is_meta or x.data_ptr() % 16 == 0


def _class_grid(call: Call, shape: Sequence[int]) -> list[int]:
    """Positions that a transposed convolution flattens: extents rounded up to the stride."""
    if call.operator != "conv_transpose":
        return [0]
    return [shape[0], *(o + s for o, s in zip(shape[2:], call.geometry.stride, strict=True))]


def _last_offset(tensor: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 0)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides (in elements) of [N, C, *spatial] as (n, c, d, h, w); missing dimensions have extent 1."""
    n, c, *spatial = _steps(tensor)
    return (n, c, *common.padded(spatial, 0))


def _steps(tensor: Tensor) -> list[int]:
    """Strides, 0 where an axis has one entry: what they are there means nothing, and may exceed the index width."""
    return [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def _input_strides(call: Call, bound: Mapping[str, E.Bound]) -> dict[str, tuple[int, ...]]:
    strides = {"x": _strides(call.x)}
    for (weight, bias), w, b in zip(_WEIGHTS[call.operator], call.weights, call.biases, strict=True):
        strides[weight] = _strides(w)
        if b is not None:
            strides[bias] = tuple(_steps(b))
    for phase, chain in bound.items():
        for i, (spec, values) in enumerate(zip(chain.specs, chain.operands, strict=True)):
            for (name, operand), value in zip(spec.operands, values, strict=True):
                key = common.operand_name(phase, i, name)
                if operand.kind == "tensor":
                    strides[key] = _strides(value)
                elif operand.kind in ("channel", "row"):
                    strides[key] = tuple(_steps(value))
    return strides


def _pack(kernel: KernelPlan, extents: Extents, strides: Mapping[str, tuple[int, ...]]) -> KernelLaunch:
    """The launch that lays the weights out for the kernel behind it."""
    module: Any = family(kernel)
    layout: Layout = module.layout(kernel)
    return KernelLaunch(
        kernel=kernel,
        grid=module.grid(kernel, extents) if extents.batch else 0,
        block=module.threads(kernel),
        shared_bytes=0,
        arguments=bytes(layout.pack(module.values(kernel, extents, strides))),
        pointers=((layout.offsets["weight"], "weight"), (layout.offsets["y"], "packed")),
        numbers=(),
        writes="packed",
        shape=(module.words(kernel),),
        dtype=torch.float32,
        memory_format=torch.contiguous_format,
    )


def _launch(
    index: int,
    final: bool,
    kernel: KernelPlan,
    extents: Extents,
    strides: Mapping[str, tuple[int, ...]],
    shape: tuple[int, ...],
    memory_format: torch.memory_format,
) -> KernelLaunch:
    module = family(kernel)
    layout: Layout = module.layout(kernel)
    reads = {} if index == 0 else {"x": f"workspace{index - 1}", "conv_value": "workspace0"}
    writes = "y" if final else f"workspace{index}"
    # An output without elements has no positions, and the kernel's divisors would have nothing to divide.
    grid = module.grid(kernel, extents) if math.prod(shape) else 0
    # Blocks that take one tile after the other are few, however many tiles there are.
    resident = module.resident_blocks(kernel) if hasattr(module, "resident_blocks") else 0
    if grid > MAX_GRID and not resident:
        raise ValueError(
            f"input: the output of shape {shape} needs a grid of {grid} blocks: expected at most {MAX_GRID}; "
            "split the batch"
        )
    values = module.values(kernel, extents, strides) if grid else {}
    # A family whose kernels copy boxes says by ``tensor_maps``, for each such field, of which tensor and what boxes.
    maps = module.tensor_maps(kernel, extents, strides) if grid and hasattr(module, "tensor_maps") else {}
    return KernelLaunch(
        kernel=kernel,
        grid=grid,
        block=module.threads(kernel),
        shared_bytes=module.shared_bytes(kernel),
        arguments=bytes(layout.pack(values)),
        pointers=tuple(
            (layout.offsets[f.name], writes if f.name == "y" else reads.get(f.name, f.name))
            for f in layout.fields
            if f.kind == "pointer" and (f.name != "conv_value" or kernel.conv_value)
        ),
        numbers=tuple((layout.offsets[f.name], f.name) for f in layout.fields if f.kind == "float"),
        writes=writes,
        shape=shape,
        dtype=getattr(torch, kernel.target_dtype),
        memory_format=memory_format,
        resident=resident,
        tensor_maps=tuple(
            (layout.offsets[member], reads.get(name, name), tensor_map) for member, (name, tensor_map) in maps.items()
        ),
    )

