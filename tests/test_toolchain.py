"""NVRTC: cubins for every architecture, and errors that lead to the template line."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jitconv import toolchain
from jitconv.architectures import KNOWN, arch_of_capability, limits_of, normalize_arch
from jitconv.diagnostics import SourceMap, find_errors, find_serialized_wgmma
from jitconv.errors import (
    CompileError,
    DriverError,
    NVRTCNotFoundError,
    NVRTCVersionError,
    ToolchainError,
    UnsupportedArchitectureError,
)
from jitconv.kernel_resources import parse_resources
from jitconv.toolchain import compile_cubin, compile_ptx

HEADERS = {
    "device/outer.cuh": '#pragma once\n#include "device/inner.cuh"\n',
    "device/inner.cuh": (
        "#pragma once\n\nnamespace jitconv {\n"
        "__device__ inline float square(float x) { return x * x; }\n}\n"
    ),
}
SOURCE = """\
#line 1 "templates/conv.cu.j2"
#include "device/outer.cuh"
#line 12 "templates/conv.cu.j2"
struct Arguments { float* out; const float* in; int n; };

extern "C" __global__ void __launch_bounds__(128) kernel(const Arguments arguments) {
    __shared__ float tile[32];
    tile[threadIdx.x & 31] = arguments.in[threadIdx.x];
    __syncthreads();
#line 20 "templates/conv.cu.j2"
    arguments.out[threadIdx.x] = jitconv::square(tile[0]);
}
"""
# 64 accumulators that all stay alive: cannot fit in 32 registers.
WIDE = """\
struct Arguments { float* out; const float* in; int n; };
extern "C" __global__ void kernel(const Arguments arguments) {
    float acc[64];
    for (int i = 0; i < 64; i++) acc[i] = arguments.in[i * threadIdx.x];
    for (int j = 0; j < arguments.n; j++) {
#pragma unroll
        for (int i = 0; i < 64; i++) acc[i] = acc[i] * acc[(i + 7) % 64] + arguments.in[i * j];
    }
    for (int i = 0; i < 64; i++) arguments.out[i * threadIdx.x] = acc[i];
}
"""
WGMMA = """\
#line 1 "templates/wgmma.cu.j2"
struct Arguments { float* out; int n; unsigned long long descriptor; };
extern "C" __global__ void kernel(const Arguments arguments) {
    float d[4] = {0, 0, 0, 0};
    asm volatile("wgmma.fence.sync.aligned;");
    for (int i = 0; i < arguments.n; i++) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%0,%1,%2,%3}, %4, %4, 1, 1, 1;"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(arguments.descriptor));
        d[0] += 1;
    }
    asm volatile("wgmma.commit_group.sync.aligned;");
    asm volatile("wgmma.wait_group.sync.aligned 0;");
    arguments.out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


def build(source=SOURCE, arch="sm_90a", headers=HEADERS, **more):
    return compile_cubin(source, name="kernel", arch=arch, headers=headers, **more)


def failure(*args, **more) -> CompileError:
    with pytest.raises(CompileError) as caught:
        build(*args, **more)
    return caught.value


# --- architectures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("90", "sm_90a"),
        ("9.0", "sm_90a"),
        ("sm_90", "sm_90a"),
        ("sm_90a", "sm_90a"),
        ("compute_90", "sm_90a"),
        ("10.0", "sm_100a"),
        ("sm_100", "sm_100a"),
        ("8.6", "sm_86"),
        ("SM_120", "sm_120"),
        ("12.0", "sm_120"),
        ("sm_103", "sm_103"),
    ],
)
def test_an_architecture_has_one_name(given, expected):
    assert normalize_arch(given) == expected


def test_a_device_gets_code_that_may_use_its_tensor_cores():
    assert arch_of_capability((9, 0)) == "sm_90a"
    assert arch_of_capability((12, 0)) == "sm_120"


@pytest.mark.parametrize("text", ["", "hopper", "sm90", "sm_", "9.0.1", "sm_90x"])
def test_text_that_names_no_architecture_is_refused(text):
    with pytest.raises(ValueError, match=r"arch: .*expected one like 'sm_80'"):
        normalize_arch(text)


@pytest.mark.parametrize("arch", ["sm_70", "6.1"])
def test_gpus_before_turing_are_refused_with_a_remedy(arch):
    with pytest.raises(UnsupportedArchitectureError, match=r"sm_75.*torch's own operators") as e:
        build(arch=arch)
    assert isinstance(e.value, ToolchainError)
    assert isinstance(e.value, DriverError)


def test_an_unknown_gpu_is_not_promised_more_shared_memory_than_it_may_have():
    assert limits_of("sm_90").shared_block == 227 * 1024
    assert limits_of("sm_88").shared_block <= 163 * 1024
    assert limits_of("sm_121").shared_block == 99 * 1024


# --- compiling -------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", KNOWN)
def test_every_architecture_compiles_and_reports_its_resources(arch):
    compiled = build(arch=arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.arch == arch
    assert 1 <= compiled.resources.registers <= 255
    assert compiled.resources.static_shared == 32 * 4
    assert compiled.resources.barriers == 1
    assert not compiled.resources.spills
    assert compiled.nvrtc_version >= (12, 8)
    assert compiled.milliseconds > 0


def test_architectures_that_only_nvrtc_knows_are_passed_on():
    assert build(arch="sm_87").arch == "sm_87"


def test_a_spill_is_seen():
    resources = build(WIDE, options=("--maxrregcount=32",)).resources
    assert resources.registers == 32
    assert resources.spills
    assert resources.spill_stores > 0
    assert resources.spill_loads > 0
    assert resources.stack_bytes > 0
    assert not build(WIDE).resources.spills


def test_a_spill_in_a_called_function_counts():
    # Hidden spills would make a slow tile look like a fast one to the planner.
    log = """\
ptxas info    : Compiling entry function 'kernel' for 'sm_80'
ptxas info    : Function properties for kernel
ptxas         .     8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 2 barriers, 128 bytes smem, 376 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Function properties for helper
    16 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
    512 bytes stack frame, 512 bytes spill stores, 512 bytes spill loads
ptxas info    : Used 255 registers
"""
    resources = parse_resources(log, "kernel")
    assert (resources.registers, resources.barriers) == (40, 2)
    assert (resources.stack_bytes, resources.spill_stores, resources.spill_loads) == (24, 4, 12)
    assert (resources.static_shared, resources.constant_bytes) == (128, 384)
    assert parse_resources(log, "other").registers == 255


def test_resources_are_never_guessed():
    with pytest.raises(ToolchainError, match=r"'absent' \(kernels in it: kernel\)"):
        compile_cubin(SOURCE, name="absent", arch="sm_80", headers=HEADERS)
    with pytest.raises(ToolchainError, match="kernels in it: none"):
        parse_resources("", "kernel")


def test_division_and_square_root_stay_exact():
    # Fast math would pass every loose test and break the error bounds.
    source = """\
struct Arguments { float* out; };
extern "C" __global__ void kernel(const Arguments a) { a.out[0] = sqrtf(a.out[1] / a.out[2]); }
"""
    ptx = compile_ptx(source, name="kernel", arch="sm_90", headers={})
    assert "div.rn.f32" in ptx
    assert "sqrt.rn.f32" in ptx
    assert ".ftz" not in ptx
    assert ".target sm_90a" in ptx


def test_threads_do_not_mix_up_their_programs():
    expected = build().cubin
    with ThreadPoolExecutor(8) as pool:
        cubins = list(pool.map(lambda _: build().cubin, range(8)))
    assert cubins == [expected] * 8


def test_the_bytes_do_not_depend_on_the_process_or_its_directory(tmp_path):
    program = (
        "import hashlib, pickle, sys\n"
        "from jitconv.toolchain import compile_cubin\n"
        "source, headers = pickle.loads(sys.stdin.buffer.read())\n"
        "c = compile_cubin(source, name='kernel', arch='sm_90', headers=headers)\n"
        "print(hashlib.sha256(c.cubin).hexdigest())\n"
    )
    root = Path(toolchain.__file__).parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps((SOURCE, HEADERS)),
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"},
        check=True,
    )
    assert done.stdout.decode().strip() == hashlib.sha256(build().cubin).hexdigest()


def test_the_order_of_the_headers_does_not_change_the_bytes():
    assert build(headers=dict(reversed(HEADERS.items()))).cubin == build().cubin


def test_a_header_on_disk_is_not_picked_up(tmp_path, monkeypatch):
    # It would be in no key: a stale kernel after the next edit of that file.
    (tmp_path / "device").mkdir()
    for name, text in HEADERS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    error = failure(headers={})
    assert (error.file, error.line) == ("templates/conv.cu.j2", 1)
    assert "device/outer.cuh" in error.message
    assert "Pass every included header in `headers`" in str(error)


@pytest.mark.parametrize(
    "option", ["--gpu-architecture=sm_80", "-arch=sm_80", "-I/usr/include", "--include-path=/x"]
)
def test_an_option_that_no_key_covers_is_refused(option):
    with pytest.raises(ValueError, match=r"options: .* is set by jitconv"):
        build(options=(option,))


# --- errors ----------------------------------------------------------------------------------


def test_an_error_in_the_template_names_its_line_and_the_constants():
    error = failure(
        SOURCE.replace("tile[0]", "missing"), constants={"OC_TILE": 8, "DTYPE": "float"}
    )
    assert (error.file, error.line) == ("templates/conv.cu.j2", 20)
    assert error.message == 'identifier "missing" is undefined'
    assert "jitconv::square(missing)" in error.excerpt
    assert ">    20 |" in error.excerpt
    assert error.constants == {"OC_TILE": 8, "DTYPE": "float"}
    text = str(error)
    assert "templates/conv.cu.j2(20): identifier" in text
    assert "  OC_TILE = 8\n  DTYPE = 'float'" in text
    assert "sm_90a" in text
    assert "Correct the lines marked above" in text
    assert "missing" in error.log
    assert error.source == SOURCE.replace("tile[0]", "missing")


def test_an_error_in_a_nested_header_shows_that_header():
    headers = {**HEADERS, "device/inner.cuh": HEADERS["device/inner.cuh"].replace("x * x", "x * y")}
    error = failure(headers=headers)
    assert (error.file, error.line) == ("device/inner.cuh", 4)
    assert ">     4 | __device__ inline float square(float x) { return x * y; }" in error.excerpt


def test_an_error_in_an_included_header_is_not_blamed_on_the_template():
    headers = {**HEADERS, "device/outer.cuh": HEADERS["device/outer.cuh"] + "int;;garbage x;\n"}
    error = failure(headers=headers)
    assert (error.file, error.line) == ("device/outer.cuh", 3)


def test_an_instantiation_says_where_it_comes_from():
    source = """\
#line 30 "templates/conv.cu.j2"
template <class T> __device__ int size(T x) { return x.size; }
struct Arguments { int* out; };
extern "C" __global__ void kernel(const Arguments a) { a.out[0] = size(1.0f); }
"""
    error = failure(source)
    assert (error.file, error.line) == ("templates/conv.cu.j2", 30)
    assert "detected during instantiation" in error.message
    assert "[with T=float]" in error.message


def test_a_template_line_rendered_many_times_shows_the_copy_that_failed():
    line = '#line 5 "templates/conv.cu.j2"\n    a.out[{0}] = {1};\n'
    source = (
        "struct Arguments { int* out; };\n"
        'extern "C" __global__ void kernel(const Arguments a) {\n'
        + "".join(line.format(i, "nothing" if i == 2 else i) for i in range(4))
        + "}\n"
    )
    error = failure(source)
    assert (error.file, error.line) == ("templates/conv.cu.j2", 5)
    assert ">     5 |     a.out[2] = nothing;" in error.excerpt


def test_source_without_line_directives_is_addressed_as_it_is():
    error = failure("struct Arguments {};\nint broken\n")
    assert error.file == "kernel.cu"
    assert error.excerpt


def test_an_error_in_inline_ptx_names_the_header_line():
    # ptxas itself knows only a line of PTX, which nobody has written.
    headers = {
        "device/inline.cuh": "#pragma once\n"
        "__device__ inline void wrong(float* p) {\n"
        "    p[1] = 2;\n"
        '    asm volatile("wrong.instruction;");\n'
        "}\n"
    }
    source = """\
#line 7 "templates/conv.cu.j2"
#include "device/inline.cuh"
struct Arguments { float* out; };
extern "C" __global__ void kernel(const Arguments a) { wrong(a.out); }
"""
    error = failure(source, headers=headers)
    assert (error.file, error.line) == ("device/inline.cuh", 4)
    assert "wrong.instruction" in error.excerpt


def test_an_instruction_of_another_architecture_names_the_template_line():
    error = failure(WGMMA, arch="sm_100a", headers={})
    assert (error.file, error.line) == ("templates/wgmma.cu.j2", 4)
    assert "wgmma.fence" in error.message


def test_one_mistake_in_an_unrolled_loop_is_reported_once():
    error = failure(WGMMA, arch="sm_100a", headers={})
    assert len(set(error.diagnostics)) == len(error.diagnostics)


def test_serialised_wgmma_is_an_error():
    # Right results at a fraction of the speed, and nothing but a remark in the log.
    error = failure(WGMMA, headers={})
    assert "serialized" in error.message
    assert "wgmma.wait_group" in str(error)


def test_the_word_serialized_in_the_source_is_no_error():
    source = SOURCE.replace("float tile[32]", "float tile[32]; int serialized")
    assert "serialized" in build(source).log


def test_too_much_shared_memory_says_to_use_a_smaller_tile():
    error = failure(SOURCE.replace("tile[32]", "tile[32000]"), arch="sm_80")
    assert error.file is None
    assert "too much shared data" in error.message
    assert "use a smaller tile" in str(error)


def test_an_unknown_option_is_not_blamed_on_the_template():
    error = failure(options=("--no-such-option",))
    assert error.file is None
    assert "Correct the options" in str(error)


def test_many_errors_are_summed_up():
    wrong = "".join(f"    wrong{i}();\n" for i in range(9))
    error = failure(SOURCE.replace("    __syncthreads();\n", wrong))
    assert len(error.diagnostics) == 9
    assert "and 4 more" in str(error)


def test_a_nul_between_the_parts_of_a_log_hides_no_error():
    # As NVRTC 12.9 writes it; the toolchain turns the NUL into a line end.
    log = "ptxas info    : 0 bytes gmem\n\n ptxas error   : Entry function 'k' uses too much"
    assert [finding.message for finding in find_errors(log)] == ["Entry function 'k' uses too much"]
    assert "\0" not in failure(SOURCE.replace("tile[32]", "tile[32000]"), arch="sm_80").log


def test_serialised_wgmma_is_found_in_the_words_of_both_majors():
    remark = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to non wgmma instructions defining accumulator registers in function 'k'"
    )
    old, new = find_serialized_wgmma(f"{remark}\n{remark} in line 56")
    assert old.ptx_line is None
    assert new.ptx_line == 56
    assert new.message == old.message


def test_a_line_directive_does_not_shift_the_lines_after_it():
    source_map = SourceMap('a\n#line 40 "t.j2"\nb\nc\n', "k.cu", {})
    assert source_map.names() == {"k.cu", "t.j2"}
    (finding,) = find_errors("t.j2(41): error: wrong\n  c\n  ^\n")
    assert source_map.explain(finding).excerpt == "     40 | b\n>    41 | c"


def test_a_compile_error_survives_pickling():
    # A warm-up in several processes sends it back to the parent.
    error = failure(SOURCE.replace("tile[0]", "missing"), constants={"C": 3})
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.file, copy.line, copy.constants) == (error.file, error.line, {"C": 3})


# --- an installation that is not right -------------------------------------------------------


class FakeNVRTC(types.ModuleType):
    """cuda.bindings.nvrtc with another version, in cuda-python's (status, value...) convention."""

    def __init__(self, version=(13, 0), architectures=(75, 80, 90), log=b"", create_status=0):
        super().__init__("cuda.bindings.nvrtc")
        self.version = version
        self.architectures = list(architectures)
        self.log = log
        self.create_status = create_status
        self.destroyed = 0

    def nvrtcVersion(self):
        return (0, *self.version)

    def nvrtcGetSupportedArchs(self):
        return 0, self.architectures

    def nvrtcGetErrorString(self, status):
        return 0, f"NVRTC_ERROR_{status}".encode()

    def nvrtcCreateProgram(self, *_):
        return self.create_status, "program"

    def nvrtcCompileProgram(self, *_):
        return (7,)

    def nvrtcGetProgramLogSize(self, _):
        return 0, len(self.log) + 1

    def nvrtcGetProgramLog(self, _, buffer):
        buffer[:] = self.log + b"\0"
        return (0,)

    def nvrtcDestroyProgram(self, _):
        self.destroyed += 1
        return (0,)


@pytest.fixture
def install(monkeypatch):
    """Put a module in the place of cuda.bindings.nvrtc, beside a cuda.bindings of a version."""

    def put(module, bindings_version="13.0.1"):
        bindings = types.ModuleType("cuda.bindings")
        bindings.__version__ = bindings_version
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", module)
        toolchain._nvrtc.cache_clear()
        return module

    yield put
    toolchain._nvrtc.cache_clear()


REMEDY = r"pip install 'jitconv\[cu13\]'.*pip install 'jitconv\[cu12\]'"


def test_without_cuda_python_the_extra_is_named(install):
    install(None)  # what makes `import` raise
    with pytest.raises(NVRTCNotFoundError, match=f"cuda-python is not installed.*{REMEDY}"):
        build()


class DynamicLibNotFoundError(RuntimeError):
    """As cuda-pathfinder names it."""


@pytest.mark.parametrize(
    "raised",
    [
        RuntimeError("Failed to dlopen libnvrtc.so.13"),
        DynamicLibNotFoundError('Failure finding "libnvrtc.so.13"'),
        FileNotFoundError("libnvrtc.so.13"),
        OSError("libnvrtc.so.13: cannot open shared object file"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_without_the_library_the_extra_is_named(install, raised):
    fake = FakeNVRTC()

    def no_library():
        raise raised

    fake.nvrtcVersion = no_library
    install(fake)
    with pytest.raises(NVRTCNotFoundError, match=f"libnvrtc.so.13.*{REMEDY}"):
        build()


def test_installing_the_extra_helps_a_running_process(install):
    install(None)
    with pytest.raises(NVRTCNotFoundError):
        toolchain.nvrtc_version()
    install(FakeNVRTC((13, 2)))
    assert toolchain.nvrtc_version() == (13, 2)


def test_an_nvrtc_before_12_9_is_refused(install):
    install(FakeNVRTC((12, 6)), "12.9.0")
    with pytest.raises(NVRTCVersionError, match=f"NVRTC 12.6 .*12.8 or newer.*{REMEDY}"):
        build()


@pytest.mark.parametrize(
    ("version", "bindings", "extra"),
    [((12, 9), "13.4.1", "cu13"), ((13, 0), "12.9.2", "cu12")],
)
def test_an_nvrtc_of_another_major_is_refused(install, version, bindings, extra):
    install(FakeNVRTC(version), bindings)
    with pytest.raises(NVRTCVersionError, match=rf"jitconv\[{extra}\].*LD_LIBRARY_PATH"):
        build()


def test_missing_builtins_are_an_installation_error_not_a_template_error(install):
    fake = install(FakeNVRTC(log=b"nvrtc: error: failed to open libnvrtc-builtins.so.13.0."))
    with pytest.raises(NVRTCNotFoundError, match=f"(?s)builtins.*reinstall.*{REMEDY}"):
        build(arch="sm_80")
    assert fake.destroyed == 1


def test_a_failed_call_names_the_call_and_its_status(install):
    install(FakeNVRTC(create_status=1))
    with pytest.raises(ToolchainError, match="nvrtcCreateProgram failed with NVRTC_ERROR_1"):
        build(arch="sm_80")


def test_a_program_is_freed_when_the_compilation_fails(install):
    fake = install(FakeNVRTC(log=b"templates/conv.cu.j2(20): error: wrong"))
    failure(arch="sm_80")
    assert fake.destroyed == 1


def test_an_architecture_newer_than_nvrtc_says_which_are_known(install):
    install(FakeNVRTC((12, 9)), "12.9.0")
    with pytest.raises(
        UnsupportedArchitectureError, match=f"sm_75, sm_80, sm_90; install a newer.*{REMEDY}"
    ):
        build(arch="sm_120")


def test_an_architecture_that_came_with_a_known_nvrtc_names_it(install):
    install(FakeNVRTC((12, 9)), "12.9.0")
    with pytest.raises(UnsupportedArchitectureError, match=r"install NVRTC 13.0 or newer"):
        build(arch="sm_110")


def test_the_library_in_use_can_be_named():
    toolchain.nvrtc_version()
    assert "libnvrtc.so" in toolchain.nvrtc_path()


def test_importing_the_toolchain_loads_no_cuda_library():
    # torch itself may import cuda.bindings; what matters is that nothing comes on top.
    program = (
        "import sys\n"
        "import torch\n"
        "def cuda():\n"
        "    return {name for name in sys.modules if name.partition('.')[0] == 'cuda'}\n"
        "def libraries():\n"
        "    maps = open('/proc/self/maps').read().split()\n"
        "    return {word for word in maps if 'libcuda' in word or 'libnvrtc' in word}\n"
        "before = cuda(), libraries()\n"
        "import jitconv.toolchain, jitconv.launch, jitconv.disassemble\n"
        "assert (cuda(), libraries()) == before\n"
    )
    root = Path(toolchain.__file__).parents[1]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)


def test_the_drivers_compile_cache_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its hits have an empty log, in which neither spills nor serialised wgmma would show.
    from cuda.bindings import nvrtc

    seen: list[list[bytes]] = []
    compile_program = nvrtc.nvrtcCompileProgram

    def recording(program: object, count: int, options: list[bytes]) -> object:
        seen.append(options)
        return compile_program(program, count, options)

    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", recording)
    compile_cubin(SOURCE, name="kernel", arch="sm_90a", headers=HEADERS)
    compile_ptx(SOURCE, name="kernel", arch="sm_90a", headers=HEADERS)
    assert [b"--no-cache" in options for options in seen] == [True, True]
