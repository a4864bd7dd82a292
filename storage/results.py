"""Looking up what an action made: only a result whose every byte is there and matches is one."""

import logging

import msgspec

from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.records import ActionResult
from graphkiln.storage.store import Store

_log = logging.getLogger("graphkiln")


def usable_result(store: Store, key: Digest) -> ActionResult | None:
    """Return the verified result of an action, or None if it has to run (again).

    Damage is set aside with a warning. If an output is lost, so is the result. A lost log is only a loss of the
    log, for which nothing is compiled again.
    """
    result = store.mend(lambda: store.read_action(key))
    if result is None:
        return None
    try:
        for name, ref in result.outputs.items():
            store.get_blob(ref, f"output {name} of the action {key}")
    except DamagedStoreError as error:
        store.quarantine(error)
        store.drop_action(key)
        return None
    return _with_readable_log(store, result)


def _with_readable_log(store: Store, result: ActionResult) -> ActionResult:
    log = result.log
    if log is None or store.mend(lambda: store.get_blob(log, f"compiler log of the action {result.key}")) is not None:
        return result
    without = msgspec.structs.replace(result, log=None)
    store.replace_action(without)
    return without
