"""Stores on a disk, in memory and on S3 do what a plain dict does: no reader ever sees a wrong byte."""

import logging
import shutil
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

import fsspec
import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.documents import seal
from graphkiln.storage.errors import DamagedStoreError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.keys import KeyPart, action_key
from graphkiln.storage.local import LocalFilesystem
from graphkiln.storage.records import ActionResult, Manifest, PlanDocument
from graphkiln.storage.remote import RemoteFilesystem
from graphkiln.storage.results import usable_result
from graphkiln.storage.s3 import S3Filesystem
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from tests.storage.s3_servers import BUCKET, options_for
from tests.storage.samples import HARMS, NOW, QUICK, STATS, blob_ref, encoded_ref, failure_of, harm, plan_of, ref_of

CONTENTS = [b"", b"one", b"two", b"three " * 1000, b"four" * 2000]
PARTS = {action_key(parts): parts for number in range(3) if (parts := (KeyPart.json("number", number),))}
KEYS = list(PARTS)
PLANS = [plan_of({name: blob_ref(name.encode())}, network=name) for name in ("toy", "another")]

contents = st.sampled_from(CONTENTS)
keys = st.sampled_from(KEYS)
plans = st.sampled_from(PLANS)

# What a reader may say of an object, besides its value.
ABSENT, DAMAGED = "absent", "damaged"


def _answer(read: Callable[[], object]) -> object:
    try:
        found = read()
    except DamagedStoreError as error:
        return ABSENT if error.reason == "missing" else DAMAGED
    return ABSENT if found is None else found


class Stores(RuleBasedStateMachine):
    """Does the same to a store on a disk, one in memory, and one on S3 if there is a server."""

    def __init__(self, s3_endpoint: str | None = None) -> None:
        super().__init__()
        self.s3_endpoint = s3_endpoint

    @initialize()
    def start(self) -> None:
        # Warnings of the damage that is done here on purpose would fill the report of a failure.
        logging.getLogger("graphkiln").disabled = True
        self.folder = tempfile.mkdtemp(prefix="state-machine-")
        self.url = f"memory://state-machine-{uuid.uuid4().hex}"
        self.filesystems: list[StoreFilesystem] = [LocalFilesystem(self.folder), RemoteFilesystem(self.url, {})]
        if self.s3_endpoint is not None:
            url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
            self.filesystems.append(S3Filesystem(url, options_for(self.s3_endpoint)))
        self.stores = [Store(filesystem, now=lambda: NOW) for filesystem in self.filesystems]
        for store in self.stores:
            store.prepare_for_writing()
        # The model: what was written last under each path, and which of it has been harmed since.
        self.objects: dict[str, object] = {}
        self.harmed: set[str] = set()

    def teardown(self) -> None:
        logging.getLogger("graphkiln").disabled = False
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)
            memory, root = fsspec.url_to_fs(self.url)
            memory.rm(root, recursive=True)

    def _all(self, act: Callable[[Store], object]) -> object:
        answers = [_answer(lambda store=store: act(store)) for store in self.stores]  # type: ignore[misc]
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    def _expected(self, path: str) -> object:
        return DAMAGED if path in self.harmed else self.objects.get(path, ABSENT)

    def _written(self, path: str, value: object) -> None:
        self.objects[path] = value
        self.harmed.discard(path)

    def _gone(self, path: str) -> None:
        self.objects.pop(path, None)
        self.harmed.discard(path)

    # ------------------------------------------------------------------ blobs

    @rule(content=contents)
    def put_blob(self, content: bytes) -> None:
        ref = self._all(lambda store: store.put_blob(content))
        assert isinstance(ref, BlobRef)
        assert ref == encoded_ref(content)
        self._written(layout.by_digest(layout.BLOBS, ref.digest), content)

    @rule(content=contents)
    def get_blob(self, content: bytes) -> None:
        ref = encoded_ref(content)
        path = layout.by_digest(layout.BLOBS, ref.digest)
        assert self._all(lambda store: store.get_blob(ref, "a blob")) == self._expected(path)

    # ------------------------------------------------------------------ actions and failures

    @rule(key=keys, named=st.lists(contents, max_size=2), log=st.none() | contents)
    def write_action(self, key: Digest, named: list[bytes], log: bytes | None) -> None:
        result = _result(key, named, log)
        path = layout.by_digest(layout.ACTIONS, key)
        expected = self._expected(path)
        wins = expected in (ABSENT, DAMAGED)
        assert self._all(lambda store: store.write_action(result)) == (result if wins else expected)
        if wins:
            self._written(path, result)

    @rule(key=keys, named=st.lists(contents, max_size=2))
    def replace_action(self, key: Digest, named: list[bytes]) -> None:
        result = _result(key, named, None)
        self._all(lambda store: store.replace_action(result))
        self._written(layout.by_digest(layout.ACTIONS, key), result)

    @rule(key=keys, named=st.lists(contents, max_size=2))
    def drop_action(self, key: Digest, named: list[bytes]) -> None:
        result = _result(key, named, None)
        self._all(lambda store: store.drop_action(result))
        path = layout.by_digest(layout.ACTIONS, key)
        if self._expected(path) in (DAMAGED, result):
            self._gone(path)

    @rule(key=keys)
    def read_action(self, key: Digest) -> None:
        path = layout.by_digest(layout.ACTIONS, key)
        assert self._all(lambda store: store.read_action(key)) == self._expected(path)

    @rule(key=keys)
    def use_action(self, key: Digest) -> None:
        path = layout.by_digest(layout.ACTIONS, key)
        expected = self._expected(path)
        found = self._all(lambda store: usable_result(store, key))
        if not isinstance(expected, ActionResult):
            self._gone(path)
            assert found == ABSENT
            return
        if not expected.outputs:
            self._gone(path)
            assert found == ABSENT
            return
        for ref in expected.outputs.values():
            blob = layout.by_digest(layout.BLOBS, ref.digest)
            if self._expected(blob) in (ABSENT, DAMAGED):
                self._gone(blob)
                self._gone(path)
                assert found == ABSENT
                return
        if expected.log is not None:
            blob = layout.by_digest(layout.BLOBS, expected.log.digest)
            if self._expected(blob) in (ABSENT, DAMAGED):
                self._gone(blob)
                expected = msgspec.structs.replace(expected, log=None)
                self._written(path, expected)
        assert found == expected

    @rule(key=keys, message=st.sampled_from(["out of memory", "syntax error"]))
    def write_failure(self, key: Digest, message: str) -> None:
        failure = failure_of(key, "compiler-error", message, None)
        self._all(lambda store: store.write_failure(failure))
        self._written(layout.by_digest(layout.FAILURES, key), failure)

    @rule(key=keys)
    def read_failure(self, key: Digest) -> None:
        path = layout.by_digest(layout.FAILURES, key)
        assert self._all(lambda store: store.read_failure(key)) == self._expected(path)

    # ------------------------------------------------------------------ plans, manifests, refs

    @rule(plan=plans, previous=st.none() | contents)
    def write_plan(self, plan: Any, previous: bytes | None) -> None:
        document = PlanDocument(plan, NOW, None if previous is None else blob_ref(previous))
        self._all(lambda store: store.write_plan(document))
        self._written(layout.by_variant(layout.PLANS, *_variant(plan)), document)

    @rule(plan=plans)
    def read_plan(self, plan: Any) -> None:
        path = layout.by_variant(layout.PLANS, *_variant(plan))
        assert self._all(lambda store: store.read_plan(*_variant(plan))) == self._expected(path)

    @rule(plan=plans, content=contents)
    def commit(self, plan: Any, content: bytes) -> None:
        manifest = _manifest(plan, content)
        digest = self._all(lambda store: store.write_manifest(manifest))
        assert digest == digest_bytes(seal("manifest", manifest))
        assert isinstance(digest, str)
        ref = ref_of(plan, Digest(digest))
        self._all(lambda store: store.write_ref(ref))
        self._written(layout.by_digest(layout.MANIFESTS, Digest(digest)), manifest)
        self._written(layout.by_variant(layout.REFS, *_variant(plan)), ref)

    @rule(plan=plans, content=contents)
    def read_manifest(self, plan: Any, content: bytes) -> None:
        digest = digest_bytes(seal("manifest", _manifest(plan, content)))
        path = layout.by_digest(layout.MANIFESTS, digest)
        assert self._all(lambda store: store.read_manifest(digest)) == self._expected(path)

    @rule(plan=plans)
    def read_ref(self, plan: Any) -> None:
        path = layout.by_variant(layout.REFS, *_variant(plan))
        assert self._all(lambda store: store.read_ref(*_variant(plan))) == self._expected(path)

    # ------------------------------------------------------------------ harm

    @precondition(lambda self: self.objects)
    @rule(data=st.data(), how=st.sampled_from([how for how in HARMS if how != "deleted"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        path = data.draw(st.sampled_from(sorted(self.objects)))
        for filesystem in self.filesystems:
            if path in self.harmed or not filesystem.read(path):
                return
            was = harm(filesystem, path, how)
            if filesystem.read(path) == was:
                return
        self.harmed.add(path)

    @precondition(lambda self: self.objects)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.objects)))
        for filesystem in self.filesystems:
            filesystem.delete(path)
        self._gone(path)

    @rule(plan=plans)
    def mend_ref(self, plan: Any) -> None:
        path = layout.by_variant(layout.REFS, *_variant(plan))
        expected = self._expected(path)
        found = self._all(lambda store: store.mend(lambda: store.read_ref(*_variant(plan))))
        if expected == DAMAGED:
            self._gone(path)
            expected = ABSENT
        assert found == expected

    # ------------------------------------------------------------------ what always holds

    @invariant()
    def all_hold_the_objects_of_the_model_and_nothing_else(self) -> None:
        for filesystem in getattr(self, "filesystems", []):
            names = [path for path in filesystem.names("") if not path.startswith(layout.QUARANTINE)]
            assert names == sorted([*self.objects, layout.FORMAT])

    @rule()
    def a_verification_reports_what_is_harmed(self) -> None:
        for store in getattr(self, "stores", []):
            damage = {problem.path for problem in verify_store(store).problems if problem.severity == "damage"}
            assert damage >= self.harmed
            assert not {path for path in damage if path in self.objects} - self.harmed


def _variant(plan: Any) -> tuple[str, str, Digest]:
    return plan.network.name, plan.target.name, plan.variant


def _result(key: Digest, named: list[bytes], log: bytes | None) -> ActionResult:
    outputs = {f"output {number}": encoded_ref(content) for number, content in enumerate(named)}
    return ActionResult(key, PARTS[key], outputs, None if log is None else encoded_ref(log), STATS)


def _manifest(plan: Any, content: bytes) -> Manifest:
    return Manifest(plan, {graph.name: {"executable": encoded_ref(content)} for graph in plan.graphs})


def test_a_disk_and_memory() -> None:
    run_state_machine_as_test(Stores, settings=settings(QUICK, max_examples=40, stateful_step_count=30))


@pytest.mark.s3
@pytest.mark.xdist_group("s3")
def test_a_disk_memory_and_s3(s3_endpoint: str) -> None:
    run_state_machine_as_test(
        lambda: Stores(s3_endpoint),  # type: ignore[arg-type]
        settings=settings(QUICK, max_examples=6, stateful_step_count=15),
    )
