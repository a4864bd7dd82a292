"""What a store knows of its networks, as `status`, `show`, `explain` and `log` tell it. Nothing is changed."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Literal, TypeVar

import msgspec

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.digests import Digest
from graphkiln.storage.documents import unseal
from graphkiln.storage.errors import BadInputError, DamagedStoreError, UntrustedError
from graphkiln.storage.keys import PartChange
from graphkiln.storage.plans import key_changes
from graphkiln.storage.records import (
    ActionResult,
    FailureRecord,
    Manifest,
    Plan,
    PlanDocument,
    PlannedGraph,
    RefRecord,
    VariantName,
)
from graphkiln.storage.results import manifest_of
from graphkiln.storage.store import Store

Found = TypeVar("Found")
Fault = DamagedStoreError | UntrustedError
GraphState = Literal["compiled", "failed", "not compiled", "damaged", "untrusted"]
VariantState = Literal["committed", "outdated", "failed", "not committed", "damaged", "untrusted"]


class GraphStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel graph of a stored plan.

    Attributes:
        name: the kernel graph.
        ranks: who runs it.
        state: whether it has a result now.
        key: its action key.
        seconds: wall time of its compile.
        bytes: size of its artifact, decoded.
        reason: why it failed, in one word.
        message: why it failed, in the compiler's words.
    """

    name: str
    ranks: str
    state: GraphState
    key: Digest
    seconds: float | None = None
    bytes: int | None = None
    reason: str | None = None
    message: str | None = None


class VariantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One variant in the store.

    Attributes:
        network: the network's name.
        target: the target's name.
        variant: the variant.
        state: ``"committed"``: `load` gives its newest plan; ``"outdated"``: `load` gives an older plan, as the
            newest has not compiled; ``"failed"`` and ``"not committed"``: there is nothing to load.
        planned_at: when its plan was written; None if the plan is lost.
        committed_at: when it was committed; None if it is not.
        signed_by: whose trusted signature its commit has; None where signatures are not required.
        damage: what is wrong with its documents, if anything; that one is not trusted is wrong as well.
        parameters: the network's parameters.
        graphs: its kernel graphs.
    """

    network: str
    target: str
    variant: Digest
    state: VariantState
    planned_at: datetime | None
    committed_at: datetime | None
    signed_by: str | None
    damage: str | None
    parameters: dict[str, object]
    graphs: tuple[GraphStatus, ...]


class GraphExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a kernel graph was a hit or a miss.

    Attributes:
        name: the kernel graph.
        state: whether it has a result now.
        changes: the key parts that differ from the plan before; None if it has no such kernel graph.
    """

    name: str
    state: GraphState
    changes: tuple[PartChange, ...] | None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """A plan beside the one before it.

    Attributes:
        network: the network's name.
        target: the target's name.
        variant: the variant of the newest plan.
        planned_at: when it was written.
        before: variant of the plan that it is compared with; None if it is the first.
        before_at: when that one was written.
        parameters: parameters that differ, as (before, after).
        graphs: its kernel graphs.
    """

    network: str
    target: str
    variant: Digest
    planned_at: datetime
    before: Digest | None
    before_at: datetime | None
    parameters: dict[str, tuple[object, object]]
    graphs: tuple[GraphExplanation, ...]


def variants_of(
    store: Store, network: str | None = None, target: str | None = None, variant: str = ""
) -> list[VariantStatus]:
    """Return every variant of a network or of all, newest first within each target.

    Args:
        store: the store.
        network: only of this network.
        target: only of this target.
        variant: only those whose variant starts with this.

    Raises:
        BadInputError: the store has no such network, target or variant.
    """
    names = variant_names(store, (layout.PLANS, layout.REFS), network, target, variant)
    found = [_variant_status(store, *name) for name in names]
    found.sort(key=lambda item: item.planned_at.timestamp() if item.planned_at else 0.0, reverse=True)
    return sorted(found, key=lambda item: (item.network, item.target))


def variant_names(
    store: Store, folders: Sequence[str], network: str | None, target: str | None, variant: str
) -> list[VariantName]:
    """Return every variant of a network or of all that has a document in one of the folders, sorted.

    Args:
        store: the store.
        folders: of `layout.PLANS`, `layout.REFS` and `layout.KEPT_PINS`.
        network: only of this network.
        target: only of this target.
        variant: only those whose variant starts with this.

    Raises:
        BadInputError: the store has no such network, target or variant there.
    """
    names = sorted({name for folder in folders for name in store.variants(folder, network, target)})
    if network is not None and not names:
        known = sorted({f"{name} for {of}" for folder in folders for name, of, _ in store.variants(folder)})
        wanted = network if target is None else f"{network} for {target}"
        there = "no pin of" if folders == (layout.KEPT_PINS,) else "no"
        message = f"the store {store.url} has {there} {wanted}; it has: {', '.join(known) or 'nothing'}"
        raise BadInputError(message, reason="unknown-network")
    names = [name for name in names if name[2].startswith(variant)]
    if variant and not names:
        raise BadInputError(f"no variant of {network} starts with {variant!r}", reason="unknown-variant")
    return names


def explain(store: Store, network: str, target: str | None = None) -> Explanation:
    """Compare the newest plan of a network with the one before it.

    Raises:
        BadInputError: the store has no plan of it, or plans for several targets.
        DamagedStoreError: a plan is damaged.
    """
    target = target or only_target(store, network)
    plans = [store.read_plan(*name) for name in store.variants(layout.PLANS, network, target)]
    documents = sorted((plan for plan in plans if plan is not None), key=lambda item: item.created_at)
    if not documents:
        raise BadInputError(f"the store {store.url} has no plan of {network} for {target}", reason="unknown-network")
    newest = documents.pop()
    if newest.previous is not None:
        documents.append(_plan_before(store, newest, newest.previous))
    before = max(documents, key=lambda item: item.created_at, default=None)
    plan = newest.plan
    return Explanation(
        network=network,
        target=target,
        variant=plan.variant,
        planned_at=newest.created_at,
        before=before.plan.variant if before else None,
        before_at=before.created_at if before else None,
        parameters=_changed_parameters(before.plan, plan) if before else {},
        graphs=tuple(_explain_graph(store, before, plan, graph) for graph in plan.graphs),
    )


def compiler_log(store: Store, network: str, graph: str, target: str | None = None, variant: str = "") -> str:
    """Return what the compiler printed for a kernel graph of the newest plan that has it; empty if nothing.

    Args:
        store: the store.
        network: the network's name.
        graph: the kernel graph.
        target: the target; the only one if None.
        variant: how the variant starts, to choose another than the newest.

    Raises:
        BadInputError: there is no such kernel graph, or it has not been compiled.
        DamagedStoreError: the log is damaged.
        UntrustedError: nobody who is trusted has signed the result.
    """
    for found in variants_of(store, network, target or only_target(store, network), variant):
        for item in found.graphs:
            if item.name == graph:
                return _log_of(store, item)
    raise BadInputError(f"{network} has no kernel graph {graph!r}", reason="unknown-kernel-graph")


def only_target(store: Store, network: str) -> str:
    """Return the one target that the store has for a network.

    Raises:
        BadInputError: it has none, or several.
    """
    targets = sorted({of for folder in (layout.PLANS, layout.REFS) for _, of, _ in store.variants(folder, network)})
    if len(targets) == 1:
        return targets[0]
    told = f"targets {', '.join(targets)}: say which with --target" if targets else "no such network"
    raise BadInputError(f"{network} in the store {store.url}: {told}", reason="unknown-target")


def _variant_status(store: Store, network: str, target: str, variant: Digest) -> VariantStatus:
    faults: list[Fault] = []
    ref: RefRecord | None = _tolerant(lambda: store.read_ref(network, target, variant), faults)
    document: PlanDocument | None = _tolerant(lambda: store.read_plan(network, target, variant), faults)
    manifest: Manifest | None = None
    if ref is not None:
        manifest = _tolerant(lambda: manifest_of(store, ref), faults)
    plan: Plan | None = document.plan if document else manifest.plan if manifest else None
    graphs = tuple(_graph_status(store, graph) for graph in plan.graphs) if plan else ()
    return VariantStatus(
        network=network,
        target=target,
        variant=variant,
        state=_variant_state(faults, manifest, plan, graphs),
        planned_at=document.created_at if document else None,
        committed_at=ref.committed_at if ref and manifest else None,
        signed_by=store.trust.name_of(ref.signature) if ref and manifest else None,
        damage=_told(faults),
        parameters=dict(plan.network.parameters) if plan else {},
        graphs=graphs,
    )


def _variant_state(
    faults: list[Fault], manifest: Manifest | None, plan: Plan | None, graphs: tuple[GraphStatus, ...]
) -> VariantState:
    kind = _kind_of(faults)
    if kind == "damaged" or any(graph.state == "damaged" for graph in graphs):
        return "damaged"
    if kind is not None:
        return kind
    if manifest is not None:
        return "committed" if manifest.plan == plan else "outdated"
    return "failed" if any(graph.state == "failed" for graph in graphs) else "not committed"


def _graph_status(store: Store, graph: PlannedGraph) -> GraphStatus:
    faults: list[Fault] = []
    result: ActionResult | None = _tolerant(lambda: store.read_action(graph.key), faults)
    failure: FailureRecord | None = None
    if result is None:
        failure = _tolerant(lambda: store.read_failure(graph.key), faults)
    state: GraphState = "compiled" if result else _kind_of(faults) or ("failed" if failure else "not compiled")
    return GraphStatus(
        name=graph.name,
        ranks=str(graph.ranks),
        state=state,
        key=graph.key,
        seconds=result.stats.seconds if result else failure.stats.seconds if failure else None,
        bytes=sum(ref.size for ref in result.outputs.values()) if result else None,
        reason=failure.reason if failure else None,
        message=failure.message if failure else _told(faults),
    )


def _plan_before(store: Store, newest: PlanDocument, ref: BlobRef) -> PlanDocument:
    what = f"the plan before {newest.plan.title()}"
    data = store.get_blob(ref, what)
    try:
        return unseal(data, "plan", PlanDocument)
    except DamagedStoreError as error:
        raise DamagedStoreError(f"{what} is damaged: {error}", reason=error.reason) from error


def _explain_graph(store: Store, before: PlanDocument | None, plan: Plan, graph: PlannedGraph) -> GraphExplanation:
    changes = key_changes(before.plan, plan, graph.name) if before else None
    return GraphExplanation(
        name=graph.name,
        state=_graph_status(store, graph).state,
        changes=None if changes is None else tuple(changes),
    )


def _changed_parameters(before: Plan, after: Plan) -> dict[str, tuple[object, object]]:
    old, new = before.network.parameters, after.network.parameters
    return {
        name: (old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def _log_of(store: Store, graph: GraphStatus) -> str:
    record = store.read_action(graph.key) or store.read_failure(graph.key)
    if record is None:
        raise BadInputError(f"kernel graph {graph.name} has not been compiled", reason="not-compiled")
    if record.log is None:
        return ""
    return store.get_blob(record.log, f"the compiler log of {graph.name}").decode(errors="replace")


def _tolerant(read: Callable[[], Found], faults: list[Fault]) -> Found | None:
    try:
        return read()
    except (DamagedStoreError, UntrustedError) as error:
        faults.append(error)
        return None


def _kind_of(faults: list[Fault]) -> Literal["damaged", "untrusted"] | None:
    if any(isinstance(fault, DamagedStoreError) for fault in faults):
        return "damaged"
    return "untrusted" if faults else None


def _told(faults: list[Fault]) -> str | None:
    return "; ".join(map(str, faults)) or None
