"""What a store says about itself and its entries."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["EntryInfo", "Finding", "StoreInfo"]


@dataclass(frozen=True)
class EntryInfo:
    """One stored kernel without its payload.

    Attributes:
        key: the key it is stored under.
        size: bytes of the payload.
        stored, read: when it was stored and last read, seconds since the epoch; ``read`` is
            accurate to about a minute.
        metadata: what its writer said about it.
    """

    key: str
    size: int
    stored: float
    read: float
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StoreInfo:
    """State of a store.

    Attributes:
        path: its directory.
        available: False when it cannot be used; ``reason`` then says why.
        reason: None, or why it cannot be used.
        entries, size: number of kernels and bytes of their payloads.
        size_limit: bytes above which the least recently used kernels are removed.
        hits, misses: look-ups of this process.
        loaded: kernels that this process uses and will not evict.
        quarantined: files moved aside because they were damaged or hostile.
    """

    path: Path
    available: bool
    reason: str | None
    entries: int
    size: int
    size_limit: int
    hits: int
    misses: int
    loaded: int
    quarantined: int


@dataclass(frozen=True)
class Finding:
    """Something that ``Store.verify`` found. ``key`` is None when it concerns no single entry."""

    key: str | None
    what: str

    def __str__(self) -> str:
        return self.what if self.key is None else f"{self.key}: {self.what}"
