"""Bundles: what goes in comes out, byte for byte, and nothing else is ever imported."""

import functools
import io
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from graphkiln.storage import bundle_file, layout
from graphkiln.storage.bundle_file import HEADER, BundleEntry, BundleHeader, sorted_entries, write_bundle_file
from graphkiln.storage.bundles import Bundle, ImportState, put_bundle, write_bundle
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.documents import seal, unseal
from graphkiln.storage.errors import BadInputError, DamagedStoreError, NotCommittedError, StoreUnavailableError
from graphkiln.storage.filesystem import StoreFilesystem
from graphkiln.storage.keys import KeyPart
from graphkiln.storage.local import LocalFilesystem
from graphkiln.storage.records import ActionResult, Manifest, Plan, PlanDocument, RefRecord, VariantName
from graphkiln.storage.results import usable_result
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from tests.storage.faults import FAULTS, WRITES, DictFilesystem, FaultPoint, FaultyFilesystem, ends_of
from tests.storage.samples import (
    HARMS,
    NOW,
    OUTPUTS,
    PAYLOADS,
    Complete,
    failure_of,
    flipped,
    harm,
    load_toy,
    make_complete,
    noise,
    plan_of,
    result_of,
)

LATER: Final = NOW + timedelta(hours=1)


def commit(
    store: Store,
    outputs: Mapping[str, Mapping[str, bytes]] = OUTPUTS,
    *,
    network: str = "toy",
    at: datetime = NOW,
) -> Plan:
    """Commit a network of these kernel graphs; a result that is there already stays."""
    store.prepare_for_writing()
    plan = plan_of({name: store.put_blob(PAYLOADS[name]) for name in outputs}, network)
    store.write_plan(PlanDocument(plan, at, None))
    artifacts = {}
    for graph in plan.graphs:
        blobs = {name: store.put_blob(content) for name, content in outputs[graph.name].items()}
        store.write_action(result_of(plan, graph, blobs, None))
        artifacts[graph.name] = blobs
    manifest = store.write_manifest(Manifest(plan, artifacts))
    store.write_ref(RefRecord(plan.network.name, plan.target.name, plan.variant, manifest, at))
    return plan


def variant_of(plan: Plan) -> VariantName:
    return plan.network.name, plan.target.name, plan.variant


def bundled(store: Store, *variants: VariantName) -> bytes:
    out = io.BytesIO()
    made = write_bundle(store, variants or store.variants(layout.REFS), out)
    assert made.bytes == len(out.getvalue())
    return out.getvalue()


def opened(data: bytes) -> Bundle:
    return Bundle(io.BytesIO(data), "toy.bundle")


def imported(data: bytes, filesystem: StoreFilesystem) -> list[ImportState]:
    store = Store(filesystem)
    store.prepare_for_writing()
    return [item.state for item in put_bundle(opened(data), store).variants]


def objects_in(data: bytes) -> dict[str, bytes]:
    """What another reader of tars finds in a bundle, the header left out."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = {}
        for member in tar:
            assert member.isreg()
            content = tar.extractfile(member)
            assert content is not None
            found[member.name] = content.read()
    assert next(iter(found)) == HEADER
    del found[HEADER]
    return found


def forged(objects: Iterable[tuple[str, bytes]]) -> bytes:
    """A bundle as a forger makes it who can write whatever he wants: all digests are right."""
    entries = [(BundleEntry(path, len(content), digest_bytes(content)), content) for path, content in objects]
    out = io.BytesIO()
    write_bundle_file(out, [entry for entry, _ in entries], [content for _, content in entries])
    return out.getvalue()


@pytest.fixture(scope="module")
def toy() -> tuple[DictFilesystem, Complete]:
    """A complete store, which no test may change."""
    filesystem = DictFilesystem({})
    return filesystem, make_complete(Store(filesystem))


@pytest.fixture(scope="module")
def data(toy: tuple[DictFilesystem, Complete]) -> bytes:
    """A bundle of it."""
    return bundled(Store(toy[0]))


# ---------------------------------------------------------------------- there and back


def test_what_is_exported_is_imported_byte_for_byte(toy: tuple[DictFilesystem, Complete], data: bytes) -> None:
    source, complete = toy
    filesystem = DictFilesystem({})
    assert imported(data, filesystem) == ["added"]
    store = Store(filesystem)
    assert load_toy(store, complete.variant) == OUTPUTS
    assert verify_store(store).problems == ()
    results = [usable_result(store, graph.key) for graph in complete.plan.graphs]
    assert [result.log is not None for result in results if result is not None] == [True, False]
    failed = {complete.paths["failure"], complete.paths["failure log"]}
    assert filesystem.objects == {path: content for path, content in source.objects.items() if path not in failed}
    assert bundled(store) == data


def test_importing_again_changes_nothing(data: bytes, tmp_path: Path) -> None:
    def files() -> dict[str, tuple[bytes, int, int]]:
        root = tmp_path / "store"
        found = [path for path in sorted(root.rglob("*")) if path.is_file()]
        return {str(path): (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns) for path in found}

    filesystem = LocalFilesystem(tmp_path / "store")
    assert imported(data, filesystem) == ["added"]
    before = files()
    assert len(before) == len(objects_in(data)) + 1
    assert imported(data, filesystem) == ["unchanged"]
    assert files() == before


def test_a_bundle_is_a_tar_that_others_read(toy: tuple[DictFilesystem, Complete], data: bytes, tmp_path: Path) -> None:
    objects = objects_in(data)
    assert objects == {path: toy[0].objects[path] for path in objects}
    (tmp_path / "toy.bundle").write_bytes(data)
    listed = subprocess.run(
        ["/bin/tar", "-tf", str(tmp_path / "toy.bundle")], capture_output=True, text=True, check=True, timeout=60
    )
    assert listed.stdout.split() == [HEADER, *objects]
    assert not listed.stderr
    folders = list(dict.fromkeys(path.partition("/")[0] for path in objects))
    assert folders == ["refs", "plans", "manifests", "actions", "blobs"]


def test_equal_variants_give_equal_bytes() -> None:
    """Whatever else is in the store, in whatever order they are named and were committed."""
    first, second = Store(DictFilesystem({})), Store(DictFilesystem({}))
    plans = [commit(first, network=name) for name in ("a", "b")]
    commit(second, network="c")
    assert [commit(second, network=name) for name in ("b", "a")] == plans[::-1]
    variants = [variant_of(plan) for plan in plans]
    assert bundled(first, *variants) == bundled(second, *variants[::-1], *variants)


def test_the_file_format_stays_what_it_is() -> None:
    """Names longer than a plain tar takes, contents of all lengths around a block, and none at all."""
    variant = digest_bytes(b"variant")
    contents = {layout.by_variant(layout.REFS, "n" * 100, "t" * 100, variant): b"ref"}
    for size in (0, 1, 511, 512, 513):
        contents[layout.by_digest(layout.BLOBS, digest_bytes(bytes(size)))] = bytes(size)
    entries = sorted_entries(BundleEntry(path, len(item), digest_bytes(item)) for path, item in contents.items())
    out = io.BytesIO()
    write_bundle_file(out, entries, [contents[entry.path] for entry in entries])
    assert objects_in(out.getvalue()) == contents
    assert digest_bytes(out.getvalue()) == "dfd9030b15c2039ddccafb84af8cb6caf2d2fc61ad6508e836d7ff6e87edb9c6"


def test_several_networks_share_what_is_equal(data: bytes) -> None:
    store = Store(DictFilesystem({}))
    for name in ("a", "b"):
        commit(store, network=name)
    both = bundled(store)
    assert len(objects_in(both)) == len(objects_in(bundled(store, *store.variants(layout.REFS, "a")))) + 3
    filesystem = DictFilesystem({})
    assert imported(both, filesystem) == ["added", "added"]
    assert verify_store(Store(filesystem)).problems == ()


def test_only_one_object_at_a_time_is_in_memory(tmp_path: Path) -> None:
    size = 1_000_000
    store = Store(LocalFilesystem(tmp_path / "store"))
    outputs = {"forward": {f"part{number}": noise(size, number) for number in range(24)}}
    variant = variant_of(commit(store, outputs))
    del outputs
    tracemalloc.start()
    try:
        with (tmp_path / "bundle").open("wb") as out:
            write_bundle(store, [variant], out)
        with (tmp_path / "bundle").open("rb") as file:
            bundle = Bundle(file, "bundle")
            other = Store(LocalFilesystem(tmp_path / "other"))
            other.prepare_for_writing()
            put_bundle(bundle, other)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 * size
    assert load_toy(other, variant) == load_toy(store, variant)


# ---------------------------------------------------------------------- what is not exported


def test_what_is_not_committed_is_refused() -> None:
    store = Store(DictFilesystem({}))
    plan = commit(store)
    with pytest.raises(NotCommittedError, match=r"toy for host .* is not committed"):
        write_bundle(store, [("toy", "host", digest_bytes(b"other"))], io.BytesIO())
    assert bundled(store, variant_of(plan))


@pytest.mark.parametrize("how", HARMS)
def test_damage_is_refused_and_named(how: str, toy: tuple[DictFilesystem, Complete]) -> None:
    source, complete = toy
    for what in set(complete.paths) - {"format", "failure", "failure log"}:
        filesystem = DictFilesystem(source.objects)
        harm(filesystem, complete.paths[what], how)
        before = dict(filesystem.objects)
        expected = NotCommittedError if (what, how) == ("ref", "deleted") else DamagedStoreError
        with pytest.raises(expected) as caught:
            write_bundle(Store(filesystem), [complete.variant], io.BytesIO())
        if expected is DamagedStoreError:
            assert complete.paths[what] in str(caught.value)
        assert filesystem.objects == before


def test_of_a_variant_that_was_changed_since_what_is_committed_is_exported() -> None:
    filesystem = DictFilesystem({})
    store = Store(filesystem)
    variant = variant_of(commit(store))
    loaded = load_toy(store, variant)
    changed = plan_of({"forward": store.put_blob(b"changed")})
    store.write_plan(PlanDocument(changed, LATER, store.put_blob(b"what it was")))
    assert variant_of(changed) == variant
    target = DictFilesystem({})
    assert imported(bundled(store), target) == ["added"]
    assert load_toy(Store(target), variant) == loaded
    assert verify_store(Store(target)).problems == ()


def test_a_store_that_others_write_to_meanwhile_gives_one_moment_of_it(toy: tuple[DictFilesystem, Complete]) -> None:
    """After each read the variant is committed anew: what is exported is one of the commits, whole."""
    _, complete = toy
    seen = set()
    for moment in range(40):
        filesystem = _Moving(toy[0].objects, moment)
        target = DictFilesystem({})
        assert imported(bundled(Store(filesystem), complete.variant), target) == ["added"]
        ref = Store(target).read_ref(*complete.variant)
        assert ref is not None
        assert load_toy(Store(target), complete.variant) == OUTPUTS
        seen.add(ref.committed_at)
    assert seen == {NOW, LATER}


class _Moving(DictFilesystem):
    """A store whose commit point moves after so many reads."""

    def __init__(self, objects: Mapping[str, bytes], after: int) -> None:
        super().__init__(objects)
        self._after = after

    def read(self, path: str) -> bytes:
        self._after -= 1
        if self._after == -1:
            ref = next(name for name in self.objects if name.startswith("refs/"))
            record = unseal(self.objects[ref], "ref", RefRecord)
            self.objects[ref] = seal("ref", msgspec.structs.replace(record, committed_at=LATER))
        return super().read(path)


# ---------------------------------------------------------------------- what is not imported


def assert_refused(data: bytes, words: str | None = None) -> None:
    with pytest.raises(BadInputError, match=words) as caught:
        opened(data)
    assert caught.value.reason == "damaged-bundle"


def test_every_flipped_byte_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bundle with one object of each kind. A head is the same each time, and is the costliest part to make."""
    monkeypatch.setattr(bundle_file, "_frame", functools.cache(bundle_file._frame))
    store = Store(DictFilesystem({}))
    commit(store, {"backward": OUTPUTS["backward"]})
    data = bundled(store)
    assert opened(data)
    for position in range(len(data)):
        assert_refused(flipped(data, position))


def test_every_truncation_and_all_that_follows_the_end_is_refused(data: bytes) -> None:
    for length in {*range(0, len(data), 64), *range(0, len(data), 509), len(data) - 1}:
        assert_refused(data[:length])
    for extra in (b"\0", b"x", bytes(512), bytes(10240), data):
        assert_refused(data + extra, "after its end")
    assert_refused(b"")


Objects = list[tuple[str, bytes]]


def _added(path: str, content: bytes = b"x") -> Callable[[Objects], Objects]:
    return lambda objects: sorted([*objects, (path, content)], key=lambda item: _ORDER.index(item[0].split("/")[0]))


def _without(folder: str) -> Callable[[Objects], Objects]:
    def leave_out(objects: Objects) -> Objects:
        first = next(path for path, _ in objects if path.startswith(f"{folder}/"))
        return [(path, content) for path, content in objects if path != first]

    return leave_out


def _edited(folder: str, **changes: Any) -> Callable[[Objects], Objects]:
    """Change the first document of a folder, and seal it again."""

    def edit(objects: Objects) -> Objects:
        at = next(at for at, (path, _) in enumerate(objects) if path.startswith(f"{folder}/"))
        path, content = objects[at]
        kind, body_type = _KINDS[folder]
        document = seal(kind, msgspec.structs.replace(unseal(content, kind, body_type), **changes))
        return [*objects[:at], (path, document), *objects[at + 1 :]]

    return edit


def _with_keys_of_no_plan(objects: Objects) -> Objects:
    """Everything fits together, but the variant is not that of the plan."""
    found = dict(objects)
    by_folder = {path.split("/")[0]: path for path in reversed(found)}
    manifest = unseal(found.pop(by_folder["manifests"]), "manifest", Manifest)
    plan = msgspec.structs.replace(manifest.plan, variant=_ELSEWHERE)
    document = seal("manifest", Manifest(plan, manifest.artifacts))
    digest = digest_bytes(document)
    ref = unseal(found.pop(by_folder["refs"]), "ref", RefRecord)
    old = unseal(found.pop(by_folder["plans"]), "plan", PlanDocument)
    variant = ("toy", "host", _ELSEWHERE)
    return [
        (
            layout.by_variant("refs", *variant),
            seal("ref", msgspec.structs.replace(ref, variant=_ELSEWHERE, manifest=digest)),
        ),
        (layout.by_variant("plans", *variant), seal("plan", msgspec.structs.replace(old, plan=plan))),
        (layout.by_digest("manifests", digest), document),
        *found.items(),
    ]


_ELSEWHERE = digest_bytes(b"elsewhere")
_ORDER = ("", "..", "graphkiln-store.json", "refs", "plans", "manifests", "actions", "blobs", "failures")
_KINDS: dict[str, tuple[str, Any]] = {
    "refs": ("ref", RefRecord),
    "plans": ("plan", PlanDocument),
    "actions": ("action result", ActionResult),
}
_PART = KeyPart.text("stage", "compile_kernel_graph")
_PLACED = layout.by_digest("blobs", _ELSEWHERE)

FORGERIES: dict[str, tuple[Callable[[Objects], Objects], str]] = {
    "out of the store": (_added("../x"), "which no bundle holds"),
    "out of its folder": (_added(f"blobs/../../{_ELSEWHERE}"), "which no bundle holds"),
    "absolute": (_added(f"/blobs/{_ELSEWHERE[:2]}/{_ELSEWHERE}"), "which no bundle holds"),
    "a blob with a path-like name": (_added(f"{_PLACED}/../x"), "which no bundle holds"),
    "a blob below a blob": (_added(f"{_PLACED}/{_ELSEWHERE}"), "which no bundle holds"),
    "a blob in the wrong folder": (_added(f"blobs/zz/{_ELSEWHERE}"), "which no bundle holds"),
    "a name in capitals": (_added(_PLACED.upper().replace("BLOBS", "blobs")), "which no bundle holds"),
    "a name with a line end": (_added(f"{_PLACED}\n"), "which no bundle holds"),
    "a network called ..": (_added(f"refs/../host/{_ELSEWHERE}"), "which no bundle holds"),
    "a failure": (_added(layout.by_digest("failures", _ELSEWHERE)), "which no bundle holds"),
    "a store's format": (_added("graphkiln-store.json"), "which no bundle holds"),
    "one twice": (lambda objects: [*objects, objects[-1]], "not in their order"),
    "another order": (lambda objects: objects[::-1], "not in their order"),
    "another content": (lambda objects: [*objects[:-1], (objects[-1][0], b"x")], "another digest"),
    "another manifest": (
        lambda objects: [(path, content + b" " * path.startswith("manif")) for path, content in objects],
        "another digest",
    ),
    "one more": (lambda objects: sorted_objects([*objects, (_blob(b"x"), b"x")]), "nothing in it needs blobs/"),
    "one more action": (_added(layout.by_digest("actions", digest_bytes(b"z"))), "not in their order|nothing in it"),
    **{f"no {folder}": (_without(folder), "is missing|nothing in it needs|no committed") for folder in _ORDER[3:8]},
    "a ref of another network": (_edited("refs", network="other"), "it belongs to other"),
    "a ref to another manifest": (_edited("refs", manifest=_ELSEWHERE), "is missing"),
    "a plan of another commit": (_edited("plans", previous=None), "nothing in it needs"),
    "an action of other parts": (_edited("actions", parts=(_PART,)), "it belongs to the action"),
    "an action of one part twice": (_edited("actions", parts=(_PART, _PART)), "of two parts with one name"),
    "an action of another key": (_edited("actions", key=_ELSEWHERE), "it belongs to the action"),
    "an action without outputs": (_edited("actions", outputs={}), "has no outputs"),
    "keys of no plan": (_with_keys_of_no_plan, "has keys that are not those of its plan"),
    "nothing": (lambda objects: [], "no committed variant"),
}


def _blob(content: bytes) -> str:
    return layout.by_digest("blobs", digest_bytes(content))


def sorted_objects(objects: Objects) -> Objects:
    return sorted(objects, key=lambda item: (_ORDER.index(item[0].split("/")[0]), item[0]))


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_with_right_digests_is_refused(forgery: str, data: bytes) -> None:
    objects = list(objects_in(data).items())
    assert forged(objects) == data
    forge, words = FORGERIES[forgery]
    assert_refused(forged(forge(objects)), words)


def test_a_ref_to_the_manifest_of_another_network_is_refused() -> None:
    store = Store(DictFilesystem({}))
    for name in ("a", "b"):
        commit(store, network=name)
    objects = objects_in(bundled(store))
    first, second = (path for path in objects if path.startswith("refs/"))
    moved = msgspec.structs.replace(
        unseal(objects[first], "ref", RefRecord), manifest=unseal(objects[second], "ref", RefRecord).manifest
    )
    assert_refused(forged({**objects, first: seal("ref", moved)}.items()), "it names the manifest of b for host")


TARS: dict[str, Callable[[tarfile.TarInfo], object]] = {
    "a symbolic link": lambda member: vars_of(member, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": lambda member: vars_of(member, type=tarfile.LNKTYPE, linkname="blobs/x"),
    "a folder": lambda member: vars_of(member, type=tarfile.DIRTYPE),
    "a pipe": lambda member: vars_of(member, type=tarfile.FIFOTYPE),
    "a device": lambda member: vars_of(member, type=tarfile.CHRTYPE),
    "a sparse file": lambda member: vars_of(member, type=tarfile.GNUTYPE_SPARSE),
    "another name": lambda member: vars_of(member, name="../x"),
    "another owner": lambda member: vars_of(member, uid=1),
    "another time": lambda member: vars_of(member, mtime=1),
    "another mode": lambda member: vars_of(member, mode=0o4755),
    "another header": lambda member: vars_of(member, pax_headers={"path": "/etc/passwd"}),
}


def vars_of(member: tarfile.TarInfo, **changes: Any) -> None:
    for name, value in changes.items():
        setattr(member, name, value)


@pytest.mark.parametrize("change", TARS)
@pytest.mark.parametrize("at", [0, 1, -1])
def test_a_tar_of_another_make_is_refused(change: str, at: int, data: bytes) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar, tarfile.open(fileobj=out, mode="w") as other:
        members = tar.getmembers()
        for member in members:
            content = tar.extractfile(member)
            if member is members[at]:
                TARS[change](member)
            other.addfile(member, content)
    assert_refused(out.getvalue())


def test_a_tar_that_others_make_again_alike_is_the_same_bundle(data: bytes) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar, tarfile.open(fileobj=out, mode="w") as other:
        for member in tar:
            other.addfile(member, tar.extractfile(member))
    assert out.getvalue() == data


@pytest.mark.parametrize(
    ("header", "reason", "words"),
    [
        (BundleHeader(2, ()), "newer-format", "format 2, .* upgrade GraphKiln"),
        (BundleHeader(0, ()), "damaged-bundle", "never was a format 0"),
        (BundleHeader(1, (BundleEntry(_PLACED, 2**63, _ELSEWHERE),)), "damaged-bundle", "altered before"),
        (BundleHeader(1, (BundleEntry(_PLACED, 2**35, _ELSEWHERE),)), "damaged-bundle", "altered before"),
        (BundleHeader(1, (BundleEntry(_PLACED, -1, _ELSEWHERE),)), "damaged-bundle", "content is not that"),
        (BundleEntry("x", 1, _ELSEWHERE), "damaged-bundle", "content is not that"),
    ],
)
def test_a_header_that_no_export_writes_is_refused(
    header: msgspec.Struct, reason: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(bundle_file, "BundleHeader", lambda *_: header)
    write_bundle_file(out, [], [])
    monkeypatch.undo()
    with pytest.raises(BadInputError, match=words) as caught:
        opened(out.getvalue())
    assert caught.value.reason == reason


def test_a_medium_that_fails_is_no_damage(data: bytes) -> None:
    class Failing(io.BytesIO):
        bad = 0

        def read(self, size: int | None = -1) -> bytes:
            if self.tell() >= self.bad:
                raise OSError(5, "Input/output error")
            return super().read(size)

    for bad in (0, 512, 4000, 12000):
        failing = Failing(data)
        failing.bad = bad
        with pytest.raises(StoreUnavailableError, match="Input/output error") as caught:
            Bundle(failing, "toy.bundle")
        assert caught.value.retryable


# ---------------------------------------------------------------------- beside what the store has


def test_the_newer_commit_stays() -> None:
    old, new = DictFilesystem({}), DictFilesystem({})
    variant = variant_of(commit(Store(old)))
    changed = {**OUTPUTS, "backward": {"executable": b"compiled anew"}}
    commit(Store(new), changed, at=LATER)
    older, newer = bundled(Store(old)), bundled(Store(new))

    before = dict(new.objects)
    assert imported(older, new) == ["kept"]
    assert new.objects == before
    assert imported(newer, old) == ["updated"]
    assert load_toy(Store(old), variant) == changed
    assert not verify_store(Store(old)).damaged
    # Its own results stay as well, whole, though the manifest names others.
    assert all(usable_result(Store(old), graph.key) for graph in Store(old).read_manifest(_manifest(old)).plan.graphs)
    assert imported(older, old) == ["kept"]
    assert load_toy(Store(old), variant) == changed


def test_another_commit_of_the_same_moment_changes_nothing(data: bytes) -> None:
    filesystem = DictFilesystem({})
    commit(Store(filesystem), {**OUTPUTS, "backward": {"executable": b"compiled elsewhere"}})
    before = dict(filesystem.objects)
    assert imported(data, filesystem) == ["kept"]
    assert filesystem.objects == before


def test_a_later_commit_of_the_same_manifest_moves_the_time_only() -> None:
    first, second = DictFilesystem({}), DictFilesystem({})
    commit(Store(first))
    commit(Store(second), at=LATER)
    manifest = _manifest(first)
    assert imported(bundled(Store(second)), first) == ["updated"]
    assert _manifest(first) == manifest
    assert imported(bundled(Store(first)), first) == ["unchanged"]


def test_a_plan_that_was_made_after_the_commit_stays(data: bytes, toy: tuple[DictFilesystem, Complete]) -> None:
    """Then the network was changed here since, and did not compile: it is outdated, as it is without bundles."""
    variant = toy[1].variant
    for at, stays in ((LATER, True), (NOW - timedelta(hours=1), False)):
        filesystem = DictFilesystem({})
        store = Store(filesystem)
        store.prepare_for_writing()
        changed = PlanDocument(plan_of({"forward": store.put_blob(b"changed")}), at, None)
        store.write_plan(changed)
        assert imported(data, filesystem) == ["added"]
        plan = store.read_plan(*variant)
        assert (plan == changed) == stays
        assert load_toy(store, variant) == OUTPUTS


def test_a_commit_that_comes_in_between_stays_if_it_is_newer(data: bytes) -> None:
    class Raced(DictFilesystem):
        """Somebody commits just before the import does."""

        def replace(self, path: str, data: bytes, *, expected: bytes | None) -> bool:
            if path.startswith("refs/") and self.waiting:
                commit(Store(self), changed, at=self.waiting.pop())
            return super().replace(path, data, expected=expected)

        waiting: list[datetime] = []  # noqa: RUF012

    changed = {**OUTPUTS, "backward": {"executable": b"compiled meanwhile"}}
    for at, state, loaded in ((LATER, "kept", changed), (NOW - timedelta(hours=1), "added", OUTPUTS)):
        filesystem = Raced({})
        filesystem.waiting = [at]
        assert imported(data, filesystem) == [state]
        assert load_toy(Store(filesystem), ("toy", "host", _variant(filesystem))) == loaded


@pytest.mark.parametrize("how", HARMS)
def test_what_the_store_has_lost_is_written_again(how: str, data: bytes, toy: tuple[DictFilesystem, Complete]) -> None:
    _, complete = toy
    whole = DictFilesystem({})
    imported(data, whole)
    for what in set(complete.paths) - {"format", "failure", "failure log"}:
        filesystem = DictFilesystem(whole.objects)
        harm(filesystem, complete.paths[what], how)
        imported(data, filesystem)
        assert not verify_store(Store(filesystem)).damaged, what
        kept = {path: item for path, item in filesystem.objects.items() if not path.startswith("quarantine/")}
        # A log is only forgotten: nothing needs it.
        assert kept == whole.objects or what == "log", what


# ---------------------------------------------------------------------- faults, and changes in between


def _manifest(filesystem: DictFilesystem) -> Digest:
    store = Store(filesystem)
    ref = store.read_ref(*store.variants(layout.REFS)[0])
    assert ref is not None
    return ref.manifest


def _variant(filesystem: DictFilesystem) -> Digest:
    return Store(filesystem).variants(layout.REFS)[0][2]


def _put(filesystem: StoreFilesystem, data: bytes) -> None:
    store = Store(filesystem)
    store.prepare_for_writing()
    put_bundle(opened(data), store)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_operation_leaves_the_old_commit_or_the_new_one(fault: str) -> None:
    former = {**OUTPUTS, "backward": {"executable": b"as it was"}}
    old, new = DictFilesystem({}), DictFilesystem({})
    variant = variant_of(commit(Store(old), former))
    commit(Store(new), at=LATER)
    data = bundled(Store(new))
    watched = FaultyFilesystem(DictFilesystem(old.objects))
    _put(watched, data)
    assert {operation for operation, _ in watched.point.operations} >= {"read", "create", "replace", "sync"}
    for at, (operation, path) in enumerate(watched.point.operations):
        if operation not in WRITES and fault != "EIO":
            continue
        filesystem = DictFilesystem(old.objects)
        with ends_of(fault, operation, path):
            _put(FaultyFilesystem(filesystem, FaultPoint(at, fault)), data)
        assert load_toy(Store(filesystem), variant) in (former, OUTPUTS), (at, operation, path)
        assert not verify_store(Store(filesystem)).damaged, (at, operation, path)
        _put(filesystem, data)
        assert load_toy(Store(filesystem), variant) == OUTPUTS, (at, operation, path)
        assert not verify_store(Store(filesystem)).damaged, (at, operation, path)


def test_everything_is_written_before_what_names_it(data: bytes) -> None:
    watched = FaultyFilesystem(DictFilesystem({}))
    _put(watched, data)
    written = [
        path.partition("/")[0] if path else operation
        for operation, path in watched.point.operations
        if operation in ("create", "replace", "sync") and not path.startswith((".tmp-", layout.PINS))
    ]
    order = ["graphkiln-store.json", "blobs", "actions", "sync", "manifests", "plans", "refs"]
    assert list(dict.fromkeys(written)) == order
    assert [name for name, before in zip(written[1:], written, strict=False) if name != before] == order[1:]


def test_a_bundle_that_is_changed_after_it_was_checked_moves_no_commit_point(data: bytes) -> None:
    objects = objects_in(data)
    for path, content in objects.items():
        changing = io.BytesIO(data)
        bundle = Bundle(changing, "toy.bundle")
        changing.seek(data.index(content))
        changing.write(flipped(content, len(content) // 2))
        filesystem = DictFilesystem({})
        store = Store(filesystem)
        store.prepare_for_writing()
        with pytest.raises(BadInputError, match="do not match the bundle's header") as caught:
            put_bundle(bundle, store)
        assert caught.value.reason == "damaged-bundle"
        assert path in str(caught.value)
        assert store.variants(layout.REFS) == []
        assert not verify_store(store).damaged
        _put(filesystem, data)
        assert store.variants(layout.REFS)


def test_a_failure_of_what_is_imported_is_forgotten(data: bytes, toy: tuple[DictFilesystem, Complete]) -> None:
    filesystem = DictFilesystem({})
    store = Store(filesystem)
    key = toy[1].plan.graphs[0].key
    store.prepare_for_writing()
    store.write_failure(failure_of(key, "timeout", "too slow", None))
    imported(data, filesystem)
    assert store.read_failure(key) is None
