"""Whatever happens at whichever operation, the store stays valid and the next run completes."""

import os
from pathlib import Path
from typing import Any

import pytest

from graphkiln.storage import layout
from graphkiln.storage.errors import StoreUnavailableError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.local import TEMPORARY_PREFIX, LocalFilesystem
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from tests.storage.faults import FAULTS, WRITES, DictFilesystem, FaultPoint, FaultyFilesystem, KilledError, ends_of
from tests.storage.samples import OUTPUTS, compile_toy, harm, load_toy, make_complete
from tests.storage.signers import trusting


def _operations(filesystem: StoreFilesystem) -> list[tuple[str, str]]:
    watching = FaultPoint()
    compile_toy(Store(FaultyFilesystem(filesystem, watching)))
    return watching.operations


def _run_with_fault(filesystem: StoreFilesystem, at: int, fault: str) -> None:
    point = FaultPoint(at, fault)
    if fault == "repeated":
        compile_toy(Store(FaultyFilesystem(filesystem, point)))
        return
    expected = KilledError if fault.startswith("killed") else StoreUnavailableError
    with pytest.raises(expected) as caught:
        compile_toy(Store(FaultyFilesystem(filesystem, point)))
    # All that a run may still try is to take its probe away.
    after = [item for item in point.operations[at + 1 :] if item[0] != "delete" or TEMPORARY_PREFIX not in item[1]]
    assert not after, "a run went on after its medium had failed"
    if isinstance(caught.value, StoreUnavailableError):
        assert caught.value.retryable
        assert caught.value.reason == ("disk-full" if fault == "ENOSPC" else "store-io")


VARIANT = compile_toy(Store(DictFilesystem({}))).variant


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_operation_of_a_first_run(fault: str) -> None:
    operations = _operations(DictFilesystem({}))
    assert {operation for operation, _ in operations} >= {"read", "create", "replace", "delete", "entries", "sync"}
    for at, operation in enumerate(operations):
        filesystem = DictFilesystem({})
        _run_with_fault(filesystem, at, fault)
        store = Store(filesystem)
        found = verify_store(store)
        assert not found.damaged, (at, operation, found.problems)
        assert load_toy(store, VARIANT) in (None, OUTPUTS), (at, operation)
        compile_toy(store)
        assert load_toy(store, VARIANT) == OUTPUTS, (at, operation)
        assert not verify_store(store).damaged, (at, operation)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("what", ["ref", "plan", "manifest", "forward action", "forward executable", "log", "format"])
def test_a_fault_at_any_operation_of_a_repair(fault: str, what: str) -> None:
    harmed = DictFilesystem({})
    harm(harmed, make_complete(Store(harmed)).paths[what], "middle byte flipped")
    operations = _operations(DictFilesystem(harmed.objects))
    assert "move" in {operation for operation, _ in operations}
    for at, operation in enumerate(operations):
        if operation[0] not in WRITES and fault != "EIO":
            continue
        filesystem = DictFilesystem(harmed.objects)
        _run_with_fault(filesystem, at, fault)
        store = Store(filesystem)
        compile_toy(store)
        assert load_toy(store, VARIANT) == OUTPUTS, (at, operation)
        assert not verify_store(store).damaged, (at, operation)


def test_everything_is_written_before_what_names_it() -> None:
    written = [
        path.partition("/")[0] if path else operation
        for operation, path in _operations(DictFilesystem({}))
        if operation in ("create", "replace", "sync") and not path.startswith(".tmp-")
    ]
    order = ["blobs", "plans", "blobs", "actions", "blobs", "actions", "sync", "manifests", "sync", "refs"]
    assert written[0] == layout.FORMAT
    assert [name for name, before in zip(written[1:], written, strict=False) if name != before] == order


# ---------------------------------------------------------------------- below the contract, on a local disk


@pytest.mark.parametrize("call", ["link", "fsync"])
def test_a_local_fault_at_any_system_call_leaves_nothing_half(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, call)
    calls = 0
    fail_at = -1

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 == fail_at:
            raise OSError(5, "Input/output error")
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, counted)
    compile_toy(Store(LocalFilesystem(tmp_path / "whole")))
    total = calls
    assert total >= 5
    for at in range(total):
        filesystem = LocalFilesystem(tmp_path / str(at))
        calls, fail_at = 0, at
        with pytest.raises(StoreUnavailableError):
            compile_toy(Store(filesystem))
        fail_at = -1
        temporaries = [path for path in filesystem.names("") if TEMPORARY_PREFIX in path]
        assert temporaries == []
        assert not verify_store(Store(filesystem)).damaged
        compile_toy(Store(filesystem))
        assert load_toy(Store(filesystem), VARIANT) == OUTPUTS


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_operation_while_untrusted_objects_are_replaced(fault: str) -> None:
    unsigned = DictFilesystem({})
    make_complete(Store(unsigned))
    trust = trusting(signing="ci")
    watched = FaultyFilesystem(DictFilesystem(unsigned.objects))
    compile_toy(Store(watched, trust=trust))
    replaced = [path for operation, path in watched.point.operations if operation == "replace"]
    assert {path.split("/")[0] for path in replaced} >= {layout.ACTIONS, layout.REFS}
    for at, operation in enumerate(watched.point.operations):
        filesystem = DictFilesystem(unsigned.objects)
        failing = FaultyFilesystem(filesystem, FaultPoint(at, fault))
        with ends_of(fault, *operation):
            compile_toy(Store(failing, trust=trust))
        store = Store(filesystem, trust=trust)
        assert not verify_store(store).damaged, (at, operation)
        compile_toy(store)
        assert load_toy(store, VARIANT) == OUTPUTS, (at, operation)
        found = verify_store(store)
        assert not (found.damaged or found.untrusted), (at, operation)
