"""What the catalogue tells: how often kernel graphs were found in the store, what that saved, what is slow and large.

All figures add up: those of all networks, and those of all days, give the total.
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from graphkiln.storage.catalog import read_catalog
from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import BadInputError
from graphkiln.storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa

TOP_GRAPHS = 10

_OUTCOMES = ("cached", "compiled", "failed", "blocked")

_COLUMNS = (
    "time",
    "run",
    "network",
    "target",
    "kernel_graph",
    "outcome",
    "action_key",
    "artifact",
    "bytes",
    "stored_bytes",
    "compile_seconds",
    "peak_memory_bytes",
    "host",
    "compiled_at",
)


class Figures(msgspec.Struct, kw_only=True):
    """Sums over some runs.

    Attributes:
        runs: how many runs, each of one network for one target.
        cached: how many kernel graphs were found in the store.
        compiled: how many were compiled.
        failed: how many did not compile.
        blocked: how many were not attempted, as the run was interrupted.
        hit_rate: cached ÷ (cached + compiled + failed); None if these are none.
        seconds_saved: what the compiles of the cached kernel graphs had taken, each action once a run.
        seconds_compiled: what the compiles took that these runs made, failed ones included, each once.
        new_bytes: stored bytes of the artifacts that no run before had.
    """

    runs: int = 0
    cached: int = 0
    compiled: int = 0
    failed: int = 0
    blocked: int = 0
    hit_rate: float | None = None
    seconds_saved: float = 0.0
    seconds_compiled: float = 0.0
    new_bytes: int = 0


class GraphFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A compile of a kernel graph.

    Attributes:
        network: the network's name.
        target: the target's name.
        kernel_graph: the kernel graph.
        action_key: its action key.
        seconds: wall time of its compile.
        peak_memory_bytes: most memory that this had resident.
        host: where it ran.
        bytes: size of the artifact, decoded.
        stored_bytes: its size in the store.
    """

    network: str
    target: str
    kernel_graph: str
    action_key: Digest
    seconds: float
    peak_memory_bytes: int
    host: str
    bytes: int
    stored_bytes: int


class CatalogReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a catalogue.

    Attributes:
        store: the store's URL.
        network: the only network that was looked at; None for all.
        since: only runs from then on were looked at; None for all. Artifacts that are older are not new.
        total: the sums over all of these runs.
        networks: the sums by network.
        days: the sums by day of UTC, such as ``"2026-01-31"``, in order.
        slowest: of each of the kernel graphs that took longest to compile, the longest compile; longest first.
        largest: of each of the kernel graphs with the largest artifacts, the largest one; largest first.
        damaged: the parts of the catalogue that were left out because they are damaged.
    """

    store: str
    network: str | None
    since: datetime | None
    total: Figures
    networks: dict[str, Figures]
    days: dict[str, Figures]
    slowest: tuple[GraphFigures, ...]
    largest: tuple[GraphFigures, ...]
    damaged: tuple[str, ...]


def report_on(store: Store, network: str | None = None, since: datetime | None = None) -> CatalogReport:
    """Read the catalogue of a store and compute its figures.

    Args:
        store: the store.
        network: only of this network; all if None.
        since: only of runs from then on; all if None.

    Raises:
        BadInputError: the catalogue has no such network, or a newer GraphKiln wrote it.
        StoreUnavailableError: the medium failed.
    """
    catalog = read_catalog(store, _COLUMNS)
    rows = _in_order(catalog.rows)
    _refuse_unknown_network(store, rows, network)
    # What is the first of its kind is decided over all runs, before any is left out.
    artifacts = _selected(_firsts(rows, ["artifact"], ("compiled", "cached")), network, since)
    compiles = _selected(_firsts(rows, ["action_key", "compiled_at"], ("compiled", "failed")), network, since)
    rows = _selected(rows, network, since)
    sums = _Sums(rows, _firsts(rows, ["run", "action_key"], ("cached",)), compiles, artifacts)
    networks = sums.by("network")
    return CatalogReport(
        store=store.url,
        network=network,
        since=since,
        total=_total(networks.values()),
        networks=networks,
        days=sums.by("day"),
        slowest=_top(rows, "compile_seconds"),
        largest=_top(rows, "bytes"),
        damaged=catalog.damaged,
    )


class _Sums(NamedTuple):
    rows: "pa.Table"
    hits: "pa.Table"
    compiles: "pa.Table"
    artifacts: "pa.Table"

    def by(self, group: str) -> dict[str, Figures]:
        """Return the figures of each network or day."""
        found: dict[str, Figures] = {}
        measures = [(outcome, _with_outcome(self.rows, (outcome,)), "run", "count") for outcome in _OUTCOMES]
        measures += [
            ("runs", self.rows, "run", "count_distinct"),
            ("seconds_saved", self.hits, "compile_seconds", "sum"),
            ("seconds_compiled", self.compiles, "compile_seconds", "sum"),
            ("new_bytes", self.artifacts, "stored_bytes", "sum"),
        ]
        for name, table, column, function in measures:
            # One thread adds in one order: the last digits of a sum are the same each time.
            summed = table.group_by(group, use_threads=False).aggregate([(column, function)])
            for key, value in zip(*(summed[item].to_pylist() for item in (group, f"{column}_{function}")), strict=True):
                setattr(found.setdefault(str(key), Figures()), name, value or 0)
        for figures in found.values():
            figures.hit_rate = _hit_rate(figures)
        return dict(sorted(found.items()))


def _total(parts: Collection[Figures]) -> Figures:
    sums = {
        name: sum(getattr(part, name) for part in parts) for name in Figures.__struct_fields__ if name != "hit_rate"
    }
    total = Figures(**sums)
    total.hit_rate = _hit_rate(total)
    return total


def _hit_rate(figures: Figures) -> float | None:
    looked_up = figures.cached + figures.compiled + figures.failed
    return figures.cached / looked_up if looked_up else None


def _in_order(rows: "pa.Table") -> "pa.Table":
    """Return the rows by time, with their day. What repeats is encoded, a third of the memory."""
    import pyarrow as pa

    for index, name in enumerate(rows.column_names):
        if pa.types.is_string(rows.schema.types[index]) or pa.types.is_fixed_size_binary(rows.schema.types[index]):
            rows = rows.set_column(index, name, rows[name].dictionary_encode())
    rows = rows.sort_by("time")
    return rows.append_column("day", rows["time"].cast(pa.date32()))


def _refuse_unknown_network(store: Store, rows: "pa.Table", network: str | None) -> None:
    import pyarrow.compute as pc

    known = pc.unique(rows["network"]).to_pylist()
    if network is not None and known and network not in known:
        raise BadInputError(
            f"the catalogue of {store.url} has no runs of {network}; it has: {', '.join(sorted(known))}",
            reason="unknown-network",
        )


def _selected(rows: "pa.Table", network: str | None, since: datetime | None) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.compute as pc

    if network is not None:
        rows = rows.filter(pc.equal(rows["network"], network))
    if since is not None:
        rows = rows.filter(pc.greater_equal(rows["time"], pa.scalar(since, rows.schema.field("time").type)))
    return rows


def _with_outcome(rows: "pa.Table", outcomes: Sequence[str]) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.compute as pc

    return rows.filter(pc.is_in(rows["outcome"], pa.array(outcomes)))


def _firsts(rows: "pa.Table", keys: Sequence[str], outcomes: Sequence[str]) -> "pa.Table":
    """Return the first row of each combination of keys, of those with one of these outcomes."""
    import pyarrow as pa

    chosen = _with_outcome(rows, outcomes)
    numbered = chosen.select(keys).append_column("number", pa.array(range(len(chosen)), pa.int64()))
    return chosen.take(numbered.group_by(keys).aggregate([("number", "min")])["number_min"])


def _top(rows: "pa.Table", column: str) -> tuple[GraphFigures, ...]:
    """Return the rows with the greatest values, one of each kernel graph."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = ["network", "target", "kernel_graph"]
    made = _with_outcome(rows, ("compiled", "cached"))
    greatest = made.group_by(names).aggregate([(column, "max")])
    # pyarrow 26 crashes if it is to sort by a column that is encoded.
    for name in names:
        greatest = greatest.set_column(greatest.column_names.index(name), name, greatest[name].cast(pa.string()))
    order = [(f"{column}_max", "descending"), *((name, "ascending") for name in names)]
    found = []
    for wanted in greatest.sort_by(order).slice(0, TOP_GRAPHS).to_pylist():
        mask = pc.equal(made[column], wanted[f"{column}_max"])
        for name in names:
            mask = pc.and_(mask, pc.equal(made[name], wanted[name]))
        found.append(_graph_figures(made.filter(mask).slice(0, 1).to_pylist()[0]))
    return tuple(found)


def _graph_figures(row: dict[str, Any]) -> GraphFigures:
    return GraphFigures(
        network=row["network"],
        target=row["target"],
        kernel_graph=row["kernel_graph"],
        action_key=Digest(row["action_key"].hex()),
        seconds=row["compile_seconds"],
        peak_memory_bytes=row["peak_memory_bytes"],
        host=row["host"],
        bytes=row["bytes"],
        stored_bytes=row["stored_bytes"],
    )
