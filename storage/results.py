"""What was made before and still holds: only a result whose every byte is there and matches is one."""

import functools
from collections.abc import Iterator

import msgspec

from graphkiln.storage import layout
from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.records import ActionResult, Manifest, RefRecord
from graphkiln.storage.store import Store


def usable_result(store: Store, key: Digest) -> ActionResult | None:
    """Return the verified result of an action, or None if it has to run (again).

    Damage is set aside with a warning. If an output is lost, so is the result. A lost log is only a loss of the
    log, for which nothing is compiled again.
    """
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
    store.replace_action(without)
    return without


def manifest_of(store: Store, ref: RefRecord) -> Manifest:
    """Return the manifest that a ref names.

    Raises:
        DamagedStoreError: it is missing, does not match its digest, or is whole but another variant's.
    """
    manifest = store.read_manifest(ref.manifest)
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
    for path, what in expected.items():
        try:
            store.read_raw(path)
        except FileNotFoundError:
            message = f"{store.url}/{path} ({what} of {plan.title()}, which is committed) is missing"
            yield DamagedStoreError(message, reason="missing", path=path)
        except DamagedStoreError as error:
            yield error
