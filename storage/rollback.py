"""What this host has seen committed, so that an older commit in its place is noticed.

A signature does not age: whoever can write to a store can put back what a trusted key has signed before. This memory
lies outside of the store, below the user's state folder (``$XDG_STATE_HOME``, else ``~/.local/state``).
"""

import logging
import os
from pathlib import Path

import msgspec

from graphkiln.storage.canonical import canonical_json
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.documents import seal, unseal
from graphkiln.storage.errors import DamagedStoreError, GraphKilnError
from graphkiln.storage.local import LocalFilesystem
from graphkiln.storage.records import KeyId, Moment, VariantName

_KIND = "memory of commits"

_log = logging.getLogger("graphkiln")


class SeenCommits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The latest commits of one variant that this host has seen.

    Attributes:
        store: URL of the store.
        network: the network's name.
        target: the target's name.
        variant: the variant.
        latest: when the latest commit was made that each key has signed.
    """

    store: str
    network: str
    target: str
    variant: Digest
    latest: dict[KeyId, Moment]


class CommitMemory:
    """Remembers the latest signed commit of each variant.

    If its folder cannot be used, it warns once and knows nothing.
    """

    def __init__(self) -> None:
        self._warned = False

    def file_of(self, store: str, variant: VariantName) -> Path:
        """Return the file that remembers a variant, which a user may remove."""
        return _folder() / _path(store, variant)

    def commits(self, store: str, variant: VariantName) -> dict[KeyId, Moment]:
        """Return the latest commit of the variant that was seen of each key."""
        try:
            seen, _ = _read(LocalFilesystem(_folder()), store, variant)
        except (OSError, GraphKilnError, RuntimeError) as error:
            self._give_up(error)
            return {}
        return seen.latest

    def remember(self, store: str, variant: VariantName, key: KeyId, committed_at: Moment) -> None:
        """Remember a commit that `key` has signed."""
        try:
            files, path = LocalFilesystem(_folder()), _path(store, variant)
            while True:
                seen, current = _read(files, store, variant)
                known = seen.latest.get(key)
                if known is not None and known >= committed_at:
                    return  # another process of this host has seen more
                latest = {**seen.latest, key: committed_at}
                data = seal(_KIND, msgspec.structs.replace(seen, latest=latest))
                if files.replace(path, data, expected=current):
                    return
        except (OSError, GraphKilnError, RuntimeError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not self._warned:
            _log.warning(
                "what has been committed cannot be remembered on this host, so that an older commit in its place would "
                "not be noticed: %s",
                error,
            )
        self._warned = True


def _folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "graphkiln"


def _path(store: str, variant: VariantName) -> str:
    return f"commits/{digest_bytes(canonical_json([store, *variant]))}.json"


def _read(files: LocalFilesystem, store: str, variant: VariantName) -> tuple[SeenCommits, bytes | None]:
    nothing = SeenCommits(store, *variant, {})
    try:
        data = files.read(_path(store, variant))
    except FileNotFoundError:
        return nothing, None
    try:
        return unseal(data, _KIND, SeenCommits), data
    except DamagedStoreError as error:
        _log.warning(
            "%s/%s is damaged, so that what it remembered is lost: %s", files.url, _path(store, variant), error
        )
        return nothing, data
