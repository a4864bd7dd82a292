"""The files of keys: what OpenSSH writes is read, and whatever is wrong is said in one line."""

import functools
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from graphkiln.storage.errors import BadInputError
from graphkiln.storage.signing import EVERYBODY, configured_trust
from graphkiln.storage.signing_keys import (
    SIGNING_KEY,
    TRUSTED_KEYS,
    new_signing_key,
    read_public_keys,
    read_signing_key,
    read_trusted_keys,
)
from tests.storage.signers import line_of, pem_of, private_key, public, write_key

RSA = generate_private_key(65537, 2048)

SSH_KEYGEN = shutil.which("ssh-keygen") or ""
needs_ssh = pytest.mark.skipif(not SSH_KEYGEN, reason="there is no ssh-keygen")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SIGNING_KEY, raising=False)
    monkeypatch.delenv(TRUSTED_KEYS, raising=False)


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(BadInputError) as caught:
        act()
    assert caught.value.reason == "bad-key"
    return str(caught.value)


# ---------------------------------------------------------------------- private keys


@pytest.mark.parametrize("form", [PrivateFormat.PKCS8, PrivateFormat.OpenSSH], ids=["pkcs8", "openssh"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n"], ids=repr)
def test_a_private_key_may_be_a_file_or_the_text_itself(form: PrivateFormat, end: str, tmp_path: Path) -> None:
    text = pem_of("ci", form).rstrip("\n") + end
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(text)
    for configured in (text, str(path)):
        key = read_signing_key(configured)
        assert key.public.id == public("ci").id
        assert key.sign(b"data") == private_key("ci").sign(b"data")
        assert public("ci").verifies(key.sign(b"data"), b"data")
        assert not public("ci").verifies(key.sign(b"data"), b"date")
        assert not public("other").verifies(key.sign(b"data"), b"data")


@needs_ssh
def test_keys_are_those_of_openssh(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    subprocess.run([SSH_KEYGEN, "-q", "-t", "ed25519", "-N", "", "-C", "a comment", "-f", theirs], check=True)
    made = new_signing_key(ours)
    for path, key in ((theirs, read_signing_key(str(theirs))), (ours, made)):
        told = subprocess.run([SSH_KEYGEN, "-l", "-f", path], capture_output=True, text=True, check=True).stdout
        assert key.public.id in told
        assert read_trusted_keys(path.with_name(f"{path.name}.pub"))[0].id == key.public.id
        line = subprocess.run([SSH_KEYGEN, "-y", "-f", path], capture_output=True, text=True, check=True).stdout
        assert line.split()[:2] == key.public.line.split()[:2]
    assert read_trusted_keys(tmp_path / "theirs.pub")[0].comment == "a comment"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o622, 0o610])
def test_a_private_key_that_others_may_use_is_refused_as_ssh_does(mode: int, tmp_path: Path) -> None:
    path = write_key(tmp_path, "ci")
    path.chmod(mode)
    assert "chmod 600" in refusal(lambda: read_signing_key(str(path)))
    path.chmod(0o400)
    read_signing_key(str(path))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no private key"),
        ("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "no private key"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n", "no private key"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "no private key"),
        (pem_of("ci")[:-40], "no private key"),
        (line_of("ci"), "no private key"),
        (
            private_key("ci").private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")).decode(),
            "encrypted",
        ),
        (
            RSA.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
            "no Ed25519 key",
        ),
    ],
    ids=["empty", "broken pkcs8", "broken openssh", "begin only", "cut", "public", "encrypted", "rsa"],
)
def test_what_is_no_private_key_is_refused_and_not_repeated(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(text)
    message = refusal(lambda: read_signing_key(str(path)))
    assert str(path) in message
    assert told in message
    if "-----BEGIN" in text:
        message = refusal(lambda: read_signing_key(text))
        assert SIGNING_KEY in message
    assert not any(line in message for line in text.splitlines() if len(line) > 20 and "-----" not in line)


@pytest.mark.parametrize("read", [read_signing_key, read_trusted_keys, lambda name: read_public_keys(Path(name))])
def test_files_that_cannot_be_read(read: Callable[[str], object], tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.touch(mode=0o600)
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none", tmp_path, binary, "~nobody-of-this-name/key", "a\0b"):
        assert "cannot be read" in refusal(functools.partial(read, str(path)))


# ---------------------------------------------------------------------- trusted keys


def test_trusted_keys_may_be_files_or_the_lines_themselves(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text(f"# who may sign\n\n{line_of('a')}\n  {line_of('b')} at work  \r\n")
    second.write_text(line_of("c"))
    both = f"{first}{os.pathsep}{second}{os.pathsep}"
    ids = [public(name).id for name in "abc"]
    for configured in (both, [first, second], [str(first), second], [first, line_of("c")], [both]):
        assert [key.id for key in read_trusted_keys(configured)] == ids  # type: ignore[arg-type]
    assert [key.comment for key in read_trusted_keys(first)] == ["a", "b at work"]
    for lines in (line_of("a"), f"\n{line_of('a')}\n", f"# mine\n{line_of('a')}", [line_of("a")]):
        assert [key.id for key in read_trusted_keys(lines)] == ids[:1]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("ssh-ed25519", "form"),
        ("ssh-ed25519 AAAA", "form"),
        (line_of("a")[:60], "form"),
        (f"cert-authority {line_of('a')}", "form"),
        ("nonsense", "form"),
        ("\0", "form"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "private key"),
        (
            RSA.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode(),
            "only Ed25519",
        ),
    ],
    ids=["type only", "short", "cut", "options", "word", "nul", "private", "rsa"],
)
def test_a_line_that_is_no_key_is_named(line: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "trusted"
    path.write_text(f"# mine\n{line_of('a')}\n\n{line}\n{line_of('b')}\n")
    message = refusal(lambda: read_trusted_keys(path))
    assert message.startswith(f"{path}, line 4: ")
    assert told in message
    assert "line 2" in refusal(lambda: read_trusted_keys(f"{line_of('a')}\n{line}\n"))


@pytest.mark.parametrize("text", ["", "\n\n", "# nobody yet\n"], ids=repr)
def test_an_empty_list_of_trusted_keys_does_not_mean_to_trust_everybody(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trusted"
    path.write_text(text)
    good = tmp_path / "good"
    good.write_text(line_of("a"))
    assert str(path) in refusal(lambda: read_trusted_keys(path))
    assert str(path) in refusal(lambda: read_trusted_keys([good, path]))
    nothing: list[str | list[str]] = [[], "", os.pathsep, "# nobody yet\n"]
    for configured in nothing:
        assert "no trusted key" in refusal(functools.partial(configured_trust, configured))


def test_trusted_keys_that_everybody_may_change_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trusted"
    path.write_text(line_of("a"))
    path.chmod(0o666)
    assert "chmod o-w" in refusal(lambda: read_trusted_keys(path))
    path.chmod(0o664)
    assert read_trusted_keys(path)


# ---------------------------------------------------------------------- new keys


def test_a_new_key_is_private_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path, half = tmp_path / "key", tmp_path / "key.pub"
    made = new_signing_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_signing_key(str(path)).public.id == made.public.id
    assert half.read_text() == f"{made.public.line}\n"
    assert [key.id for file in (path, half) for key in read_public_keys(file)] == [made.public.id] * 2
    assert made.public.id != new_signing_key(tmp_path / "another").public.id

    before = path.read_bytes(), half.read_bytes()
    for kept, gone in ((path, half), (half, path)):
        gone.unlink()
        with pytest.raises(BadInputError) as caught:
            new_signing_key(path)
        assert caught.value.reason == "key-exists"
        assert str(kept) in str(caught.value)
        assert not gone.exists()
        gone.write_bytes(before[gone == half])
    assert (path.read_bytes(), half.read_bytes()) == before
    assert "cannot be written" in refusal(lambda: new_signing_key(tmp_path / "none" / "key"))
    assert "cannot be written" in refusal(lambda: new_signing_key(path / "key"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_key_that_could_not_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def full(path: "str | Path", flags: int, mode: int = 0o777) -> int:
        if str(path).endswith(".pub"):
            real(path, flags, mode)
            return real("/dev/full", os.O_WRONLY)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", full)
    assert "cannot be written" in refusal(lambda: new_signing_key(tmp_path / "key"))
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- configuration


def test_without_keys_everybody_is_trusted() -> None:
    assert configured_trust() is EVERYBODY
    assert not EVERYBODY.required
    assert EVERYBODY.can_sign


def test_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUSTED_KEYS, line_of("a"))
    trust = configured_trust()
    assert (trust.required, trust.can_sign, trust.signer) == (True, False, None)
    monkeypatch.setenv(SIGNING_KEY, str(write_key(tmp_path, "ci")))
    trust = configured_trust()
    assert (trust.required, trust.can_sign) == (True, True)
    # An argument stands in for the environment's trusted keys, and not for its signing key.
    monkeypatch.setenv(TRUSTED_KEYS, "/none")
    assert "/none" in refusal(configured_trust)
    trust = configured_trust([line_of("b")])
    assert trust.signer is not None
    assert trust.signer.public.id == public("ci").id
    monkeypatch.delenv(TRUSTED_KEYS)
    assert configured_trust().required, "who signs must not sign what somebody else has planted"
    for name in (SIGNING_KEY, TRUSTED_KEYS):
        monkeypatch.setenv(name, "")
    assert configured_trust() is EVERYBODY
