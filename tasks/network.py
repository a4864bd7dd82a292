"""A committed network, as a trainer uses it. Imports neither Prefect nor pydantic nor a framework."""

import functools
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from graphkiln.storage.canonical import Json
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.documents import seal
from graphkiln.storage.leases import this_process
from graphkiln.storage.pins import pin_manifest
from graphkiln.storage.records import Manifest, PlannedGraph
from graphkiln.storage.store import Store
from graphkiln.tasks.artifacts import unpack
from graphkiln.tasks.checks import refuse_unknown
from graphkiln.tasks.contracts import Backend
from graphkiln.tasks.registry import load_backend


class CompiledNetwork:
    """A complete, committed variant of a network. Every byte is checked before anything uses it.

    Attributes:
        manifest: the plan and the artifacts.
        committed_at: when it was committed, with a time zone.
    """

    def __init__(self, manifest: Manifest, committed_at: datetime, store: Store) -> None:
        self.manifest = manifest
        self._store = store
        self._graphs = {graph.name: graph for graph in manifest.plan.graphs}
        self.committed_at = committed_at

    @property
    def name(self) -> str:
        """The network's name."""
        return self.manifest.plan.network.name

    @property
    def target(self) -> str:
        """The target's name."""
        return self.manifest.plan.target.name

    @property
    def variant(self) -> Digest:
        """The digest of parameters, target and toolchain."""
        return self.manifest.plan.variant

    @property
    def parameters(self) -> Mapping[str, Json]:
        """The network's parameters."""
        return self.manifest.plan.network.parameters

    def graphs(self, rank: int | None = None) -> list[str]:
        """Return the names of the kernel graphs, in the frontend's order.

        Args:
            rank: only those that this rank runs.
        """
        return [graph.name for graph in self._graphs.values() if rank is None or rank in graph.ranks]

    def load(self, graph: str, *, devices: Sequence[Any] | None = None) -> Any:
        """Return one kernel graph, ready to run.

        Args:
            graph: its name.
            devices: the devices to run on, as the backend understands them; its own choice if None.

        Raises:
            BadInputError: there is no such kernel graph, or the devices do not suit it.
            DamagedStoreError: the artifact is missing or damaged. `ensure` makes it again.
        """
        return self._ready(self._artifacts([graph])[0], devices)

    def load_all(self, rank: int | None = None, *, devices: Sequence[Any] | None = None) -> dict[str, Any]:
        """Return the kernel graphs of a rank by name, ready to run. Their artifacts are read side by side.

        Args:
            rank: only those that this rank runs; all of them if None.
            devices: as for `load`, for each of them.

        Raises:
            BadInputError: the devices do not suit one of them.
            DamagedStoreError: an artifact is missing or damaged. `ensure` makes it again.
        """
        names = self.graphs(rank)
        artifacts = self._artifacts(names)
        # Each artifact's bytes go as soon as it is ready.
        return {name: self._ready(artifacts.pop(0), devices) for name in names}

    def _artifacts(self, graphs: Sequence[str]) -> list[dict[str, bytes]]:
        refs = [self.manifest.artifacts[self._planned(graph).name] for graph in graphs]
        title = self.manifest.plan.title()
        wanted = [
            (ref, f"output {name} of {graph} in {title}")
            for graph, outputs in zip(graphs, refs, strict=True)
            for name, ref in outputs.items()
        ]
        contents = iter(self._store.get_blobs(wanted, node_cache="use"))
        return [{name: next(contents) for name in outputs} for outputs in refs]

    def _ready(self, artifact: Mapping[str, bytes], devices: Sequence[Any] | None) -> Any:
        return self._backend.load(self.manifest.plan.target.settings, unpack(artifact), devices)

    def pin(self, life: timedelta) -> None:
        """Keep what this network names from being collected, though it be replaced or removed meanwhile.

        For trainers that load kernel graphs late: `ensure` pins for an hour, `load` not at all.

        Args:
            life: how long the pin holds.

        Raises:
            BadInputError: the store cannot be written.
            DamagedStoreError: it has been collected already.
        """
        plan = self.manifest.plan
        variant = (plan.network.name, plan.target.name, plan.variant)
        digest = digest_bytes(seal("manifest", self.manifest))
        pin_manifest(self._store, variant, digest, reason=f"a trainer, {this_process()}", life=life)
        self._store.read_manifest(digest)  # a collector that could not see the pin yet may have been faster

    def __repr__(self) -> str:
        return f"<CompiledNetwork {self.manifest.plan.title()}, committed {self.committed_at:%Y-%m-%d %H:%M:%S %Z}>"

    @functools.cached_property
    def _backend(self) -> Backend:
        # Finding it reads the metadata of every installed package, which is a tenth of loading a kernel graph.
        return load_backend(self.manifest.plan.target.backend)

    def _planned(self, graph: str) -> PlannedGraph:
        refuse_unknown([graph], self._graphs, what=f"kernel graph of {self.name}", reason="unknown-kernel-graph")
        return self._graphs[graph]
