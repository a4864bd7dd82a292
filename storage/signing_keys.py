"""Ed25519 keys in the usual files: private ones in OpenSSH's format or PKCS8, public ones as lines of OpenSSH."""

import base64
import contextlib
import getpass
import hashlib
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln.storage.errors import BadInputError

if TYPE_CHECKING:
    # Who has no keys pays nothing for them.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNING_KEY, TRUSTED_KEYS = "GRAPHKILN_SIGNING_KEY", "GRAPHKILN_TRUSTED_KEYS"

# What a user names as trusted: a file, several of them with `os.pathsep` between, or the lines themselves.
TrustedKeys = str | Path | Sequence[str | Path]

_LINE = re.compile(r"\s*(#|(ssh|ecdsa|sk)-\S+\s)")


@dataclass(frozen=True)
class PublicKey:
    """A key whose signatures can be checked.

    Attributes:
        id: its fingerprint, as `ssh-keygen -l` prints it.
        comment: what its line says of whose it is.
        key: the key.
    """

    id: str
    comment: str
    key: "Ed25519PublicKey"

    @property
    def line(self) -> str:
        """The line of a file of trusted keys."""
        return f"{_openssh_line(self.key)} {self.comment}".rstrip()

    def __str__(self) -> str:
        return f"{self.id} ({self.comment})" if self.comment else self.id

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Tell whether a signature of `data` is of this key."""
        from cryptography.exceptions import InvalidSignature

        try:
            self.key.verify(signature, data)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class SigningKey:
    """A key to sign with.

    Attributes:
        public: its other half.
        key: the key.
    """

    public: PublicKey
    key: "Ed25519PrivateKey"

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`, which is always the same."""
        return self.key.sign(data)


def read_signing_key(configured: str) -> SigningKey:
    """Return a private key.

    Args:
        configured: path of its file, or the text of such a file.

    Raises:
        BadInputError: it is no private Ed25519 key that can be read, or others may read its file.
    """
    if "-----BEGIN" in configured:
        return _parse_private(configured, SIGNING_KEY)
    what = f"the signing key ({SIGNING_KEY})"
    text, status = _read(configured, what)
    # As ssh does: a secret that others may read is none. One of another user's is as that user wants it.
    if status.st_mode & 0o077 and status.st_uid == os.getuid():
        raise _bad_key(f"{what} {configured} may be used by others than its owner: chmod 600 it")
    return _parse_private(text, configured)


def read_trusted_keys(configured: TrustedKeys) -> list[PublicKey]:
    """Return the public keys that a user trusts; at least one.

    Raises:
        BadInputError: one cannot be read, or there is none: who configures trust does not mean to trust everybody.
    """
    found: list[PublicKey] = []
    for item in [configured] if isinstance(configured, str | Path) else configured:
        if isinstance(item, str) and (_LINE.match(item) or "\n" in item):
            found += _parse_public(item, "the trusted keys")
            continue
        for path in [str(item)] if isinstance(item, Path) else filter(None, item.split(os.pathsep)):
            found += _read_trusted_file(path)
    if not found:
        raise _bad_key("no trusted key is named where trusted keys are configured")
    return found


def _read_trusted_file(path: str) -> list[PublicKey]:
    what = "the file of trusted keys"
    text, status = _read(path, what)
    if status.st_mode & 0o002:
        raise _bad_key(f"{what} {path} may be changed by everybody: chmod o-w it")
    keys = _parse_public(text, path)
    if not keys:
        raise _bad_key(f"{what} {path} names no key")
    return keys


def read_public_keys(path: Path) -> list[PublicKey]:
    """Return the public keys of a file of trusted keys, or the public half of a private key.

    Raises:
        BadInputError: it is neither.
    """
    text, _ = _read(str(path), "the key")
    if "PRIVATE KEY-----" in text:
        return [_parse_private(text, str(path)).public]
    return _parse_public(text, str(path))


def new_signing_key(path: Path) -> SigningKey:
    """Make a new key, and write it to `path`, readable by its owner alone, and its public half to `path` + ``.pub``.

    Raises:
        BadInputError: one of the files exists already, or cannot be written.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate()
    made = SigningKey(_public_key(key.public_key(), _owner()), key)
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = path.with_name(f"{path.name}.pub")
    if public.exists():
        raise _bad_key(f"{public} exists already: name another file", reason="key-exists")
    _write_new(path, secret, mode=0o600)
    try:
        _write_new(public, f"{made.public.line}\n".encode(), mode=0o644)
    except BadInputError:
        path.unlink()
        raise
    return made


def _write_new(path: Path, data: bytes, *, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    except FileExistsError:
        raise _bad_key(f"{path} exists already: name another file", reason="key-exists") from None
    except OSError as error:
        raise _bad_key(f"{path} cannot be written: {error.strerror}") from error
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123  # a descriptor has no path
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise _bad_key(f"{path} cannot be written: {error.strerror}") from error


def _read(path: str, what: str) -> tuple[str, os.stat_result]:
    try:
        with Path(path).expanduser().open("rb") as file:
            return file.read().decode(), os.fstat(file.fileno())
    except (OSError, RuntimeError, ValueError) as error:
        told = (error.strerror if isinstance(error, OSError) else None) or error
        raise _bad_key(f"{what} {path} cannot be read: {told}") from error


def _parse_private(text: str, source: str) -> SigningKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    load = load_ssh_private_key if "BEGIN OPENSSH PRIVATE KEY" in text else load_pem_private_key
    try:
        key = load(f"{text.strip()}\n".encode(), password=None)
    except TypeError as error:
        raise _bad_key(f"{source}: the key is encrypted, and nobody is there to ask: use one without") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        # What the library says of it may hold a part of the secret.
        raise _bad_key(f"{source}: it is no private key in OpenSSH's format or PKCS8") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _bad_key(f"{source}: it is no Ed25519 key; make one with `graphkiln keys new` or `ssh-keygen -t ed25519`")
    return SigningKey(_public_key(key.public_key(), ""), key)


def _parse_public(text: str, source: str) -> list[PublicKey]:
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1)]
    return [_parse_line(line, f"{source}, line {number}") for number, line in lines if line and line[0] != "#"]


def _parse_line(line: str, where: str) -> PublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    if "PRIVATE KEY" in line:
        raise _bad_key(f"{where}: this is a private key: name the file with its public half, which ends in .pub")
    try:
        key = load_ssh_public_key(line.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _bad_key(f"{where}: it is not of the form `ssh-ed25519 AAAA… comment`") from error
    if not isinstance(key, Ed25519PublicKey):
        raise _bad_key(f"{where}: only Ed25519 keys are used, which start with ssh-ed25519")
    return _public_key(key, " ".join(line.split()[2:]))


def _public_key(key: "Ed25519PublicKey", comment: str) -> PublicKey:
    blob = base64.b64decode(_openssh_line(key).split()[1])
    fingerprint = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return PublicKey(f"SHA256:{fingerprint}", comment, key)


def _openssh_line(key: "Ed25519PublicKey") -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def _owner() -> str:
    try:
        return f"{getpass.getuser()}@{platform.node()}"
    except (OSError, KeyError):  # a user without a name, as in some containers
        return platform.node()


def _bad_key(message: str, *, reason: str = "bad-key") -> BadInputError:
    return BadInputError(message, reason=reason)
