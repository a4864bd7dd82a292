"""Keys for tests, always the same ones: a key a name."""

import functools
import hashlib
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from graphkiln.storage.rollback import CommitMemory
from graphkiln.storage.signing import Trust
from graphkiln.storage.signing_keys import PublicKey, SigningKey, read_signing_key, read_trusted_keys


@functools.cache
def private_key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


@functools.cache
def pem_of(name: str, form: PrivateFormat = PrivateFormat.PKCS8) -> str:
    """What the file of a private key holds."""
    return private_key(name).private_bytes(Encoding.PEM, form, NoEncryption()).decode()


@functools.cache
def signer(name: str) -> SigningKey:
    return read_signing_key(pem_of(name))


@functools.cache
def line_of(name: str) -> str:
    """A line of a file of trusted keys, with the name as its comment."""
    return f"{signer(name).public.line} {name}"


@functools.cache
def public(name: str) -> PublicKey:
    return read_trusted_keys(f"{line_of(name)}\n")[0]


def trusting(*names: str, signing: str | None = None, memory: CommitMemory | None = None) -> Trust:
    """Trust in these keys."""
    return Trust([public(name) for name in names], signer(signing) if signing else None, memory)


def write_key(folder: Path, name: str) -> Path:
    """Write a private key to a file, and its public half beside it."""
    path = folder / name
    path.touch(mode=0o600)
    path.write_text(pem_of(name))
    path.with_name(f"{name}.pub").write_text(f"{line_of(name)}\n")
    return path
