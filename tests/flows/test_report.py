"""The figures of a catalogue: worked out by hand, and again by a plain loop over 20,000 rows."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from graphkiln.flows.report import TOP_GRAPHS, Figures, report_on
from graphkiln.storage.catalog import CatalogRow, part_paths, write_part
from graphkiln.storage.compaction import compact_catalog
from graphkiln.storage.errors import BadInputError
from graphkiln.storage.leases import Leases
from graphkiln.storage.store import Store
from tests.storage.catalogs import history, named, row
from tests.storage.faults import DictFilesystem

FRIDAY = datetime(2026, 1, 30, 23, 0, tzinfo=UTC)
SATURDAY = FRIDAY + timedelta(hours=1)
SUNDAY = FRIDAY + timedelta(hours=30)

# What three compiles made, and one that failed.
FORWARD = {"action_key": named("f"), "compiled_at": FRIDAY, "compile_seconds": 10.0, "artifact": named("F")}
FORWARD |= {"stored_bytes": 100, "bytes": 1000}
BACKWARD = {"action_key": named("b"), "compiled_at": FRIDAY, "compile_seconds": 20.0, "artifact": named("B")}
BACKWARD |= {"stored_bytes": 200, "bytes": 900}
UPDATE = {"action_key": named("u"), "compiled_at": SATURDAY, "compile_seconds": 7.0, "artifact": named("U")}
UPDATE |= {"stored_bytes": 50, "bytes": 5000}
BROKEN = {"action_key": named("u"), "compiled_at": FRIDAY, "compile_seconds": 5.0}

ALPHA_FRIDAY = [
    row("1", "forward", "compiled", time=FRIDAY, network="alpha", **FORWARD),
    row("1", "forward-twin", "compiled", time=FRIDAY, network="alpha", **FORWARD),
    row("1", "backward", "compiled", time=FRIDAY, network="alpha", **BACKWARD),
    row("1", "update", "failed", time=FRIDAY, network="alpha", **BROKEN),
]
# Of the same Prefect run a moment later: the compile was alpha's.
BETA_FRIDAY = [row("2", "step", "compiled", time=FRIDAY + timedelta(seconds=1), network="beta", **FORWARD)]
ALPHA_SATURDAY = [
    row("3", "forward", "cached", time=SATURDAY, network="alpha", **FORWARD),
    row("3", "forward-twin", "cached", time=SATURDAY, network="alpha", **FORWARD),
    row("3", "backward", "cached", time=SATURDAY, network="alpha", **BACKWARD),
    row("3", "update", "compiled", time=SATURDAY, network="alpha", **UPDATE),
]
BETA_SUNDAY = [
    row("4", "step", "cached", time=SUNDAY, network="beta", **FORWARD),
    row("4", "other", "blocked", time=SUNDAY, network="beta"),
]

FIGURES_ALPHA = Figures(
    runs=2,
    cached=3,
    compiled=4,
    failed=1,
    blocked=0,
    hit_rate=3 / 8,
    seconds_saved=30.0,  # forward once, though two kernel graphs have it, and backward
    seconds_compiled=42.0,  # forward once, backward, the failure, update
    new_bytes=350,
)
FIGURES_BETA = Figures(runs=2, cached=1, compiled=1, blocked=1, hit_rate=1 / 2, seconds_saved=10.0)


def store_of(*runs: Sequence[CatalogRow]) -> Store:
    store = Store(DictFilesystem({}))
    for rows in runs:
        write_part(store, rows)
    return store


@pytest.fixture
def store() -> Store:
    return store_of(BETA_SUNDAY, ALPHA_FRIDAY, ALPHA_SATURDAY, BETA_FRIDAY)


def test_figures_of_networks_and_of_all(store: Store) -> None:
    report = report_on(store)
    assert report.networks == {"alpha": FIGURES_ALPHA, "beta": FIGURES_BETA}
    assert report.total == Figures(
        runs=4,
        cached=4,
        compiled=5,
        failed=1,
        blocked=1,
        hit_rate=4 / 10,
        seconds_saved=40.0,
        seconds_compiled=42.0,
        new_bytes=350,
    )
    assert (report.network, report.since, report.damaged) == (None, None, ())


def test_figures_of_days(store: Store) -> None:
    assert list(report_on(store).days.items()) == [
        ("2026-01-30", Figures(runs=2, compiled=4, failed=1, hit_rate=0.0, seconds_compiled=35.0, new_bytes=300)),
        (
            "2026-01-31",
            Figures(
                runs=1, cached=3, compiled=1, hit_rate=3 / 4, seconds_saved=30.0, seconds_compiled=7.0, new_bytes=50
            ),
        ),
        ("2026-02-01", Figures(runs=1, cached=1, blocked=1, hit_rate=1.0, seconds_saved=10.0)),
    ]


def test_figures_of_one_network(store: Store) -> None:
    report = report_on(store, "beta")
    assert report.network == "beta"
    assert report.total == FIGURES_BETA
    assert list(report.networks) == ["beta"]
    assert list(report.days) == ["2026-01-30", "2026-02-01"]
    assert [graph.kernel_graph for graph in report.slowest] == ["step"]


def test_what_is_older_is_left_out_and_is_not_new(store: Store) -> None:
    report = report_on(store, since=SATURDAY)
    assert report.since == SATURDAY
    assert report.total.runs == 2
    assert report.total.new_bytes == 50
    assert report.total.seconds_compiled == 7.0
    assert report.total.seconds_saved == 40.0
    assert list(report.days) == ["2026-01-31", "2026-02-01"]
    assert report_on(store, since=SATURDAY + timedelta(microseconds=1)).total.runs == 1


def test_the_slowest_and_the_largest(store: Store) -> None:
    report = report_on(store)
    assert [(graph.network, graph.kernel_graph, graph.seconds) for graph in report.slowest] == [
        ("alpha", "backward", 20.0),
        ("alpha", "forward", 10.0),
        ("alpha", "forward-twin", 10.0),
        ("beta", "step", 10.0),
        ("alpha", "update", 7.0),
    ]
    assert [(graph.kernel_graph, graph.bytes, graph.stored_bytes) for graph in report.largest] == [
        ("update", 5000, 50),
        ("forward", 1000, 100),
        ("forward-twin", 1000, 100),
        ("step", 1000, 100),
        ("backward", 900, 200),
    ]
    backward = report.slowest[0]
    assert (backward.target, backward.action_key, backward.host) == ("host", named("b"), "host-a")
    assert backward.peak_memory_bytes == 7000


def test_of_each_kernel_graph_the_slowest_compile_is_shown_and_not_more_than_ten() -> None:
    runs = [
        [
            row(
                f"run {run}",
                f"graph-{graph:02}",
                time=FRIDAY + timedelta(hours=run),
                compile_seconds=float(graph + 100 * (run == graph % 3)),
                action_key=named(f"{graph} {run}"),
            )
            for graph in range(20)
        ]
        for run in range(3)
    ]
    slowest = report_on(store_of(*runs)).slowest
    assert [graph.seconds for graph in slowest] == [100.0 + number for number in range(19, 19 - TOP_GRAPHS, -1)]
    assert [graph.action_key for graph in slowest] == [
        named(f"{number} {number % 3}") for number in range(19, 19 - TOP_GRAPHS, -1)
    ]


def test_an_empty_catalogue_has_no_figures() -> None:
    report = report_on(store_of(), "any", SUNDAY)
    assert report.total == Figures()
    assert (report.networks, report.days, report.slowest, report.largest) == ({}, {}, (), ())


def test_a_network_that_never_ran_is_an_error_that_names_those_that_did(store: Store) -> None:
    with pytest.raises(BadInputError, match="has no runs of gamma; it has: alpha, beta") as caught:
        report_on(store, "gamma")
    assert caught.value.reason == "unknown-network"
    assert report_on(store, "alpha", SUNDAY).total == Figures()


# ---------------------------------------------------------------------- many rows


def plain_figures(rows: Sequence[CatalogRow], network: str | None, since: datetime | None) -> dict[str, Any]:
    """What a report says, by a loop over rows that are in the order of time."""
    found: dict[str, Figures] = defaultdict(Figures)
    runs, hits, compiles, artifacts = set(), set(), set(), set()
    for item in rows:
        wanted = (network is None or item.network == network) and (since is None or item.time >= since)
        for name in (item.network, f"{item.time:%Y-%m-%d}", "total"):
            figures = found[name] if wanted else Figures()
            setattr(figures, item.outcome, getattr(figures, item.outcome) + 1)
            figures.runs += item.run not in runs
            if item.outcome == "cached" and (item.run, item.action_key) not in hits:
                figures.seconds_saved += item.compile_seconds or 0
            if item.outcome in ("compiled", "failed") and (item.action_key, item.compiled_at) not in compiles:
                figures.seconds_compiled += item.compile_seconds or 0
            if item.artifact and item.artifact not in artifacts:
                figures.new_bytes += item.stored_bytes or 0
        runs.add(item.run)
        if item.outcome == "cached":
            hits.add((item.run, item.action_key))
        if item.outcome in ("compiled", "failed"):
            compiles.add((item.action_key, item.compiled_at))
        artifacts.add(item.artifact)
    for figures in found.values():
        looked_up = figures.cached + figures.compiled + figures.failed
        figures.hit_rate = figures.cached / looked_up if looked_up else None
    return dict(found)


@pytest.fixture(scope="module")
def many() -> list[list[CatalogRow]]:
    return list(history(40, 500))


@pytest.mark.parametrize("network", [None, "net-2"])
@pytest.mark.parametrize("since", [None, FRIDAY + timedelta(hours=13, minutes=20)])
def test_figures_of_20000_rows(many: list[list[CatalogRow]], network: str | None, since: datetime | None) -> None:
    report = report_on(store_of(*many), network, since)
    expected = plain_figures([item for rows in many for item in rows], network, since)
    assert {**report.networks, **report.days, "total": report.total} == expected
    assert report.total.cached > report.total.compiled > report.total.failed > 0
    assert report.total.blocked > 0


def test_a_report_is_the_same_after_a_compaction(many: list[list[CatalogRow]]) -> None:
    store = store_of(*many)
    before = report_on(store)
    with Leases(store) as leases:
        assert compact_catalog(store, leases, tell_waiting=print).rows == 20_000
    assert len(part_paths(store)) == 1
    assert msgspec.to_builtins(report_on(store)) == msgspec.to_builtins(before)
