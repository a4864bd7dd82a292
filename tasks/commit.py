"""Stage 3: nothing else makes a network loadable.

Everything that the manifest will name is read back and checked, then made durable; then the manifest is
written, and last the ref that makes it visible.
"""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import CompileFailedError
from graphkiln.storage.records import Manifest, Plan, RefRecord
from graphkiln.storage.results import usable_results
from graphkiln.storage.store import Store
from graphkiln.tasks.outcome import GraphOutcome

_log = logging.getLogger("graphkiln")


def commit_manifest(plan: Plan, outcomes: Mapping[str, GraphOutcome], store: Store) -> RefRecord:
    """Read back everything that the manifest will name, write the manifest, and move the ref.

    Args:
        plan: the plan.
        outcomes: what became of its kernel graphs, by name. Those of other ranks may be missing.
        store: the store.

    Returns:
        The commit point, as this run left it.

    Raises:
        CompileFailedError: a kernel graph of the plan has not compiled. Nothing is written.
        DamagedStoreError: something is not what was written. Nothing is written.
    """
    artifacts = _verified_artifacts(plan, outcomes, store)
    for damage in store.damage_of([(graph.payload, f"the payload of {graph.name}") for graph in plan.graphs]):
        raise damage
    store.sync(_named_paths(plan, artifacts))
    manifest = Manifest(plan=plan, artifacts=artifacts)
    known = store.holds_manifest(manifest)
    digest = store.write_manifest(manifest)
    store.read_manifest(digest)
    return _move_ref(plan, digest, store, known=known)


def _verified_artifacts(
    plan: Plan, outcomes: Mapping[str, GraphOutcome], store: Store
) -> dict[str, dict[str, BlobRef]]:
    for outcome in outcomes.values():
        if not outcome.succeeded:
            raise CompileFailedError(
                f"kernel graph {outcome.name} did not compile: {outcome.message}", reason="not-compiled"
            )
    results = usable_results(store, [graph.key for graph in plan.graphs])
    artifacts: dict[str, dict[str, BlobRef]] = {}
    for graph in plan.graphs:
        result = results[graph.key]
        if result is None:
            raise CompileFailedError(f"kernel graph {graph.name} has no result: compile it", reason="not-compiled")
        artifacts[graph.name] = dict(result.outputs)
    return artifacts


def _named_paths(plan: Plan, artifacts: Mapping[str, Mapping[str, BlobRef]]) -> list[str]:
    blobs = [graph.payload for graph in plan.graphs]
    blobs += [ref for outputs in artifacts.values() for ref in outputs.values()]
    paths = {layout.by_digest(layout.BLOBS, ref.digest) for ref in blobs}
    return sorted(paths | {layout.by_digest(layout.ACTIONS, graph.key) for graph in plan.graphs})


def _move_ref(plan: Plan, manifest: Digest, store: Store, *, known: bool) -> RefRecord:
    variant = (plan.network.name, plan.target.name, plan.variant)
    current = store.mend(lambda: store.read_ref(*variant))
    if current is None and known:
        # A ref that was lost cannot be told from a commit that was killed before it wrote one.
        path = layout.by_variant(layout.REFS, *variant)
        _log.warning("%s/%s was missing, though its manifest was there: it is written again", store.url, path)
    if current is not None and current.manifest == manifest:
        return current
    ref = RefRecord(
        network=plan.network.name,
        target=plan.target.name,
        variant=plan.variant,
        manifest=manifest,
        committed_at=datetime.now(UTC),
    )
    store.write_ref(ref)
    return ref
