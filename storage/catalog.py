"""The catalogue: what became of every kernel graph in every run, as a table in immutable Parquet files.

Each run writes its rows as one part, named by the time of its oldest row and the digest of its bytes. A row is known
by its run and its kernel graph. All rows of a run lie in one part, and never change; if two parts have a run, as after
a compaction that was killed, they have the same rows of it, which are counted once. Nothing in a store depends on the
catalogue.

pyarrow takes a quarter of a second to import, so that it is imported where rows are written or read.
"""

import functools
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from graphkiln.storage import layout
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.errors import BadInputError, DamagedStoreError
from graphkiln.storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
ROWS_PER_GROUP = 2**17

_VERSION_FIELD = "graphkiln.catalog.version"
_RUN_BYTES = 16
# As many parts are fetched at once, and held until they are decoded.
_FETCHED_AT_ONCE = 8
_SMALL_TABLES = 256

_log = logging.getLogger("graphkiln")

Item = TypeVar("Item")
Result = TypeVar("Result")


class CatalogRow(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one kernel graph in one run. The columns of the table have these names; digests are binary there.

    Attributes:
        time: when the run reported, with a time zone; the same in all rows of a run.
        run: 16 random bytes that name the run.
        network: the network's name.
        target: the target's name.
        variant: the variant.
        kernel_graph: the kernel graph; with `run` it identifies the row.
        ranks: who runs it, such as ``"0-15"``.
        rank_count: how many ranks these are.
        outcome: ``"compiled"``, ``"cached"``, ``"failed"`` or ``"blocked"``.
        action_key: its action key, the same in all rows that share the action.
        artifact: digest of the artifact; None without one, as all below.
        bytes: size of the artifact, decoded.
        stored_bytes: its size in the store.
        compile_seconds: wall time of the compile that made the artifact, whenever that was, or that failed.
        peak_memory_bytes: most memory that this compile had resident.
        host: where it ran.
        compiled_at: when it ended; with `action_key` it identifies the compile.
    """

    time: datetime
    run: bytes
    network: str
    target: str
    variant: Digest
    kernel_graph: str
    ranks: str
    rank_count: int
    outcome: str
    action_key: Digest
    artifact: Digest | None
    bytes: int | None
    stored_bytes: int | None
    compile_seconds: float | None
    peak_memory_bytes: int | None
    host: str | None
    compiled_at: datetime | None


@dataclass(frozen=True)
class Catalog:
    """The rows of a catalogue, each once.

    Attributes:
        rows: the columns that were asked for.
        damaged: the parts whose rows are missing because they are damaged.
    """

    rows: "pa.Table"
    damaged: tuple[str, ...]


def write_part(store: Store, rows: Sequence[CatalogRow]) -> str:
    """Store the rows of one run as a part of their own, and return its path.

    Raises:
        StoreUnavailableError: the medium failed.
        BadInputError: the store cannot be written.
    """
    return store_table(store, table_of(rows))


def read_catalog(store: Store, columns: Sequence[str]) -> Catalog:
    """Return the rows of all parts, in the order of the parts. A damaged part is left out, with a warning.

    Args:
        store: the store.
        columns: the columns to read; `run` has to be among them.

    Raises:
        BadInputError: a newer GraphKiln wrote a part.
        StoreUnavailableError: the medium failed.
    """
    seen = SeenRuns()
    rows = GatheredRows(schema().empty_table().select(columns))
    damaged: list[str] = []
    done: set[str] = set()
    while wanted := [path for path in part_paths(store) if path not in done]:
        for path, found in read_parts(store, wanted, columns):
            if not isinstance(found, DamagedStoreError):
                rows.add(seen.without_repeats(found))
            elif found.reason != "missing":
                _log.warning("%s: its rows are left out", found)
                damaged.append(path)
            done.add(path)
        # A compaction may have replaced parts since they were listed, so they are listed again.
    return Catalog(rows.table(), tuple(damaged))


def part_paths(store: Store) -> list[str]:
    """Return the paths of all parts, in the order of their oldest rows."""
    return sorted(path for path in store.names(layout.CATALOG) if layout.digest_of_catalog_part(path))


def read_parts(
    store: Store, paths: Sequence[str], columns: Sequence[str] | None = None
) -> "Iterator[tuple[str, pa.Table | DamagedStoreError]]":
    """Iterate over parts in the given order: the path of each, and its rows or what is wrong with it.

    Raises:
        BadInputError: a newer GraphKiln wrote a part.
    """

    def fetch(path: str) -> bytes | DamagedStoreError:
        try:
            return store.get_catalog_part(path)
        except DamagedStoreError as error:
            return error

    for path, data in zip(paths, in_parallel(fetch, paths), strict=True):
        try:
            yield path, data if isinstance(data, DamagedStoreError) else decode(data, f"{store.url}/{path}", columns)
        except DamagedStoreError as error:
            yield path, error


def store_table(store: Store, table: "pa.Table") -> str:
    """Store rows as a part, and return its path. Equal rows have an equal path.

    Raises:
        RuntimeError: pyarrow does not read what it wrote; nothing was stored.
    """
    import pyarrow.compute as pc

    data = encode(table)
    # A digest that is right says nothing of rows that were lost before, and a reader would take them for all of a run.
    if not decode(data, "a new part of the catalogue").equals(table):
        raise RuntimeError("pyarrow does not read the rows that it wrote")
    path = layout.catalog_part(pc.min(table["time"]).as_py(), digest_bytes(data))
    store.put_catalog_part(path, data)
    return path


def table_of(rows: Sequence[CatalogRow]) -> "pa.Table":
    """Return rows as a table."""
    import pyarrow as pa

    binary = {field.name for field in schema() if pa.types.is_fixed_size_binary(field.type)} - {"run"}
    columns = {
        name: [_digest_column(getattr(row, name)) if name in binary else getattr(row, name) for row in rows]
        for name in CatalogRow.__struct_fields__
    }
    return pa.table(columns, schema=schema())


def encode(table: "pa.Table") -> bytes:
    """Return rows as a Parquet file."""
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    # Any reader understands the columns without the schema of Arrow, which would be a quarter of a small part.
    with pq.ParquetWriter(buffer, table.schema, compression="zstd", compression_level=3, store_schema=False) as writer:
        writer.add_key_value_metadata({_VERSION_FIELD: str(SCHEMA_VERSION)})
        writer.write_table(table, row_group_size=ROWS_PER_GROUP)
    return buffer.getvalue()


def decode(data: bytes, where: str, columns: Sequence[str] | None = None) -> "pa.Table":
    """Return the rows of a Parquet file whose bytes have been checked.

    Args:
        data: the file.
        where: what to call it in an error.
        columns: which columns; all of them if None.

    Raises:
        DamagedStoreError: it is no part of a catalogue.
        BadInputError: a newer GraphKiln wrote it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            version = int((file.metadata.metadata or {}).get(_VERSION_FIELD.encode(), b"0"))
            if version > SCHEMA_VERSION:
                raise BadInputError(
                    f"{where} has version {version} of the catalogue, and this GraphKiln reads up to "
                    f"{SCHEMA_VERSION}: upgrade GraphKiln",
                    reason="newer-format",
                )
            if version < 1 or not file.schema_arrow.equals(schema()):
                raise DamagedStoreError(f"{where} is damaged: it has not the columns of a catalogue")
            # A thread of pyarrow's that lets go of `data` needs Python's lock. If the process ends just then, Python
            # kills the thread in the middle of C++ code, which aborts the process.
            return file.read(columns, use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamagedStoreError(f"{where} is damaged: it cannot be read as Parquet: {error}") from error


@functools.cache
def schema() -> "pa.Schema":
    """Return the columns of the catalogue, in order."""
    import pyarrow as pa

    digest, moment = pa.binary(32), pa.timestamp("us", "UTC")
    required = {
        "time": moment,
        "run": pa.binary(_RUN_BYTES),
        "network": pa.string(),
        "target": pa.string(),
        "variant": digest,
        "kernel_graph": pa.string(),
        "ranks": pa.string(),
        "rank_count": pa.int64(),
        "outcome": pa.string(),
        "action_key": digest,
    }
    optional = {
        "artifact": digest,
        "bytes": pa.int64(),
        "stored_bytes": pa.int64(),
        "compile_seconds": pa.float64(),
        "peak_memory_bytes": pa.int64(),
        "host": pa.string(),
        "compiled_at": moment,
    }
    fields = [pa.field(name, kind, nullable=False) for name, kind in required.items()]
    fields += [pa.field(name, kind) for name, kind in optional.items()]
    return pa.schema(fields)


class SeenRuns:
    """Drops the rows of runs that an earlier part had."""

    def __init__(self) -> None:
        self._runs: set[Any] = set()

    def without_repeats(self, table: "pa.Table") -> "pa.Table":
        """Return the rows of a part whose runs no part before had."""
        import pyarrow as pa
        import pyarrow.compute as pc

        runs = set(pc.unique(table["run"]).to_pylist())
        repeated = runs & self._runs
        self._runs |= runs
        if not repeated:
            return table
        known = pa.array(repeated, table.schema.field("run").type)
        return table.filter(pc.invert(pc.is_in(table["run"], value_set=known)))


class GatheredRows:
    """Puts tables together. A table of a few rows takes a hundred times their memory, so that none is kept for long."""

    def __init__(self, first: "pa.Table") -> None:
        self._large: list[pa.Table] = []
        self._small = [first]

    def add(self, table: "pa.Table") -> None:
        """Append the rows of a table."""
        self._small.append(table)
        if len(self._small) >= _SMALL_TABLES:
            self._large.append(_combined(self._small))
            self._small = []

    def table(self) -> "pa.Table":
        """Return all rows in one piece."""
        return _combined([*self._large, *self._small])


def in_parallel(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Iterate over the results of a function that waits for the store, in order; only a few are held at once."""
    with ThreadPoolExecutor(_FETCHED_AT_ONCE, thread_name_prefix="graphkiln-catalog") as threads:
        for start in range(0, len(items), _FETCHED_AT_ONCE):
            yield from threads.map(function, items[start : start + _FETCHED_AT_ONCE])


def _digest_column(digest: Digest | None) -> bytes | None:
    return None if digest is None else bytes.fromhex(digest)


def _combined(tables: "list[pa.Table]") -> "pa.Table":
    import pyarrow as pa

    return pa.concat_tables(tables).combine_chunks()
