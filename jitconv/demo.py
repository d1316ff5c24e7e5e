"""``jitconv demo``: the three headline operators from template to result.

1. generate and compile them for this machine's GPU, or for sm_90a without one;
2. with a GPU, run them at full size beside eager PyTorch and torch.compile; without one, run the same generated
   source in the emulator on small inputs; either way against float64;
3. say what to try next.

Where a part needs something that this machine lacks (a compiler, NVRTC, memory), it says so and goes on.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from rich.markup import escape
from torch import Tensor

from jitconv import emulate, emulated
from jitconv.calls import public_function
from jitconv.errors import EmulatorUnavailableError, JitconvError, NVRTCNotFoundError, NVRTCVersionError
from jitconv.inspect import Inspection, inspect_call
from jitconv.machine import cores, gpus
from jitconv.manifest import ManifestEntry, find
from jitconv.report import baked, resources_line
from jitconv.resources import cache_root
from jitconv.timing import interleaved

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["demo"]

Tensors = Mapping[str, Tensor]

_SEED = 0


def _w1(t: Tensors) -> Tensor:
    return torch.tanh(F.mish(F.conv3d(t["input"], t["weight"], t["bias"])))


def _w2(t: Tensors) -> Tensor:
    y = F.conv_transpose3d(t["input"], t["weight"], t["bias"], stride=2, padding=1, output_padding=1)
    y = F.layer_norm(y + t["epilogue[0].other"], (64,), t["epilogue[1].weight"], t["epilogue[1].bias"])
    return F.gelu(F.avg_pool3d(y, 2))


def _w3(t: Tensors) -> Tensor:
    return F.conv2d(F.conv2d(t["x"], t["dw_weight"], padding=1, groups=64), t["pw_weight"])


@dataclass(frozen=True)
class Headline:
    """A headline operator: its manifest entry, the same in plain PyTorch, and an input small enough to emulate."""

    address: str
    title: str
    torch: Callable[[Tensors], Tensor]
    small_input: tuple[int, ...]
    #: torch's settings for convolutions at which the kernels differ, its default first: tf32 changes forward ones only.
    settings: tuple[str, ...] = ("ieee",)

    @property
    def entry(self) -> ManifestEntry:
        return find(self.address)

    def shown_at(self, setting: str) -> str:
        """Address and setting, the latter where it makes a difference."""
        return f"{self.address} at {setting}" if len(self.settings) > 1 else self.address


#: Largest error against float64 that is right. Sums of about a thousand products are good to a few 1e-7 in fp32; of
#: operands rounded to TF32, whose steps are 2^-11, to a few 1e-4.
_LIMITS = {"tf32": 1e-3, "ieee": 1e-5}

#: How a setting is called beside times.
_LABELS = {"tf32": "TF32", "ieee": "fp32"}

#: The small inputs keep channels, filters, the width that LayerNorm normalises and the class of sizes and alignment:
#: the kernels are the same ones.
HEADLINES = (
    Headline("headline:w1", "conv3d → mish → tanh", _w1, (1, 32, 4, 19, 20), ("tf32", "ieee")),
    Headline("headline:w2", "conv_transpose3d → + s → layer_norm(64) → avg_pool(2) → gelu", _w2, (1, 32, 2, 2, 32)),
    Headline("headline:w3", "depthwise 3×3 → pointwise", _w3, (1, 64, 13, 19)),
)


def demo(console: Console) -> None:
    """Run the demo, printing to ``console``. Raises JitconvError when generated code is wrong."""
    started = time.perf_counter()
    found = gpus()
    usable = bool(found) and found[torch.cuda.current_device()].arch is not None
    where = f"on {found[torch.cuda.current_device()].name}" if found else "no GPU here"
    console.print(f"[bold]jitconv demo[/]: the three headline operators, {where}")
    _heading(console, "1. generate and compile")
    compiled = [_generate(console, headline, setting) for headline in HEADLINES for setting in headline.settings]
    if usable and all(compiled):
        _heading(console, "2. run at full size, beside PyTorch")
        console.print(
            "\nPyTorch and jitconv at the same setting of torch.backends.cudnn.conv.fp32_precision: tf32 (PyTorch's\n"
            "default), and ieee, called fp32 here. jitconv's transposed and depthwise-separable convolutions are fp32\n"
            "(FFMA) at either, and not yet as fast as tensor cores. Errors are relative to float64.",
            soft_wrap=True,
        )
        for headline in HEADLINES:
            _race(console, headline)
    else:
        _heading(console, "2. run the generated source on the CPU")
        _emulate_all(console)
    _heading(console, "3. try next")
    _next_steps(console, on_gpu=usable)
    console.print(f"\ndone in {time.perf_counter() - started:.0f} s")


def _heading(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/]\n[dim]{'─' * len(text)}[/]")


# ---- 1. generate and compile ---------------------------------------------------------------------


def _generate(console: Console, headline: Headline, setting: str) -> bool:
    """Show what one operator becomes at one of torch's settings; returns whether it could be compiled."""
    inspection = inspect_call(headline.entry.at_precision(setting).call(), headline.address, None)
    console.print(f"\n[bold]{headline.shown_at(setting)}[/]  {headline.title}")
    compiled = True
    for kernel in inspection.kernels:
        constants = ", ".join(f"{name} {value}" for name, value in baked(kernel.plan))
        console.print(f"  [cyan]{kernel.name}[/]")
        console.print(_wrapped("    baked in   ", constants))
        compiled &= _show_compiled(console, inspection, kernel.index)
    return compiled


def _wrapped(label: str, text: str) -> str:
    return textwrap.fill(text, 112, initial_indent=label, subsequent_indent=" " * len(label))


def _show_compiled(console: Console, inspection: Inspection, index: int) -> bool:
    kernel = inspection.kernels[index]
    try:
        resources = kernel.resources
    except (NVRTCNotFoundError, NVRTCVersionError) as error:
        lines = kernel.source.splitlines()
        console.print(f"    [yellow]not compiled[/]: {escape(str(error))}", soft_wrap=True)
        console.print(f"    generated  {len(lines)} lines of CUDA: jitconv inspect {inspection.title} --format source")
        return False
    origin = "from the store, compiled earlier in" if kernel.was_stored else "in"
    console.print(f"    uses       {resources_line(resources)}, {resources.threads} threads per block")
    console.print(f"    compiled   for {inspection.arch} {origin} {resources.compile_ms:.0f} ms")
    return True


# ---- 2a. without a GPU: the emulator -------------------------------------------------------------


def _emulate_all(console: Console) -> None:
    try:
        compiler = emulate.compiler()
    except EmulatorUnavailableError as error:
        console.print(f"\n[yellow]not run[/]: {escape(str(error))}", soft_wrap=True)
        console.print("The kernels above need a GPU, or this compiler, to run.")
        return
    console.print(
        f"\nThe CUDA text that was generated above, byte for byte, built by {compiler} with address and undefined-"
        "behaviour\nsanitizers, run under three schedules of its threads that must agree, on small inputs:\n",
        soft_wrap=True,
    )
    # Programs run outside this process, so threads use every core.
    runs = [(headline, setting) for headline in HEADLINES for setting in headline.settings]
    width = max(len(headline.shown_at(setting)) for headline, setting in runs)
    with console.status("building and running"), ThreadPoolExecutor(max_workers=cores()) as pool:
        for (headline, setting), line in zip(runs, pool.map(_emulate, *zip(*runs, strict=True)), strict=True):
            console.print(f"  {headline.shown_at(setting):<{width}}  {line}", soft_wrap=True)


def _emulate(headline: Headline, setting: str) -> str:
    tensors: dict[str, Tensor] = {}
    entry = headline.entry.resized(headline.small_input).at_precision(setting)
    call = entry.call(_random_tensors(tensors, "cpu"))
    started = time.perf_counter()
    out = emulated.run(call)
    seconds = time.perf_counter() - started
    expected = headline.torch(_doubled(tensors))
    error = _checked_error(headline, setting, out, expected)
    return f"{list(headline.small_input)} → {list(out.shape)}   error {error:.1e} against float64   {seconds:.1f} s"


# ---- 2b. with a GPU ------------------------------------------------------------------------------


def _race(console: Console, headline: Headline) -> None:
    """Time one operator beside its peers, with the batch halved until everything fits in memory."""
    batch, *rest = headline.entry.input_shape
    full = batch
    while True:
        try:
            _race_at(console, headline, (batch, *rest), "" if batch == full else f", batch {full} → {batch} to fit")
            return
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if batch == 1:
                console.print(f"\n[bold]{headline.address}[/]  [yellow]not run[/]: not enough memory on this GPU")
                return
            batch //= 2


def _race_at(console: Console, headline: Headline, shape: tuple[int, ...], note: str) -> None:
    from rich.table import Table

    tensors: dict[str, Tensor] = {}
    entry = headline.entry.resized(shape)
    arguments = entry.arguments(_random_tensors(tensors, "cuda"))
    ours = {f"jitconv {_LABELS[setting]}": setting for setting in headline.settings}
    candidates: dict[str, Callable[[], Tensor]] = {
        # Without precision=: jitconv reads the setting as PyTorch does.
        name: partial(_at_precision, setting, partial(public_function(entry.operator), **arguments))
        for name, setting in ours.items()
    }
    candidates |= _peers(headline, tensors)
    failed = _drop_failing(candidates)
    errors = _errors(headline, candidates, ours, tensors)
    times = interleaved(candidates)
    console.print(f"\n[bold]{headline.address}[/]  {headline.title}\ninput {list(shape)} float32{note}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for heading in ("ms: median [10 %, 90 %]", "jitconv is", "error"):
        table.add_column(heading, justify="right")
    for name, timing in times.items():
        # Against jitconv at the same setting, or at the only one that it has.
        same = f"jitconv {name.split()[-1]}"
        own = times[same if same in times else next(iter(ours))].median
        ratio = "" if name in ours else f"{timing.median / own:.2f} × as fast"
        table.add_row(name, f"{timing}", ratio, f"{errors[name]:.1e}", style="bold" if name in ours else "")
    console.print(table)
    for name, reason in failed.items():
        console.print(f"  {name}: not run: {escape(reason)}", soft_wrap=True)


def _peers(headline: Headline, tensors: Tensors) -> dict[str, Callable[[], Tensor]]:
    """PyTorch's own ways, at its default precision for convolutions (TF32) and at fp32."""
    peers: dict[str, Callable[[], Tensor]] = {}
    # One compilation for both: convolutions stay calls of cuDNN, which reads the setting as it runs.
    compiled = torch.compile(headline.torch, dynamic=False)
    for setting, label in _LABELS.items():
        peers[f"eager {label}"] = partial(_at_precision, setting, headline.torch, tensors)
        peers[f"torch.compile {label}"] = partial(_at_precision, setting, compiled, tensors)
    return peers


def _at_precision(setting: str, function: Callable[..., Tensor], *arguments: Tensors) -> Tensor:
    with _conv_precision(setting):
        return function(*arguments)


@contextmanager
def _conv_precision(setting: str) -> Iterator[None]:
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # set up in a way that mypy misses
    before = convolutions.fp32_precision
    convolutions.fp32_precision = setting
    try:
        yield
    finally:
        convolutions.fp32_precision = before


def _drop_failing(candidates: dict[str, Callable[[], Tensor]]) -> dict[str, str]:
    """Take out the peers that do not run here (torch.compile without Triton), with the reason of each."""
    failed = {}
    for name in [name for name in candidates if not name.startswith("jitconv")]:
        try:
            candidates[name]()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # A peer may fail in any way that its compiler can: that must not end the demo.
            failed[name] = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            del candidates[name]
    return failed


def _errors(
    headline: Headline, candidates: Mapping[str, Callable[[], Tensor]], ours: Mapping[str, str], tensors: Tensors
) -> dict[str, float]:
    """Relative L2 error of each over its first sample (no operator here mixes samples); ``ours`` must be right."""
    source = next(iter(tensors))
    expected = headline.torch(_doubled({**tensors, source: tensors[source][:1]}))
    errors = {}
    for name, function in candidates.items():
        out = function()[:1]
        own = ours.get(name)
        errors[name] = _error(out, expected) if own is None else _checked_error(headline, own, out, expected)
    return errors


# ---- data ----------------------------------------------------------------------------------------


def _random_tensors(made: dict[str, Tensor], device: str) -> Callable[[str, tuple[int, ...], torch.dtype], Tensor]:
    """A maker of tensors: the input from [0, 1), parameters as PyTorch initialises them; each is kept in ``made``."""
    generator = torch.Generator(device).manual_seed(_SEED)

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        values = torch.rand(shape, dtype=dtype, device=device, generator=generator)
        if made:  # the input comes first
            fan_in = values.numel() // shape[0] if len(shape) > 1 else 1
            values = (2 * values - 1) / fan_in**0.5
        made[name] = values
        return values

    return make


def _doubled(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}


def _error(out: Tensor, expected: Tensor) -> float:
    """Relative L2 error; NaN for another shape."""
    if out.shape != expected.shape:
        return math.nan
    return float((out.double() - expected).norm() / expected.norm())


def _checked_error(headline: Headline, setting: str, out: Tensor, expected: Tensor) -> float:
    error = _error(out, expected)
    # NaN fails the comparison too.
    if not error < _LIMITS[setting]:
        raise JitconvError(
            f"{headline.shown_at(setting)}: the generated kernels are wrong: error {error:.1e} against float64, "
            f"expected less than {_LIMITS[setting]:.0e}; please report this together with the output of "
            "'jitconv doctor'"
        )
    return error


# ---- 3. what next --------------------------------------------------------------------------------


def _next_steps(console: Console, *, on_gpu: bool) -> None:
    steps = [
        ("jitconv inspect headline:w2", "constants, registers, shared memory, occupancy of both kernels"),
        ("jitconv inspect headline:w1 --format source", "the CUDA that was generated (ptx, sass, json too)"),
        ("jitconv warm headline --arch sm_80,sm_90a", "compile ahead of time, without a GPU"),
        ("jitconv cache ls", "the kernels in the store"),
        ("jitconv doctor", "what this machine has, and what would go wrong"),
    ]
    # A wheel carries no examples.
    if (cache_root().parent / "examples").is_dir():
        steps.append(("python examples/custom_step.py", "a step of your own in the epilogue"))
        if on_gpu:
            steps.append(("python examples/performance/headline.py", "more peers, more formats, peak memory"))
    width = max(len(command) for command, _ in steps)
    for command, what in steps:
        console.print(f"  {command:<{width}}  {what}", soft_wrap=True)
