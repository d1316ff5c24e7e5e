"""The same kernel is the same bytes, whenever and wherever it is compiled."""

from __future__ import annotations

import time

import pytest

from jitconv import program, toolchain
from jitconv.manifest import find
from jitconv.render import render


@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_a_later_compilation_gives_the_same_bytes(name: str) -> None:
    # NVRTC once mixed the time into the symbols of a nameless namespace.
    kernels = [render(step.kernel) for step in program.build(find(f"headline:{name}").call()).launches]

    def compiled() -> list[bytes]:
        return [
            toolchain.compile_cubin(k.source, name=k.name, arch="sm_90a", headers=k.headers).cubin for k in kernels
        ]

    first = compiled()
    time.sleep(1.1)  # the clock that NVRTC would look at counts seconds
    assert compiled() == first
