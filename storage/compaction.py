"""Compaction: many small parts of the catalogue become a few large ones.

No part is deleted before all its rows were read back from others, and those flushed to disk. A compaction that is
killed leaves rows twice, which readers count once and the next compaction drops. A lease keeps two from doing the same
work; should two meet nevertheless, as after a long sleep of one, that one finds parts gone that it counts on, and
deletes nothing.
"""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from graphkiln.storage.catalog import (
    ROWS_PER_GROUP,
    GatheredRows,
    SeenRuns,
    in_parallel,
    part_paths,
    read_parts,
    schema,
    store_table,
)
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.leases import LeaseRecord, Leases, Observation
from graphkiln.storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

# A part with as many rows is left as it is. A merged one has fewer than twice as many, which have to fit into memory.
FULL_PART_ROWS = 2 * ROWS_PER_GROUP

# What the lease is taken on, in the place of an action.
LEASE_KEY = digest_bytes(b"compaction of the catalogue")
_WAIT_SECONDS = 1.0

_log = logging.getLogger("graphkiln")


class Compaction(msgspec.Struct, frozen=True, kw_only=True):
    """What a compaction did.

    Attributes:
        before: how many parts there were, damaged ones not counted.
        after: how many there are now.
        rows: how many rows they have, each counted once.
        repeated_rows: how many rows were there a second time, and are not any more.
        damaged: the parts that were left alone because they are damaged.
    """

    before: int
    after: int
    rows: int
    repeated_rows: int
    damaged: tuple[str, ...]


def compact_catalog(
    store: Store,
    leases: Leases,
    *,
    tell_waiting: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
) -> Compaction:
    """Merge the parts of a catalogue, once no other compaction is at work.

    Args:
        store: the store.
        leases: leases of this store.
        tell_waiting: is told the owner of another compaction for which this one waits.
        wait: sleeps for some seconds.

    Raises:
        BadInputError: a newer GraphKiln wrote a part, or the store cannot be written.
        StoreUnavailableError: the medium failed. No row is lost.
        DamagedStoreError: the medium does not keep what is written. No row is lost.
    """
    if not part_paths(store):
        return Compaction(before=0, after=0, rows=0, repeated_rows=0, damaged=())
    seen: Observation | None = None
    while not isinstance(taken := leases.take(LEASE_KEY, seen), LeaseRecord):
        if seen is None:
            tell_waiting(taken.owner)
        seen = taken
        wait(_WAIT_SECONDS)
    with leases.holding(taken):
        return _Compactor(store).run()


class _Batch:
    """What is to become one part."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.rows = GatheredRows(schema().empty_table())
        self.size = 0
        self.repeats = False  # whether a part has rows that are not here, as an earlier part had them

    def add(self, path: str, rows: "pa.Table", *, whole: bool) -> None:
        self.paths.append(path)
        self.rows.add(rows)
        self.size += rows.num_rows
        self.repeats |= not whole


class _Compactor:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._batch = _Batch()
        self._kept: set[str] = set()  # the parts that hold all rows in the end
        self._merged: set[str] = set()  # the parts whose rows are in those

    def run(self) -> Compaction:
        seen = SeenRuns()
        before = rows = repeated = 0
        damaged: list[str] = []
        for path, found in read_parts(self._store, part_paths(self._store)):
            if isinstance(found, DamagedStoreError):
                if found.reason != "missing":  # else another compaction has merged it
                    _log.warning("%s: it is left alone", found)
                    damaged.append(path)
                continue
            before += 1
            new = seen.without_repeats(found)
            rows += new.num_rows
            repeated += found.num_rows - new.num_rows
            self._take(path, new, whole=new.num_rows == found.num_rows)
        self._write_batch()
        deleted = self._delete_merged()
        return Compaction(
            before=before,
            after=len((self._kept | self._merged) - deleted),
            rows=rows,
            repeated_rows=repeated,
            damaged=tuple(damaged),
        )

    def _take(self, path: str, rows: "pa.Table", *, whole: bool) -> None:
        if rows.num_rows == 0:
            self._merged.add(path)
        elif rows.num_rows >= FULL_PART_ROWS and whole:
            self._kept.add(path)
        else:
            self._batch.add(path, rows, whole=whole)
            if self._batch.size >= FULL_PART_ROWS:
                self._write_batch()

    def _write_batch(self) -> None:
        batch, self._batch = self._batch, _Batch()
        if len(batch.paths) == 1 and not batch.repeats:
            self._kept.update(batch.paths)
        elif batch.paths:
            self._kept.add(self._write(batch.rows.table()))
            self._merged.update(batch.paths)

    def _write(self, rows: "pa.Table") -> str:
        """Store rows as one part, and read it back."""
        # The rows of a network lie together, which halves the part.
        path = store_table(self._store, rows.sort_by([("network", "ascending"), ("time", "ascending")]))
        try:
            self._store.get_catalog_part(path)
        except DamagedStoreError as error:
            if error.reason != "missing":  # else another compaction has merged it, and `_delete_merged` will see that
                raise
        return path

    def _delete_merged(self) -> set[str]:
        obsolete = self._merged - self._kept
        if not obsolete:
            return obsolete
        there = self._kept.issubset(part_paths(self._store))
        if there:
            self._store.sync(sorted(self._kept))
            there = self._kept.issubset(part_paths(self._store))
        if not there:
            _log.warning("%s: another compaction was at work, so that this one deleted nothing", self._store.url)
            return set()
        for _ in in_parallel(self._store.drop_catalog_part, sorted(obsolete)):
            pass
        return obsolete
