"""Signed documents: whose word counts in a store that others can write to.

A signature covers the kind, the schema and every field of a document but itself, as they are stored. It counts if its
key is a trusted one. Blobs and manifests need none, as a signed document names their digests.
"""

import os
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TypeVar

import msgspec

from graphkiln.storage.canonical import Json, canonical_json, parse_json
from graphkiln.storage.documents import SCHEMA
from graphkiln.storage.errors import BadInputError, UntrustedError
from graphkiln.storage.records import RefRecord, Signature, Signed, VariantName
from graphkiln.storage.rollback import CommitMemory
from graphkiln.storage.signing_keys import (
    SIGNING_KEY,
    TRUSTED_KEYS,
    PublicKey,
    SigningKey,
    TrustedKeys,
    read_signing_key,
    read_trusted_keys,
)

# No signature of something else, such as of an ssh session, is one of a document.
_DOMAIN = b"graphkiln signed document 1\0"

_TICK = timedelta(microseconds=1)

AnySigned = TypeVar("AnySigned", bound=Signed)


class Trust:
    """Which keys' signatures a user of a store accepts, and with which key the user signs.

    Attributes:
        signer: the key to sign with, if there is one. It is trusted as well.
    """

    def __init__(
        self,
        trusted: Iterable[PublicKey] = (),
        signer: SigningKey | None = None,
        memory: CommitMemory | None = None,
    ) -> None:
        """Remember the keys.

        Args:
            trusted: whose signatures count; if there are none, and no `signer`, unsigned documents count as well.
            signer: the key to sign with.
            memory: what this host has seen committed; nothing that has been put back is noticed without.
        """
        own = [signer.public] if signer else []
        # A line of the file of trusted keys says more of the own key than the key itself.
        self._trusted = {key.id: key for key in (*own, *trusted)}
        self.signer = signer
        self._memory = memory

    @property
    def required(self) -> bool:
        """Whether a document counts only with a trusted signature."""
        return bool(self._trusted)

    @property
    def can_sign(self) -> bool:
        """Whether what this user makes counts, for this user and for all who trust the key."""
        return not self.required or self.signer is not None

    def name_of(self, signature: Signature | None) -> str | None:
        """Return the comment of the trusted key that has signed, else its fingerprint; None if none has."""
        key = self._trusted.get(signature.key) if signature else None
        return None if key is None else key.comment or key.id

    def require_signer(self, why: str) -> None:
        """Make sure that what this user makes will be trusted.

        Args:
            why: what has to be made, for the message.

        Raises:
            BadInputError: signatures are required, and there is no key to sign with.
        """
        if not self.can_sign:
            raise BadInputError(
                f"{why}, and this host requires signatures but has no key to sign with: set {SIGNING_KEY}, or compile "
                "where it is set",
                reason="no-signing-key",
            )

    def sign(self, kind: str, record: AnySigned) -> AnySigned:
        """Return a document with this user's signature; without any if signatures are not required.

        Only what this user has made, or has checked to the last byte, may be signed.

        Args:
            kind: what it is, such as ``"ref"``.
            record: the document.

        Raises:
            BadInputError: signatures are required, and there is no key to sign with.
        """
        self.require_signer(f"a {kind} has to be signed")
        if self.signer is None:
            return msgspec.structs.replace(record, signature=None)
        value = self.signer.sign(_signed_bytes(kind, SCHEMA, msgspec.to_builtins(record)))
        return msgspec.structs.replace(record, signature=Signature(self.signer.public.id, value.hex()))

    def sign_ref(self, store: str, ref: RefRecord, after: RefRecord | None) -> RefRecord:
        """Return a ref with this user's signature; as it is if signatures are not required.

        It is made later than all trusted commits of its variant that are known here, so that no host whose clock is
        ahead takes it for an older one that was put back.

        Args:
            store: URL of the store.
            ref: the ref, with the time of this host.
            after: the trusted commit that it replaces.

        Raises:
            BadInputError: signatures are required, and there is no key to sign with.
        """
        if self.required:
            earlier = [self.latest_commit(store, ref.variant_name), after.committed_at if after else None]
            moments = [ref.committed_at, *(moment + _TICK for moment in earlier if moment is not None)]
            ref = msgspec.structs.replace(ref, committed_at=max(moments))
        return self.sign("ref", ref)

    def check(self, kind: str, stored: bytes, record: Signed) -> None:
        """Return if a document counts.

        Args:
            kind: what it is, such as ``"ref"``.
            stored: its bytes, of which the digest has matched.
            record: what they say.

        Raises:
            UntrustedError: signatures are required, and it has none that is trusted.
        """
        if not self.required:
            return
        signature = record.signature
        if signature is None:
            raise _untrusted("nobody has signed it; compile again with a trusted key", "unsigned", stored)
        key = self._trusted.get(signature.key)
        if key is None:
            raise _untrusted(
                f"{signature.key} has signed it, which is none of the trusted keys; compile again with one of them, or "
                f"add it to {TRUSTED_KEYS}",
                "unknown-key",
                stored,
            )
        # The stored fields, not those of this version: one that comes later with a default must not break signatures.
        envelope = parse_json(stored)
        if not isinstance(envelope, dict) or not key.verifies(
            bytes.fromhex(signature.value), _signed_bytes(kind, envelope["schema"], envelope["body"])
        ):
            raise _untrusted(
                f"it is not what {key} has signed: somebody has altered it; compile again", "altered", stored
            )

    def latest_commit(self, store: str, variant: VariantName) -> datetime | None:
        """Return when the latest commit of a variant was made that this host has seen, if it remembers one.

        Args:
            store: URL of the store.
            variant: network, target and variant.
        """
        if not self.required or self._memory is None:
            return None
        # What a key has signed that is not trusted any more says nothing.
        seen = [at for key, at in self._memory.commits(store, variant).items() if key in self._trusted]
        return max(seen, default=None)

    def check_not_older(self, store: str, ref: RefRecord, latest: datetime | None) -> None:
        """Return unless a ref, which has been checked, is older than a commit that was seen in its place.

        Args:
            store: URL of the store.
            ref: the ref.
            latest: what `latest_commit` gave *before* the ref was read: somebody may commit at any moment.

        Raises:
            UntrustedError: it is older.
        """
        if latest is not None and self._memory is not None and ref.committed_at < latest:
            raise _untrusted(
                f"it is of {ref.committed_at}, and this host has seen a commit of {latest} in its place, so that "
                "somebody has put an older one back; compile again, or, if that was on purpose, remove "
                f"{self._memory.file_of(store, ref.variant_name)}",
                "rolled-back",
            )
        if latest is None or latest < ref.committed_at:
            self.remember(store, ref)

    def remember(self, store: str, ref: RefRecord) -> None:
        """Remember a ref, which has been checked, as a commit that this host has seen."""
        if self._memory is not None and ref.signature is not None and ref.signature.key in self._trusted:
            self._memory.remember(store, ref.variant_name, ref.signature.key, ref.committed_at)


# Where no keys are configured, a document counts whoever wrote it.
EVERYBODY = Trust()


def configured_trust(trusted_keys: TrustedKeys | None = None) -> Trust:
    """Return what the user has configured, by ``$GRAPHKILN_SIGNING_KEY`` and ``$GRAPHKILN_TRUSTED_KEYS``.

    Args:
        trusted_keys: what to take instead of ``$GRAPHKILN_TRUSTED_KEYS``.

    Raises:
        BadInputError: a key or a file of keys cannot be read, or is not one.
    """
    signing = os.environ.get(SIGNING_KEY)
    trusting = trusted_keys if trusted_keys is not None else os.environ.get(TRUSTED_KEYS) or None
    if not signing and trusting is None:
        return EVERYBODY
    return Trust(
        read_trusted_keys(trusting) if trusting is not None else (),
        read_signing_key(signing) if signing else None,
        CommitMemory(),
    )


def _signed_bytes(kind: str, schema: Json, body: dict[str, Json] | Json) -> bytes:
    if not isinstance(body, dict):
        raise TypeError("the body of a document is an object")
    unsigned = {name: value for name, value in body.items() if name != "signature"}
    return _DOMAIN + canonical_json({"body": unsigned, "kind": kind, "schema": schema})


def _untrusted(message: str, reason: str, stored: bytes = b"") -> UntrustedError:
    return UntrustedError(message, reason=reason, stored=stored)
