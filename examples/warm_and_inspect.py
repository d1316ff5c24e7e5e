"""Compile a manifest for two architectures, on a machine that may have no GPU, and look at what came out.

    python examples/warm_and_inspect.py

The same as ``jitconv warm examples/decoder.toml --arch sm_80,sm_90a`` and ``jitconv inspect``, from Python.
"""

from __future__ import annotations

from pathlib import Path

import jitconv
from jitconv.manifest import select
from jitconv.store import Store
from jitconv.warm import jobs_of, warm

MANIFEST = Path(__file__).with_name("decoder.toml")
ARCHS = ("sm_80", "sm_90a")


def main() -> None:
    store = Store.open(strict=True)
    report = warm(jobs_of(select(str(MANIFEST)), ARCHS), store)
    print(f"{report.count('compiled')} kernels compiled, {report.count('warm')} already in {store.directory}")
    if report.errors:
        raise SystemExit("\n".join(report.errors))

    for arch in ARCHS:
        # The first kernel lays the weights out for tensor cores, the last one convolves.
        kernel = jitconv.inspect(f"{MANIFEST}:residual", arch=arch).kernels[-1]
        r = kernel.resources
        print(
            f"{kernel.name} on tensor cores, for {arch}: {r.registers} registers, "
            f"{r.spill_stores + r.spill_loads} bytes of spills, "
            f"{r.shared_bytes} bytes of shared memory, {r.blocks_per_sm} blocks per SM"
        )


if __name__ == "__main__":
    main()
