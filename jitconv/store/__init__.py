"""Where compiled kernels live between processes.

=============  =====================================================================
``entry``      one kernel as bytes: checksum, metadata, source, cubin
``location``   which directory, how large, and whether it can be trusted
``vetting``    looking at a database before it is opened, and moving a bad one aside
``database``   diskcache, held to bytes, bounded waits and no pickle
``claims``     one process compiles, the others wait
``records``    what a store says about itself and its entries
``fork``       no connection crosses a fork
``store``      ``Store``: the above put together, and what to do when something fails
``flight``     ``fetch_or_build``: one build per key, whoever asks
``default``    ``default_store``: the one that the environment configures
=============  =====================================================================
"""

from jitconv.store.default import default_store
from jitconv.store.entry import CorruptEntryError, Entry, decode, encode
from jitconv.store.flight import fetch_or_build
from jitconv.store.location import StoreUnavailableError, parse_size
from jitconv.store.records import EntryInfo, Finding, StoreInfo
from jitconv.store.store import Store

__all__ = [
    "CorruptEntryError",
    "Entry",
    "EntryInfo",
    "Finding",
    "Store",
    "StoreInfo",
    "StoreUnavailableError",
    "decode",
    "default_store",
    "encode",
    "fetch_or_build",
    "parse_size",
]
