from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from graphkiln.storage import layout
from graphkiln.storage.blobs import encode
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.documents import seal, unseal
from graphkiln.storage.errors import BadInputError, DamagedStoreError, StoreUnavailableError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.records import Manifest, PlanDocument, QuarantineNote, RefRecord, StoreFormat
from graphkiln.storage.store import Store, open_for_writing, open_store
from graphkiln.storage.verify import verify_store
from tests.storage.samples import (
    FORWARD,
    HARMS,
    NOW,
    OUTPUTS,
    STATS,
    Complete,
    compile_toy,
    harm,
    load_toy,
    make_complete,
    overwrite,
    plan_of,
    ref_of,
    result_of,
)

OTHER = digest_bytes(b"other")


@pytest.fixture
def complete(store: Store) -> Complete:
    return make_complete(store)


def _quarantined(filesystem: StoreFilesystem) -> list[str]:
    return list(filesystem.names(layout.QUARANTINE))


# ---------------------------------------------------------------------- the store as a whole


def test_an_empty_store_has_no_format_and_nothing_in_it(store: Store) -> None:
    assert store.read_format() is None
    assert store.read_action(OTHER) is None
    assert store.read_failure(OTHER) is None
    assert store.read_plan("toy", "host", OTHER) is None
    assert store.read_ref("toy", "host", OTHER) is None
    assert store.variants(layout.REFS) == []
    assert list(store.names("")) == []
    with pytest.raises(DamagedStoreError) as caught:
        store.read_manifest(OTHER)
    assert caught.value.reason == "missing"
    with pytest.raises(FileNotFoundError):
        store.read_raw("blobs/none")


def test_preparing_writes_the_format_once_and_leaves_no_probe(store: Store) -> None:
    for _ in range(2):
        store.prepare_for_writing()
        assert list(store.names("")) == [layout.FORMAT]
        assert store.read_format() == StoreFormat(1, "blake3")


@pytest.mark.parametrize("written", [StoreFormat(2, "blake3"), StoreFormat(1, "blake4")], ids=repr)
def test_a_store_that_a_newer_version_wrote_is_left_alone(
    store: Store, filesystem: StoreFilesystem, written: StoreFormat
) -> None:
    data = seal("store format", written)
    filesystem.create(layout.FORMAT, data)
    for use in (
        store.read_format,
        store.prepare_for_writing,
        lambda: open_store(store.url),
        lambda: verify_store(store),
    ):
        with pytest.raises(BadInputError, match="upgrade") as caught:
            use()
        assert caught.value.reason == "newer-format"
    assert filesystem.read(layout.FORMAT) == data
    assert list(filesystem.names("")) == [layout.FORMAT]


def test_a_document_that_a_newer_version_wrote_is_left_alone(
    store: Store, filesystem: StoreFilesystem, complete: Complete, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphkiln.storage.documents.SCHEMA", 2)
    newer = seal("ref", ref_of(complete.plan, OTHER))
    monkeypatch.undo()
    overwrite(filesystem, complete.paths["ref"], newer)
    for use in (lambda: store.read_ref(*complete.variant), lambda: compile_toy(store)):
        with pytest.raises(BadInputError, match="upgrade") as caught:
            use()
        assert complete.paths["ref"] in str(caught.value)
    assert filesystem.read(complete.paths["ref"]) == newer


@pytest.mark.parametrize("folder", ["ref", "plan"])
def test_a_format_that_is_missing_in_a_store_in_use_is_damage(
    store: Store, filesystem: StoreFilesystem, complete: Complete, folder: str
) -> None:
    filesystem.delete(layout.FORMAT)
    filesystem.delete(complete.paths["plan" if folder == "ref" else "ref"])
    for use in (store.read_format, lambda: open_store(store.url)):
        with pytest.raises(DamagedStoreError) as caught:
            use()
        assert (caught.value.reason, caught.value.path) == ("missing", layout.FORMAT)
    assert open_store(store.url, checked=False).url == store.url


@pytest.mark.parametrize("how", HARMS)
def test_opening_for_writing_mends_the_format(
    store: Store, filesystem: StoreFilesystem, complete: Complete, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    was = harm(filesystem, layout.FORMAT, how)
    open_for_writing(store.url)
    assert filesystem.read(layout.FORMAT) == was
    assert len(_quarantined(filesystem)) == (0 if how == "deleted" else 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# ---------------------------------------------------------------------- quarantine


@pytest.mark.parametrize("how", [how for how in HARMS if how != "deleted"])
def test_quarantine_keeps_the_object_and_a_note_and_warns(
    store: Store, filesystem: StoreFilesystem, complete: Complete, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = complete.paths["ref"]
    harm(filesystem, path, how)
    harmed = filesystem.read(path)
    assert store.mend(lambda: store.read_ref(*complete.variant)) is None
    kept, note = _quarantined(filesystem)
    assert filesystem.read(kept) == harmed
    found = unseal(filesystem.read(note), "quarantine note", QuarantineNote)
    assert (found.path, found.found_at) == (path, NOW)
    assert f"{store.url}/{path}" in found.reason
    assert found.reason in caplog.records[0].getMessage()
    assert store.read_ref(*complete.variant) is None
    assert store.mend(lambda: store.read_ref(*complete.variant)) is None
    assert len(_quarantined(filesystem)) == 2


def test_mending_answers_what_is_well_and_passes_other_errors_on(store: Store, complete: Complete) -> None:
    assert store.mend(lambda: store.read_ref(*complete.variant)) == ref_of(complete.plan, complete.manifest)

    def fail() -> None:
        raise StoreUnavailableError("the network is down", reason="store-io", retryable=True)

    with pytest.raises(StoreUnavailableError):
        store.mend(fail)


def test_damage_of_no_known_place_moves_nothing(store: Store, filesystem: StoreFilesystem, complete: Complete) -> None:
    before = list(filesystem.names(""))
    for error in (
        DamagedStoreError("somewhere"),
        DamagedStoreError("it is missing", reason="missing", path="blobs/00/none"),
    ):
        assert store.mend(_raising(error)) is None
    assert list(filesystem.names("")) == before


def _raising(error: Exception) -> Callable[[], object]:
    def read() -> object:
        raise error

    return read


def test_damage_on_the_way_is_no_damage_of_the_store(
    store: Store, filesystem: StoreFilesystem, complete: Complete, caplog: pytest.LogCaptureFixture
) -> None:
    ref = ref_of(complete.plan, complete.manifest)
    answers: list[RefRecord | DamagedStoreError] = [DamagedStoreError("cut", path=complete.paths["ref"]), ref]

    def read() -> RefRecord:
        answer = answers.pop(0)
        if isinstance(answer, DamagedStoreError):
            raise answer
        return answer

    before = list(filesystem.names(""))
    assert store.mend(read) == ref
    assert list(filesystem.names("")) == before
    assert [record.getMessage() for record in caplog.records] == ["cut; read again, it is whole"]


class Mended:
    """A file system on which somebody else mends an object just before this reader's operation of that number."""

    def __init__(self, inner: StoreFilesystem, path: str, whole: bytes, moment: int) -> None:
        self._inner, self._path, self._whole, self._left = inner, path, whole, moment
        self.url = inner.url

    def __getattr__(self, name: str) -> object:
        if self._left == 0:
            overwrite(self._inner, self._path, self._whole)
        self._left -= 1
        return getattr(self._inner, name)


def test_what_somebody_else_has_mended_meanwhile_is_never_taken_away(
    store: Store, filesystem: StoreFilesystem, complete: Complete
) -> None:
    """Whenever between this reader's operations that happens."""
    blob = encode(OUTPUTS[FORWARD]["executable"])[0]
    path = complete.paths["forward executable"]
    whole = filesystem.read(path)
    for moment in range(4):
        harm(filesystem, path, "cut in half")
        other = Store(Mended(filesystem, path, whole, moment))  # type: ignore[arg-type]
        found = other.mend(lambda: other.get_blob(blob, "a blob"))  # noqa: B023  (it is called at once)
        assert filesystem.read(path) == whole, moment
        assert (found is None) == (moment == 3), moment
        assert not list(filesystem.names(layout.QUARANTINE)), moment


def test_the_longest_names_can_be_set_aside(store: Store, filesystem: StoreFilesystem) -> None:
    plan = plan_of({}, network="n" * 100, target="t" * 100)
    store.write_ref(ref_of(plan, OTHER))
    variant = ("n" * 100, "t" * 100, plan.variant)
    path = layout.by_variant(layout.REFS, *variant)
    harm(filesystem, path, "emptied")
    assert store.mend(lambda: store.read_ref(*variant)) is None
    assert len(_quarantined(filesystem)) == 2
    assert all(len(part) <= 143 for path in _quarantined(filesystem) for part in path.split("/"))


# ---------------------------------------------------------------------- blobs


@pytest.mark.parametrize("content", [b"", b"short", b"long " * 5000], ids=["empty", "short", "long"])
def test_a_blob_comes_back_and_is_stored_once(store: Store, content: bytes) -> None:
    ref = store.put_blob(content)
    assert store.put_blob(content) == ref
    assert store.get_blob(ref, "a blob") == content
    assert list(store.names("")) == [layout.by_digest(layout.BLOBS, ref.digest)]
    assert digest_bytes(store.read_raw(layout.by_digest(layout.BLOBS, ref.digest))) == ref.digest


@pytest.mark.parametrize("content", [b"short", b"long " * 5000], ids=["short", "long"])
@pytest.mark.parametrize("how", HARMS)
def test_a_damaged_blob_is_never_returned_and_is_healed_in_place(
    store: Store, filesystem: StoreFilesystem, content: bytes, how: str
) -> None:
    ref = store.put_blob(content)
    path = layout.by_digest(layout.BLOBS, ref.digest)
    harm(filesystem, path, how)
    with pytest.raises(DamagedStoreError) as caught:
        store.get_blob(ref, "the payload of forward")
    assert caught.value.path == path
    assert f"{store.url}/{path} (the payload of forward) is " in str(caught.value)
    assert (caught.value.reason == "missing") == (how == "deleted")
    assert store.put_blob(content) == ref
    assert store.get_blob(ref, "a blob") == content
    assert len(_quarantined(filesystem)) == (0 if how == "deleted" else 2)


def test_a_blob_that_was_known_and_is_gone_is_written_again_with_a_warning(
    store: Store, filesystem: StoreFilesystem, caplog: pytest.LogCaptureFixture
) -> None:
    ref = store.put_blob(b"content")
    store.put_blob(b"content", known={ref.digest})
    store.put_blob(b"new", known={ref.digest})
    assert caplog.records == []
    path = layout.by_digest(layout.BLOBS, ref.digest)
    harm(filesystem, path, "deleted")
    store.put_blob(b"content", known={ref.digest})
    assert [path in record.getMessage() for record in caplog.records] == [True]
    assert store.get_blob(ref, "a blob") == b"content"


def test_a_reference_that_asks_for_another_content_of_the_same_blob_gets_none(store: Store) -> None:
    ref = store.put_blob(b"content")
    for change in ({"content_digest": OTHER}, {"size": 6}, {"stored_size": 8}, {"encoding": "zstd"}):
        changes: dict[str, Any] = change
        with pytest.raises(DamagedStoreError):
            store.get_blob(msgspec.structs.replace(ref, **changes), "a blob")


# ---------------------------------------------------------------------- actions and failures


def test_the_first_result_of_an_action_stays(store: Store) -> None:
    plan = plan_of({"forward": encode(b"x")[0]})
    first = result_of(plan, plan.graphs[0], {"out": store.put_blob(b"1")}, None)
    second = result_of(plan, plan.graphs[0], {"out": store.put_blob(b"2")}, None)
    assert store.write_action(first) == first
    assert store.write_action(second) == first
    assert store.read_action(first.key) == first
    store.replace_action(second)
    assert store.read_action(first.key) == second
    store.drop_action(first)
    assert store.read_action(first.key) == second, "another one has taken its place"
    store.drop_action(second)
    store.drop_action(second)
    assert store.read_action(first.key) is None


@pytest.mark.parametrize("how", HARMS)
def test_a_result_takes_the_place_of_a_damaged_one(
    store: Store, filesystem: StoreFilesystem, complete: Complete, how: str
) -> None:
    key = complete.plan.graphs[0].key
    harm(filesystem, complete.paths["forward action"], how)
    again = result_of(complete.plan, complete.plan.graphs[0], {}, None)
    assert store.write_action(again) == again
    assert store.read_action(key) == again
    assert len(_quarantined(filesystem)) == (0 if how == "deleted" else 2)


def test_the_last_failure_of_an_action_stays_and_is_no_result(store: Store, complete: Complete) -> None:
    failure = store.read_failure(complete.failed_key)
    assert failure is not None
    later = msgspec.structs.replace(failure, reason="timeout", retryable=True, stats=STATS)
    store.write_failure(later)
    assert store.read_failure(complete.failed_key) == later
    assert store.read_action(complete.failed_key) is None
    store.drop_failure(complete.failed_key)
    store.drop_failure(complete.failed_key)
    assert store.read_failure(complete.failed_key) is None


# ---------------------------------------------------------------------- plans, manifests, refs


def test_the_last_plan_of_a_variant_stays(store: Store) -> None:
    plan = plan_of({"forward": encode(b"x")[0]})
    for document in (PlanDocument(plan, NOW, None), PlanDocument(plan, NOW, encode(b"before")[0])):
        store.write_plan(document)
        assert store.read_plan("toy", "host", plan.variant) == document


def test_equal_manifests_are_one(store: Store, complete: Complete) -> None:
    manifest = store.read_manifest(complete.manifest)
    assert store.write_manifest(manifest) == complete.manifest
    assert len(list(store.names(layout.MANIFESTS))) == 1


@pytest.mark.parametrize("how", HARMS)
def test_a_damaged_manifest_is_healed_in_place(
    store: Store, filesystem: StoreFilesystem, complete: Complete, how: str
) -> None:
    manifest = store.read_manifest(complete.manifest)
    harm(filesystem, complete.paths["manifest"], how)
    with pytest.raises(DamagedStoreError) as caught:
        store.read_manifest(complete.manifest)
    assert caught.value.path == complete.paths["manifest"]
    assert store.write_manifest(manifest) == complete.manifest
    assert store.read_manifest(complete.manifest) == manifest


@pytest.mark.parametrize("missing", ["forward", "all", "outputs"])
def test_a_manifest_without_an_artifact_for_each_graph_is_damage(
    store: Store, complete: Complete, filesystem: StoreFilesystem, missing: str
) -> None:
    whole = store.read_manifest(complete.manifest)
    artifacts = {
        "forward": {"backward": whole.artifacts["backward"]},
        "all": {},
        "outputs": {**whole.artifacts, "forward": {}},
    }[missing]
    data = seal("manifest", Manifest(whole.plan, artifacts))
    filesystem.create(layout.by_digest(layout.MANIFESTS, digest_bytes(data)), data)
    with pytest.raises(DamagedStoreError) as caught:
        store.read_manifest(digest_bytes(data))
    assert caught.value.reason == "incomplete"


def test_a_ref_moves(store: Store, complete: Complete) -> None:
    moved = ref_of(complete.plan, OTHER)
    store.write_ref(moved)
    assert store.read_ref(*complete.variant) == moved


def test_variants_are_listed_by_network_and_target(store: Store, filesystem: StoreFilesystem) -> None:
    names = [("toy", "cpu"), ("toy", "tpu"), ("toy2", "cpu"), ("a.b-c_d", "cpu")]
    plans = {(network, target): plan_of({}, network, target) for network, target in names}
    for plan in plans.values():
        store.write_ref(ref_of(plan, OTHER))
    everything = sorted((*names_of, plan.variant) for names_of, plan in plans.items())
    for junk in (".tmp-1", "x", f".snapshot/host/{OTHER}", f"toy/.nfs/{OTHER}", f"toy/cpu/x/{OTHER}", "toy/cpu/.tmp-2"):
        filesystem.create(f"{layout.REFS}/{junk}", b"")
    assert store.variants(layout.REFS) == everything
    assert store.variants(layout.REFS, "toy") == [name for name in everything if name[0] == "toy"]
    assert store.variants(layout.REFS, "toy", "cpu") == [name for name in everything if name[:2] == ("toy", "cpu")]
    assert store.variants(layout.REFS, "none") == []
    assert store.variants(layout.PLANS) == []


# ---------------------------------------------------------------------- things in the wrong place


def test_documents_copied_to_the_place_of_others_are_damage(
    store: Store, filesystem: StoreFilesystem, complete: Complete
) -> None:
    network, target, variant = complete.variant
    reads: dict[str, tuple[str, Callable[[], object]]] = {
        "forward action": (layout.by_digest(layout.ACTIONS, OTHER), lambda: store.read_action(OTHER)),
        "failure": (layout.by_digest(layout.FAILURES, OTHER), lambda: store.read_failure(OTHER)),
        "plan": (
            layout.by_variant(layout.PLANS, network, "elsewhere", variant),
            lambda: store.read_plan(network, "elsewhere", variant),
        ),
        "ref": (
            layout.by_variant(layout.REFS, network, target, OTHER),
            lambda: store.read_ref(network, target, OTHER),
        ),
        "ref of another network": (
            layout.by_variant(layout.REFS, "another", target, variant),
            lambda: store.read_ref("another", target, variant),
        ),
    }
    for what, (path, read) in reads.items():
        filesystem.create(path, filesystem.read(complete.paths[what.removesuffix(" of another network")]))
        with pytest.raises(DamagedStoreError) as caught:
            read()
        assert (caught.value.reason, caught.value.path) == ("misplaced", path), what
        assert "it belongs to" in str(caught.value)
    renamed = layout.by_digest(layout.MANIFESTS, OTHER)
    manifest = complete.paths["manifest"]
    filesystem.move(manifest, renamed, expected=filesystem.read(manifest))
    with pytest.raises(DamagedStoreError) as caught:
        store.read_manifest(OTHER)
    assert (caught.value.reason, caught.value.path) == ("wrong-digest", renamed)


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("plan", "ref"),
        ("ref", "plan"),
        ("failure", "forward action"),
        ("forward action", "failure"),
        ("plan", "format"),
    ],
)
def test_a_document_of_another_kind_is_damage(
    store: Store, filesystem: StoreFilesystem, complete: Complete, source: str, place: str
) -> None:
    overwrite(filesystem, complete.paths[place], filesystem.read(complete.paths[source]))
    reads: dict[str, Callable[[], object]] = {
        "plan": lambda: store.read_plan(*complete.variant),
        "ref": lambda: store.read_ref(*complete.variant),
        "forward action": lambda: store.read_action(complete.plan.graphs[0].key),
        "failure": lambda: store.read_failure(complete.failed_key),
        "format": store.read_format,
    }
    with pytest.raises(DamagedStoreError) as caught:
        reads[place]()
    assert (caught.value.reason, caught.value.path) == ("wrong-kind", complete.paths[place])


# ---------------------------------------------------------------------- names

BAD_NAMES = ["", ".", "..", "../x", "a/b", "a\\b", "/etc", ".hidden", "-x", "a b", "a\n", "é", "a\0", "n" * 101, "_a"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_names_that_could_leave_their_folder_are_refused(store: Store, filesystem: StoreFilesystem, name: str) -> None:
    uses: list[Callable[[], object]] = [
        lambda: store.read_ref(name, "host", OTHER),
        lambda: store.read_ref("toy", name, OTHER),
        lambda: store.read_plan(name, "host", OTHER),
        lambda: store.write_ref(ref_of(plan_of({}, network=name), OTHER)),
        lambda: store.write_plan(PlanDocument(plan_of({}, target=name), NOW, None)),
        lambda: store.variants(layout.REFS, name),
        lambda: store.variants(layout.REFS, "toy", name),
    ]
    for use in uses:
        with pytest.raises(BadInputError) as caught:
            use()
        assert caught.value.reason == "bad-name"
    assert list(filesystem.names("")) == []


@pytest.mark.parametrize("digest", ["", "..", "../../etc/passwd", "A" * 64, "a" * 64 + "\n"], ids=ascii)
def test_what_is_no_digest_names_nothing(store: Store, digest: str) -> None:
    wrong = Digest(digest)
    uses: list[Callable[[], object]] = [
        lambda: store.read_action(wrong),
        lambda: store.read_failure(wrong),
        lambda: store.read_manifest(wrong),
        lambda: store.read_ref("toy", "host", wrong),
        lambda: store.get_blob(msgspec.structs.replace(encode(b"x")[0], digest=wrong), "a blob"),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="not a digest"):
            use()


# ---------------------------------------------------------------------- writers that meet


class Rival:
    """A file system on which somebody else is always faster to replace an object."""

    def __init__(self, inner: StoreFilesystem, races: int) -> None:
        self._inner, self.races = inner, races

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
        if self.races:
            self.races -= 1
            self._inner.replace(path, b"theirs %d" % self.races, expected=expected)
        return self._inner.replace(path, data, expected=expected)


def test_a_lost_race_for_a_ref_is_run_again(filesystem: StoreFilesystem) -> None:
    rival = Rival(filesystem, races=3)
    plan = plan_of({})
    Store(rival).write_ref(ref_of(plan, OTHER))  # type: ignore[arg-type]
    assert rival.races == 0
    assert Store(filesystem).read_ref("toy", "host", plan.variant) == ref_of(plan, OTHER)


def test_a_race_that_is_never_won_ends_with_an_error(filesystem: StoreFilesystem) -> None:
    with pytest.raises(StoreUnavailableError) as caught:
        Store(Rival(filesystem, races=10_000)).write_ref(ref_of(plan_of({}), OTHER))  # type: ignore[arg-type]
    assert (caught.value.reason, caught.value.retryable) == ("contended", True)


def test_a_second_run_changes_nothing(store: Store, filesystem: StoreFilesystem) -> None:
    complete = compile_toy(store)
    before = {path: filesystem.read(path) for path in filesystem.names("")}
    assert compile_toy(store) == complete
    assert {path: filesystem.read(path) for path in filesystem.names("")} == before
    assert load_toy(store, complete.variant) is not None
