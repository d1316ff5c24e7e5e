"""Where the store lives, how large it may grow, and whether the directory can be trusted.

Checksums find damage, not forgery, so ownership is the defence: a directory that somebody else
owns or can write is not used, because a kernel from it is code that would run in this process.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from jitconv.errors import JitconvError

__all__ = [
    "DEFAULT_SIZE_LIMIT",
    "StoreUnavailableError",
    "absolute_directory",
    "configured_directory",
    "configured_size_limit",
    "parse_size",
    "prepare_directory",
    "private_subdirectory",
]

DEFAULT_SIZE_LIMIT = 1 << 30

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)

_CHOOSE_ANOTHER = "set JITCONV_CACHE_DIR to a directory of your own"


class StoreUnavailableError(JitconvError):
    """The kernel store cannot be used: its directory or database is missing, foreign or locked.

    Raised by a strict store only (command-line tools); a library call warns once instead and
    goes on without the store. The message names the path, the reason and the remedy.
    """


def parse_size(text: str) -> int:
    """Bytes meant by ``"2GiB"``, ``"500MB"``, ``"1.5 GB"`` or ``"1048576"``.

    Raises:
        ValueError: anything else, with the accepted forms.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNITS:
        raise ValueError(
            f"size {text!r}: expected a number of bytes or a number with a unit "
            "(kB, MB, GB, TB, KiB, MiB, GiB, TiB), such as 2GiB"
        )
    # Whole numbers stay integers: a float would round sizes above 2**53.
    number = match.group(1)
    if "." not in number:
        return int(number) * _UNITS[unit]
    return int(float(number) * _UNITS[unit])


def configured_size_limit(environ: Mapping[str, str]) -> int:
    """The byte cap from JITCONV_CACHE_SIZE, or 1 GiB; ValueError names the variable."""
    text = environ.get("JITCONV_CACHE_SIZE", "")
    if not text:
        return DEFAULT_SIZE_LIMIT
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"JITCONV_CACHE_SIZE: {error}") from None


def configured_directory(environ: Mapping[str, str]) -> Path:
    """JITCONV_CACHE_DIR, or ``jitconv`` in the user's cache directory.

    Raises:
        StoreUnavailableError: the variable is unset and this user has no home directory, as in a
            container that runs under a uid without a passwd entry.
    """
    named = environ.get("JITCONV_CACHE_DIR", "")
    if named:
        return absolute_directory(named)
    import platformdirs

    try:
        directory = Path(platformdirs.user_cache_dir("jitconv", appauthor=False))
    except (RuntimeError, KeyError) as error:
        raise StoreUnavailableError(f"no user cache directory can be found ({error}); {_CHOOSE_ANOTHER}") from error
    # Older platformdirs answer with a literal "~/.cache" when there is no home directory.
    if not directory.is_absolute():
        raise StoreUnavailableError(
            f"the user cache directory {str(directory)!r} is not absolute because this user has "
            f"no home directory; {_CHOOSE_ANOTHER}"
        )
    return absolute_directory(directory)


def absolute_directory(directory: Path | str) -> Path:
    """``directory`` with ``~`` and variables expanded, absolute.

    Raises:
        StoreUnavailableError: a variable in it stays unknown. diskcache expands paths by itself;
            one that still changes would make it open another directory than the one checked.
    """
    expanded = os.path.abspath(os.path.expandvars(os.path.expanduser(str(directory))))
    if os.path.expandvars(os.path.expanduser(expanded)) != expanded:
        raise StoreUnavailableError(f"cache directory {expanded!r} holds a variable inside a variable; spell it out")
    return Path(expanded)


def prepare_directory(directory: Path, environ: Mapping[str, str]) -> None:
    """Create ``directory`` (mode 0700) if needed, and make sure that it can be trusted and used.

    ``JITCONV_CACHE_TRUST=1`` accepts a directory of another owner or with wider permissions.

    Raises:
        StoreUnavailableError: it cannot be created, is no directory, is not trusted, or is not
            writable.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise StoreUnavailableError(f"{directory} cannot be created: {error.strerror}; {_CHOOSE_ANOTHER}") from error
    if environ.get("JITCONV_CACHE_TRUST") != "1":
        _check_owner(directory, status)
    effective = os.access in os.supports_effective_ids
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK, effective_ids=effective):
        raise StoreUnavailableError(f"{directory} is not writable; {_CHOOSE_ANOTHER}")


def private_subdirectory(directory: Path, name: str) -> Path:
    """``directory/name``, created with mode 0700, and never a link to somewhere else.

    Raises:
        StoreUnavailableError: something that is not a directory is in the way.
        OSError: it cannot be created.
    """
    path = directory / name
    path.mkdir(mode=0o700, exist_ok=True)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise StoreUnavailableError(f"{path} is a link, not a directory; remove it")
    return path


def _check_owner(directory: Path, status: os.stat_result) -> None:
    # Windows reports uid 0 and synthetic mode bits; its user cache folder is private by ACL.
    if not hasattr(os, "geteuid"):
        return
    remedy = f"{_CHOOSE_ANOTHER}, or JITCONV_CACHE_TRUST=1 to use this one all the same"
    me = os.geteuid()
    # A link is as trustworthy as whoever can point it elsewhere, so both owners count.
    for owner in (status.st_uid, directory.lstat().st_uid):
        if owner != me:
            raise StoreUnavailableError(f"{directory} belongs to uid {owner}, this process runs as uid {me}; {remedy}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise StoreUnavailableError(
            f"{directory} has mode {mode:04o} and can be written by others; chmod go-w it, {remedy}"
        )
