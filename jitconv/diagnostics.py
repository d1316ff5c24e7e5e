"""From the log of NVRTC and ptxas to errors that name a template line.

Three coordinate systems meet here:

    template or header   templates/conv.cu.j2(10)       what a person edits
    rendered source      line 57 of the text given to NVRTC; #line directives lead back
    PTX                  "application ptx input, line 62"; .loc directives lead back, when the
                         PTX was made with line information
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jitconv.errors import Diagnostic

_FRONT_END = re.compile(
    r"^(?P<file>\S.*?)\((?P<line>\d+)\): (?P<kind>catastrophic error|error|warning|remark)"
    r"(?: #[\w-]+)?: (?P<message>.*)$"
)
_CARET = re.compile(r"^\s*\^\s*$")
_PTXAS_LINE = re.compile(r"^ptxas .*, line (?P<line>\d+); (?:error|fatal)\s*: (?P<message>.*)$")
_PTXAS = re.compile(r"^\s*(?:ptxas|nvrtc|nvlink)\s*:?\s*(?:error|fatal)\s*: (?P<message>.*)$")
_SERIALIZED = re.compile(
    r"^ptxas .*?: (?P<message>.*\bserialized\b.*?)(?: in line (?P<line>\d+))?$"
)
_ABORTED = "Ptx assembly aborted due to errors"

_LINE_DIRECTIVE = re.compile(r'^\s*#\s*(?:line\s+)?(?P<line>\d+)(?:\s+"(?P<file>[^"]*)")?')
_PTX_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"')
_PTX_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s")

_CONTEXT_LINES = 3


@dataclass(frozen=True)
class Finding:
    """One error as the log states it, before it is mapped to a template line.

    ``quoted`` is the source line that NVRTC prints under its message; ``ptx_line`` the place that
    ptxas names, counted from 1 in the PTX of that compilation.
    """

    message: str
    file: str | None = None
    line: int | None = None
    quoted: str = ""
    ptx_line: int | None = None


def find_errors(log: str) -> list[Finding]:
    """Return the errors of NVRTC's front end and of ptxas, in the order of the log."""
    lines = log.splitlines()
    found: dict[Finding, None] = {}
    for index, line in enumerate(lines):
        if match := _FRONT_END.match(line):
            if match["kind"].endswith("error"):
                found[_front_end_error(match, lines[index + 1 :])] = None
        elif match := _PTXAS_LINE.match(line):
            found[Finding(match["message"].strip(), ptx_line=int(match["line"]))] = None
        elif (match := _PTXAS.match(line)) and match["message"].strip() != _ABORTED:
            found[Finding(match["message"].strip())] = None
    return list(found)


def find_serialized_wgmma(log: str) -> list[Finding]:
    """Return the remarks by which ptxas says that it serialised wgmma instructions.

    Such a kernel is correct and several times too slow; ptxas calls it information, not an error.
    """
    found = []
    for line in log.splitlines():
        if match := _SERIALIZED.match(line):
            ptx_line = int(match["line"]) if match["line"] else None
            found.append(Finding(match["message"].strip(), ptx_line=ptx_line))
    return found


def _front_end_error(match: re.Match[str], following: Sequence[str]) -> Finding:
    """Collect one message of the front end: its text, the quoted line and the context."""
    body: list[str] = []
    for line in following:
        if not line.strip() or _FRONT_END.match(line):
            break
        body.append(line)
    carets = [i for i, line in enumerate(body) if _CARET.match(line)]
    quoted_at = carets[0] - 1 if carets else -1
    quoted = body[quoted_at].strip() if quoted_at >= 0 else ""
    notes = [line.strip() for i, line in enumerate(body) if i != quoted_at and i not in carets]
    return Finding(
        "\n".join([match["message"].strip(), *notes]), match["file"], int(match["line"]), quoted
    )


def locate_in_ptx(findings: Iterable[Finding], ptx: str, names: Iterable[str]) -> list[Finding]:
    """Give a file and line to the findings that have only a line of PTX.

    Args:
        findings: from the log of a compilation with line information.
        ptx: the PTX of that compilation.
        names: the file names that may be meant. NVRTC turns a name into an absolute path of the
            current directory when it writes line information; this undoes it.
    """
    lines = ptx.splitlines()
    files = {m[1]: m[2] for line in lines if (m := _PTX_FILE.match(line))}
    by_length = sorted(names, key=len, reverse=True)
    located = []
    for finding in findings:
        place = _place_in_ptx(lines, finding.ptx_line) if finding.ptx_line else None
        if finding.file is None and place is not None:
            path = files.get(place[0], "")
            file = next((n for n in by_length if path == n or path.endswith("/" + n)), path)
            finding = replace(finding, file=file, line=place[1])
        located.append(finding)
    return located


def _place_in_ptx(lines: Sequence[str], ptx_line: int) -> tuple[str, int] | None:
    """Return (file number, line) of the last ``.loc`` before a line of PTX."""
    for line in reversed(lines[:ptx_line]):
        if match := _PTX_LOC.match(line):
            return match[1], int(match[2])
    return None


class SourceMap:
    """The rendered source and its headers, addressed by template file and line."""

    def __init__(self, source: str, source_name: str, headers: Mapping[str, str]) -> None:
        self._rendered = source.splitlines()
        self._places = _places(self._rendered, source_name)
        self._headers = headers

    def names(self) -> set[str]:
        """Return every file name that a diagnostic may carry."""
        return {file for file, _ in self._places if file} | set(self._headers)

    def explain(self, finding: Finding) -> Diagnostic:
        """Return the finding with the lines around it, as the person who edits them knows them."""
        excerpt = ""
        if finding.file is not None and finding.line is not None:
            excerpt = self._excerpt(finding.file, finding.line, finding.quoted)
        return Diagnostic(finding.message, finding.file, finding.line, excerpt)

    def _excerpt(self, file: str, line: int, quoted: str) -> str:
        if file in self._headers:
            text = self._headers[file].splitlines()
            return _format(text, list(range(1, len(text) + 1)), line - 1)
        candidates = [i for i, place in enumerate(self._places) if place == (file, line)]
        # A template line inside a loop is rendered many times: the quoted text tells which one.
        exact = [i for i in candidates if self._rendered[i].strip() == quoted]
        chosen = (exact or candidates)[:1]
        if not chosen:
            return ""
        numbers = [number if name == file else None for name, number in self._places]
        return _format(self._rendered, numbers, chosen[0])


def _places(rendered: Sequence[str], source_name: str) -> list[tuple[str, int]]:
    """Return (file, line) of every rendered line; a ``#line`` directive itself has ("", 0)."""
    file, number = source_name, 1
    places = []
    for text in rendered:
        if match := _LINE_DIRECTIVE.match(text):
            file, number = match["file"] or file, int(match["line"])
            places.append(("", 0))
        else:
            places.append((file, number))
            number += 1
    return places


def _format(lines: Sequence[str], numbers: Sequence[int | None], at: int) -> str:
    """Format the lines around index ``at``; those without a number are left out."""
    shown = []
    for i in range(max(0, at - _CONTEXT_LINES), min(len(lines), at + _CONTEXT_LINES + 1)):
        if numbers[i] is not None:
            shown.append(f"{'>' if i == at else ' '}{numbers[i]:>6} | {lines[i]}".rstrip())
    return "\n".join(shown)
