"""Several users of one store, and stores that can only be read: real users, real mounts, real processes."""

import grp
import json
import os
import pwd
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import graphkiln
from graphkiln.storage import layout
from graphkiln.storage.store import open_store
from graphkiln.storage.verify import verify_store
from tests.flows.cc_networks import NAME, TARGET, CcNetwork

ROOT = Path(__file__).parents[2]
KERNELS = {"scale": "int run(int a) { return 3 * a; }", "shift": "int run(int a) { return a + 11; }"}

# Runs command lines one after the other in one process, and calls of a trainer.
_DRIVER = """
import contextlib, io, json, sys
import graphkiln
from graphkiln.flows.cli import main
def load(*arguments):
    network = graphkiln.load(arguments[0], target=arguments[1], store=arguments[2])
    print(sorted(len(network.load(graph).outputs) for graph in network.graphs()))
def ensure(*arguments):
    graphkiln.ensure(arguments[0], store=arguments[1])
done = []
for command, *arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if command in ("load", "ensure"):
                {"load": load, "ensure": ensure}[command](*arguments)
            else:
                sys.argv[1:] = [command, *arguments]
                main()
        except SystemExit as end:
            code = end.code
        except graphkiln.GraphKilnError as error:
            code = error.exit_code
            print(f"error: {error}", file=sys.stderr)
    done.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(done))
"""

Command = Sequence[str | Path]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class User:
    """A user of this host that nobody else is.

    Attributes:
        uid: the user's number.
        gid: the user's own group.
        groups: further groups.
        umask: what the user's new files are not to allow.
        mounts: an empty folder for what the user's processes need to have mounted.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    umask: int
    mounts: Path

    def run(self, folder: Path, *commands: Command) -> list[Done]:
        """Run commands in one process of this user."""
        return _run(folder, *commands, before=self.become(), umask=self.umask)

    def become(self) -> list[str]:
        """Return what starts a process as this user."""
        groups = ["--groups", ",".join(map(str, self.groups))] if self.groups else ["--clear-groups"]
        return [
            *_with_reachable_python(self.mounts),
            "setpriv",
            "--reuid",
            str(self.uid),
            "--regid",
            str(self.gid),
            *groups,
            "--",
        ]


def _with_reachable_python(mounts: Path) -> list[str]:
    """Return what starts a process for which Python lies in no folder that only root may enter, such as /root."""
    closed: dict[Path, Path] = {}
    for tree in (Path(sys.base_prefix), Path(sys.prefix), ROOT):
        ancestors = [folder for folder in reversed(tree.resolve().parents) if not folder.stat().st_mode & 0o001]
        if ancestors:
            closed[tree.resolve()] = ancestors[0]
    kept = [(shlex.quote(str(tree)), shlex.quote(f"{mounts}/{at}")) for at, tree in enumerate(closed)]
    script = "; ".join(
        [
            "set -e",
            f"mount -t tmpfs tmpfs {shlex.quote(str(mounts))}",
            *(f"mkdir {kept_at}; mount --bind {tree} {kept_at}" for tree, kept_at in kept),
            *(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(folder))}" for folder in set(closed.values())),
            *(f"mkdir -p {tree}; mount --bind {kept_at} {tree}" for tree, kept_at in kept),
            'exec "$@"',
        ]
    )
    return ["unshare", "-m", "/bin/sh", "-c", script, "sh"] if closed else []


def _run(folder: Path, *commands: Command, before: Sequence[str] = (), **options: Any) -> list[Done]:
    """Run commands in one process, which `before` starts."""
    done = subprocess.run(
        [*before, sys.executable, "-c", _DRIVER, json.dumps([list(map(str, command)) for command in commands])],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder)},
        timeout=120,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return [Done(*item) for item in json.loads(done.stdout)]


def _unused(taken: set[int], count: int) -> list[int]:
    free = (number for number in range(61000, 62000) if number not in taken)
    return [next(free) for _ in range(count)]


class Shared:
    """A folder that everybody may enter, with a network in it, and two users with a group in common."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        first, second = _unused({user.pw_uid for user in pwd.getpwall()}, 2)
        self.group, *own = _unused({group.gr_gid for group in grp.getgrall()}, 3)
        self.users = [(first, own[0]), (second, own[1])]
        self.homes = [folder / "first", folder / "second"]
        for (uid, gid), home in zip(self.users, self.homes, strict=True):
            home.mkdir()
            os.chown(home, uid, gid)
        self.mounts = folder / "mounts"
        self.mounts.mkdir()
        self.network = CcNetwork(folder / "network", KERNELS)
        (self.network.folder / "runs.txt").chmod(0o666)

    def user(self, number: int, umask: int, *, in_group: bool) -> User:
        """Return the first (0) or the second (1) user."""
        return User(*self.users[number], (self.group,) if in_group else (), umask, self.mounts)

    def make_store(self, mode: int) -> None:
        """Make the folder of the store, of the first user and the common group."""
        self.store.mkdir()
        os.chown(self.store, self.users[0][0], self.group)
        self.store.chmod(mode)

    def compile(self) -> Command:
        """Return the command that compiles the network."""
        return ["compile", self.network.spec, "--no-prefect", "--store", self.store]


def readings(store: Path, home: Path) -> list[Command]:
    """Return commands that only read the store."""
    looks: list[Command] = [["status"], ["show", NAME], ["explain", NAME], ["verify"]]
    return [
        ["load", NAME, TARGET, store],
        *([*command, "--store", store] for command in looks),
        ["export", NAME, "-o", home / "kernels.bundle", "--store", store],
        ["import", home / "kernels.bundle", "--store", home / "own-store"],
    ]


@pytest.fixture
def shared() -> Iterator[Shared]:
    if os.geteuid() != 0:
        pytest.skip("only root may become other users")
    # Temporary folders of tests are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="graphkiln-users-"))
    folder.chmod(0o755)
    try:
        found = Shared(folder)
        other = found.user(1, 0o022, in_group=False)
        reads = [*other.become(), sys.executable, "-c", "import graphkiln"]
        if subprocess.run(reads, cwd="/", capture_output=True, check=False).returncode:
            pytest.skip("other users cannot be made to read this installation of Python")
        yield found
    finally:
        shutil.rmtree(folder)


def assert_refused_at_once(done: Done, words: str) -> None:
    assert done.code == 2, done
    assert len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith("error: the store ")
    assert words in done.err
    assert "compiling" not in done.out


def test_a_second_user_reads_what_the_first_wrote_and_is_told_at_once_that_he_cannot_write(shared: Shared) -> None:
    first, second = shared.user(0, 0o022, in_group=False), shared.user(1, 0o022, in_group=False)
    shared.make_store(0o755)
    assert [done.code for done in first.run(shared.homes[0], shared.compile())] == [0]
    assert shared.network.take_runs() == sorted(KERNELS)
    before = sorted(shared.store.rglob("*"))
    *reading, compiled = second.run(shared.homes[1], *readings(shared.store, shared.homes[1]), shared.compile())
    assert [done.code for done in reading] == [0] * len(reading), reading
    assert reading[0].out == "[1, 1]\n"
    assert_refused_at_once(compiled, f"Permission denied at {shared.store}/")
    assert shared.network.take_runs() == []
    assert sorted(shared.store.rglob("*")) == before


def test_users_of_one_group_write_to_one_store(shared: Shared) -> None:
    first, second = shared.user(0, 0o002, in_group=True), shared.user(1, 0o002, in_group=True)
    shared.make_store(0o2775)
    assert [done.code for done in first.run(shared.homes[0], shared.compile())] == [0]
    assert shared.network.take_runs() == sorted(KERNELS)

    # The second one changes the network, and mends what has been lost of the first one's.
    shared.network.write_kernel("shift", "int run(int a) { return a + 12; }")
    plan = graphkiln.load(NAME, target=TARGET, store=str(shared.store)).manifest.plan
    scale = next(graph.key for graph in plan.graphs if graph.name == "scale")
    (shared.store / layout.by_digest(layout.ACTIONS, scale)).write_bytes(b"")
    compiled, *reading = second.run(shared.homes[1], shared.compile(), *readings(shared.store, shared.homes[1]))
    assert compiled.code == 0, compiled
    assert [done.code for done in reading] == [0] * len(reading), reading
    assert shared.network.take_runs() == sorted(KERNELS)
    assert [
        done.code for done in first.run(shared.homes[0], shared.compile(), ["load", NAME, TARGET, shared.store])
    ] == [0, 0]
    assert shared.network.take_runs() == []
    assert not verify_store(open_store(str(shared.store))).damaged
    for path in shared.store.rglob("*"):
        status = path.stat()
        assert status.st_gid == shared.group
        assert status.st_mode & 0o7777 == (0o2775 if path.is_dir() else 0o664), path
    assert {path.stat().st_uid for path in shared.store.rglob("*")} == {first.uid, second.uid}


def test_a_folder_that_the_group_cannot_write_to_is_found_before_anything_compiles(shared: Shared) -> None:
    """The first user's umask keeps the group out of all folders but the store's own."""
    first, second = shared.user(0, 0o022, in_group=True), shared.user(1, 0o022, in_group=True)
    shared.make_store(0o2775)
    assert [done.code for done in first.run(shared.homes[0], shared.compile())] == [0]
    shared.network.take_runs()
    shared.network.write_kernel("shift", "int run(int a) { return a + 12; }")
    (refused,) = second.run(shared.homes[1], shared.compile())
    assert_refused_at_once(refused, f"Permission denied at {shared.store}/plans")
    # One of 256 folders is enough, as the artifact of an hour's compile may belong there.
    for folder in shared.store.rglob("*"):
        if folder.is_dir():
            folder.chmod(0o2775)
    closed = next((shared.store / "blobs").iterdir())
    closed.chmod(0o2755)
    (refused,) = second.run(shared.homes[1], shared.compile())
    assert_refused_at_once(refused, f"Permission denied at {closed}")
    assert shared.network.take_runs() == []
    # Folders of other networks do not matter.
    closed.chmod(0o2775)
    other = shared.store / "refs" / "other"
    other.mkdir()
    other.chmod(0o2755)
    (compiled,) = second.run(shared.homes[1], shared.compile())
    assert compiled.code == 0, compiled
    assert shared.network.take_runs() == ["shift"]


# ---------------------------------------------------------------------- read-only mounts


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


def test_a_read_only_mount_is_read_and_writers_are_told_at_once(tmp_path: Path) -> None:
    """In a name space of its own, where any user may mount."""
    network = CcNetwork(tmp_path / "network", KERNELS)
    store, home = tmp_path / "store", tmp_path / "home"
    home.mkdir()
    compiling: Command = ["compile", network.spec, "--no-prefect", "--store", store]
    assert [done.code for done in _run(home, compiling)] == [0]
    network.take_runs()
    network.write_kernel("shift", "int run(int a) { return a + 12; }")
    before = ["unshare", "-rm", "/bin/sh", "-c", READ_ONLY, str(store)]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no name spaces with mounts of their own here")
    writings: list[Command] = [
        compiling,
        ["ensure", network.spec, store],
        ["import", home / "kernels.bundle", "--store", store],
    ]
    done = _run(home, *readings(store, home), *writings, before=before)
    assert [item.code for item in done[: -len(writings)]] == [0] * (len(done) - len(writings)), done
    assert done[0].out == "[1, 1]\n"
    for refused in done[-len(writings) :]:
        assert_refused_at_once(refused, f"Read-only file system at {store}/")
    assert network.take_runs() == []
