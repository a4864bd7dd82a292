"""Every operation that a run does on its store, and every fault that may befall it there.

A scenario is a store and something that is done to it. The thing is done once undisturbed, to see its operations; then
once for each operation and each fault that this operation can have, each time on a copy of the store.
"""

import abc
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

from graphkiln.storage import layout
from graphkiln.storage.collection import Collector
from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.local import LocalFilesystem
from graphkiln.storage.plans import distinct_graphs
from graphkiln.storage.records import Plan
from graphkiln.storage.results import manifest_of
from graphkiln.storage.retention import Policy
from graphkiln.storage.store import Store, open_for_writing
from graphkiln.tasks.artifacts import unpack
from graphkiln.tasks.session import Report
from tests.flows.stand_in_workers import Kernels, Outputs, resolved_network, run
from tests.storage.faults import FAULTS, HALF_READ, HALF_WRITTEN, DictFilesystem, FaultPoint
from tests.storage.faulty_disk import FAULTS_OF_CALLS, faulty_disk
from tests.storage.faulty_fsspec import URL, Medium

# Two of them are one action; one is large enough to be compressed.
KERNELS: Kernels = {
    "negate": b"int run(int a) { return -a; }" * 200,
    "scale": b"int run(int a) { return 3 * a; }",
    "twin": b"int run(int a) { return 3 * a; }",
}
FORMER: Kernels = {**KERNELS, "negate": b"int run(int a) { return a; }"}

Objects = Mapping[str, bytes]
# Does something to a store that it opens for writing, and reports if that is a run.
Act = Callable[[Callable[[], Store]], Report | None]


class Place(abc.ABC):
    """A store that can be opened with faults and without.

    Attributes:
        name: what kind of place it is.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def faulty(self, point: FaultPoint) -> AbstractContextManager[Callable[[], Store]]:
        """Return what opens the store for writing, as a run does, with a fault."""

    @abc.abstractmethod
    def store(self) -> Store:
        """Return the store as it is; nothing is read or written yet."""

    @abc.abstractmethod
    def faults_of(self, operation: str) -> tuple[str, ...]:
        """Return what may befall an operation there."""


class ObjectStore(Place):
    """The product's client for fsspec, on a medium whose every operation is counted."""

    name = "an object store"

    def __init__(self, objects: Objects) -> None:
        self._medium = Medium(objects)

    @contextmanager
    def faulty(self, point: FaultPoint) -> Iterator[Callable[[], Store]]:
        yield lambda: open_for_writing(URL, {"medium": self._medium, "point": point})

    def store(self) -> Store:
        return Store(DictFilesystem(self.objects()))

    def objects(self) -> dict[str, bytes]:
        """Return all that is stored."""
        return self._medium.objects()

    def faults_of(self, operation: str) -> tuple[str, ...]:
        # Where nothing is changed, to be killed afterwards is to be killed before the next operation.
        if operation in ("read", "list", "look", "make folder"):
            return ("killed before", "EIO", "throttled", *([HALF_READ] if operation == "read" else []))
        return (*FAULTS, *HALF_WRITTEN) if operation in ("create", "write") else FAULTS


class Disk(Place):
    """A folder of a real file system, with every system call counted that changes it."""

    name = "a disk"

    def __init__(self, objects: Objects, folder: Path) -> None:
        self._folder = folder
        self._filesystem = LocalFilesystem(folder)
        for path, data in objects.items():
            self._filesystem.create(path, data)

    @contextmanager
    def faulty(self, point: FaultPoint) -> Iterator[Callable[[], Store]]:
        with faulty_disk(self._folder, point):
            yield lambda: open_for_writing(str(self._folder))

    def store(self) -> Store:
        return Store(self._filesystem)

    def faults_of(self, operation: str) -> tuple[str, ...]:
        return FAULTS_OF_CALLS[operation]


@dataclass(frozen=True)
class Scenario:
    """What is done, and to what.

    Attributes:
        objects: the store before.
        act: what is done to it.
        committed: what was committed before.
        damaged: which objects of the store are damaged to begin with.
    """

    objects: Objects
    act: Act
    committed: Kernels | None = None
    damaged: frozenset[str] = frozenset()


def _compiles(kernels: Kernels, failing: str = "") -> Act:
    return lambda store: run(store, kernels, failing)[0]


def _collects(store: Callable[[], Store]) -> None:
    """Collect, ten days later: all that nobody needs is old enough."""
    waited: list[float] = []
    opened = Store(store()._fs, now=lambda: datetime.now(UTC) + timedelta(days=10))
    Collector(opened, Policy(), sleep=waited.append, monotonic=lambda: sum(waited)).run()


def _after(*runs: Act) -> dict[str, bytes]:
    """Return the objects of a store in which these runs were made."""
    place = ObjectStore({})
    for act in runs:
        with place.faulty(FaultPoint()) as opened:
            act(opened)
    return place.objects()


def _mending(*folders: str) -> Scenario:
    """All that was committed is there, but the objects of these folders have lost their last byte."""
    objects = _after(_compiles(FORMER), _compiles(KERNELS))
    needed = _after(_compiles(KERNELS))
    damaged = {path for path in objects if path in needed and path.partition("/")[0] in folders}
    harmed = {path: data[:-1] if path in damaged else data for path, data in objects.items()}
    # With its outputs, a result is lost as well.
    results = {path for path in needed if path.startswith(layout.ACTIONS)}
    return Scenario(harmed, _compiles(KERNELS), committed=KERNELS, damaged=frozenset(damaged | results))


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "a first run": lambda: Scenario({}, _compiles(KERNELS)),
    "a run with nothing to do": lambda: Scenario(_after(_compiles(KERNELS)), _compiles(KERNELS), KERNELS),
    "a run after a change": lambda: Scenario(_after(_compiles(FORMER)), _compiles(KERNELS), FORMER),
    "a run that fails to compile": lambda: Scenario(
        _after(_compiles(FORMER)), _compiles(KERNELS, failing="negate"), FORMER
    ),
    "a run after one that failed": lambda: Scenario(
        _after(_compiles(FORMER), _compiles(KERNELS, failing="negate")), _compiles(KERNELS), FORMER
    ),
    "a mending of documents": lambda: _mending(
        layout.FORMAT, layout.PLANS, layout.REFS, layout.MANIFESTS, layout.ACTIONS
    ),
    "a collection": lambda: Scenario(_after(_compiles(FORMER), _compiles(KERNELS)), _collects, KERNELS),
    "a mending of blobs": lambda: _mending(layout.BLOBS),
}


# ---------------------------------------------------------------------- what a store has for its readers


def load(store: Store) -> Outputs | None:
    """Read what a trainer reads; None if nothing is committed."""
    resolved = resolved_network()
    ref = store.read_ref(resolved.network.name, resolved.target.name, resolved.variant)
    if ref is None:
        return None
    return {
        graph: unpack({name: store.get_blob(blob, f"output {name} of {graph}") for name, blob in outputs.items()})
        for graph, outputs in manifest_of(store, ref).artifacts.items()
    }


@functools.cache
def _plan() -> Plan:
    place = ObjectStore({})
    with place.faulty(FaultPoint()) as opened:
        report, _ = run(opened, KERNELS)
    assert report.manifest is not None
    return place.store().read_manifest(report.manifest).plan


def not_usable(store: Store) -> list[str]:
    """Return the kernel graphs whose result is not there, or not whole."""
    found = []
    for key, graphs in distinct_graphs(_plan().graphs).items():
        try:
            result = store.read_action(key)
            for name, blob in result.outputs.items() if result else ():
                store.get_blob(blob, name)
        except DamagedStoreError:
            result = None
        if result is None:
            found.append(graphs[0].name)
    return found
