"""The three headline operators against eager and torch.compile, in one run, on one GPU.

    python examples/performance/headline.py [--output examples/performance]

Each peer runs as its users would run it: eager in both memory formats (the input already in that format), torch.compile
default and max-autotune, at both of torch's settings for convolutions: TF32 (its default) and strict fp32 ("ieee").
jitconv is called without precision=, so it follows the setting too: W1 is multiplied on tensor cores at either, W2 and
W3 by FFMA at either. Timings: CUDA events, after warm-up, candidates in turns, L2 flushed before
each run; median of 20 with the 10 % and 90 % quantiles. Errors: relative L2 against float64 over the whole output, on
random data with every parameter random. Extra memory: peak allocation of one call beyond the output.

torch.compile's max-autotune may pick a template of its own for a 1x1 convolution, which asks another precision setting
than cuDNN's: its error then shows that its "tf32" row was computed in fp32.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import jitconv
from jitconv import epilogue as E
from jitconv import launch, toolchain
from jitconv.timing import Timing, interleaved

Function = Callable[..., Tensor]


@dataclass
class Workload:
    """A headline operator: its jitconv call, the same in torch, and its arguments."""

    title: str
    fused: Function
    torch: Function
    arguments: tuple[Tensor, ...]
    gflop: float


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


def w1() -> Workload:
    def fused(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return jitconv.conv3d(x, w, b, epilogue=[E.mish(), E.tanh()])

    def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(F.mish(F.conv3d(x, w, b)))

    scale = (32 * 27) ** -0.5
    arguments = (rand(16, 32, 32, 64, 64), randn(64, 32, 3, 3, 3) * scale, randn(64))
    return Workload("W1 conv3d + mish + tanh", fused, plain, arguments, 204)


def w2() -> Workload:
    def fused(x: Tensor, w: Tensor, b: Tensor, s: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        steps = [E.add(s), E.layer_norm((64,), gamma, beta), E.avg_pool(2), E.gelu()]
        return jitconv.conv_transpose3d(x, w, b, stride=2, padding=1, output_padding=1, epilogue=steps)

    def plain(x: Tensor, w: Tensor, b: Tensor, s: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        v = F.conv_transpose3d(x, w, b, stride=2, padding=1, output_padding=1) + s
        return F.gelu(F.avg_pool3d(F.layer_norm(v, (64,), gamma, beta), 2))

    scale = (32 * 27) ** -0.5
    arguments = (
        rand(32, 32, 16, 32, 32), randn(32, 64, 3, 3, 3) * scale, randn(64), randn(), randn(64), randn(64),
    )  # fmt: skip
    return Workload("W2 conv_transpose3d + add + layer_norm + avg_pool + gelu", fused, plain, arguments, 58)


def w3() -> Workload:
    def fused(x: Tensor, dw: Tensor, pw: Tensor) -> Tensor:
        return jitconv.depthwise_separable_conv2d(x, dw, pw, padding=1)

    def plain(x: Tensor, dw: Tensor, pw: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, dw, padding=1, groups=64), pw)

    arguments = (rand(16, 64, 512, 512), randn(64, 1, 3, 3) / 3, randn(128, 64, 1, 1) / 8)
    return Workload("W3 depthwise-separable conv2d", fused, plain, arguments, 73.6)


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


@dataclass
class Row:
    """One line of the table."""

    candidate: str
    timing: Timing
    error: float
    extra_mib: float


def at_precision(setting: str, function: Function) -> Function:
    def run(*arguments: Tensor) -> Tensor:
        torch.backends.cudnn.conv.fp32_precision = setting
        return function(*arguments)

    return run


def measure(work: Workload) -> list[Row]:
    # Inductor looks at the setting when it compiles, so each precision has a compilation of its own.
    x, *rest = work.arguments
    last = channels_last(x)
    settings = ("tf32", "ieee")
    functions: dict[str, tuple[Function, Tensor]] = {
        f"jitconv {setting}": (at_precision(setting, work.fused), x) for setting in settings
    }
    for setting in settings:
        functions[f"eager {setting}"] = (at_precision(setting, work.torch), x)
        functions[f"eager channels_last {setting}"] = (at_precision(setting, work.torch), last)
        for mode in ("default", "max-autotune-no-cudagraphs"):
            torch._dynamo.reset()
            compiled = torch.compile(work.torch, mode=mode, dynamic=False)
            function = at_precision(setting, compiled)
            function(x, *rest)
            functions[f"torch.compile {mode.removesuffix('-no-cudagraphs')} {setting}"] = (function, x)
    expected = work.torch(*(t.double() for t in work.arguments))
    quality = {name: quality_of(function, (first, *rest), expected) for name, (function, first) in functions.items()}
    del expected
    timings = interleaved(
        {name: lambda f=function, a=first: f(a, *rest) for name, (function, first) in functions.items()}
    )
    return [Row(name, timings[name], *quality[name]) for name in functions]


def quality_of(function: Function, arguments: tuple[Tensor, ...], expected: Tensor) -> tuple[float, float]:
    """Relative L2 error against float64, and peak memory beyond the output in MiB."""
    function(*arguments)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = function(*arguments)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    error = float((out.double() - expected).norm() / expected.norm())
    return error, extra / 2**20


def environment() -> str:
    info = launch.device_info(0)
    driver = ".".join(map(str, launch.driver_version()))
    return (
        f"{info.name} ({info.arch}), driver for CUDA {driver}, NVRTC {'.'.join(map(str, toolchain.nvrtc_version()))}, "
        f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, Python {platform.python_version()}, "
        f"jitconv {jitconv.__version__}"
    )


def table(work: Workload, rows: list[Row]) -> str:
    ours = {row.candidate: row.timing.median for row in rows if row.candidate.startswith("jitconv")}
    lines = [
        f"### {work.title}",
        "",
        f"input {list(work.arguments[0].shape)}, {work.gflop:g} GFLOP",
        "",
        "| | ms: median [10 %, 90 %] | jitconv at the same setting is … times as fast | error | extra memory, MiB |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        speedup = row.timing.median / ours[f"jitconv {row.candidate.split()[-1]}"]
        lines.append(f"| {row.candidate} | {row.timing} | {speedup:.2f} | {row.error:.1e} | {row.extra_mib:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for headline.md and headline.json; none: print only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "error: no GPU that torch can use: there is nothing to measure here\n")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    sections, record = [], {}
    for make in (w1, w2, w3):
        work = make()
        rows = measure(work)
        sections.append(table(work, rows))
        record[make.__name__] = {
            row.candidate: {
                "ms": row.timing.median, "low": row.timing.low, "high": row.timing.high, "error": row.error,
                "extra_mib": row.extra_mib,
            }
            for row in rows
        }  # fmt: skip
        print(sections[-1], "\n", flush=True)
        del work
        torch.cuda.empty_cache()
    page = "\n\n".join(["# Headline operators", f"Made by `headline.py` on {environment()}.", *sections]) + "\n"
    print(environment())
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "headline.md").write_text(page)
        (options.output / "headline.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
