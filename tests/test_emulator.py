"""What goes wrong in a kernel on the CPU is found, and the report says what and where."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jitconv import emulate
from jitconv.emulate import EmulationError, Launch, Schedule, build, execute
from jitconv.errors import EmulatorUnavailableError
from tests.kernels import Kernel, write

pytestmark = pytest.mark.compiler

THREADS = 64


def run(
    body: str,
    x: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    *,
    n: int = 0,
    shared: int = 4 * THREADS,
    block: int = THREADS,
    grid: int = 1,
    **options,
) -> torch.Tensor:
    """Run a written kernel with `a.x`, `a.y`, `a.n`; return y."""
    x = torch.arange(float(block)) if x is None else x
    y = torch.full((block,), float("nan")) if y is None else y
    arguments = struct.pack("<2Qi4x", 0, 0, n)
    execute(write(body), Launch(grid, block, shared), arguments, {0: x, 8: y}, **options)
    return y


def refused(body: str, *expected: str, **options) -> str:
    """The report on a kernel that must fail; it contains each of `expected`."""
    with pytest.raises(EmulationError) as caught:
        run(body, **options)
    message = str(caught.value)
    for text in expected:
        assert text in message, message
    return message


# ---- Memory ---------------------------------------------------------------------------------


def test_read_one_element_past_a_tensor() -> None:
    refused(
        "a.y[t] = a.x[t + 1];",
        "READ of size 4",
        "written.cu:1",
        "thread 63 of 64",
        "block 0 of 1",
        "outside the (64,) tensor at argument offset 0",
        "offset 256",
    )


def test_write_one_element_before_a_tensor() -> None:
    refused("a.y[t - 1] = 0;", "WRITE of size 4", "thread 0 of 64", "offset -4")


def test_read_of_the_storage_around_a_view() -> None:
    storage = torch.zeros(3 * THREADS)
    view = storage[THREADS : 2 * THREADS]
    refused("a.y[t] = a.x[t + 1];", "READ of size 4", x=view)
    refused("a.y[t] = a.x[t - 1];", "READ of size 4", x=view)


def test_read_far_past_a_tensor() -> None:
    refused("a.y[t] = a.x[t + 20000000];", "READ", "thread 0 of 64")


def test_null_pointer() -> None:
    with pytest.raises(EmulationError, match="null pointer"):
        execute(write("a.y[t] = a.x[t];"), Launch(1, 32), bytes(24), {8: torch.zeros(32)})


def test_access_past_shared_memory() -> None:
    refused("shared[t + 1] = 0;", "WRITE of size 4", "shared memory of 256 bytes, offset 256")


def test_misaligned_vector_access() -> None:
    refused(
        "a.y[t] = load_vector<4>(a.x + t).element[0];",
        "misaligned address",
        "thread 1 of 64",
        x=torch.zeros(THREADS + 3),
    )


def test_a_view_is_as_misaligned_as_it_is_on_the_device() -> None:
    body = "a.y[t] = load_vector<4>(a.x + 4 * t).element[0];"
    storage = torch.arange(4.0 * THREADS + 1)
    refused(body, "misaligned address", x=storage[1:])
    assert torch.equal(run(body, storage[:-1]), storage[:-1:4])


def test_undefined_arithmetic() -> None:
    refused("a.y[t] = static_cast<float>(1 << (t + 1));", "shift exponent 32")
    refused("a.y[t] = static_cast<float>(2147483647 + t);", "signed integer overflow")
    refused("a.y[t] = static_cast<float>(1 / (t - 5));", "division by zero")


def test_uninitialised_shared_memory() -> None:
    refused("a.y[t] = shared[t];", "depends on the schedule", "element [0] of the (64,) tensor")


@pytest.mark.parametrize("swallow", ["fmaxf", "fminf"])
def test_uninitialised_shared_memory_that_a_maximum_swallows(swallow: str) -> None:
    refused(f"a.y[t] = {swallow}(shared[t], a.x[t]);", "depends on the schedule")


def test_uninitialised_index() -> None:
    refused("a.y[t] = a.x[reinterpret_cast<int*>(shared)[t]];", "READ")


def test_shared_memory_does_not_outlive_its_block() -> None:
    body = "if (blockIdx.x == 0) { shared[t] = 0; } else { a.y[t] = shared[t]; }"
    # Block by block forward, the poison of the second block is what both schedules must see.
    refused(body, "depends on the schedule", grid=2)


def test_static_shared_memory_is_refused() -> None:
    refused("__shared__ float buffer[4]; buffer[0] = 0;", "use jitconv::shared_memory()")


# ---- Barriers -------------------------------------------------------------------------------


def test_missing_barrier() -> None:
    body = "shared[t] = a.x[t]; {} a.y[t] = shared[(t + 1) % 64];"
    refused(body.format(""), "depends on the schedule", "forward, late landing", "reversed")
    assert torch.equal(run(body.format("__syncthreads();")), torch.arange(64.0).roll(-1))


def test_barrier_that_some_threads_never_reach() -> None:
    refused(
        "if (t < 32) return;\n__syncthreads();",
        "no thread of the block can go on",
        "threads 0-31 exited",
        "threads 32-63 wait at __syncthreads(), written.cu:2",
    )


def test_barriers_in_two_branches() -> None:
    refused(
        "if (t < 32) {\n__syncthreads();\n} else {\n__syncthreads();\n}",
        "different __syncthreads()",
        "written.cu:2",
        "written.cu:4",
    )


def test_barrier_against_shuffle() -> None:
    refused(
        "if (t < 8) { __syncthreads(); } else { __shfl_sync(0xffffffffu, t, 0); }",
        "threads 0-7 wait at __syncthreads()",
        "threads 8-31 wait at __shfl_sync with mask 0xffffffff",
    )


def test_shuffle_with_lanes_missing() -> None:
    refused(
        "if (t % 32 != 3) a.y[t] = __shfl_xor_sync(0xffffffffu, a.x[t], 1);",
        "threads 3, 35 exited",
        "__shfl_xor_sync with mask 0xffffffff",
    )


def test_shuffle_with_unequal_masks() -> None:
    refused(
        "a.y[t] = __shfl_sync(t < 16 ? 0xffffffffu : 0xffff0000u, a.x[t], 20);",
        "threads 0-15 wait at __shfl_sync with mask 0xffffffff",
        "threads 16-31 exited",
        block=32,
    )


def test_shuffle_from_a_lane_outside_the_mask() -> None:
    refused(
        "if (t < 16) a.y[t] = __shfl_down_sync(0x0000ffffu, a.x[t], 1);",
        "thread 15 reads lane 16, which is not in the mask 0x0000ffff",
    )


def test_shuffle_by_a_lane_outside_its_own_mask() -> None:
    refused("a.y[t] = __shfl_sync(0xfffffffeu, a.x[t], 1);", "thread 0 is lane 0, which its own mask")


def test_shuffle_among_whichever_lanes_are_active() -> None:
    refused("a.y[t] = __shfl_sync(__activemask(), a.x[t], 0);", "which is not in the mask")


def test_missing_syncwarp() -> None:
    body = "shared[t] = a.x[t]; {} a.y[t] = shared[t ^ 1];"
    refused(body.format(""), "depends on the schedule")
    run(body.format("__syncwarp();"))


def test_barrier_of_one_warp_does_not_order_another() -> None:
    refused("shared[t] = a.x[t]; __syncwarp(); a.y[t] = shared[t ^ 32];", "depends on the schedule")


def test_named_barrier_counts() -> None:
    refused("named_barrier_sync(1, 48);", "48 threads is not a multiple of 32")
    refused("named_barrier_sync(0, 64);", "must be 1 to 15")
    refused("named_barrier_sync(1, t < 32 ? 32 : 64);", "threads 32-63 wait at named barrier 1")
    refused("if (t < 40) named_barrier_sync(1, t < 16 ? 64 : 32);", "counts on 64 threads, another on 32")
    refused("if (t < 32) named_barrier_arrive(2, 64);", "32 of 64 threads have arrived at named barrier 2")


def test_result_that_depends_on_the_order_of_atomics() -> None:
    body = "atomicAdd(a.y, t == 0 ? 1e8f : 1.0f);"
    refused(body, "depends on the schedule", "element [0]", y=torch.zeros(1))


def test_result_that_depends_on_the_order_of_blocks() -> None:
    refused("if (t == 0) a.y[0] = static_cast<float>(blockIdx.x);", "depends on the schedule", grid=2)


# ---- Asynchronous copies --------------------------------------------------------------------

COPY = "cp_async<4>(&shared[t], &a.x[t]); cp_async_commit_group();"


def test_read_before_the_wait_for_a_copy() -> None:
    refused(COPY + "a.y[t] = shared[t];", "depends on the schedule")
    refused(COPY + "cp_async_wait_group<1>(); a.y[t] = shared[t];", "depends on the schedule")
    assert torch.equal(run(COPY + "cp_async_wait_group<0>(); a.y[t] = shared[t];"), torch.arange(64.0))


def test_source_overwritten_before_a_copy_has_landed() -> None:
    body = COPY + "a.x[t] = -1; cp_async_wait_group<0>(); a.y[t] = shared[t];"
    refused(body, "depends on the schedule")


def test_destination_written_before_a_copy_has_landed() -> None:
    body = COPY + "shared[t] = -1; cp_async_wait_group<0>(); a.y[t] = shared[t];"
    refused(body, "depends on the schedule")


def test_copy_of_another_thread_read_without_a_barrier() -> None:
    body = COPY + "cp_async_wait_group<0>(); {} a.y[t] = shared[t ^ 1];"
    refused(body.format(""), "depends on the schedule")
    run(body.format("__syncthreads();"))


def test_copy_out_of_bounds_is_reported_where_it_is_issued() -> None:
    refused("\ncp_async<4>(&shared[t], &a.x[t + 1]);", "cp.async: 4 bytes at buffer 0", "written.cu:2")
    refused("\ncp_async<4>(&shared[t + 1], &a.x[t]);", "shared memory + 256 are out of bounds")


def test_misaligned_copy() -> None:
    refused("cp_async<16>(shared + 4 * (t % 16), a.x + t % 16 + 1);", "is not a multiple of 16")


BARRIER = """
uint64_t* barrier = reinterpret_cast<uint64_t*>(shared + 64);
if (t == 0) { mbarrier_init(barrier, ARRIVALS); fence_mbarrier_init(); }
__syncthreads();
"""
LOAD = "mbarrier_arrive_expect_tx(barrier, 256); bulk_load(shared, a.x, 256, barrier);"


def bulk(body: str, arrivals: int = 1) -> str:
    return BARRIER.replace("ARRIVALS", str(arrivals)) + body


def test_read_before_the_phase_of_a_bulk_copy() -> None:
    body = bulk(f"if (t == 0) {{ {LOAD} }} a.y[t] = shared[t];")
    refused(body, "the block ends with 1 bulk copies", shared=264)
    body = bulk(f"if (t == 0) {{ {LOAD} }} a.y[t] = shared[t]; mbarrier_wait(barrier, 0);")
    refused(body, "depends on the schedule", shared=264)
    body = bulk(f"if (t == 0) {{ {LOAD} }} mbarrier_wait(barrier, 0); a.y[t] = shared[t];")
    assert torch.equal(run(body, shared=264), torch.arange(64.0))


def test_phase_that_never_completes() -> None:
    refused(
        bulk("mbarrier_arrive(barrier); mbarrier_wait(barrier, 0);", 65),
        "the mbarrier at shared memory + 256 for its phase of parity 0, which lacks 1 of 65 arrivals",
        shared=264,
    )
    load = LOAD.replace("tx(barrier, 256", "tx(barrier, 260")
    body = bulk(f"if (t == 0) {{ {load} }} mbarrier_wait(barrier, 0);")
    refused(body, "lacks 0 of 1 arrivals and 4 bytes", shared=264)


def test_phase_missed_by_a_late_thread() -> None:
    body = "mbarrier_arrive(barrier); if (t == 0) { mbarrier_wait(barrier, 0); mbarrier_wait(barrier, 1); }"
    refused(bulk(body, 32), "mbarrier", shared=264)


def test_misused_mbarrier() -> None:
    refused("if (t == 0) mbarrier_arrive(reinterpret_cast<uint64_t*>(shared));", "no mbarrier has been")
    refused(bulk("if (t == 0) mbarrier_init(barrier, 1);"), "a second time", shared=264)
    refused(bulk("if (t == 0) { shared[64] = 0; mbarrier_arrive(barrier); }"), "overwritten", shared=264)
    refused(bulk("mbarrier_wait(barrier, 2);"), "parity 2", shared=264)
    refused(bulk("", 0), "0 arrivals never completes", shared=264)
    two = "if (t == 0) { mbarrier_arrive_expect_tx(barrier, 16); mbarrier_arrive(barrier); }"
    refused(bulk(two), "one more than the 1 arrivals", shared=264)


def test_misused_bulk_copy() -> None:
    def issue(call: str) -> str:
        return bulk(f"if (t == 0) {{ {call} }}")

    refused(issue("bulk_load(shared, a.x + 1, 16, barrier);"), "not a multiple of 16", shared=264)
    refused(issue("bulk_load(shared, a.x, 24, barrier);"), "24 bytes is not", shared=264)
    refused(issue("bulk_load(shared, a.x + 56, 48, barrier);"), "48 bytes at buffer 0", shared=264)
    refused(issue("bulk_load(shared + 60, a.x, 32, barrier);"), "out of bounds", shared=264)
    no_fence = issue(LOAD).replace("fence_mbarrier_init();", "")
    refused(no_fence, "no fence_mbarrier_init()", shared=264)


STORE = "if (t == 0) {{ bulk_store(a.y, shared, 256); bulk_commit_group(); {} }}"


def test_bulk_store_without_fence_or_wait() -> None:
    fill = "shared[t] = a.x[t]; {} __syncthreads();"
    wait = STORE.format("bulk_wait_group_read<0>();")
    fenced = fill.format("fence_proxy_async();")
    assert torch.equal(run(fenced + wait), torch.arange(64.0))
    refused(fill.format("") + wait, "no fence_proxy_async()")
    refused(fenced + STORE.format(""), "no bulk_wait_group_read()")
    early = STORE.format("shared[0] = 5; bulk_wait_group_read<0>();")
    refused(fenced + early, "overwritten before the wait")


def test_only_the_writer_can_fence_its_writes() -> None:
    body = "shared[t] = a.x[t]; if (t == 0) fence_proxy_async(); __syncthreads();"
    refused(body + STORE.format("bulk_wait_group_read<0>();"), "no fence_proxy_async()")


def test_bulk_copies_do_not_exist_below_sm_90() -> None:
    with pytest.raises(EmulationError, match="bulk_commit_group"):
        build(write("bulk_commit_group();"), arch="sm_80")


# ---- Tensors --------------------------------------------------------------------------------


def test_strided_outputs_leave_the_gaps_between_their_elements() -> None:
    storage = torch.full((THREADS, 2), -1.0)
    run("a.y[2 * t] = a.x[t];", y=storage[:, 0])
    assert torch.equal(storage[:, 0], torch.arange(64.0))
    assert (storage[:, 1] == -1).all()


def test_write_into_the_gap_of_a_strided_output() -> None:
    storage = torch.full((THREADS, 2), -1.0)
    refused(
        "a.y[2 * t] = 0; if (t == 5) a.y[11] = 0;",
        "write into the gap between elements",
        "offset 44",
        "argument offset 8",
        y=storage[:, 0],
    )
    assert (storage == -1).all()


def test_read_from_the_gap_of_a_strided_input() -> None:
    x = torch.zeros(THREADS, 2)[:, 0]
    assert torch.isnan(run("a.y[t] = t < 63 ? a.x[2 * t + 1] : NAN;", x)).all()


def test_overlapping_tensors_share_memory() -> None:
    storage = torch.arange(2.0 * THREADS)
    x, y = storage[:THREADS], storage[32 : 32 + THREADS]
    run("float v = a.x[t]; __syncthreads(); a.y[t] = -v; __syncthreads(); a.x[t % 32] = 7;", x, y)
    assert (storage[:32] == 7).all()
    assert torch.equal(storage[32:96], -torch.arange(64.0))
    assert torch.equal(storage[96:], torch.arange(96.0, 128.0))


def test_one_tensor_under_two_pointers() -> None:
    x = torch.arange(float(THREADS))
    assert torch.equal(run("a.y[t] = 2 * a.x[t];", x, x), 2 * torch.arange(float(THREADS)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.int64])
def test_bytes_of_every_dtype_pass_through(dtype: torch.dtype) -> None:
    x = torch.arange(THREADS).to(dtype)
    y = torch.zeros_like(x)
    body = "const int n = a.n; for (int i = 0; i < n; ++i) "
    body += "reinterpret_cast<uint8_t*>(a.y)[n * t + i] = reinterpret_cast<uint8_t*>(a.x)[n * t + i];"
    assert torch.equal(run(body, x, y, n=x.element_size()), x)


def test_empty_tensors() -> None:
    empty = torch.zeros(0)
    run("if (t < a.n) a.y[t] = a.x[t];", empty, empty)
    refused("a.y[0] = 1;", "WRITE of size 4", y=torch.zeros(0))


def test_requires_grad_and_expanded_tensors() -> None:
    x = torch.tensor([3.0], requires_grad=True).expand(THREADS)
    assert (run("a.y[t] = a.x[0];", x) == 3).all()


def test_a_failed_run_changes_nothing() -> None:
    y = torch.zeros(THREADS)
    refused("a.y[t] = 1; __syncthreads(); a.y[t + 1] = 2;", "WRITE of size 4", y=y)
    assert (y == 0).all()


# ---- Programs -------------------------------------------------------------------------------


def test_one_program_serves_many_sizes() -> None:
    kernel = write("if (t < a.n) a.y[t] = a.x[t];")
    program = build(kernel)
    before = program.stat().st_mtime_ns
    for n in (1, 33, 64):
        x = torch.arange(float(n))
        y = torch.zeros(n)
        execute(kernel, Launch(1, 64), struct.pack("<2Qi4x", 0, 0, n), {0: x, 8: y})
        assert torch.equal(x, y)
    assert build(kernel) == program
    assert program.stat().st_mtime_ns == before


def test_a_changed_header_builds_another_program() -> None:
    kernel = write("a.y[t] = warp_sum(a.x[t]);")
    header = kernel.headers["device/warp.cuh"].replace("value += ", "value -= ")
    other = Kernel(kernel.name, kernel.source, {**kernel.headers, "device/warp.cuh": header})
    assert build(kernel) != build(other)
    assert build(kernel) != build(kernel, sanitize=False)
    assert build(kernel) != build(kernel, arch="sm_80")


def test_an_error_in_the_text_names_its_line() -> None:
    refused("\n\na.y[t] = undeclared;", "does not compile", "written.cu:3", "undeclared")


@pytest.mark.parametrize("sanitize", [True, False])
def test_a_full_block_of_threads(sanitize: bool) -> None:
    body = "shared[t] = a.x[t]; __syncthreads(); a.y[t] = shared[1023 - t];"
    y = run(body, block=1024, shared=4096, sanitize=sanitize)
    assert torch.equal(y, torch.arange(1024.0).flip(0))


def test_a_fault_of_the_fast_build_is_reported() -> None:
    body = "a.y[t] = a.x[(t + 1) * 2000000000ll];"
    refused(body, "Segmentation fault", "thread 0 of 64", sanitize=False)


def test_deep_stacks_fit() -> None:
    body = "float local[4096]; for (int i = 0; i < 4096; ++i) local[i] = a.x[t] + i;"
    body += "float sum = 0; for (int i = 0; i < 4096; ++i) sum += local[(i * 7) % 4096] - i; a.y[t] = sum;"
    assert not torch.isnan(run(body)).any()


def test_an_endless_loop_is_given_up() -> None:
    refused("volatile int stop = 0; while (!stop) {}", "still running after 1 s", timeout=1.0)


def test_grid_of_nothing() -> None:
    assert torch.isnan(run("a.y[t] = 1;", grid=0)).all()


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (Launch(-1, 32), "launch.grid = -1"),
        (Launch(1, 0), "launch.block = 0"),
        (Launch(1, 1025), "launch.block = 1025"),
        (Launch(1, 32, -4), "launch.shared_bytes = -4"),
    ],
)
def test_launches_that_no_gpu_takes(launch: Launch, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        execute(write("a.y[t] = 1;"), launch, bytes(24), {})


def test_arguments_that_do_not_fit() -> None:
    kernel = write("a.y[t] = 1;")
    y = torch.zeros(32)
    for offset in (4, 24, -8):
        with pytest.raises(ValueError, match=re.escape(f"pointers[{offset}]")):
            execute(kernel, Launch(1, 32), bytes(24), {offset: y})
    with pytest.raises(EmulationError, match="parameter has 24 bytes"):
        execute(kernel, Launch(1, 32), bytes(16), {8: y})
    with pytest.raises(ValueError, match="schedules is empty"):
        execute(kernel, Launch(1, 32), bytes(24), {8: y}, schedules=())
    with pytest.raises(ValueError, match="expected a CPU tensor"):
        execute(kernel, Launch(1, 32), bytes(24), {8: y.to("meta")})
    with pytest.raises(ValueError, match="arch 'hopper'"):
        build(kernel, arch="hopper")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmulatorUnavailableError, match=r"apt-get install g\+\+"):
        emulate.compiler()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EmulatorUnavailableError, match="CXX='no-such-compiler'"):
        emulate.compiler()


def test_processes_that_build_at_once_do_not_meet() -> None:
    code = "from tests.kernels import write; from jitconv.emulate import build; print(build(write('a.y[t] = 12345;')))"
    command = [sys.executable, "-c", code]
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    several = [
        subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [process.communicate()[0] for process in several]
    assert [process.returncode for process in several] == [0, 0, 0]
    assert len(set(outputs)) == 1
    assert os.access(outputs[0].strip(), os.X_OK)


def test_every_schedule_finds_its_name_in_the_report() -> None:
    for schedule in (Schedule("random", "early", seed=9), Schedule("reversed", "late")):
        with pytest.raises(EmulationError, match=f"schedule {schedule.order}.*{schedule.landing}"):
            run("a.y[t + 1] = 0;", schedules=[schedule])


# ---- Races on shared memory -----------------------------------------------------------------


def raced(body: str, *expected: str, **options) -> None:
    refused(body, "race at shared memory", *expected, races=True, **options)


def test_race_that_every_schedule_hides() -> None:
    # The same value from every thread: no order of the threads makes a difference.
    body = "shared[0] = 1;\na.y[t] = shared[0];"
    run(body)
    raced(body, "write by thread 0 at written.cu:1", "by thread 1 at written.cu:1")


def test_race_between_read_and_write() -> None:
    raced(
        "shared[t] = 1; __syncthreads();\na.y[t] = shared[t ^ 1];\nshared[t] = 2;",
        "shared memory + 0",
        "write by thread 0 at written.cu:3",
        "read by thread 1 at written.cu:2",
    )


def test_race_with_one_of_many_readers() -> None:
    body = "shared[t] = 1; __syncthreads(); a.y[t] = shared[0];\n{}\nif (t == 9) shared[0] = 2;"
    raced(body.format("__syncwarp();"), "thread 9 at written.cu:3")
    run(body.format("__syncthreads();"), races=True)


def test_shuffle_taken_for_a_memory_barrier() -> None:
    body = "shared[t] = a.x[t]; __shfl_sync(0xffffffffu, t, 0); a.y[t] = shared[t ^ 1];"
    run(body)
    raced(body)


def test_race_of_neighbouring_halves() -> None:
    body = "half_t* h = reinterpret_cast<half_t*>(shared); h[t] = half_t{{1}}; {} h[t {}] = half_t{{2}};"
    run(body.format("", ""), races=True)
    raced(body.format("", "^ 1"))
    run(body.format("__syncthreads();", "^ 1"), races=True)


def test_read_of_what_nobody_has_written() -> None:
    # The value does not reach the result, so that only the reading itself shows.
    body = "if (t % 2 == 0) shared[t] = 0; __syncthreads();\nvolatile float unused = shared[t];"
    run(body)
    refused(body, "shared memory + 4 has not been written yet", "thread 1 at written.cu:2", races=True)


def test_race_with_a_copy_in_flight() -> None:
    barrier_before_the_wait = "__syncthreads(); cp_async_wait_group<0>(); a.y[t] = shared[t ^ 1];"
    raced(COPY + barrier_before_the_wait, "by an asynchronous copy of thread")
    run(COPY + "cp_async_wait_group<0>(); __syncthreads(); a.y[t] = shared[t ^ 1];", races=True)
    raced("shared[t ^ 1] = 0;" + COPY + "cp_async_wait_group<0>();", "by an asynchronous copy of thread")


def test_race_with_a_bulk_copy_in_flight() -> None:
    raced(bulk(f"if (t == 0) {{ {LOAD} }} a.y[t] = shared[t]; mbarrier_wait(barrier, 0);"), shared=264)
    raced(bulk(f"shared[t] = 0; if (t == 0) {{ {LOAD} }} mbarrier_wait(barrier, 0);"), shared=264)


def test_atomics_do_not_race() -> None:
    body = "if (t == 0) shared[0] = 0; __syncthreads(); atomicAdd(shared, 1.0f); __syncthreads(); a.y[t] = shared[0];"
    assert (run(body, races=True) == 64).all()
