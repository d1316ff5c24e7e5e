"""Manifests: readable TOML that names the problems to compile ahead of time.

One table is one call of a public function, under the function's own argument names::

    [block]
    operator = "conv2d"
    input = [8, 64, 56, 56]                 # tensors by their shape
    weight = [128, 64, 3, 3]
    bias = true                             # an optional tensor, by whether it is there
    padding = 1                             # everything else by its value
    dtype = "bfloat16"                      # default float32
    memory_format = "channels_last"         # of the input; default channels_first
    precision = "ieee"                      # of float32; default: torch's setting, "tf32" unless changed
    epilogue = ["silu", { step = "add", other = "tensor" }]

A step is its name in :mod:`jitconv.epilogue`, or a table with the arguments of that function. An operand is a
number, ``"scalar"`` (a one-element tensor), ``"channel"`` (one value per channel), ``"tensor"`` (the shape of the
value), ``"conv"`` (the convolution's own value), or ``{ kind = "channel", dtype = "float32" }`` where its dtype is
not that of the input; an optional tensor of a step (layer_norm's weight) is ``true`` or ``{ dtype = … }``.

An entry becomes a Call by calling the library with tensors of those shapes, so a manifest cannot mean anything
that the library does not. An entry without ``precision`` is the call without it: ``jitconv warm`` compiles what that
call runs where torch's setting for convolutions is its default, and with ``--precision ieee`` what it runs where TF32
is turned off.
"""

from __future__ import annotations

import difflib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jitconv.calls import OPERATORS, call_of, public_function
from jitconv.errors import ManifestError
from jitconv.problem import DTYPES, MEMORY_FORMATS
from jitconv.resources import cache_root

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jitconv import epilogue as E
    from jitconv.program import Call

__all__ = ["Manifest", "ManifestEntry", "TensorMaker", "find", "load", "meta_tensor", "select", "shipped"]

#: Makes the tensor for (name such as ``weight`` or ``epilogue[1].bias``, shape, dtype).
TensorMaker = Callable[[str, "tuple[int, ...]", "torch.dtype"], "Tensor"]

_OWN_KEYS = ("operator", "dtype", "memory_format")
_CHAINS = ("between", "epilogue")
# Byte counts of a tensor must fit 63 bits, whatever its dtype.
_MAX_ELEMENTS = 2**60
_KINDS = ("scalar", "channel", "tensor", "conv")


@dataclass(frozen=True)
class Manifest:
    """A manifest file: ``source`` is how it was named, ``entries`` its problems by name, in the file's order."""

    source: str
    path: Path
    entries: Mapping[str, ManifestEntry]


@dataclass(frozen=True)
class ManifestEntry:
    """One problem of a manifest. ``table`` is what the file says, its keys checked and its values not yet."""

    source: str
    name: str
    table: Mapping[str, Any]

    @property
    def address(self) -> str:
        """How the command line names it: ``headline:w1``."""
        return f"{self.source}:{self.name}"

    @property
    def operator(self) -> str:
        """Name of the public function."""
        return str(self.table["operator"])

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the input."""
        return tuple(self.table[_tensor_names(self.operator)[0]])

    def resized(self, shape: Iterable[int]) -> ManifestEntry:
        """The same problem for an input of another shape."""
        return replace(self, table={**self.table, _tensor_names(self.operator)[0]: list(shape)})

    def at_precision(self, precision: str | None) -> ManifestEntry:
        """The same problem where torch's setting for convolutions is ``precision`` (None: whatever it is here).

        An entry that names its precision keeps it, as the call that it stands for does.
        """
        if precision is None or "precision" in self.table:
            return self
        return replace(self, table={**self.table, "precision": precision})

    def arguments(self, tensor: TensorMaker | None = None) -> dict[str, Any]:
        """Keyword arguments for the public function; ``tensor`` makes the tensors (default: on ``meta``).

        Raises ManifestError when the entry describes no call that the library accepts.
        """
        return _Reader(self, tensor or meta_tensor).arguments()

    def call(self, tensor: TensorMaker | None = None) -> Call:
        """The checked Call, its chains included. Arguments and errors as for :meth:`arguments`."""
        arguments = self.arguments(tensor)
        with _explained(self):
            return call_of(public_function(self.operator), **arguments)


def shipped() -> list[str]:
    """Names of the manifests that come with jitconv."""
    return sorted(path.stem for path in (cache_root() / "manifests").glob("*.toml"))


def load(source: str) -> Manifest:
    """Read a manifest, given by path (``….toml``) or by the name of a shipped one.

    Raises ManifestError, which names the file, the entry, the key, its value and what was expected.
    """
    path = _path(source)
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"manifest {source}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(f"manifest {path}: not valid TOML: {error}") from error
    if not document:
        raise ManifestError(f"manifest {path}: it has no entry; expected tables such as [block] with operator = …")
    return Manifest(source, path, {name: _entry(source, name, table) for name, table in document.items()})


def find(address: str) -> ManifestEntry:
    """The entry at ``NAME:ENTRY`` or ``path.toml:ENTRY``. Raises ManifestError when there is none."""
    source, colon, name = address.rpartition(":")
    if not colon or not source or not name:
        raise ManifestError(f"address {address!r}: expected MANIFEST:ENTRY, such as headline:w1 or shapes.toml:block")
    entries = load(source).entries
    if name not in entries:
        raise ManifestError(
            f"manifest {source}: no entry {name!r}{_similar(name, entries)}; it has {', '.join(entries)}"
        )
    return entries[name]


def select(text: str) -> list[ManifestEntry]:
    """Every entry of a manifest, or the one at an address."""
    if ":" in text and not Path(text).is_file():
        return [find(text)]
    return list(load(text).entries.values())


def meta_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor with a shape and no memory."""
    import torch

    return torch.empty(shape, dtype=dtype, device="meta")


def _path(source: str) -> Path:
    # By its form alone: which file a name means must not depend on the working directory.
    if source.endswith(".toml") or "/" in source or "\\" in source:
        path = Path(source)
        if not path.is_file():
            raise ManifestError(f"manifest {source}: no such file; expected the path of a TOML file")
        return path
    path = cache_root() / "manifests" / f"{source}.toml"
    if not path.is_file():
        raise ManifestError(
            f"manifest {source!r}: jitconv ships no manifest of that name{_similar(source, shipped())}; "
            f"expected one of {', '.join(shipped())}, or the path of a file, ending in .toml"
        )
    return path


def _similar(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _tensor_names(operator: str) -> tuple[str, ...]:
    """Arguments given by shape, the input first."""
    if operator == "depthwise_separable_conv2d":
        return ("x", "dw_weight", "pw_weight")
    return ("input", "weight")


def _bias_names(operator: str) -> tuple[str, ...]:
    return ("dw_bias", "pw_bias") if operator == "depthwise_separable_conv2d" else ("bias",)


def _entry(source: str, name: str, table: Any) -> ManifestEntry:
    where = f"manifest {source}: {name}"
    if not isinstance(table, dict):
        raise ManifestError(f"{where} = {table!r}: expected a table [{name}] with operator = …")
    where = f"manifest {source}: [{name}]"
    operator = table.get("operator")
    if operator is None:
        raise ManifestError(f"{where}: operator is missing; expected one of {', '.join(OPERATORS)}")
    if operator not in OPERATORS:
        close = _similar(operator, OPERATORS) if isinstance(operator, str) else ""
        raise ManifestError(f"{where}: operator = {operator!r}{close}: expected one of {', '.join(OPERATORS)}")
    known = (*_OWN_KEYS, *inspect.signature(public_function(operator)).parameters)
    for key, value in table.items():
        if key not in known:
            raise ManifestError(
                f"{where}: {key} = {value!r}: {operator} has no argument {key}{_similar(key, known)}; "
                f"expected keys among {', '.join(known)}"
            )
    for key in _tensor_names(operator):
        if key not in table:
            raise ManifestError(f"{where}: {key} is missing; expected the shape of the tensor, such as {key} = [1, 3]")
    return ManifestEntry(source, name, table)


class _explained:
    """Turns what the library says about an entry's values into a ManifestError that names the entry."""

    def __init__(self, entry: ManifestEntry, where: str = "") -> None:
        self._where = f"manifest {entry.source}: [{entry.name}]{where}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (RuntimeError, TypeError, ValueError)) and not isinstance(error, ManifestError):
            raise ManifestError(f"{self._where}: {error}") from error


@dataclass(frozen=True)
class _Reader:
    """Reads the values of one entry into arguments."""

    entry: ManifestEntry
    make: TensorMaker

    def arguments(self) -> dict[str, Any]:
        table, operator = self.entry.table, self.entry.operator
        dtype = self.dtype("dtype", table.get("dtype", "float32"))
        shapes = {name: self.shape(name, table[name]) for name in _tensor_names(operator)}
        arguments: dict[str, Any] = {name: self.make(name, shape, dtype) for name, shape in shapes.items()}
        source = _tensor_names(operator)[0]
        arguments[source] = self.laid_out(arguments[source], len(shapes[_tensor_names(operator)[1]]))
        for name in _bias_names(operator):
            if self.flag(name, table.get(name, False)):
                arguments[name] = self.make(name, (self.bias_length(name, shapes),), dtype)
        given = {*_OWN_KEYS, *_CHAINS, *_tensor_names(operator), *_bias_names(operator)}
        arguments |= {name: _frozen(value) for name, value in table.items() if name not in given}
        for phase in _CHAINS:
            if phase in table:
                arguments[phase] = self.chain(phase, arguments)
        return arguments

    def fail(self, key: str, value: Any, expected: str) -> NoReturn:
        entry = self.entry
        raise ManifestError(f"manifest {entry.source}: [{entry.name}]: {key} = {value!r}: expected {expected}")

    def dtype(self, key: str, value: Any) -> torch.dtype:
        if value not in DTYPES:
            self.fail(key, value, f"one of {', '.join(DTYPES)} (other types take torch's path and compile nothing)")
        import torch

        dtype: torch.dtype = getattr(torch, value)
        return dtype

    def shape(self, key: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or not all(type(extent) is int and extent >= 0 for extent in value):
            self.fail(key, value, "a shape: a list of whole numbers, 0 or more")
        if math.prod(extent or 1 for extent in value) > _MAX_ELEMENTS:
            self.fail(key, value, f"a shape of at most {_MAX_ELEMENTS} elements")
        return tuple(value)

    def flag(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            self.fail(key, value, "true or false: whether the call has this tensor")
        return value

    def bias_length(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
        weight = shapes[{"bias": "weight", "dw_bias": "dw_weight", "pw_bias": "pw_weight"}[name]]
        if not self.entry.operator.startswith("conv_transpose"):
            return weight[0] if weight else 0
        groups = self.entry.table.get("groups", 1)
        return weight[1] * groups if len(weight) > 1 and type(groups) is int else 0

    def laid_out(self, x: Tensor, weight_rank: int) -> Tensor:
        value = self.entry.table.get("memory_format", "channels_first")
        if value not in MEMORY_FORMATS:
            self.fail("memory_format", value, f"one of {', '.join(MEMORY_FORMATS)}")
        if value == "channels_first":
            return x
        import torch

        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        if weight_rank not in formats or x.dim() != weight_rank:
            self.fail("memory_format", value, f"channels_first for a batched 2-D or 3-D input, got {tuple(x.shape)}")
        return x.contiguous(memory_format=formats[weight_rank])

    def chain(self, phase: str, arguments: Mapping[str, Any]) -> tuple[E.Step, ...]:
        """The steps of a chain; each meets the shape that the steps before it leave."""
        steps = self.entry.table[phase]
        if not isinstance(steps, list):
            self.fail(phase, steps, 'a list of steps, such as ["relu"]')
        from jitconv import epilogue as E
        from jitconv.program import bind_chains

        with _explained(self.entry):
            bare = call_of(public_function(self.entry.operator), **{**arguments, phase: ()})
            shape = bind_chains(bare)[phase].shape
        chain: tuple[E.Step, ...] = ()
        for i, step in enumerate(steps):
            with _explained(self.entry):
                current = E.bind(chain, shape, bare.x.dtype, bare.x.device, phase).shape
            chain += (self.step(f"{phase}[{i}]", step, current, bare.x.dtype),)
        with _explained(self.entry):
            E.bind(chain, shape, bare.x.dtype, bare.x.device, phase)
        return chain

    def step(self, where: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> E.Step:
        table = {"step": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or not isinstance(table.get("step"), str):
            self.fail(where, value, 'the name of a step, or a table such as { step = "add", other = "channel" }')
        function = self.step_function(where, table["step"])
        parameters = inspect.signature(function).parameters
        given: dict[str, Any] = {}
        for key, argument in table.items():
            if key == "step":
                continue
            if key not in parameters:
                self.fail(f"{where}.{key}", argument, f"keys among {', '.join(('step', *parameters))}")
            annotation = str(parameters[key].annotation)
            if "Operand" in annotation:
                given[key] = self.operand(f"{where}.{key}", argument, shape, dtype)
            elif "Tensor" in annotation:
                width = _width(table.get("normalized_shape"), shape)
                given[key] = self.optional_tensor(f"{where}.{key}", argument, width, dtype)
            else:
                given[key] = _frozen(argument)
        with _explained(self.entry, f": {where}"):
            return function(**given)

    def step_function(self, where: str, name: str) -> Callable[..., E.Step]:
        from jitconv import epilogue as E

        steps = {key: getattr(E, key) for key in E.__all__ if key.islower() and key not in ("bind", "register")}
        if name not in steps:
            self.fail(
                where,
                name,
                f"one of {', '.join(steps)}{_similar(name, steps)}; a step registered in Python has no name here: "
                "call its function once instead",
            )
        step: Callable[..., E.Step] = steps[name]
        return step

    def operand(self, where: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> E.Operand:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        kind = value
        if isinstance(value, dict):
            kind = value.get("kind")
            if set(value) - {"kind", "dtype"}:
                self.fail(where, value, '{ kind = "channel", dtype = "float32" }')
            dtype = self.dtype(f"{where}.dtype", value.get("dtype", str(dtype).removeprefix("torch.")))
        if kind not in _KINDS:
            self.fail(where, value, f"a number, or one of {', '.join(_KINDS)}")
        if kind == "conv":
            from jitconv import epilogue as E

            return E.CONV
        return self.make(where, {"scalar": (), "channel": (shape[1],), "tensor": shape}[kind], dtype)

    def optional_tensor(self, where: str, value: Any, width: int, dtype: torch.dtype) -> Tensor | None:
        if isinstance(value, dict) and set(value) == {"dtype"}:
            return self.make(where, (width,), self.dtype(f"{where}.dtype", value["dtype"]))
        return self.make(where, (width,), dtype) if self.flag(where, value) else None


def _width(normalized_shape: Any, shape: tuple[int, ...]) -> int:
    """The row that layer_norm says it normalises; a misfit with ``shape`` is the library's to report."""
    if isinstance(normalized_shape, list) and len(normalized_shape) == 1:
        normalized_shape = normalized_shape[0]
    return normalized_shape if type(normalized_shape) is int and normalized_shape > 0 else shape[-1]


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
