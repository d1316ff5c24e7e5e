"""Forward convolutions that people run, with what follows them, against eager PyTorch in both memory formats.

    python examples/performance/layers.py [--output examples/performance] [--only TEXT] [--rows A:B] [--compile MODE]

The list was written down before anything was tuned to it. Each row is timed at the dtype it names: float32 at both of
torch's settings for convolutions, tf32 (its default) and ieee, which jitconv follows; 16-bit types as they are. jitconv
is timed as a function, which lays the weights out for the tensor cores at each call, and with frozen weights
(jitconv.prepare), which are laid out once; what is said against the best peer is said of the function. Peers: eager on
NC* and eager on channels_last input, the chain included, and with --compile torch.compile on both, in its mode
"default" or "max-autotune". Kernels are compiled before anything is timed, by as many threads as there are cores.
Timings as in headline.py: CUDA events, candidates in turns, L2 flushed, median of 10.

--rows measures a part of the list, for machines that are lent by the minute; --output then adds to what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from headline import environment
from torch import Tensor

import jitconv
from jitconv import epilogue as E
from jitconv.timing import Timing, interleaved

CONV = {1: (F.conv1d, jitconv.conv1d), 2: (F.conv2d, jitconv.conv2d), 3: (F.conv3d, jitconv.conv3d)}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Layer:
    """x ``[N, C, *]``, K filters, and what follows: ``silu`` or ``relu``, ``add`` (a residual), both, or nothing."""

    name: str
    x: tuple[int, ...]
    k: int
    kernel: tuple[int, ...]
    follows: tuple[str, ...] = ("silu",)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    parameters: dict[str, Any] = field(default_factory=dict)


def _layers() -> list[Layer]:
    video, both = ("bfloat16",), ("silu", "add")
    three = (3, 3, 3)
    pad = {"padding": 1}
    return [
        # Video VAE decoders; the input comes padded.
        Layer("video 96@482x834", (1, 96, 6, 482, 834), 96, three, both, video),
        Layer("video 192@242x418", (1, 192, 6, 242, 418), 192, three, both, video),
        Layer("video 384@122x210", (1, 384, 4, 122, 210), 384, three, both),
        Layer("video 128@258", (1, 128, 67, 258, 258), 128, three, both, video),
        Layer("video 512@66", (1, 512, 19, 66, 66), 512, three, both, video),
        Layer("video to rgb", (1, 96, 6, 482, 834), 3, three, (), video),
        Layer("video time only", (1, 192, 8, 120, 208), 192, (3, 1, 1), both),
        # Image VAE decoders.
        Layer("image 512@128", (1, 512, 128, 128), 512, (3, 3), both, parameters=pad),
        Layer("image 256@512", (1, 256, 512, 512), 256, (3, 3), both, parameters=pad),
        Layer("image 128@1024", (1, 128, 1024, 1024), 128, (3, 3), both, parameters=pad),
        # 3-D U-Nets.
        Layer("unet 32@128", (2, 32, 128, 128, 128), 32, three, ("silu",), ("float32", "float16"), pad),
        Layer("unet 64@64", (2, 64, 64, 64, 64), 64, three, ("silu",), ("float32", "float16"), pad),
        Layer("unet 128@32", (2, 128, 32, 32, 32), 128, three, ("silu",), ("float32", "float16"), pad),
        Layer("unet 320@8", (2, 320, 8, 8, 8), 320, three, ("silu",), ("float32", "float16"), pad),
        Layer("segresnet 16", (1, 16, 224, 224, 144), 16, three, ("relu",), ("float32", "float16"), pad),
        # ResNets, batch 64.
        Layer("resnet stem", (64, 3, 224, 224), 64, (7, 7), ("relu",), parameters={"stride": 2, "padding": 3}),
        Layer("resnet 64@56", (64, 64, 56, 56), 64, (3, 3), ("relu",), parameters=pad),
        Layer("resnet 128@28", (64, 128, 28, 28), 128, (3, 3), ("relu", "add"), parameters=pad),
        Layer("resnet 256@14", (64, 256, 14, 14), 256, (3, 3), ("relu",), parameters=pad),
        Layer("resnet 512@7", (64, 512, 7, 7), 512, (3, 3), ("relu",), parameters=pad),
        Layer("resnet strided", (64, 128, 56, 56), 128, (3, 3), ("relu",), parameters={"stride": 2, "padding": 1}),
        Layer("resnet 256to64 k1", (64, 256, 56, 56), 64, (1, 1), ("relu",)),
        Layer("resnet 64to256 k1", (64, 64, 56, 56), 256, (1, 1), ("add", "relu")),
        # Patch embeddings: kernel = stride, a matrix product.
        Layer("patch 14", (1024, 3, 2, 14, 14), 1152, (2, 14, 14), (), parameters={"stride": (2, 14, 14)}),
        Layer("patch 16", (64, 3, 224, 224), 768, (16, 16), (), parameters={"stride": 16}),
        # Few input channels.
        Layer("8 channels", (8, 8, 256, 256), 32, (3, 3), ("relu",), parameters=pad),
        Layer("1 channel", (8, 1, 512, 512), 32, (5, 5), ("relu",), parameters={"padding": 2}),
        # Audio.
        Layer("audio 256 k7", (4, 256, 65536), 256, (7,), ("silu",), parameters={"padding": 3}),
        Layer("audio 64 k3 dilated", (4, 64, 65536), 64, (3,), both, parameters={"padding": 9, "dilation": 9}),
        Layer("audio 1024 k3", (4, 1024, 4096), 1024, (3,), ("silu",), parameters=pad),
        Layer("audio 32 k15", (4, 32, 131072), 32, (15,), ("silu",), parameters={"padding": 7}),
        # Groups.
        Layer("groups 32", (32, 256, 56, 56), 256, (3, 3), ("relu",), parameters={"padding": 1, "groups": 32}),
        Layer("groups 2", (32, 128, 56, 56), 128, (3, 3), ("relu",), parameters={"padding": 1, "groups": 2}),
    ]


LAYERS = _layers()


def warm(layers: list[Layer]) -> None:
    """Compile the kernels of all rows, in both memory formats, as a manifest names them."""
    tables = []
    for layer in layers:
        operator = f"conv{len(layer.kernel)}d"
        weight = [layer.k, layer.x[1] // layer.parameters.get("groups", 1), *layer.kernel]
        steps = ", ".join('{ step = "add", other = "tensor" }' if s == "add" else f'"{s}"' for s in layer.follows)
        values = {name: list(v) if isinstance(v, tuple) else v for name, v in layer.parameters.items()}
        formats = ["channels_first"] if operator == "conv1d" else ["channels_first", "channels_last"]
        for dtype in layer.dtypes:
            for precision in ("tf32", "ieee") if dtype == "float32" else (None,):
                for memory_format in formats:
                    lines = [
                        f"[row{len(tables)}]",
                        f'operator = "{operator}"',
                        f"input = {list(layer.x)}",
                        f"weight = {weight}",
                        "bias = true",
                        f'dtype = "{dtype}"',
                        f'memory_format = "{memory_format}"',
                        f"epilogue = [{steps}]",
                        *(f"{name} = {value}" for name, value in values.items()),
                        *([f'precision = "{precision}"'] if precision else []),
                    ]
                    tables.append("\n".join(lines))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layers.toml"
        path.write_text("\n\n".join(tables) + "\n")
        subprocess.run([sys.executable, "-m", "jitconv", "warm", str(path)], check=True)


def measure(layer: Layer, dtype: torch.dtype, setting: str, mode: str | None) -> dict[str, Any]:
    """Times, errors and extra memory of one row, at torch's ``setting`` for convolutions in float32."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    groups = layer.parameters.get("groups", 1)
    c = layer.x[1] // groups
    x, b = randn(*layer.x), randn(layer.k)
    w = (torch.randn(layer.k, c, *layer.kernel, device="cuda") / math.sqrt(c * math.prod(layer.kernel))).to(dtype)
    plain, fused = CONV[len(layer.kernel)]
    residual = torch.randn_like(plain(x, w, b, **layer.parameters)) if "add" in layer.follows else None
    torch.backends.cudnn.conv.fp32_precision = setting

    def chain(x: Tensor, w: Tensor, b: Tensor, residual: Tensor | None) -> Tensor:
        v = plain(x, w, b, **layer.parameters)
        for step in layer.follows:
            v = v + residual if step == "add" else getattr(F, step)(v)
        return v

    steps = [E.add(residual) if step == "add" else getattr(E, step)() for step in layer.follows]
    last = CHANNELS_LAST.get(x.dim())
    frozen = jitconv.prepare(fused, w, b, epilogue=steps, freeze_weights=True, **layer.parameters)
    candidates = {
        "jitconv": lambda: fused(x, w, b, epilogue=steps, **layer.parameters),
        "frozen": lambda: frozen(x),
        "eager": lambda: chain(x, w, b, residual),
    }
    if last is not None:
        x_last, w_last = x.contiguous(memory_format=last), w.contiguous(memory_format=last)
        r_last = None if residual is None else residual.contiguous(memory_format=last)
        steps_last = [E.add(r_last) if step == "add" else getattr(E, step)() for step in layer.follows]
        frozen_last = jitconv.prepare(fused, w, b, epilogue=steps_last, freeze_weights=True, **layer.parameters)
        candidates["jitconv channels_last"] = lambda: fused(x_last, w, b, epilogue=steps_last, **layer.parameters)
        candidates["frozen channels_last"] = lambda: frozen_last(x_last)
        candidates["eager channels_last"] = lambda: chain(x_last, w_last, b, r_last)
    if mode is not None:
        function = torch.compile(chain, dynamic=False, mode=mode)
        candidates["torch.compile"] = lambda: function(x, w, b, residual)
        if last is not None:
            candidates["torch.compile channels_last"] = lambda: function(x_last, w_last, b, r_last)
    times: dict[str, Timing] = interleaved(candidates, repeats=10)
    out = candidates["eager"]()
    flop = 2 * out.numel() * c * math.prod(layer.kernel)
    row = {name: timing.median for name, timing in times.items()}
    ours, frozen_ours = (min(row[name] for name in row if name.startswith(start)) for start in ("jitconv", "frozen"))
    best = min(value for name, value in row.items() if not name.startswith(("jitconv", "frozen")))
    difference = (candidates["jitconv"]().double() - out.double()).norm() / out.double().norm()
    return {
        **row, "tflops": flop / ours / 1e9, "speed-up": best / ours, "speed-up frozen": best / frozen_ours,
        "difference": float(difference),
    }  # fmt: skip


def _line(label: str, row: dict[str, Any], names: tuple[str, ...]) -> str:
    cells = [f"{row[name]:.3f}" if name in row else "–" for name in names]
    numbers = [f"{row['tflops']:.0f}", f"{row['speed-up']:.2f}", f"{row['difference']:.1e}"]
    return "| " + " | ".join([label, *cells, *numbers]) + " |"


def _mean(record: dict[str, Any], name: str) -> str:
    return f"{math.exp(sum(math.log(row[name]) for row in record.values()) / len(record)):.2f}"


def main() -> None:
    """Measure every layer and print (and keep) the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for layers.md and layers.json; none: print only")
    parser.add_argument("--only", default="", help="measure the layers whose name contains this")
    parser.add_argument("--rows", default=":", help="measure layers A:B of the list only")
    parser.add_argument("--compile", choices=("default", "max-autotune"), help="torch.compile as a peer; slow to start")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    first, last = (int(number) if number else None for number in options.rows.split(":"))
    layers = [layer for layer in LAYERS[first:last] if options.only in layer.name]
    warm(layers)
    names = ("jitconv", "jitconv channels_last", "frozen", "frozen channels_last", "eager", "eager channels_last",
             "torch.compile", "torch.compile channels_last")  # fmt: skip
    head = ["layer and dtype", *names, "TFLOP/s", "times the best peer's speed", "difference from eager"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    print("\n".join(lines), flush=True)
    earlier = options.output / "layers.json" if options.output else None
    partial = options.rows != ":" or options.only
    record: dict[str, Any] = json.loads(earlier.read_text()) if earlier and partial and earlier.exists() else {}
    for layer in layers:
        for name in layer.dtypes:
            for setting in ("tf32", "ieee") if name == "float32" else ("ieee",):
                row = measure(layer, getattr(torch, name), setting, options.compile)
                label = f"{layer.name} {setting if name == 'float32' else name}"
                record[label] = row
                print(_line(label, row, names), flush=True)
                torch.cuda.empty_cache()
    lines += [_line(label, row, names) for label, row in record.items()]
    summary = f"{len(record)} rows, geometric mean {_mean(record, 'speed-up')}"
    if all("speed-up frozen" in row for row in record.values()):
        summary += f", with frozen weights {_mean(record, 'speed-up frozen')}"
    print(f"\n{summary}; {environment()}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        page = ["# Layers", "", f"Made by `layers.py` on {environment()}. Milliseconds. {summary}.", "", *lines]
        (options.output / "layers.md").write_text("\n".join(page) + "\n")
        (options.output / "layers.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
