"""A step of your own in the epilogue: Snake, the periodic activation of audio decoders.

    python examples/custom_step.py

``register`` takes the CUDA expression and the same function in torch. The first is pasted into the generated kernel,
the second is the path of CPU tensors, the oracle, and what gradients come from. Here the step has one operand, and it
is given one value per channel; a number, a 0-d tensor or a full tensor would do as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

import jitconv
from jitconv import epilogue as E

snake = E.register(
    "snake",
    # v is the value so far, alpha the operand; both are float.
    cuda="snake_of(v, alpha)",
    torch=lambda v, alpha: v + torch.sin(alpha * v) ** 2 / alpha,
    operands=("alpha",),
    # Device code that the expression may call: functions of its own, once per kernel.
    preamble="""
__device__ __forceinline__ float snake_of(float v, float alpha) {
    const float s = sinf(alpha * v);
    return v + s * s / alpha;
}
""",
)


def block(x: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor) -> Tensor:
    """A causal convolution followed by Snake and a residual: one kernel."""
    return jitconv.conv1d(x, weight, bias, padding=((6, 0),), epilogue=[snake(alpha), E.add(x)])


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(2, 32, 1000, device=device)
    weight, bias = torch.randn(32, 32, 7, device=device) / 15, torch.randn(32, device=device)
    alpha = torch.rand(32, device=device) + 0.5

    out = block(x, weight, bias, alpha)
    padded = torch.nn.functional.pad(x.double(), (6, 0))
    v = torch.nn.functional.conv1d(padded, weight.double(), bias.double())
    a = alpha.double().view(-1, 1)
    expected = v + torch.sin(a * v) ** 2 / a + x
    error = ((out - expected).norm() / expected.norm()).item()
    path = "a generated kernel" if jitconv.stats().generated_calls else "torch, because the tensors are on the CPU"
    print(f"served by {path}; error against float64: {error:.1e}")

    # What a CUDA tensor would run, visible on any machine.
    found = jitconv.inspect(
        jitconv.conv1d, x, weight, bias, padding=((6, 0),), epilogue=[snake(alpha), E.add(x)], arch="sm_90a"
    )
    print(f"the generated kernel is called {found.kernels[-1].name}; in it:")
    for line in found.source.splitlines():
        if "snake_of" in line:
            print(f"    {line.strip()}")


if __name__ == "__main__":
    main()
