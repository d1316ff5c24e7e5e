"""One compiled kernel as bytes: what the store keeps under a key.

Layout, little endian::

    magic 8 | format 4 | SHA-256 32 | four lengths 8 each | metadata | packed source | cubin

The four lengths are those of the metadata (JSON, UTF-8), of the packed (zlib) source, of the
source itself and of the cubin. The digest covers the key, the lengths and everything after them,
so a payload that was copied under another key is as invalid as one with a flipped bit. It finds
damage, not forgery: whoever can write the directory can also write a matching digest.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CorruptEntryError", "Entry", "OtherFormatError", "check_key", "decode", "encode"]

MAGIC = b"\x89JITCONV"
FORMAT = 1
# A rendered source is tens of kilobytes. The bound keeps a damaged length from allocating memory.
MAX_SOURCE_BYTES = 1 << 26

_PREFIX = struct.Struct("<8sI32s")
_LENGTHS = struct.Struct("<QQQQ")
HEADER_BYTES = _PREFIX.size + _LENGTHS.size

_KEY = re.compile(r"[!-~]{1,256}")


class CorruptEntryError(ValueError):
    """The bytes are not the entry that was stored under this key."""


class OtherFormatError(CorruptEntryError):
    """An entry written by another version of jitconv: not damaged, only unreadable here."""


@dataclass(frozen=True)
class Entry:
    """A compiled kernel and what is needed to explain it.

    Attributes:
        cubin: machine code for one exact architecture.
        source: the rendered CUDA text that the cubin was compiled from.
        metadata: JSON-serialisable description (problem, plan, options, registers, ...).
    """

    cubin: bytes
    source: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


def check_key(key: str) -> str:
    """Return ``key``, or raise ValueError unless it is 1 to 256 printable ASCII characters."""
    if type(key) is not str or not _KEY.fullmatch(key):
        raise ValueError(f"key={key!r}: expected a str of 1 to 256 printable ASCII characters without spaces")
    return key


def metadata_json(entry: Entry) -> str:
    """Canonical JSON of the entry's metadata; TypeError or ValueError if it is not JSON."""
    return json.dumps(dict(entry.metadata), sort_keys=True, allow_nan=False)


def encode(key: str, entry: Entry) -> bytes:
    """The bytes of ``entry`` as stored under ``key``.

    Raises:
        TypeError: the cubin is not bytes, or the metadata holds something JSON cannot say.
        ValueError: the metadata holds NaN or an infinity, or the source is too long.
    """
    if type(entry.cubin) is not bytes:
        raise TypeError(f"entry.cubin is {type(entry.cubin).__name__}; expected bytes")
    source = entry.source.encode("utf-8")
    if len(source) > MAX_SOURCE_BYTES:
        raise ValueError(f"entry.source has {len(source)} bytes; at most {MAX_SOURCE_BYTES} fit")
    metadata = metadata_json(entry).encode("utf-8")
    packed = zlib.compress(source, 6)
    lengths = _LENGTHS.pack(len(metadata), len(packed), len(source), len(entry.cubin))
    body = b"".join((lengths, metadata, packed, entry.cubin))
    return _PREFIX.pack(MAGIC, FORMAT, _digest(key, body)) + body


def decode(key: str, payload: bytes) -> Entry:
    """The entry stored under ``key``, verified.

    Raises:
        OtherFormatError: another version of jitconv wrote it.
        CorruptEntryError: truncated, altered, or stored under another key.
    """
    if len(payload) < HEADER_BYTES:
        raise CorruptEntryError(f"truncated: {len(payload)} bytes, a header has {HEADER_BYTES}")
    magic, version, digest = _PREFIX.unpack_from(payload)
    if magic != MAGIC:
        raise CorruptEntryError(f"not a kernel entry: it begins with {magic!r}")
    if version != FORMAT:
        raise OtherFormatError(f"entry format {version}; this version reads format {FORMAT}")
    body = payload[_PREFIX.size :]
    if _digest(key, body) != digest:
        raise CorruptEntryError("SHA-256 mismatch: truncated, altered, or of another key")
    return _parse(body)


def _digest(key: str, body: bytes) -> bytes:
    name = key.encode("utf-8")
    # The length in front keeps a key that ends like a body begins from colliding.
    hasher = hashlib.sha256(struct.pack("<Q", len(name)) + name)
    hasher.update(body)
    return hasher.digest()


def _parse(body: bytes) -> Entry:
    """Split a body whose digest was right; what fails here was written wrong, not damaged."""
    metadata_bytes, packed_bytes, source_bytes, cubin_bytes = _LENGTHS.unpack_from(body)
    if _LENGTHS.size + metadata_bytes + packed_bytes + cubin_bytes != len(body):
        raise CorruptEntryError("the lengths in the header do not add up")
    if source_bytes > MAX_SOURCE_BYTES:
        raise CorruptEntryError(f"the header announces a source of {source_bytes} bytes")
    start = _LENGTHS.size
    metadata_text = body[start : start + metadata_bytes]
    packed = body[start + metadata_bytes : start + metadata_bytes + packed_bytes]
    try:
        metadata = json.loads(metadata_text)
        source = _unpack(packed, source_bytes).decode("utf-8")
    except (ValueError, RecursionError, zlib.error) as error:
        raise CorruptEntryError(f"unreadable content: {error}") from error
    if not isinstance(metadata, dict):
        raise CorruptEntryError(f"metadata is a {type(metadata).__name__}, not an object")
    return Entry(cubin=body[len(body) - cubin_bytes :], source=source, metadata=metadata)


def _unpack(packed: bytes, expected: int) -> bytes:
    """Decompress to exactly ``expected`` bytes, never allocating more than that."""
    unpacker = zlib.decompressobj()
    # max_length=0 would mean "no limit", so an empty source asks for one byte and gets none.
    data = unpacker.decompress(packed, max(expected, 1))
    if len(data) != expected or not unpacker.eof:
        raise CorruptEntryError(f"the source does not unpack to {expected} bytes")
    return data
