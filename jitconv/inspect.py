"""Looking inside: what a call generates, as source, PTX, SASS and resources, whether it is warm or not.

::

    jitconv.inspect("headline:w1", arch="sm_90a").report()
    jitconv.inspect(jitconv.conv3d, x, w, b, epilogue=[E.mish()]).sass

Nothing is compiled until something that needs it is asked for: the source needs no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jitconv.architectures import arch_number, limits_of, normalize_arch
from jitconv.errors import JitconvError

if TYPE_CHECKING:
    from jitconv.families import KernelPlan
    from jitconv.planning.tuned import Choice
    from jitconv.problem import Problem
    from jitconv.program import Call, KernelLaunch
    from jitconv.render import Rendered
    from jitconv.store import Entry

__all__ = ["Inspection", "KernelInspection", "KernelResources", "inspect"]


@dataclass(frozen=True)
class KernelResources:
    """What one block of a compiled kernel takes.

    Attributes:
        registers: per thread.
        spill_stores, spill_loads, stack_bytes: bytes per thread.
        shared_bytes: static and dynamic shared memory of a block.
        threads: of a block.
        blocks_per_sm: how many blocks fit on a multiprocessor at once, by registers, shared memory and threads.
        occupancy: resident warps over the most that a multiprocessor holds, 0 to 1.
        compile_ms: how long NVRTC took when it was compiled.
        nvrtc_version: (major, minor) of the NVRTC that compiled it.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    shared_bytes: int
    threads: int
    blocks_per_sm: int
    occupancy: float
    compile_ms: float
    nvrtc_version: tuple[int, int]


@dataclass(frozen=True)
class KernelInspection:
    """One generated kernel for one architecture.

    ``index`` is its place among the call's kernels; ``launch`` is what the inspected sizes make of it.
    """

    index: int
    launch: KernelLaunch
    arch: str
    key: str

    @property
    def plan(self) -> KernelPlan:
        """The kernel before it is text: family, tile, and the steps that it applies."""
        return self.launch.kernel

    @cached_property
    def rendered(self) -> Rendered:
        """Source, headers and constants."""
        from jitconv.render import render

        return render(self.plan)

    @property
    def name(self) -> str:
        """The symbol, which profilers show."""
        return self.rendered.name

    @property
    def source(self) -> str:
        """The rendered text; ``rendered.headers`` holds what it includes."""
        return self.rendered.source

    @property
    def constants(self) -> Mapping[str, Any]:
        """What the template was given, the Problem included."""
        return self.rendered.constants

    @property
    def grid(self) -> int:
        """Blocks of a launch at the inspected sizes."""
        return self.launch.grid

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.launch.block

    @cached_property
    def _fetched(self) -> tuple[Entry, bool]:
        from jitconv.store import default_store
        from jitconv.warm import fetch

        return fetch(self.key, self.plan, self.arch, default_store())

    @property
    def cubin(self) -> bytes:
        """Machine code, from the store or compiled and published to it."""
        return self._fetched[0].cubin

    @property
    def was_stored(self) -> bool:
        """Whether the store had it already."""
        return not self._fetched[1]

    @cached_property
    def resources(self) -> KernelResources:
        """Registers, spills, shared memory and occupancy."""
        metadata = self._fetched[0].metadata
        blocks = resident_blocks(self.arch, metadata["registers"], metadata["threads"], metadata["shared_bytes"])
        major, minor = metadata["nvrtc_version"]
        return KernelResources(
            registers=metadata["registers"],
            spill_stores=metadata["spill_stores"],
            spill_loads=metadata["spill_loads"],
            stack_bytes=metadata["stack_bytes"],
            shared_bytes=metadata["shared_bytes"],
            threads=metadata["threads"],
            blocks_per_sm=blocks,
            occupancy=blocks * metadata["threads"] / limits_of(self.arch).threads_sm,
            compile_ms=metadata["compile_ms"],
            nvrtc_version=(major, minor),
        )

    @cached_property
    def ptx(self) -> str:
        """PTX of the same source, compiled for reading; what runs is the cubin."""
        from jitconv.toolchain import compile_ptx

        text = self.rendered
        return compile_ptx(text.source, name=text.name, arch=self.arch, headers=text.headers, constants=text.constants)

    @cached_property
    def sass(self) -> str:
        """SASS of the cubin. Raises DisassemblerNotFoundError where there is no nvdisasm or cuobjdump."""
        from jitconv.disassemble import disassemble

        return disassemble(self.cubin)

    def as_dict(self) -> dict[str, Any]:
        """All but PTX, SASS and the machine code, as JSON values."""
        from dataclasses import asdict

        return {
            "index": self.index,
            "name": self.name,
            "key": self.key,
            "arch": self.arch,
            "grid": self.grid,
            "block": self.block,
            "plan": self.plan.canonical(),
            "constants": dict(self.constants),
            "resources": asdict(self.resources),
            "was_stored": self.was_stored,
            "headers": sorted(self.rendered.headers),
            "source": self.source,
        }


@dataclass(frozen=True)
class Inspection:
    """What one call generates.

    Attributes:
        title: how the call was named: an address or a function.
        arch, arch_reason: the architecture shown, and why that one.
        gpu: the model of GPU whose tuned tiles count here, as torch names it; None where none do.
        tuned: the measurement that chose the convolution's tile, None where the heuristic did.
        path: ``"generated"`` or ``"torch"``: what serves this call.
        path_reason: why torch does, else None. A CPU tensor takes torch's path; the kernels shown are then those of
            the same call on CUDA tensors.
        problem: the Problem, None where no kernel exists for it (float64, complex).
        kernels: those shown, in launch order.
        kernel_count: how many the call launches.
        input_shape, output_shape: of the batched tensors.
        workspace_bytes: memory needed beside the output, in bytes; without packed weights that are kept.
        frozen: whether the weights are frozen (:func:`jitconv.prepare`): the kernel that packs them then runs once, not
            at each call.
    """

    title: str
    arch: str
    arch_reason: str
    gpu: str | None
    tuned: Choice | None
    path: str
    path_reason: str | None
    problem: Problem | None
    kernels: tuple[KernelInspection, ...]
    kernel_count: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    workspace_bytes: int
    frozen: bool = False

    def selected(self, index: int) -> Inspection:
        """The same with one kernel only; ValueError when there is none of that index."""
        from dataclasses import replace

        if not 0 <= index < len(self.kernels):
            raise ValueError(f"kernel {index}: {self.title} has {len(self.kernels)} kernels, counted from 0")
        return replace(self, kernels=(self.kernels[index],))

    @property
    def source(self) -> str:
        """The source of every kernel, in launch order."""
        return self._joined(kernel.source for kernel in self.kernels)

    @property
    def ptx(self) -> str:
        """The PTX of every kernel, in launch order."""
        return self._joined(kernel.ptx for kernel in self.kernels)

    @property
    def sass(self) -> str:
        """The SASS of every kernel, in launch order."""
        return self._joined(kernel.sass for kernel in self.kernels)

    @property
    def resources(self) -> tuple[KernelResources, ...]:
        """The resources of every kernel, in launch order."""
        return tuple(kernel.resources for kernel in self.kernels)

    def report(self) -> str:
        """All of it that fits on a page, for people."""
        from jitconv.report import inspection_report

        return inspection_report(self)

    def as_dict(self) -> dict[str, Any]:
        """The inspection as JSON values."""
        return {
            "title": self.title,
            "arch": self.arch,
            "arch_reason": self.arch_reason,
            "path": self.path,
            "path_reason": self.path_reason,
            "problem": None if self.problem is None else self.problem.canonical(),
            "input_shape": list(self.input_shape),
            "output_shape": list(self.output_shape),
            "workspace_bytes": self.workspace_bytes,
            "frozen": self.frozen,
            "gpu": self.gpu,
            "tuned": None if self.tuned is None else {"source": self.tuned.source, **self.tuned.record.as_dict()},
            "kernel_count": self.kernel_count,
            "kernels": [kernel.as_dict() for kernel in self.kernels],
        }

    def _joined(self, texts: Iterator[str]) -> str:
        if not self.kernels:
            raise JitconvError(
                f"{self.title}: torch serves this call ({self.path_reason}), so nothing is generated for it; "
                "inspect it with float32, float16 or bfloat16 tensors"
            )
        parts = list(texts)
        if len(parts) == 1:
            return parts[0]
        return "\n".join(f"// kernel {i}: {self.kernels[i].name}\n{part}" for i, part in enumerate(parts))


def inspect(
    target: str | Callable[..., Any], /, *args: Any, arch: str | None = None, gpu: str | None = None, **kwargs: Any
) -> Inspection:
    """What a call generates, without running it.

    Args:
        target: the address of a manifest entry (``"headline:w1"``, ``"shapes.toml:block"``), or a public function of
            jitconv, followed by the arguments of the call, or an operator that :func:`jitconv.prepare` made, followed
            by its input. Tensors may be on any device, ``meta`` included. Without ``precision`` it is torch's setting
            for convolutions, here as in a call.
        arch: architecture to compile for, such as ``"sm_80"``; default: that of the tensors' GPU, else of the
            current GPU, else sm_90a.
        gpu: model whose tuned tiles are taken, as torch names it (``"NVIDIA H200"``); default: the GPU that ``arch``
            comes from, else none, and the heuristic chooses.

    Raises:
        ManifestError: the address names no entry, or the entry no valid call.
        ValueError: ``arch`` is no architecture. Also whatever the call itself would raise.

    >>> import torch, jitconv
    >>> from jitconv import epilogue as E
    >>> x, w = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
    >>> [kernel.name for kernel in jitconv.inspect(jitconv.conv2d, x, w, epilogue=[E.relu()], arch="sm_80").kernels]
    ['jitconv_pack_weights_c3k4_t9_float32_tf32', 'jitconv_conv2d_c3k4_k3_relu_float32']
    """
    from jitconv.calls import call_of
    from jitconv.manifest import find
    from jitconv.prepared import PreparedOperator

    if isinstance(target, str):
        if args or kwargs:
            raise TypeError(
                f"inspect({target!r}): an address takes no arguments of a call; expected arch= and gpu= at most"
            )
        return inspect_call(find(target).call(), target, arch, gpu)
    call = target.call(*args, **kwargs) if isinstance(target, PreparedOperator) else call_of(target, *args, **kwargs)
    return inspect_call(call, call.function, arch, gpu)


def inspect_call(call: Call, title: str, arch: str | None, gpu: str | None = None) -> Inspection:
    """As :func:`inspect`, for a checked Call."""
    from jitconv import program
    from jitconv.compilation import key_of
    from jitconv.functional import torch_path_reason
    from jitconv.problem import DTYPES

    exact, arch_reason, model = _target(call, arch, gpu)
    reason = torch_path_reason(call)
    if reason == "meta tensor":
        # A tensor without memory stands for one on a GPU: that is what a manifest means.
        reason = None
    kernels: tuple[KernelInspection, ...] = ()
    problem, workspace, choice = None, 0, None
    dtype = str(call.x.dtype).removeprefix("torch.")
    if dtype in DTYPES:
        built = program.build(call, exact, model)
        problem, shape = built.problem, built.shape
        workspace = built.frozen_workspace_bytes if call.frozen is not None else built.workspace_bytes
        choice = built.plan.tuned
        kernels = tuple(
            KernelInspection(i, step, exact, key_of(step.kernel, exact)) for i, step in enumerate(built.launches)
        )
    else:
        # On any device, so a CPU tensor is not the reason to name.
        reason = dtype
        shape = program.bind_chains(call)["epilogue"].shape
    return Inspection(
        title=title,
        arch=exact,
        arch_reason=arch_reason,
        gpu=model,
        tuned=choice,
        path="generated" if reason is None else "torch",
        path_reason=reason,
        problem=problem,
        kernels=kernels,
        kernel_count=len(kernels),
        input_shape=tuple(call.x.shape),
        output_shape=tuple(shape),
        workspace_bytes=workspace,
        frozen=call.frozen is not None,
    )


def _target(call: Call, arch: str | None, gpu: str | None) -> tuple[str, str, str | None]:
    """The architecture to show, why it is that one, and the model of GPU whose tuned tiles count."""
    from jitconv.machine import default_arch, gpus

    if arch is None and gpu is not None:
        from jitconv.planning import tuned

        known = [arch_of for name, arch_of, _, _ in tuned.overview() if name == gpu]
        if known:
            return known[0], f"that of {gpu}", gpu
    if arch is not None:
        exact, reason = normalize_arch(arch), "as asked"
        if exact != arch:
            reason = f"asked for as {arch}"
    elif call.x.device.type == "cuda":
        from jitconv.launch import device_info

        info = device_info(call.x.device.index)
        return info.arch, f"that of GPU {info.ordinal}, {info.name}", gpu or info.name
    else:
        exact, reason = default_arch()
    if gpu is None:
        import torch

        # An architecture that was asked for has many models; the one that is here is meant.
        here = gpus()
        current = here[torch.cuda.current_device()] if here else None
        gpu = current.name if current is not None and current.arch == exact else None
    return exact, reason, gpu


def resident_blocks(arch: str, registers: int, threads: int, shared_bytes: int) -> int:
    """How many blocks fit on one multiprocessor at once.

    Registers are handed out in units of 256 to a warp, and warps are spread over four schedulers with a quarter of
    the registers each; shared memory is handed out in units of 128 bytes (256 on sm_75) and each block costs what
    the system reserves. (Rules: CUDA C++ Programming Guide, and the occupancy calculator of Nsight Compute.)
    """
    limits = limits_of(arch)
    warps = -(-threads // 32)
    warp_registers = -(-registers * 32 // 256) * 256
    warps_by_registers = limits.registers_sm // 4 // max(warp_registers, 1) * 4
    unit = 256 if arch_number(arch) == 75 else 128
    block_shared = -(-(shared_bytes + limits.shared_reserved) // unit) * unit
    return min(
        limits.blocks_sm,
        limits.threads_sm // (warps * 32),
        warps_by_registers // warps,
        limits.shared_sm // block_shared if block_shared else limits.blocks_sm,
    )
