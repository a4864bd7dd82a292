"""Leases: of all runs that miss an action, one compiles it while the others wait.

A lease is an optimisation. Results are published by exclusive create, so that nothing breaks if two compile.

A lease is a small document that its owner rewrites, with a new nonce, while it works. Nobody compares clocks: an
observer takes a lease for dead once it has seen the same bytes for the lease's time to live, on the observer's own
monotonic clock. It then takes it over by compare-and-set, which one of all observers wins.
"""

import contextlib
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from graphkiln.storage import layout
from graphkiln.storage.digests import Digest
from graphkiln.storage.documents import seal, unseal
from graphkiln.storage.errors import DamagedStoreError, GraphKilnError
from graphkiln.storage.periodic import Periodic
from graphkiln.storage.store import Store

TIME_TO_LIVE_SECONDS = 30.0
# However long a lease says that it lives, nobody waits longer for a sign of life: it may be planted.
LONGEST_LIFE_SECONDS = 3600.0
_RENEWALS_PER_LIFE = 3

_log = logging.getLogger("graphkiln")


class LeaseRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lease as it is stored.

    Attributes:
        key: the action.
        token: names this holding of the lease; a failure record repeats it, so that who waits knows it is meant.
        owner: host and process, for messages.
        nonce: another one at each renewal, so that two states of a lease never have the same bytes.
        seconds: time to live.
    """

    key: Digest
    token: str
    owner: str
    nonce: str
    seconds: float


@dataclass
class Observation:
    """What an observer has seen of a lease that somebody else holds.

    Attributes:
        content: the lease's bytes.
        since: when they were first seen, on the observer's monotonic clock.
        record: what they say; None if they are damaged.
    """

    content: bytes
    since: float
    record: LeaseRecord | None

    @property
    def owner(self) -> str:
        """Who holds the lease, for messages."""
        return self.record.owner if self.record else "somebody"

    def expired(self, now: float) -> bool:
        """Tell whether the lease has not been renewed for its time to live."""
        seconds = self.record.seconds if self.record else TIME_TO_LIVE_SECONDS
        return now - self.since >= min(seconds, LONGEST_LIFE_SECONDS)


class Leases:
    """Takes and renews leases in a store. One renewing thread serves all; close it, or use it with `with`."""

    def __init__(
        self,
        store: Store,
        *,
        seconds: float = TIME_TO_LIVE_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._seconds = seconds
        self._monotonic = monotonic
        # What each lease may hold: besides what is known, what was written last if the answer to that was lost.
        self._held: dict[Digest, tuple[bytes, ...]] = {}
        self._lock = threading.Lock()
        self._renewing = Periodic(seconds / _RENEWALS_PER_LIFE, self.renew, "graphkiln-leases")

    def __enter__(self) -> "Leases":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def take(self, key: Digest, seen: Observation | None = None) -> LeaseRecord | Observation:
        """Try to take the lease of an action.

        Args:
            key: the action.
            seen: what the last call gave, if the lease was held then.

        Returns:
            The lease, which is renewed until `release`; or what is seen of another's lease.
        """
        wanted = LeaseRecord(key, secrets.token_hex(16), this_process(), secrets.token_hex(8), self._seconds)
        content = seal("lease", wanted)
        if self._store.create(_path(key), content):
            return self._hold(wanted, content)
        current = self._store.peek(_path(key))
        if current == content:  # created at the first try, whose reply was lost
            return self._hold(wanted, content)
        if current is None:  # released between the two requests: the next try will tell
            return seen or Observation(b"", self._monotonic(), None)
        if seen is None or seen.content != current:
            return Observation(current, self._monotonic(), _record_of(current))
        if seen.expired(self._monotonic()) and self._store.swap(_path(key), content, expected=current):
            _log.warning("took over the compile of %s from %s, which has not renewed its lease", key[:12], seen.owner)
            return self._hold(wanted, content)
        return seen

    def release(self, lease: LeaseRecord) -> None:
        """Give a lease back, unless somebody else has taken it over. If the medium fails, it expires."""
        with self._lock:
            contents = self._held.pop(lease.key, ())
        try:
            for content in contents:
                self._store.remove(_path(lease.key), expected=content)
        except GraphKilnError as error:
            _log.warning("the lease of %s could not be given back: %s", lease.key[:12], error)

    def holds(self, lease: LeaseRecord) -> bool:
        """Tell whether a lease was still this holder's when it was last renewed."""
        with self._lock:
            return lease.key in self._held

    @contextlib.contextmanager
    def holding(self, lease: LeaseRecord) -> Iterator[None]:
        """Release a lease at the end of a block."""
        try:
            yield
        finally:
            self.release(lease)

    def close(self) -> None:
        """Stop renewing. Leases that are still held expire."""
        self._renewing.close()

    def renew(self) -> None:
        """Rewrite every lease that is held; one that was taken over is given up."""
        with self._lock:
            for key, contents in list(self._held.items()):
                self._renew_one(key, contents)

    def _renew_one(self, key: Digest, contents: tuple[bytes, ...]) -> None:
        renewed = seal("lease", msgspec.structs.replace(_record(contents[0]), nonce=secrets.token_hex(8)))
        try:
            kept = any(self._store.swap(_path(key), renewed, expected=content) for content in contents)
        except GraphKilnError as error:
            _log.warning("the lease of %s could not be renewed: %s", key[:12], error)
            self._held[key] = (*contents, renewed)  # the next renewal tries again
            return
        if kept:
            self._held[key] = (renewed,)
        else:
            del self._held[key]

    def _hold(self, lease: LeaseRecord, content: bytes) -> LeaseRecord:
        with self._lock:
            self._held[lease.key] = (content,)
            self._renewing.start()
        return lease


def _path(key: Digest) -> str:
    return layout.by_digest(layout.LEASES, key)


def this_process() -> str:
    """Return who this is, for messages."""
    return f"process {os.getpid()} on {platform.node()}"


def _record(content: bytes) -> LeaseRecord:
    return unseal(content, "lease", LeaseRecord)


def _record_of(content: bytes) -> LeaseRecord | None:
    try:
        return _record(content)
    except DamagedStoreError:
        return None  # it cannot be renewed either, and expires
