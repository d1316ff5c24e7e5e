"""The host twin of warpgroup products computes what the definition says, and a misused product is noticed."""

from __future__ import annotations

import functools
import struct

import pytest
import torch

from jitconv.emulate import ALL_SCHEDULES, EmulationError, Launch, build, execute
from tests.kernels import HEADERS, cases, write
from tests.kernels.cases import Operand

pytestmark = pytest.mark.compiler

every_schedule = functools.partial(execute, schedules=ALL_SCHEDULES)
fast = functools.partial(execute, sanitize=False, schedules=ALL_SCHEDULES[:2])

MATHS = list(cases.MATHS)
WIDTHS = (8, 16, 32, 64, 96, 128, 192, 256)

# Two planes of rows, 16 bytes each, and behind them two more for the next product.
A = Operand(start=0, leading=2048, stride=128, advance=4096, group=1024)
B = Operand(start=16384, leading=4096, stride=128, advance=8192)


def assert_products(y: torch.Tensor, expected: torch.Tensor) -> None:
    # One rounding per product of up to three, of values of size 10.
    torch.testing.assert_close(y.double(), expected, rtol=2.0**-22, atol=2.0**-19)


# ---- Values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("math", MATHS)
@pytest.mark.parametrize("n", WIDTHS)
def test_values(math: str, n: int) -> None:
    assert_products(*cases.products(fast, math, n, A, B))


@pytest.mark.parametrize("math", MATHS)
def test_values_under_every_schedule_and_the_sanitizer(math: str) -> None:
    assert_products(*cases.products(every_schedule, math, 64, A, B, steps=3))


@pytest.mark.parametrize("math", MATHS)
def test_products_on_the_same_accumulators_follow_each_other(math: str) -> None:
    assert_products(*cases.products(fast, math, 96, A, B, steps=3, accumulate=False))


@pytest.mark.parametrize("offset", [16, 48, 112, 1040])
def test_rows_from_any_multiple_of_16_bytes(offset: int) -> None:
    a, b = (Operand(o.start + offset, o.leading, o.stride, o.advance, o.group) for o in (A, B))
    assert_products(*cases.products(fast, "tf32", 64, a, b, steps=2))


@pytest.mark.parametrize(
    ("leading", "stride"),
    [(128, 256), (256, 512), (4096 + 16, 144), (16384, 16), (4096, 0), (0, 128)],
)
def test_rows_at_other_distances(leading: int, stride: int) -> None:
    a = Operand(32, leading, stride, group=64)
    assert_products(*cases.products(fast, "half", 32, a, Operand(64, leading, stride)))


def test_tf32_operands_are_cut_not_rounded() -> None:
    # 1 + 2^-10 - 2^-23 is nearer to 1 + 2^-10, and is read as 1.
    x = torch.full((16384,), 1.0).view(torch.int32).add(0x1FFF).view(torch.float32)
    y = torch.zeros(2, 64, 8)
    places = [p for o in (A, B) for p in (o.start, o.leading, o.stride, o.advance, o.group)]
    arguments = struct.pack("<2Q5i10I4x", 0, 0, 16384, 0, 8, 1, 0, *places)
    fast(cases.load("products"), Launch(1, 256, 65536), arguments, {0: x, 8: y})
    assert (y == 8).all()


# ---- Misuse ---------------------------------------------------------------------------------

# Shared memory: A [2][64][4] at 0, B [2][8][4] behind it. Every thread fills a part, then fences.
FILL = """
for (int i = t; i < 512 + 64; i += static_cast<int>(blockDim.x)) shared[i] = a.x[i];
fence_proxy_async();
__syncthreads();
float d[4] = {};
const uint64_t left = descriptor_at(matrix_descriptor(1024, 128), shared_address(shared));
const uint64_t right = descriptor_at(matrix_descriptor(128, 128), shared_address(shared + 512));
"""
STORE = """
const int row = t / 32 * 16 + t % 32 / 4;
for (int i = 0; i < 4; ++i) a.y[(row + i / 2 * 8) * 8 + 2 * (t % 4) + i % 2] = d[i];
"""
FENCE = "wgmma_fence();\n"
ISSUE = "wgmma<Math::TF32, 8>(d, left, right, true);\n"
COMMIT = "wgmma_commit_group();\n"
WAIT = "wgmma_wait_group<0>();\n"


def run(body: str, *, block: int = 128, shared: int = 4 * 576, rows: int = 64, **options) -> None:
    """Run a body; if it stores what it has computed, that must be the product of A and B."""
    x = torch.randn(576, generator=torch.Generator().manual_seed(0))
    y = torch.full((rows, 8), float("nan"))
    kernel = write(body, headers=(*HEADERS, "math", "wgmma"))
    options.setdefault("schedules", ALL_SCHEDULES)
    execute(kernel, Launch(1, block, shared), struct.pack("<2Qi4x", 0, 0, 0), {0: x, 8: y}, **options)
    if STORE in body:
        left, right = (cases.tf32(part).view(2, -1, 4).transpose(0, 1).reshape(-1, 8) for part in x.split(512))
        assert_products(y, left.double() @ right.double().T)


def refused(body: str, *expected: str, **options) -> None:
    """The body must fail with a report that contains each of `expected`."""
    with pytest.raises(EmulationError) as caught:
        run(body, **options)
    for text in expected:
        assert text in str(caught.value), str(caught.value)


@pytest.mark.parametrize("checks", ["memory", "races"])
def test_the_body_that_the_others_break(checks: str) -> None:
    run(FILL + FENCE + ISSUE + COMMIT + WAIT + STORE, races=checks == "races")


def test_missing_wait() -> None:
    refused(FILL + FENCE + ISSUE + COMMIT, "exits with a product in flight", "wgmma_wait_group")
    refused(FILL + FENCE + ISSUE + COMMIT + "wgmma_wait_group<1>();" + STORE + WAIT, "depends on the schedule")


def test_missing_commit() -> None:
    refused(FILL + FENCE + ISSUE + WAIT, "exits with a product in flight", "wgmma_commit_group")
    refused(FILL + FENCE + ISSUE + WAIT + STORE + COMMIT + WAIT, "depends on the schedule")


def test_missing_fence() -> None:
    refused(FILL + ISSUE + COMMIT + WAIT, "no wgmma_fence() by the thread before its first product", "written.cu:8")
    again = FILL + FENCE + ISSUE + COMMIT + WAIT + ISSUE + COMMIT + WAIT
    refused(again, "since the wait that gave it these accumulators")
    other = FILL + "float e[4] = {};" + FENCE + ISSUE + COMMIT + WAIT + ISSUE.replace("(d", "(e")
    refused(other, "since its last wait")
    touched = FILL + FENCE + ISSUE + COMMIT + WAIT + FENCE + "d[t % 4] += 1;\n" + ISSUE + COMMIT + WAIT
    refused(touched, "since it has written these accumulators")


def test_products_in_a_row_need_one_fence() -> None:
    more = ISSUE.replace("true", "false")
    run(FILL + FENCE + ISSUE + more + COMMIT + more + COMMIT + WAIT + STORE)
    run(FILL + FENCE + ISSUE + COMMIT + "wgmma_wait_group<1>();" + more + COMMIT + WAIT + STORE)


def test_accumulators_read_before_the_wait() -> None:
    refused(FILL + FENCE + ISSUE + "a.y[t] = d[0];" + COMMIT + WAIT, "depends on the schedule")


def test_accumulators_written_before_the_wait() -> None:
    refused(FILL + FENCE + ISSUE + COMMIT + "d[1] = 0;" + WAIT, "has written its accumulators")
    refused(FILL + FENCE + ISSUE + "d[1] *= 0.5f;" + ISSUE + COMMIT + WAIT, "has written its accumulators")


def test_accumulators_that_overlap_those_of_another_shape() -> None:
    wide = "float e[8] = {};\n" + FENCE + "wgmma<Math::TF32, 16>(e, left, left, true);\n"
    part = "wgmma<Math::TF32, 8>(reinterpret_cast<float (&)[4]>(e[2]), left, right, true);"
    refused(FILL + wide + part, "overlap those of a product of another N")


@pytest.mark.parametrize("place", ["shared[t]", "shared[512 + t % 64]"])
def test_operand_written_before_the_wait(place: str) -> None:
    report = ("depends on the schedule", "before the wait for it")
    overwrite = f"{place} = 3;\n"
    refused(FILL + FENCE + ISSUE + COMMIT + overwrite + WAIT + STORE, *report)
    # That the async proxy is told does not make it right.
    fenced = overwrite + "fence_proxy_async();\n"
    refused(FILL + FENCE + ISSUE + COMMIT + fenced + WAIT + STORE, *report)


def test_operand_written_when_only_one_warp_has_waited() -> None:
    waited = FILL + FENCE + ISSUE + COMMIT + WAIT
    overwrite = "if (t < 32) shared[512 + t] = 3;\n" + STORE
    refused(waited + overwrite, "depends on the schedule", "16 bytes of an operand, at shared memory + 2048")
    refused(waited + overwrite, "race at shared memory + 20", "read by a wgmma of warp", races=True)
    run(waited + "__syncthreads();" + overwrite)
    run(waited + "__syncthreads();" + overwrite, races=True)


def test_operand_that_the_async_proxy_does_not_see() -> None:
    unfenced = FILL.replace("fence_proxy_async();\n", "")
    refused(unfenced + FENCE + ISSUE + COMMIT + WAIT + STORE, "depends on the schedule", "no fence_proxy_async() since")
    # A fence behind the issue comes too late.
    late = FENCE + ISSUE + "fence_proxy_async();\n" + COMMIT + WAIT + STORE
    refused(unfenced + late, "depends on the schedule", "no fence_proxy_async() since")


def test_missing_barrier_before_the_product() -> None:
    no_barrier = FILL.replace("__syncthreads();\n", "")
    refused(no_barrier + FENCE + ISSUE + COMMIT + WAIT + STORE, "depends on the schedule")
    refused(no_barrier + FENCE + ISSUE + COMMIT + WAIT + STORE, "race at shared memory", races=True)


def test_rows_that_nobody_uses_may_be_anything() -> None:
    # Rows 60 to 63 of A are never written; the last warp does not use what they give.
    fill = FILL.replace("shared[i] = ", "if (i >= 512 || i % 256 < 240) shared[i] = ")
    zero = "for (int i = 2; i < 4; ++i) if (t / 32 == 3 && t % 32 / 4 >= 4) d[i] = 0;\n"
    store = STORE.replace("= d[i]", "= row + i / 2 * 8 < 60 ? d[i] : 0")
    run(fill + FENCE + ISSUE + COMMIT + WAIT + zero + store)
    run(fill + FENCE + ISSUE + COMMIT + WAIT + zero + store, races=True)


def test_threads_that_diverge() -> None:
    differ = "wgmma<Math::TF32, 8>(d, left, right, t != 40);\n"
    refused(FILL + FENCE + differ + COMMIT + WAIT, "a warpgroup diverge", "not accumulating")
    differ = "wgmma<Math::TF32, 8>(d, left + (t >= 64), right, true);\n"
    refused(FILL + FENCE + differ + COMMIT + WAIT, "a warpgroup diverge", "A 0x")
    half = ISSUE.replace("TF32", "HALF")
    places = "if (t < 32) {\n" + ISSUE + "} else {\n" + half + "}\n"
    refused(FILL + FENCE + places + COMMIT + WAIT, "a warpgroup diverge", "wgmma of half", "wgmma of tf32")
    places = "if (t % 2 == 0) {\n" + ISSUE + "} else {\n" + ISSUE + "}\n"
    refused(FILL + FENCE + places + COMMIT + WAIT, "a warpgroup diverge", "written.cu:10", "written.cu:12")
    lanes = "if (t % 32 < 5) {\n" + WAIT + "} else {\n" + COMMIT + "}\n"
    report = ("the lanes of a warp diverge", "wgmma_wait_group<0>()", "wgmma_commit_group()")
    refused(FILL + FENCE + ISSUE + lanes + COMMIT + WAIT, *report)


def test_threads_that_are_missing() -> None:
    refused(FILL + FENCE + "if (t == 77) return;\n" + ISSUE + COMMIT + WAIT, ", 77, ", "64-76, 78-95 wait at wgmma")
    refused(FILL + FENCE + ISSUE + COMMIT + "if (t != 77) {" + WAIT + "}", "exits with a product in flight")
    refused(FILL + FENCE + "if (t < 32) return;\n" + ISSUE + COMMIT + WAIT, "threads 0-31 of the warpgroup have not")
    refused(FILL + "if (t != 3) wgmma_fence();", "the lanes of warp 0 diverge: 31 of 32", "wgmma_fence()")
    refused(FILL + FENCE + ISSUE, "lacks threads: the block has 96", block=96)
    refused(FILL + "if (t >= 128) { " + FENCE + "}", "lacks threads: the block has 192", block=192)


def test_operands_out_of_bounds() -> None:
    body = FILL + FENCE + ISSUE + COMMIT + WAIT
    refused(body.replace("shared + 512)", "shared + 516)"), "row 7 of B, 16 bytes at shared memory + 2304", "out of b")
    below = "left - 2"
    refused(body.replace("(d, left", f"(d, {below}"), "row 0 of A, 16 bytes at shared memory + -32")
    refused(body.replace("(d, left", "(d, left | 1ull << 62"), "has bits beside start, leading and stride")
    refused(FILL + "shared_address(a.x);", "is not in shared memory", "written.cu:8")


def test_addresses_wrap_at_18_bits() -> None:
    # The second half of k lies 1024 bytes behind the first, also when that is written as 2^18 - 1024 from the other.
    body = FILL.replace("matrix_descriptor(1024, 128), shared_address(shared)",
                        "matrix_descriptor((1u << 18) - 1024, 128), shared_address(shared + 256)")
    swap = "for (int i = t; i < 256; i += 128) { const float v = shared[i]; shared[i] = shared[256 + i]; "
    swap += "shared[256 + i] = v; } fence_proxy_async(); __syncthreads();\n"
    run(body + swap + FENCE + ISSUE + COMMIT + WAIT + STORE)


def test_registers_of_a_warpgroup() -> None:
    move = "if (t < 128) decrease_registers<40>(); else increase_registers<232>();\n"
    run(FILL + move, block=256)
    with pytest.raises(EmulationError, match="multiple of 8"):
        run("decrease_registers<20>();")


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "sm_120"])
def test_products_exist_for_sm_90_only(arch: str) -> None:
    with pytest.raises(EmulationError, match="wgmma_fence"):
        build(write("wgmma_fence();", headers=("platform", "math", "wgmma")), arch=arch)


def test_a_width_that_the_device_lacks_does_not_compile() -> None:
    with pytest.raises(EmulationError, match="no wgmma of this N"):
        run(FILL + "float e[12] = {};\n" + FENCE + "wgmma<Math::TF32, 24>(e, left, right, true);")
