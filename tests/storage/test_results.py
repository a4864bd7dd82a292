import msgspec
import pytest

from graphkiln.storage import layout
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.keys import KeyPart, action_key
from graphkiln.storage.records import ActionResult
from graphkiln.storage.results import missing_from, usable_result
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from tests.storage.faults import DictFilesystem
from tests.storage.samples import FORWARD, HARMS, OUTPUTS, STATS, compile_toy, harm, load_toy, make_complete

# What each of the store's objects is needed for.
NEEDED_BY_FORWARD = ["forward action", "forward contract", "forward executable"]
NEEDED_TO_LOAD = ["manifest", *NEEDED_BY_FORWARD[1:], "backward executable"]
OBJECTS = [
    "format", "plan", "ref", "manifest", "log", "old plan", "failure", "failure log",
    "forward action", "forward payload", "forward contract", "forward executable",
    "backward action", "backward payload", "backward executable",
]  # fmt: skip


@pytest.fixture
def filesystem() -> StoreFilesystem:
    """Hundreds of stores, so that they are of the fastest kind."""
    return DictFilesystem({})


@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize("what", OBJECTS)
def test_a_result_is_used_only_if_every_byte_of_it_is_there(
    store: Store, filesystem: StoreFilesystem, what: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    complete = make_complete(store)
    assert sorted(complete.paths) == sorted(OBJECTS)
    graph = next(graph for graph in complete.plan.graphs if graph.name == FORWARD)
    before = store.read_action(graph.key)
    assert before is not None
    harm(filesystem, complete.paths[what], how)
    harmed = None if how == "deleted" else filesystem.read(complete.paths[what])

    found = usable_result(store, graph.key)

    touched = [*NEEDED_BY_FORWARD, "log"]
    if what in NEEDED_BY_FORWARD:
        assert found is None
        assert store.read_action(graph.key) is None
    elif what == "log":
        assert found is not None
        assert found.log is None
        assert found.outputs == before.outputs
        assert store.read_action(graph.key) == found
    else:
        assert found == before
    kept = [filesystem.read(path) for path in filesystem.names(layout.QUARANTINE) if not path.endswith(".note")]
    assert kept == ([harmed] if harmed is not None and what in touched else [])
    silent = what not in touched or (what == "forward action" and how == "deleted")
    assert len(caplog.records) == (0 if silent else 1)
    # Asked again, it says the same without finding anything new.
    assert usable_result(store, graph.key) == found
    assert len(caplog.records) == (0 if silent else 1)


@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize("what", OBJECTS)
def test_what_is_loaded_is_right_or_an_error_and_the_next_run_mends_it(
    store: Store, filesystem: StoreFilesystem, what: str, how: str
) -> None:
    complete = make_complete(store)
    harm(filesystem, complete.paths[what], how)
    if what in NEEDED_TO_LOAD or (what == "ref" and how != "deleted"):
        with pytest.raises(DamagedStoreError) as caught:
            load_toy(store, complete.variant)
        assert caught.value.path == complete.paths[what]
    else:
        assert load_toy(store, complete.variant) == (None if what == "ref" else OUTPUTS)
    compile_toy(store)
    assert load_toy(store, complete.variant) == OUTPUTS
    left = {problem.path for problem in verify_store(store).problems if problem.severity == "damage"}
    assert left <= {complete.paths[nobodys] for nobodys in ("failure", "failure log")}
    assert (what in ("failure", "failure log") and (what, how) != ("failure", "deleted")) == bool(left)


def test_what_a_committed_variant_has_lost_is_listed(store: Store, filesystem: StoreFilesystem) -> None:
    complete = make_complete(store)
    manifest = store.read_manifest(complete.manifest)
    assert list(missing_from(store, manifest)) == []
    lost = ["forward action", "backward action", "plan"]
    for what in lost:
        filesystem.delete(complete.paths[what])
    errors = list(missing_from(store, manifest))
    assert sorted(error.path for error in errors) == sorted(complete.paths[what] for what in lost)
    assert {error.reason for error in errors} == {"missing"}
    assert all("which is committed" in str(error) for error in errors)


def test_a_result_without_outputs_or_with_another_actions_parts_is_damage(store: Store) -> None:
    parts = (KeyPart.text("stage", "compile"),)
    empty = ActionResult(action_key(parts), parts, {}, None, STATS)
    store.write_action(empty)
    assert usable_result(store, empty.key) is None
    assert store.read_action(empty.key) is None

    planted = digest_bytes(b"another action")
    store.write_action(msgspec.structs.replace(empty, key=planted))
    with pytest.raises(DamagedStoreError, match="as its key parts say"):
        store.read_action(planted)
    assert usable_result(store, planted) is None
