"""The catalogue: what is written is read, by us and by others; damage costs its rows and nothing else."""

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from graphkiln.storage import catalog, layout
from graphkiln.storage.catalog import (
    SCHEMA_VERSION,
    CatalogRow,
    SeenRuns,
    encode,
    part_paths,
    read_catalog,
    schema,
    store_table,
    table_of,
    write_part,
)
from graphkiln.storage.compaction import compact_catalog
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import BadInputError, DamagedStoreError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.leases import Leases
from graphkiln.storage.store import Store, open_for_writing
from graphkiln.storage.verify import verify_store
from tests.storage.catalogs import START, expected, named, row, rows_in, run_of
from tests.storage.faults import DictFilesystem
from tests.storage.samples import HARMS, flipped, harm

OUTCOMES = [row(graph=outcome, outcome=outcome) for outcome in ("compiled", "cached", "failed", "blocked")]


def compact(store: Store) -> None:
    with Leases(store) as leases:
        compact_catalog(store, leases, tell_waiting=print)


def store_bytes(store: Store, data: bytes) -> str:
    """Store any bytes as a part whose digest is right."""
    path = layout.catalog_part(START, digest_bytes(data))
    store.put_catalog_part(path, data)
    return path


def test_what_is_written_is_read(store: Store) -> None:
    assert rows_in(store) == []
    path = write_part(store, OUTCOMES)
    assert path.startswith("catalog/20260130T220000Z-")
    assert part_paths(store) == list(store.names("")) == [path]
    assert rows_in(store) == expected(OUTCOMES)
    failed = rows_in(store)[-1]
    assert (failed["outcome"], failed["artifact"], failed["compile_seconds"]) == ("failed", None, 2.5)
    assert failed["time"] == START
    assert failed["variant"] == bytes.fromhex(named("variant"))


def test_parts_are_read_in_the_order_of_their_runs_and_only_the_columns_that_are_wanted(store: Store) -> None:
    for number in (3, 1, 20, 2):
        write_part(store, run_of(number))
    found = read_catalog(store, ["run", "time"]).rows
    assert found.column_names == ["run", "time"]
    assert found["time"].to_pylist() == [START + timedelta(hours=hours) for hours in (1, 2, 3, 20) for _ in range(3)]


def test_the_columns_are_those_of_a_row_in_their_order_and_each_is_documented() -> None:
    assert tuple(schema().names) == CatalogRow.__struct_fields__
    documented = (Path(__file__).parents[2] / "docs" / "store.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in documented for name in schema().names)


def test_a_run_that_two_parts_have_is_counted_once(store: Store) -> None:
    rows = [*run_of(1), *run_of(2)]
    write_part(store, rows)
    write_part(store, run_of(2))
    store_table(store, table_of([*run_of(3), *reversed(rows)]))
    assert len(part_paths(store)) == 3
    assert rows_in(store) == expected([*rows, *run_of(3)])


def test_only_the_runs_that_were_seen_are_dropped() -> None:
    seen = SeenRuns()
    assert seen.without_repeats(table_of(run_of(1))).num_rows == 3
    both = table_of([run_of(1)[0], run_of(2)[0], run_of(1)[1], run_of(2)[1]])
    assert seen.without_repeats(both).equals(both.take([1, 3]))
    assert seen.without_repeats(both).num_rows == 0


@pytest.mark.parametrize("how", HARMS)
def test_a_damaged_part_is_named_and_left_out_and_nothing_else(
    store: Store, filesystem: StoreFilesystem, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [write_part(store, run_of(number)) for number in range(3)]
    harm(filesystem, paths[1], how)
    with caplog.at_level(logging.WARNING, logger="graphkiln"):
        found = read_catalog(store, schema().names)
    assert found.rows.num_rows == 6
    assert found.damaged == (() if how == "deleted" else (paths[1],))
    assert [f"{store.url}/{paths[1]}" in record.getMessage() for record in caplog.records] == [True] * len(
        found.damaged
    )
    verified = verify_store(store)
    assert [(problem.path, problem.severity) for problem in verified.problems] == [
        (path, "leftover") for path in found.damaged
    ]
    assert not verified.damaged
    assert filesystem.read(paths[0])  # verifying and reading moved nothing away
    assert len(part_paths(store)) == (2 if how == "deleted" else 3)


def test_each_byte_of_a_part_that_is_flipped_is_noticed() -> None:
    store = Store(filesystem := DictFilesystem({}))
    path = write_part(store, OUTCOMES)
    data = filesystem.read(path)
    for position in range(len(data)):
        filesystem.objects[path] = flipped(data, position)
        with pytest.raises(DamagedStoreError, match="do not match the digest in its name"):
            store.get_catalog_part(path)


def other_columns() -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"time": [1]}), buffer)
    return bytes(buffer.getvalue())


@pytest.mark.parametrize("make", [lambda: b"", lambda: b"PAR1 and PAR1", other_columns])
def test_a_part_that_was_never_one_is_damaged(store: Store, make: Callable[[], bytes]) -> None:
    write_part(store, run_of(1))
    path = store_bytes(store, make())
    assert read_catalog(store, schema().names).damaged == (path,)
    assert [problem.path for problem in verify_store(store).problems] == [path]


def test_a_part_of_a_newer_version_is_an_error_that_says_what_to_do(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
        path = write_part(store, run_of(1))
    write_part(store, run_of(2))
    told = f"{path} has version 2 of the catalogue.* upgrade GraphKiln"
    with pytest.raises(BadInputError, match=told) as caught:
        rows_in(store)
    assert caught.value.reason == "newer-format"
    with pytest.raises(BadInputError, match=told):
        compact(store)
    assert len(part_paths(store)) == 2
    (problem,) = verify_store(store).problems
    assert (problem.path, problem.severity) == (path, "leftover")
    assert "upgrade" in problem.message


def test_what_others_put_beside_the_parts_is_not_read_and_reported(store: Store, filesystem: StoreFilesystem) -> None:
    path = write_part(store, run_of(1))
    others = ["catalog/notes.txt", "catalog/mine.parquet", f"catalog/more/{Path(path).name}", "catalog/.tmp-1"]
    for other in others:
        filesystem.create(other, filesystem.read(path))
    assert rows_in(store) == expected(run_of(1))
    assert sorted(problem.path for problem in verify_store(store).problems) == sorted(others)


def test_rows_that_are_compacted_while_they_are_read_are_read_all_the_same() -> None:
    store = Store(filesystem := DictFilesystem({}))
    for number in range(5):
        write_part(store, run_of(number))

    class CompactedMeanwhile(DictFilesystem):
        lock = threading.Lock()  # parts are read by several threads

        def read(self, path: str) -> bytes:
            with self.lock:
                if len(part_paths(store)) > 1:
                    compact(store)
            return super().read(path)

    reading = CompactedMeanwhile({})
    reading.objects = filesystem.objects
    assert rows_in(Store(reading)) == expected([row for number in range(5) for row in run_of(number)])
    assert len(part_paths(store)) == 1


def test_a_part_in_the_place_of_a_damaged_one_is_written_again(store: Store, filesystem: StoreFilesystem) -> None:
    path = write_part(store, OUTCOMES)
    harm(filesystem, path, "middle byte flipped")
    assert write_part(store, OUTCOMES) == path
    assert rows_in(store) == expected(OUTCOMES)


def test_digests_that_repeat_take_hardly_any_room() -> None:
    rows = [row for number in range(100) for row in run_of(number, 10)]
    assert len(encode(table_of(rows))) < 10 * len(rows)


# ---------------------------------------------------------------------- as other libraries read it


@pytest.fixture
def local(tmp_path: Path) -> tuple[str, list[CatalogRow]]:
    """A glob for the parts of a local store, one of them of many runs, and their rows."""
    store = open_for_writing(str(tmp_path))
    runs = [OUTCOMES, *(run_of(number) for number in range(1, 6))]
    for rows in runs[:4]:
        write_part(store, rows)
    compact(store)
    for rows in runs[4:]:
        write_part(store, rows)
    assert len(part_paths(store)) == 3
    return str(tmp_path / "catalog" / "*.parquet"), [row for rows in runs for row in rows]


def check(found: list[dict[str, Any]], rows: list[CatalogRow]) -> None:
    found = sorted(found, key=lambda item: (item["time"], item["run"], item["kernel_graph"]))
    assert found == expected(rows)


def test_polars_reads_it(local: tuple[str, list[CatalogRow]]) -> None:
    check(pl.read_parquet(local[0]).to_dicts(), local[1])
    hits = pl.scan_parquet(local[0]).filter(pl.col("outcome") == "cached").collect()
    assert len(hits) == 1 + 5 * 3


def test_pandas_reads_it(local: tuple[str, list[CatalogRow]]) -> None:
    frame = pd.read_parquet(str(Path(local[0]).parent), dtype_backend="pyarrow")
    check(pa.Table.from_pandas(frame, schema=schema(), preserve_index=False).to_pylist(), local[1])
    plain = pd.concat(pd.read_parquet(path) for path in sorted(Path(local[0]).parent.glob("*.parquet")))
    assert plain.groupby("outcome").size().to_dict() == {"cached": 16, "compiled": 1, "failed": 1, "blocked": 1}
    assert plain["time"].min() == START


def test_duckdb_reads_it(local: tuple[str, list[CatalogRow]]) -> None:
    found = duckdb.sql("SELECT * FROM read_parquet(?) ORDER BY time, run, kernel_graph", params=[local[0]])
    check(found.to_arrow_table().to_pylist(), local[1])
    seconds = duckdb.sql(
        "SELECT hex(variant), sum(compile_seconds) FROM read_parquet(?) WHERE outcome = 'cached' GROUP BY ALL",
        params=[local[0]],
    )
    assert seconds.fetchall() == [(named("variant").upper(), 2.5 * 16)]
