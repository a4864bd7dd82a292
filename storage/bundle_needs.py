"""What committed variants need to be loaded, and to be found cached when they are ensured again."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import DamagedStoreError, NotCommittedError
from graphkiln.storage.keys import action_key
from graphkiln.storage.plans import parts_of, variant_digest
from graphkiln.storage.records import ActionResult, Plan, PlanDocument, RefRecord, VariantName
from graphkiln.storage.results import manifest_of
from graphkiln.storage.store import Store


@dataclass
class Needs:
    """What some commit points need, themselves included.

    Attributes:
        refs: the commit points.
        plans: the plan document of each.
        actions: the results of their kernel graphs.
        blobs: the blobs, each with what it is.
    """

    refs: list[RefRecord] = field(default_factory=list)
    plans: list[PlanDocument] = field(default_factory=list)
    actions: list[ActionResult] = field(default_factory=list)
    blobs: dict[BlobRef, str] = field(default_factory=dict)

    def paths(self) -> set[str]:
        """Return where all of them lie."""
        return {
            *map(path_of_ref, self.refs),
            *map(path_of_plan, self.refs),
            *(layout.by_digest(layout.MANIFESTS, ref.manifest) for ref in self.refs),
            *map(path_of_action, self.actions),
            *map(path_of_blob, self.blobs),
        }


def needs_of(source: Store, variants: Iterable[VariantName]) -> Needs:
    """Follow commit points to all that they need. Documents are read and verified, blobs are not read.

    Raises:
        NotCommittedError: a variant is not committed.
        DamagedStoreError: a document is missing, damaged, or does not fit the others.
    """
    needs = Needs()
    keys: set[Digest] = set()
    for variant in variants:
        ref = committed_ref(source, variant)
        plan = _add_manifest(needs, source, ref)
        document = source.read_plan(*variant)
        if document is None:
            raise _lacking(source, path_of_plan(ref), f"the plan of {plan.title()}", "is missing")
        if document.plan != plan:
            raise _lacking(source, path_of_plan(ref), f"the plan of {plan.title()}", "is not that of its manifest")
        needs.refs.append(ref)
        needs.plans.append(document)
        if document.previous is not None:
            needs.blobs.setdefault(document.previous, f"the plan before {plan.title()}")
        for graph in plan.graphs:
            if graph.key not in keys:
                keys.add(graph.key)
                _add_action(needs, source, graph.key, f"the action result of {graph.name} of {plan.title()}")
    return needs


def committed_ref(source: Store, variant: VariantName) -> RefRecord:
    """Return the commit point of a variant.

    Raises:
        NotCommittedError: it is not committed.
    """
    ref = source.read_ref(*variant)
    if ref is None:
        network, target, digest = variant
        raise NotCommittedError(
            f"{network} for {target} (variant {digest[:12]}) is not committed in {source.url}: compile it first",
            reason="not-committed",
        )
    return ref


def _add_manifest(needs: Needs, source: Store, ref: RefRecord) -> Plan:
    manifest = manifest_of(source, ref)
    plan = manifest.plan
    if not _is_derived(plan):
        path = layout.by_digest(layout.MANIFESTS, ref.manifest)
        raise _lacking(source, path, f"the manifest of {plan.title()}", "has keys that are not those of its plan")
    for graph in plan.graphs:
        needs.blobs.setdefault(graph.payload, f"the payload of {graph.name} in {plan.title()}")
        for output in manifest.artifacts[graph.name].values():
            needs.blobs.setdefault(output, f"the artifact of {graph.name} in {plan.title()}")
    return plan


def _is_derived(plan: Plan) -> bool:
    """Tell whether the variant and the action keys of a plan are those that its content gives."""
    try:
        return plan.variant == variant_digest(plan.network, plan.target, plan.toolchain) and all(
            graph.key == action_key(parts_of(plan, graph)) for graph in plan.graphs
        )
    except ValueError:  # two parts of one name
        return False


def _add_action(needs: Needs, source: Store, key: Digest, what: str) -> None:
    path = layout.by_digest(layout.ACTIONS, key)
    result = source.read_action(key)
    if result is None:
        raise _lacking(source, path, what, "is missing")
    if not result.outputs:
        raise _lacking(source, path, what, "has no outputs")
    needs.actions.append(result)
    for name, output in result.outputs.items():
        needs.blobs.setdefault(output, f"output {name} of {what}")
    if result.log is not None:
        needs.blobs.setdefault(result.log, f"the log of {what}")


def _lacking(source: Store, path: str, what: str, problem: str) -> DamagedStoreError:
    return DamagedStoreError(f"{source.url}/{path} ({what}) {problem}", reason="incomplete", path=path)


def path_of_blob(ref: BlobRef) -> str:
    """Return where a blob lies in a store."""
    return layout.by_digest(layout.BLOBS, ref.digest)


def path_of_action(result: ActionResult) -> str:
    """Return where the result of an action lies in a store."""
    return layout.by_digest(layout.ACTIONS, result.key)


def path_of_plan(ref: RefRecord) -> str:
    """Return where the plan of a variant lies in a store."""
    return layout.by_variant(layout.PLANS, ref.network, ref.target, ref.variant)


def path_of_ref(ref: RefRecord) -> str:
    """Return where the commit point of a variant lies in a store."""
    return layout.by_variant(layout.REFS, ref.network, ref.target, ref.variant)
