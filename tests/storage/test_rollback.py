"""An older signed commit that is put back is noticed by a host that has seen a later one, and by no false alarm."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.errors import UntrustedError
from graphkiln.storage.records import RefRecord
from graphkiln.storage.rollback import CommitMemory
from graphkiln.storage.signing import EVERYBODY, Trust
from graphkiln.storage.store import Store
from graphkiln.storage.verify import verify_store
from tests.storage.faults import DictFilesystem
from tests.storage.samples import NOW, compile_toy
from tests.storage.signers import trusting

VARIANT = digest_bytes(b"variant")
NAME = "toy", "host", VARIANT
MINUTE = timedelta(minutes=1)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What this host remembers."""
    folder = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    def take() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    with caplog.at_level(logging.WARNING, logger="graphkiln"):
        yield take


def host(files: DictFilesystem, *names: str, signing: str | None = None) -> Store:
    return Store(files, trust=trusting(*names, signing=signing, memory=CommitMemory()))


def commit(store: Store, what: str, at: datetime = NOW) -> RefRecord:
    """Move the ref as a run on a host does whose clock says `at`."""
    current = store.mend(lambda: store.read_ref(*NAME))
    ref = store.trust.sign_ref(store.url, RefRecord(*NAME, digest_bytes(what.encode()), at), after=current)
    assert store.write_ref(ref)
    return ref


def stored(files: DictFilesystem) -> bytes:
    (path,) = [path for path in files.objects if path.startswith("refs/")]
    return files.objects[path]


def put_back(files: DictFilesystem, data: bytes) -> None:
    (path,) = [path for path in files.objects if path.startswith("refs/")]
    files.objects[path] = data


def refusal(store: Store) -> UntrustedError:
    with pytest.raises(UntrustedError) as caught:
        store.read_ref(*NAME)
    return caught.value


def test_an_older_commit_is_refused_until_it_is_accepted_on_purpose(state: Path) -> None:
    files = DictFilesystem({})
    signer, reader = host(files, signing="ci"), host(files, "ci")
    old = commit(signer, "old")
    data = stored(files)
    assert reader.read_ref(*NAME) == old
    new = commit(signer, "new", NOW + MINUTE)
    assert reader.read_ref(*NAME) == new
    put_back(files, data)
    for store in (reader, signer, host(files, "ci")):  # the last one as another process
        error = refusal(store)
        assert error.reason == "rolled-back"
        assert str(old.committed_at) in str(error)
        assert str(new.committed_at) in str(error)
    found = verify_store(reader)
    assert [problem.severity for problem in found.problems if "has put an older one back" in problem.message] == [
        "untrusted"
    ]
    (remembered,) = [path for path in state.rglob("*") if path.is_file()]
    assert str(remembered) in str(error)
    remembered.unlink()
    assert reader.read_ref(*NAME) == old
    put_back(files, stored(files))
    assert reader.read_ref(*NAME) == old


def test_a_host_that_has_seen_nothing_cannot_notice(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = DictFilesystem({})
    old = commit(host(files, signing="ci"), "old")
    data = stored(files)
    commit(host(files, signing="ci"), "new", NOW + MINUTE)
    put_back(files, data)
    monkeypatch.setenv("XDG_STATE_HOME", str(state / "of another host"))
    assert host(files, "ci").read_ref(*NAME) == old


def test_a_signer_commits_over_what_was_put_back() -> None:
    files = DictFilesystem({})
    signer, reader = host(files, signing="ci"), host(files, "ci")
    commit(signer, "old")
    data = stored(files)
    new = commit(signer, "new", NOW + MINUTE)
    put_back(files, data)
    again = commit(signer, "new", NOW + MINUTE / 2)
    assert again.committed_at > new.committed_at
    assert reader.read_ref(*NAME) == again


@pytest.mark.parametrize("behind", [timedelta(0), timedelta(microseconds=1), MINUTE, timedelta(days=400)])
def test_clocks_that_differ_give_no_alarm(behind: timedelta) -> None:
    files = DictFilesystem({})
    ahead, late, reader = (host(files, "a", "b", signing=name) for name in ("a", "b", None))
    refs = []
    for number, store in enumerate([ahead, late, ahead, late]):
        clock = NOW - behind if store is late else NOW
        refs.append(commit(store, str(number), clock))
    assert [ref.committed_at for ref in refs] == [NOW + number * timedelta(microseconds=1) for number in range(4)]
    assert reader.read_ref(*NAME) == refs[-1]


def test_the_host_of_a_lost_ref_commits_later_than_it() -> None:
    files = DictFilesystem({})
    signer = host(files, signing="ci")
    lost = commit(signer, "one")
    files.objects.clear()
    assert commit(signer, "one", NOW - MINUTE).committed_at > lost.committed_at


def test_a_later_commit_of_another_run_is_not_replaced_by_an_earlier_one() -> None:
    files = DictFilesystem({})
    store = host(files, signing="ci")
    current = commit(store, "first")
    # Both runs have read the first one; the other is faster.
    sign = store.trust.sign_ref
    theirs = sign(store.url, RefRecord(*NAME, digest_bytes(b"theirs"), NOW + MINUTE), after=current)
    ours = [sign(store.url, RefRecord(*NAME, digest_bytes(b"ours"), at), after=current) for at in (NOW, NOW + MINUTE)]
    assert store.write_ref(theirs)
    for ref in ours:
        assert not store.write_ref(ref)
        assert store.read_ref(*NAME) == theirs
    assert store.write_ref(theirs), "it is there already"
    # What is not trusted is no commit that could stay.
    for trust in (EVERYBODY, trusting("mallory", signing="mallory")):
        Store(files, trust=trust).write_ref(
            trust.sign("ref", RefRecord(*NAME, digest_bytes(b"planted"), NOW + 1000 * MINUTE))
        )
        assert commit(store, "ours", NOW + 2 * MINUTE).committed_at < NOW + 3 * MINUTE
        assert store.read_ref(*NAME) is not None


def test_a_commit_between_two_looks_is_no_rollback() -> None:
    """A rank reads the ref; another one of the host sees the next commit before the first one goes on."""

    class Slow(DictFilesystem):
        def read(self, path: str) -> bytes:
            data = super().read(path)
            if path.startswith("refs/") and self is files and turns:
                turns.pop()()
            return data

    turns: list[Callable[[], object]] = []
    files = Slow({})
    signer = host(files, signing="ci")
    old = commit(signer, "old")
    turns.append(lambda: commit(signer, "new", NOW + MINUTE))
    assert host(files, "ci").read_ref(*NAME) == old
    assert not turns
    late = host(files, "ci").read_ref(*NAME)
    assert late is not None
    assert late.manifest == digest_bytes(b"new")


def test_memories_are_of_one_variant_in_one_store() -> None:
    files, elsewhere = DictFilesystem({}), DictFilesystem({})
    elsewhere.url = "elsewhere"
    commit(host(files, signing="ci"), "new", NOW + MINUTE)
    old = commit(host(elsewhere, signing="ci"), "old")
    assert old.committed_at == NOW
    assert host(elsewhere, "ci").read_ref(*NAME) == old
    other = RefRecord("toy", "host", digest_bytes(b"another variant"), digest_bytes(b"x"), NOW)
    store = host(files, signing="ci")
    assert store.write_ref(store.trust.sign("ref", other))
    assert store.read_ref(*other.variant_name) == store.trust.sign("ref", other)


def test_what_a_key_signed_that_is_trusted_no_more_is_forgotten() -> None:
    """Who has stolen a key may sign a commit of the far future; without that key, life goes on."""
    files = DictFilesystem({})
    future = commit(host(files, signing="stolen"), "planted", NOW + timedelta(days=36500))
    assert host(files, "new", "stolen").read_ref(*NAME) == future
    honest = commit(host(files, signing="new"), "honest")
    assert honest.committed_at == NOW
    assert host(files, "new").read_ref(*NAME) == honest
    assert refusal(host(files, "new", "stolen")).reason == "rolled-back"
    # What the new key has signed before counts as before.
    data = stored(files)
    commit(host(files, signing="new"), "next", NOW + MINUTE)
    put_back(files, data)
    assert refusal(host(files, "new")).reason == "rolled-back"


# ---------------------------------------------------------------------- the memory itself


def test_without_keys_nothing_is_remembered(state: Path) -> None:
    store = Store(DictFilesystem({}), trust=Trust())
    complete = compile_toy(store)
    assert store.read_ref(*complete.variant) is not None
    assert not state.exists()


@pytest.mark.parametrize("obstacle", ["a file in the way", "no home"])
def test_a_host_that_cannot_remember_works_and_warns_once(
    obstacle: str, state: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    if obstacle == "no home":
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("there is no home")))
    else:
        state.write_text("")
    files = DictFilesystem({})
    signer = host(files, signing="ci")
    old = commit(signer, "old")
    data = stored(files)
    commit(signer, "new", NOW + MINUTE)
    put_back(files, data)
    assert signer.read_ref(*NAME) == old
    (warning,) = warnings()
    assert "cannot be remembered" in warning


def test_a_damaged_memory_starts_anew(state: Path, warnings: Callable[[], list[str]]) -> None:
    files = DictFilesystem({})
    signer = host(files, signing="ci")
    commit(signer, "old")
    data = stored(files)
    (remembered,) = [path for path in state.rglob("*") if path.is_file()]
    remembered.write_bytes(b"{}")
    new = commit(signer, "new", NOW + MINUTE)
    assert all(str(remembered) in warning and "is damaged" in warning for warning in warnings())
    put_back(files, data)
    assert refusal(signer).reason == "rolled-back"
    put_back(files, stored(files))
    remembered.unlink()
    remembered.mkdir()
    store = host(files, "ci")
    store.read_ref(*NAME)
    (warning,) = warnings()
    assert "cannot be remembered" in warning
    assert new.committed_at > NOW


def test_many_writers_remember_the_latest(state: Path) -> None:
    times = [NOW + number * timedelta(seconds=1) for number in range(40)]

    def remember(part: list[datetime]) -> None:
        memory = CommitMemory()
        for at in part:
            memory.remember("store", NAME, key, at)

    reference = commit(host(DictFilesystem({}), signing="ci"), "any")
    assert reference.signature is not None
    key = reference.signature.key
    threads = [threading.Thread(target=remember, args=(times[start::4][::-1],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert CommitMemory().commits("store", NAME) == {key: times[-1]}
    assert not [name for _, _, names in os.walk(state) for name in names if name.startswith(".tmp-")]
