"""Inference with weights that do not change: prepared once, called with images of any size.

    python examples/frozen_weights.py

A function of jitconv lays the weights out for the tensor cores at each call, because nothing says reliably that they
did not change. ``prepare(..., freeze_weights=True)`` is that promise: the operator keeps a copy, lays it out once, and
from then on launches one kernel less.
"""

from __future__ import annotations

import torch
from torch import Tensor

import jitconv
from jitconv import epilogue as E


class Stem(torch.nn.Module):
    """Two convolutions with what follows them, prepared for inference."""

    def __init__(self, channels: int, device: str) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, channels, 3, stride=2, padding=1, device=device)
        self.second = torch.nn.Conv2d(channels, channels, 3, padding=1, device=device)
        self.prepare()

    def prepare(self) -> None:
        """Bind the weights as they are now. Again after ``.to()``, which puts other tensors in their place."""
        step = {"padding": 1, "epilogue": [E.silu()], "freeze_weights": True}
        self.steps = [
            jitconv.prepare(jitconv.conv2d, self.first.weight, self.first.bias, stride=2, **step),
            jitconv.prepare(jitconv.conv2d, self.second.weight, self.second.bias, **step),
        ]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


def reference(stem: Stem, x: Tensor) -> Tensor:
    x = torch.nn.functional.silu(stem.first(x))
    return torch.nn.functional.silu(stem.second(x))


def difference(y: Tensor, expected: Tensor) -> float:
    return float((y - expected).norm() / expected.norm())


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stem = Stem(32, device).eval()

    for height, width in ((64, 64), (48, 100), (65, 33)):
        x = torch.rand(1, 3, height, width, device=device)
        y = stem(x)
        print(f"{height} x {width} -> {tuple(y.shape)}, difference from torch {difference(y, reference(stem, x)):.1e}")
    before = jitconv.stats()
    stem(x)
    print(f"launches of a warm call: {jitconv.stats().launches - before.launches}")
    print(stem.steps[1])

    # A change of the weights is not seen, until the operator is told.
    stem.second.weight.mul_(0.5)
    changed = reference(stem, x)
    print(f"after a change of the weights: {difference(stem(x), changed):.1e}")
    stem.steps[1].refresh()
    print(f"after refresh(): {difference(stem(x), changed):.1e}")


if __name__ == "__main__":
    main()
