"""What was made before and still holds: only a result whose every byte is there and matches is one."""

import functools
from collections.abc import Iterable, Iterator

import msgspec

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.objects import NodeCacheUse
from graphkiln.storage.records import ActionResult, Manifest, RefRecord
from graphkiln.storage.store import Store


def usable_result(store: Store, key: Digest) -> ActionResult | None:
    """Return the verified result of an action, or None if it has to run (again).

    Damage is set aside with a warning; what is not trusted counts as absent. If an output is lost, so is the result. A
    lost log is only a loss of the log, for which nothing is compiled again.
    """
    return usable_results(store, [key])[key]


def usable_results(store: Store, keys: Iterable[Digest]) -> dict[Digest, ActionResult | None]:
    """Return what `usable_result` does of each action. All are read side by side, from the store itself."""
    found = store.read_actions(list(dict.fromkeys(keys)))
    results = {key: result for key, result in found.items() if result is not None and result.outputs}
    blobs = [item for result in results.values() for item in _blobs_of(result)]
    damaged = {error.path for error in store.damage_of(blobs, node_cache="fill")}
    whole = {
        key: result
        for key, result in results.items()
        if not any(layout.by_digest(layout.BLOBS, ref.digest) in damaged for ref, _ in _blobs_of(result))
    }
    absent = {key for key, result in found.items() if result is None}
    # Whatever is not in order is looked at again, one by one.
    return {key: whole.get(key) or (None if key in absent else _mended_result(store, key)) for key in keys}


def _blobs_of(result: ActionResult) -> Iterator[tuple[BlobRef, str]]:
    for name, ref in result.outputs.items():
        yield ref, f"output {name} of the action {result.key}"
    if result.log is not None:
        yield result.log, f"compiler log of the action {result.key}"


def _mended_result(store: Store, key: Digest) -> ActionResult | None:
    result = store.mend(lambda: _complete_result(store, key))
    if result is None:
        return None
    for name, ref in result.outputs.items():
        read = functools.partial(store.get_blob, ref, f"output {name} of the action {key}")
        if store.mend(read) is None:
            store.drop_action(result)
            return None
    return _with_readable_log(store, result)


def _complete_result(store: Store, key: Digest) -> ActionResult | None:
    result = store.read_action(key)
    if result is not None and not result.outputs:
        path = layout.by_digest(layout.ACTIONS, key)
        message = f"{store.url}/{path} (the action result) is damaged: it has no outputs"
        raise DamagedStoreError(message, reason="incomplete", path=path)
    return result


def _with_readable_log(store: Store, result: ActionResult) -> ActionResult:
    log = result.log
    if log is None or store.mend(lambda: store.get_blob(log, f"compiler log of the action {result.key}")) is not None:
        return result
    without = msgspec.structs.replace(result, log=None)
    if result.signature is None or store.trust.signer is not None:
        # Without a key the signed one stays: it is worth more than a tidy log.
        without = store.trust.sign("action result", without)
        store.replace_action(without)
    return without


def manifest_of(store: Store, ref: RefRecord, *, node_cache: NodeCacheUse = "bypass") -> Manifest:
    """Return the manifest that a ref names.

    Args:
        store: the store.
        ref: the ref.
        node_cache: what this host's copies are to the reader.

    Raises:
        DamagedStoreError: it is missing, does not match its digest, or is whole but another variant's.
    """
    manifest = store.read_manifest(ref.manifest, node_cache=node_cache)
    plan = manifest.plan
    if (plan.network.name, plan.target.name, plan.variant) != (ref.network, ref.target, ref.variant):
        path = layout.by_variant(layout.REFS, ref.network, ref.target, ref.variant)
        raise DamagedStoreError(
            f"{store.url}/{path} is damaged: it names the manifest of {plan.title()}", reason="misplaced", path=path
        )
    return manifest


def missing_from(store: Store, manifest: Manifest) -> Iterator[DamagedStoreError]:
    """Iterate over the documents that belong to a committed manifest and are not there: its actions, its plan."""
    plan = manifest.plan
    expected = {
        layout.by_digest(layout.ACTIONS, graph.key): f"the action result of {graph.name}" for graph in plan.graphs
    }
    expected[layout.by_variant(layout.PLANS, plan.network.name, plan.target.name, plan.variant)] = "the plan"
    for path, found in zip(expected, store.read_all(list(expected)), strict=True):
        if isinstance(found, FileNotFoundError):
            message = f"{store.url}/{path} ({expected[path]} of {plan.title()}, which is committed) is missing"
            yield DamagedStoreError(message, reason="missing", path=path)
        elif isinstance(found, DamagedStoreError):
            yield found
