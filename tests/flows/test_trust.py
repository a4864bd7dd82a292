"""Commits are signed and checked end to end: whatever is planted in a store, a trusting host does not run it."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

import graphkiln
from graphkiln import BadInputError, CompiledNetwork, DamagedStoreError, GraphKilnError, UntrustedError
from graphkiln.flows.cli import cli
from graphkiln.storage import layout
from graphkiln.storage.locations import open_filesystem
from graphkiln.storage.records import RefRecord, Signature
from graphkiln.storage.signing_keys import SIGNING_KEY, TRUSTED_KEYS
from graphkiln.storage.store import open_store
from graphkiln.storage.verify import verify_store
from tests.flows.attacks import Attacker, evil_library
from tests.flows.cc_networks import NAME, TARGET, CcNetwork, call, outputs_of
from tests.storage.faults import FaultyFilesystem
from tests.storage.signers import line_of, pem_of, public, trusting, write_key

pytestmark = pytest.mark.usefixtures("without_prefect")

KERNELS = {"negate": "int run(int a) { return -a; }", "scale": "int run(int a) { return 3 * a; }"}
OF_7 = {"negate": -7, "scale": 21}
CHANGED = "int run(int a) { return 4 * a; }"
EVIL = {"negate": 666, "scale": 666}


class Hosts:
    """A network, and hosts with and without keys that use it."""

    def __init__(self, network: CcNetwork, store: Path) -> None:
        self.network = network
        self.store = store

    def ensure(self, *trusted: str, signing: str | None = None) -> CompiledNetwork:
        with pytest.MonkeyPatch.context() as patch:
            if signing is not None:
                patch.setenv(SIGNING_KEY, pem_of(signing))
            return graphkiln.ensure(
                self.network.spec,
                store=str(self.store),
                trusted_keys=[line_of(name) for name in trusted] or None,
                jobs=1,
            )

    def load(self, *trusted: str) -> CompiledNetwork:
        keys = [line_of(name) for name in trusted] or None
        return graphkiln.load(NAME, target=TARGET, store=str(self.store), trusted_keys=keys)

    def refusal(self, *trusted: str) -> UntrustedError:
        with pytest.raises(UntrustedError) as caught:
            self.load(*trusted)
        assert caught.value.exit_code == 7
        return caught.value

    def is_trusted(self, *trusted: str) -> bool:
        found = verify_store(open_store(str(self.store), trusted_keys=[line_of(name) for name in trusted]))
        return not (found.untrusted or found.damaged)


@pytest.fixture(autouse=True)
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No keys are configured, whatever the user has, and this host has seen nothing."""
    monkeypatch.delenv(SIGNING_KEY, raising=False)
    monkeypatch.delenv(TRUSTED_KEYS, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """A network with a store that `ci` has signed, and beside it ``unsigned``, a store that nobody has."""
    folder = tmp_path_factory.mktemp("trust")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PREFECT_API_URL", SIGNING_KEY, TRUSTED_KEYS):
            patch.delenv(name, raising=False)
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("PREFECT_HOME", str(folder / "prefect"))
        hosts = Hosts(CcNetwork(folder / "network", KERNELS), folder / "signed")
        hosts.ensure(signing="ci")
        Hosts(hosts.network, folder / "unsigned").ensure()
    hosts.network.take_runs()
    yield hosts


@pytest.fixture
def hosts(templates: Hosts, tmp_path: Path) -> Hosts:
    """Hosts of a store that `ci` has signed."""
    return Hosts(templates.network, Path(shutil.copytree(templates.store, tmp_path / "store")))


@pytest.fixture
def unsigned(templates: Hosts, tmp_path: Path) -> Hosts:
    """Hosts of a store that nobody has signed."""
    return Hosts(templates.network, Path(shutil.copytree(templates.store.parent / "unsigned", tmp_path / "store")))


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    def take() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "graphkiln"]
        caplog.clear()
        return found

    with caplog.at_level(logging.WARNING, logger="graphkiln"):
        yield take


def results(network: CompiledNetwork, folder: Path) -> dict[str, int]:
    return {graph: call(network, graph, folder, 7) for graph in network.graphs()}


# ---------------------------------------------------------------------- the ordinary way


def test_what_is_signed_loads_with_its_key_and_with_none(hosts: Hosts, tmp_path: Path) -> None:
    for trusted in ((), ("ci",), ("other", "ci")):
        assert results(hosts.load(*trusted), tmp_path / "loaded") == OF_7
    assert hosts.refusal("other").reason == "unknown-key"
    assert hosts.is_trusted("ci")
    assert outputs_of(hosts.ensure(signing="ci")) == outputs_of(hosts.load("ci"))
    assert not hosts.network.take_runs()


def test_what_nobody_signed_is_refused_and_compiled_anew(
    unsigned: Hosts, tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    assert unsigned.refusal("ci").reason == "unsigned"
    before = unsigned.load()
    assert not warnings()
    made = unsigned.ensure(signing="ci")
    assert unsigned.network.take_runs() == sorted(KERNELS)
    assert made.manifest == before.manifest, "cc gives the same bytes, and a manifest holds no signature"
    assert made.committed_at > before.committed_at
    told = warnings()
    assert len(told) == len(KERNELS) + 2, told  # each action and the ref once, and that the ref is written again
    assert all("unsigned" in line or "nobody has signed it" in line or "could not be used" in line for line in told)
    assert results(unsigned.load("ci"), tmp_path / "loaded") == OF_7
    assert unsigned.is_trusted("ci")


# ---------------------------------------------------------------------- planted objects


def sign_as_mallory(attacker: Attacker) -> None:
    trust = trusting("mallory", signing="mallory")
    for result in attacker.actions():
        attacker.plant_action(trust.sign("action result", result))


def claim_to_be_ci(attacker: Attacker) -> None:
    trust = trusting("mallory", signing="mallory")
    for result in attacker.actions():
        signature = trust.sign("action result", result).signature
        assert signature is not None
        forged = Signature(public("ci").id, signature.value)
        attacker.plant_action(msgspec.structs.replace(result, signature=forged))


@pytest.mark.parametrize("disguise", [None, sign_as_mallory, claim_to_be_ci, "the signatures that were there"])
def test_a_planted_action_is_neither_run_nor_signed(disguise: Any, hosts: Hosts, tmp_path: Path) -> None:
    evil, mark = evil_library(tmp_path / "evil")
    honest = outputs_of(hosts.load("ci"))
    attacker = Attacker(hosts.store)
    signatures = {result.key: result.signature for result in attacker.actions()}
    attacker.replace_outputs(evil)
    if callable(disguise):
        disguise(attacker)
    elif disguise:
        for result in attacker.actions():
            attacker.plant_action(msgspec.structs.replace(result, signature=signatures[result.key]))
    shutil.rmtree(hosts.store / layout.REFS)  # or else nothing would be committed
    victim = Hosts(hosts.network, Path(shutil.copytree(hosts.store, tmp_path / "victim")))

    # Who trusts everybody runs it: what is planted works.
    assert results(victim.ensure(), tmp_path / "victims") == EVIL
    assert mark.exists()
    mark.unlink()
    assert not hosts.network.take_runs()

    made = hosts.ensure(signing="ci")
    assert hosts.network.take_runs() == sorted(KERNELS)
    assert outputs_of(made) == honest
    for network in (made, hosts.load("ci")):
        assert results(network, tmp_path / "loaded") == OF_7
    assert not mark.exists()
    assert hosts.is_trusted("ci")
    assert all(not evil_in(result.outputs, attacker, evil) for result in attacker.actions())


def evil_in(outputs: Any, attacker: Attacker, evil: bytes) -> bool:
    return any(attacker.opened().get_blob(ref, "an output") == evil for ref in outputs.values())


def test_a_planted_commit_is_refused_before_anything_of_it_is_loaded(hosts: Hosts, tmp_path: Path) -> None:
    evil, mark = evil_library(tmp_path / "evil")
    attacker = Attacker(hosts.store)
    (ref,) = attacker.refs()
    planted = msgspec.structs.replace(ref, manifest=attacker.plant_manifest(ref, evil))
    mallory = trusting("mallory", signing="mallory")
    for forged, reason in (
        (planted, "altered"),
        (msgspec.structs.replace(planted, signature=None), "unsigned"),
        (mallory.sign("ref", planted), "unknown-key"),
    ):
        attacker.plant_ref(forged)
        error = hosts.refusal("ci")
        assert error.reason == reason
        assert error.path in str(attacker.path_of(ref))
        assert not hosts.is_trusted("ci")
        assert not mark.exists()
    assert results(hosts.load(), tmp_path / "victims") == EVIL
    assert mark.exists()
    mark.unlink()

    # Its actions are honest: they are only committed again.
    made = hosts.ensure(signing="ci")
    assert not hosts.network.take_runs()
    for network in (made, hosts.load("ci")):
        assert results(network, tmp_path / "loaded") == OF_7
    assert not mark.exists()


def test_a_tampered_manifest_is_refused(hosts: Hosts) -> None:
    (ref,) = Attacker(hosts.store).refs()
    path = hosts.store / layout.by_digest(layout.MANIFESTS, ref.manifest)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data.replace(b'"ranks":"0-3"', b'"ranks":"0-9"', 1))
    assert path.read_bytes() != data
    with pytest.raises(DamagedStoreError):
        hosts.load("ci")
    hosts.ensure(signing="ci")
    assert path.read_bytes() == data
    assert hosts.is_trusted("ci")


def test_a_ref_cannot_be_moved_to_another_network(hosts: Hosts, tmp_path: Path) -> None:
    """Both networks are signed by one key; one must not stand in for the other."""
    other = CcNetwork(tmp_path / "other", {"negate": "int run(int a) { return 0; }"}, name="other")
    Hosts(other, hosts.store).ensure(signing="ci")
    attacker = Attacker(hosts.store)
    refs = {ref.network: ref for ref in attacker.refs()}
    ours, theirs = refs[NAME], refs["other"]
    place = attacker.path_of(ours)
    honest = place.read_bytes()

    def moved(**changes: Any) -> RefRecord:
        return msgspec.structs.replace(theirs, **changes)

    place.write_bytes(attacker.path_of(theirs).read_bytes())
    with pytest.raises(DamagedStoreError, match="it belongs to other"):
        hosts.load("ci")
    names = {"network": NAME, "target": TARGET, "variant": ours.variant}
    for ref in (
        moved(**names),
        moved(**names, signature=ours.signature),
        msgspec.structs.replace(ours, manifest=theirs.manifest),
        msgspec.structs.replace(ours, signature=theirs.signature),
    ):
        attacker.plant_ref(ref)
        assert hosts.refusal("ci").reason == "altered"
    place.unlink()
    place.write_bytes(honest)
    assert outputs_of(hosts.load("ci"))


def test_a_trusted_variant_loads_beside_one_that_is_not(hosts: Hosts) -> None:
    attacker = Attacker(hosts.store)
    (ref,) = attacker.refs()
    attacker.plant_ref(msgspec.structs.replace(ref, variant="0" * 64))
    assert outputs_of(hosts.load("ci"))
    assert not hosts.is_trusted("ci")


# ---------------------------------------------------------------------- rollback and rotation


def test_a_commit_that_is_put_back_is_noticed_where_a_later_one_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    hosts = Hosts(CcNetwork(tmp_path / "network", KERNELS), tmp_path / "store")
    hosts.ensure(signing="ci")
    attacker = Attacker(hosts.store)
    (old,) = attacker.refs()
    hosts.network.write_kernel("scale", CHANGED)
    hosts.ensure(signing="ci")
    assert results(hosts.load("ci"), tmp_path / "new") == {**OF_7, "scale": 28}
    attacker.plant_ref(old)
    assert hosts.refusal("ci").reason == "rolled-back"
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_STATE_HOME", str(tmp_path / "of a host that has seen nothing"))
        assert results(hosts.load("ci"), tmp_path / "old") == OF_7
    hosts.network.take_runs()
    warnings()
    hosts.ensure(signing="ci")
    assert not hosts.network.take_runs()
    assert any("put an older one back" in line for line in warnings())
    assert results(hosts.load("ci"), tmp_path / "again") == {**OF_7, "scale": 28}


def test_keys_are_rotated_with_two_of_them_trusted_for_a_while(hosts: Hosts) -> None:
    hosts.load("ci", "next")
    hosts.ensure("ci", signing="next")
    assert not hosts.network.take_runs(), "what the old key has signed still counts"
    hosts.load("ci", "next")
    # The old key is trusted no more: what only it has signed is made again.
    assert hosts.refusal("next").reason == "unknown-key"
    hosts.ensure(signing="next")
    assert hosts.network.take_runs() == sorted(KERNELS)
    hosts.load("next")
    assert hosts.is_trusted("next")
    assert hosts.refusal("ci").reason == "unknown-key"


# ---------------------------------------------------------------------- hosts that only check


def test_a_host_without_a_signing_key_uses_what_is_committed(hosts: Hosts, tmp_path: Path) -> None:
    before = _stored(hosts.store)
    assert results(hosts.ensure("ci"), tmp_path / "loaded") == OF_7
    assert _stored(hosts.store) == before
    assert not hosts.network.take_runs()


def _stored(store: Path) -> dict[Path, bytes]:
    """Every object but the pins, which say of each run that it was there."""
    return {
        path: path.read_bytes()
        for path in store.rglob("*")
        if path.is_file() and layout.PINS not in path.relative_to(store).parts
    }


@pytest.mark.parametrize("lost", ["everything", "ref", "action", "manifest", "artifact"])
def test_a_host_without_a_signing_key_makes_nothing(lost: str, hosts: Hosts) -> None:
    attacker = Attacker(hosts.store)
    (ref,) = attacker.refs()
    if lost == "everything":
        shutil.rmtree(hosts.store)
    elif lost == "ref":
        attacker.plant_ref(msgspec.structs.replace(ref, signature=None))
    elif lost == "manifest":
        (hosts.store / layout.by_digest(layout.MANIFESTS, ref.manifest)).unlink()
    elif lost == "action":
        attacker.plant_action(msgspec.structs.replace(attacker.actions()[0], signature=None))
    else:
        (output,) = attacker.actions()[0].outputs.values()
        (hosts.store / layout.by_digest(layout.BLOBS, output.digest)).unlink()
    with pytest.raises(BadInputError) as caught:
        hosts.ensure("ci")
    assert caught.value.reason == "no-signing-key"
    assert SIGNING_KEY in str(caught.value)
    assert not hosts.network.take_runs()
    assert len(attacker.refs()) == (lost != "everything")
    if lost == "everything":
        assert {path.name for path in hosts.store.iterdir()} == {layout.FORMAT}, (
            "it is refused before the frontend runs"
        )
    hosts.ensure(signing="ci")
    assert outputs_of(hosts.ensure("ci"))
    assert hosts.is_trusted("ci")
    hosts.network.take_runs()


def test_a_changed_network_is_refused_before_its_compile(tmp_path: Path) -> None:
    hosts = Hosts(CcNetwork(tmp_path / "network", KERNELS), tmp_path / "store")
    hosts.ensure(signing="ci")
    hosts.network.take_runs()
    hosts.network.write_kernel("scale", CHANGED)
    with pytest.raises(BadInputError) as caught:
        hosts.ensure("ci")
    assert caught.value.reason == "no-signing-key"
    # Nor is a network committed whose kernel graphs are all there.
    (hosts.network.folder / "kernels" / "scale.c").unlink()
    with pytest.raises(BadInputError) as caught:
        hosts.ensure("ci")
    assert caught.value.reason == "no-signing-key"
    assert not hosts.network.take_runs()
    assert len([path for path in (hosts.store / layout.MANIFESTS).rglob("*") if path.is_file()]) == 1
    assert results(hosts.load("ci"), tmp_path / "loaded") == OF_7


# ---------------------------------------------------------------------- what it costs


def test_who_has_no_keys_does_not_pay_for_them(hosts: Hosts) -> None:
    script = (
        "import sys, graphkiln\n"
        "network = graphkiln.load(sys.argv[1], target=sys.argv[2], store=sys.argv[3])\n"
        "[network.load(graph) for graph in network.graphs()]\n"
        "print('cryptography' in sys.modules)\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GRAPHKILN_")}
    for keys, expected in (({}, "False"), ({TRUSTED_KEYS: line_of("ci")}, "True")):
        done = subprocess.run(
            [sys.executable, "-c", script, NAME, TARGET, str(hosts.store)],
            env={**clean, **keys},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.strip() == expected


def test_signatures_cost_no_request(templates: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[FaultyFilesystem] = []

    def watching(*arguments: Any) -> FaultyFilesystem:
        watched.append(FaultyFilesystem(open_filesystem(*arguments)))
        return watched[-1]

    monkeypatch.setattr("graphkiln.storage.store.open_filesystem", watching)

    def requests(act: Callable[[], CompiledNetwork]) -> Counter[str]:
        watched.clear()
        outputs_of(act())
        (filesystem,) = watched
        return Counter(operation for operation, _ in filesystem.point.operations)

    plain = Hosts(templates.network, tmp_path / "without")
    keyed = Hosts(templates.network, tmp_path / "with")
    for without, with_keys in (
        (plain.ensure, lambda: keyed.ensure(signing="ci")),
        (plain.ensure, lambda: keyed.ensure(signing="ci")),
        (plain.ensure, lambda: keyed.ensure("ci")),
        (plain.load, lambda: keyed.load("ci")),
    ):
        wanted = requests(without)
        assert wanted["read"]
        assert requests(with_keys) == wanted
    templates.network.take_runs()


# ---------------------------------------------------------------------- the command line


class Project:
    """A folder in which somebody uses the command line, with no keys but those that are given."""

    def __init__(self, network: CcNetwork, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.network, self.folder = network, folder
        monkeypatch.chdir(folder)
        monkeypatch.setenv("GRAPHKILN_STORE", str(folder / "store"))

    def look(self, *arguments: str) -> tuple[int, str]:
        """Run a command that compiles nothing in this process; return its exit code and what it printed."""
        done = CliRunner().invoke(cli, arguments, standalone_mode=False)
        if done.exception is not None:
            assert isinstance(done.exception, GraphKilnError)
            return done.exception.exit_code, done.output + str(done.exception)
        return done.return_value, done.output

    def compile(self, *options: str, **environment: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run `compile` as a process."""
        return subprocess.run(
            [
                *(sys.executable, "-m", "graphkiln", "compile", str(self.network.spec)),
                *("--no-prefect", "--jobs", "1", *options),
            ],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={**os.environ, **{name: str(value) for name, value in environment.items()}},
            timeout=120,
        )


@pytest.fixture
def project(templates: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    return Project(templates.network, tmp_path, monkeypatch)


def test_the_command_line_makes_and_shows_keys(project: Project) -> None:
    code, printed = project.look("keys", "new", "ci")
    assert code == 0
    for hint in (f"export {SIGNING_KEY}={project.folder / 'ci'}", TRUSTED_KEYS, "ci.pub"):
        assert hint in printed
    code, again = project.look("keys", "new", "ci", "--json")
    assert code == 2
    assert '"reason": "key-exists"' in again
    document = json.loads(project.look("keys", "show", "ci.pub", "--json")[1])
    (shown,) = document["keys"]
    assert shown["id"] in printed
    assert shown["line"] in project.look("keys", "show", "ci.pub")[1]
    assert shown["id"] in project.look("keys", "show", "ci")[1]
    made = json.loads(project.look("keys", "new", "next", "--json")[1])
    assert (made["private"], made["public"]) == ("next", "next.pub")
    assert (project.folder / "next.pub").read_text() == f"{made['line']}\n"


def test_the_command_line_signs_and_checks(project: Project) -> None:
    write_key(project.folder, "ci")
    trust = ("--trusted-keys", "ci.pub")
    looks = (("verify",), ("status",), ("show", NAME), ("log", NAME, "scale"))

    assert project.compile().returncode == 0
    for command in looks:
        assert project.look(*command)[0] == 0
        code, printed = project.look(*command, *trust)
        assert code == 7
        assert "not trusted" in printed or "untrusted" in printed
    refused = project.compile(*trust)
    assert refused.returncode == 2
    assert SIGNING_KEY in refused.stderr

    text = (project.folder / "ci").read_text()
    signed = project.compile(**{SIGNING_KEY: text})  # what a CI system gives
    assert signed.returncode == 0, signed.stderr
    assert text.splitlines()[1] not in signed.stdout + signed.stderr
    for command in looks:
        assert project.look(*command, *trust)[0] == 0
    for command in looks[1:3]:
        (variant,) = json.loads(project.look(*command, *trust, "--json")[1])["variants"]
        assert (variant["state"], variant["signed_by"]) == ("committed", "ci")
        assert "signed by" in project.look(*command, *trust)[1]
        assert "signed by" not in project.look(*command)[1]
    project.network.take_runs()


def test_bad_keys_are_refused_at_the_start(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    open_key = write_key(project.folder, "open")
    open_key.chmod(0o644)
    broken = project.folder / "broken"
    broken.write_text(f"{line_of('ci')}\nssh-ed25519 AAAA oops\n")
    none = project.folder / "none"
    base64 = "bm90IGEga2V5"
    for environment, told in (
        ({SIGNING_KEY: none}, f"{none} cannot be read"),
        ({SIGNING_KEY: open_key}, "chmod 600"),
        ({SIGNING_KEY: f"-----BEGIN OPENSSH PRIVATE KEY-----\n{base64}\n"}, SIGNING_KEY),
        ({TRUSTED_KEYS: broken}, f"{broken}, line 2"),
        ({TRUSTED_KEYS: "ssh-ed25519 AAAA oops"}, "line 1"),
    ):
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, str(value))
            code, printed = project.look("compile", str(project.network.spec), "--no-prefect")
        assert code == 2
        assert told in printed
        assert base64 not in printed
    assert not (project.folder / "store").exists()
    assert not project.network.take_runs()
