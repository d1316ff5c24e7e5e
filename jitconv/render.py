"""From a KernelPlan to CUDA source: Jinja2 over templates/*.cu.j2.

StrictUndefined: a constant that a template names and nobody gave is an error, not an empty string. ``#line``
directives lead every diagnostic back to the template's own file and line. The key of a kernel is computed here
too, from everything that the text depends on, without rendering it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from jitconv.families import KernelPlan, family
from jitconv.problem import canonical_json
from jitconv.resources import templates_root

if TYPE_CHECKING:
    import jinja2

#: Part of every key; raised when the meaning of stored kernels changes in a way that nothing else shows.
SCHEMA = 1

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_IMPORT = re.compile(r"{%-?\s*(?:import|include|extends|from)\s+\"([^\"]+)\"")
# A line that is only a Jinja statement, a comment, the call of a macro, or a text of several lines.
_BLOCK_LINE = re.compile(r"^\s*({%.*%}|{#.*#}|{{ [\w.]+\(.*\) }}|{{ \w+ \| join\(.*\) }}|{{ text }})\s*$")


@dataclass(frozen=True)
class Rendered:
    """A kernel as text.

    ``name`` is the extern "C" symbol, ``source`` the whole translation unit except the headers that it includes,
    ``headers`` every header it reaches by include name, ``constants`` what the template was given.
    """

    name: str
    source: str
    headers: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict, compare=False)


def render(kernel: KernelPlan) -> Rendered:
    """The source of ``kernel``. Deterministic: the same plan gives the same bytes."""
    module = family(kernel)
    constants = module.constants(kernel)
    text = _environment().get_template(module.TEMPLATE).render(constants)
    return Rendered(constants["name"], _tidy(text), headers(module.TEMPLATE), constants)


def kernel_key(kernel: KernelPlan, arch: str, options: tuple[str, ...]) -> str:
    """The name of the compiled kernel in every store: SHA-256 over all that decides its bytes, in hex.

    Schema, canonical Problem and plan, the constants that the template gets, the text of every template and
    header that it reaches, compiler options, exact architecture. No path, no time, nothing random.
    """
    return hashlib.sha256(canonical_json(key_components(kernel, arch, options)).encode()).hexdigest()


def key_components(kernel: KernelPlan, arch: str, options: tuple[str, ...]) -> dict[str, Any]:
    """What :func:`kernel_key` hashes, as JSON values."""
    module = family(kernel)
    return {
        "schema": SCHEMA,
        "problem": kernel.problem.canonical(),
        "plan": kernel.canonical(),
        "constants": module.constants(kernel),
        "sources": source_digests(module.TEMPLATE),
        "options": list(options),
        "arch": arch,
    }


@cache
def source_digests(template: str) -> dict[str, str]:
    """SHA-256 of ``template`` and of every template and header that it reaches, by name."""
    texts = {template: _read(template)}
    for name in _IMPORT.findall(texts[template]):
        texts[name] = _read(name)
    texts.update(headers(template))
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(texts.items())}


@cache
def headers(template: str) -> Mapping[str, str]:
    """Every device header that ``template`` reaches, by include name. Host headers are the emulator's."""
    found: dict[str, str] = {}
    pending = _INCLUDE.findall(_read(template))
    while pending:
        name = pending.pop()
        if name in found or name.startswith("host/"):
            continue
        found[name] = _read(name)
        pending += _INCLUDE.findall(found[name])
    return dict(sorted(found.items()))


def _read(name: str) -> str:
    return (templates_root() / name).read_text(encoding="utf-8")


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    class Loader(jinja2.BaseLoader):
        def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Any]:
            return _with_line_marks(template, _read(template)), template, lambda: True

    return jinja2.Environment(
        loader=Loader(), undefined=jinja2.StrictUndefined, autoescape=False, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip


def _with_line_marks(name: str, text: str) -> str:
    """``text`` with a #line directive wherever Jinja changes how many lines there are.

    That is after each line that is a Jinja statement or the call of a macro: the directive says where the next
    line of the template stands.
    """
    lines = text.split("\n")
    out = [] if name.startswith("macros/") else [_mark(1, name)]
    for number, line in enumerate(lines, start=1):
        out.append(line)
        if _BLOCK_LINE.match(line) and number < len(lines):
            out.append(_mark(number + 1, name))
    return "\n".join(out)


def _mark(line: int, name: str) -> str:
    return f'#line {line} "templates/{name}"'


def _tidy(text: str) -> str:
    """Without directives that another one follows at once, and without runs of blank lines before one."""
    out: list[str] = []
    for line in text.split("\n"):
        if line.startswith("#line"):
            while out and (out[-1].startswith("#line") or not out[-1].strip()):
                out.pop()
        out.append(line.rstrip())
    while out and (not out[-1].strip() or out[-1].startswith("#line")):
        out.pop()
    return "\n".join(out) + "\n"
