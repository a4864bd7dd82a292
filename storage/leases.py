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

from graphkiln.storage.digests import Digest
from graphkiln.storage.documents import seal, unseal
from graphkiln.storage.errors import DamagedStoreError, GraphKilnError
from graphkiln.storage.store import Store

TIME_TO_LIVE_SECONDS = 30.0
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
        return now - self.since >= (self.record.seconds if self.record else TIME_TO_LIVE_SECONDS)


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
        self._held: dict[Digest, bytes] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._renewer: threading.Thread | None = None

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
        wanted = LeaseRecord(key, secrets.token_hex(16), _owner(), secrets.token_hex(8), self._seconds)
        content = seal("lease", wanted)
        if self._store.create_lease(key, content):
            return self._hold(wanted, content)
        current = self._store.read_lease(key)
        if current == content:  # created at the first try, whose reply was lost
            return self._hold(wanted, content)
        if current is None:  # released between the two requests: the next try will tell
            return seen or Observation(b"", self._monotonic(), None)
        if seen is None or seen.content != current:
            return Observation(current, self._monotonic(), _record_of(current))
        if seen.expired(self._monotonic()) and self._store.replace_lease(key, content, expected=current):
            _log.warning("took over the compile of %s from %s, which has not renewed its lease", key[:12], seen.owner)
            return self._hold(wanted, content)
        return seen

    def release(self, lease: LeaseRecord) -> None:
        """Give a lease back, unless somebody else has taken it over."""
        with self._lock:
            content = self._held.pop(lease.key, None)
        if content is not None:
            self._store.remove_lease(lease.key, expected=content)

    @contextlib.contextmanager
    def holding(self, lease: LeaseRecord) -> Iterator[None]:
        """Release a lease at the end of a block."""
        try:
            yield
        finally:
            self.release(lease)

    def close(self) -> None:
        """Stop renewing. Leases that are still held expire."""
        self._closing.set()
        if self._renewer is not None:
            self._renewer.join()

    def renew(self) -> None:
        """Rewrite every lease that is held; one that was taken over is given up."""
        with self._lock:
            for key, content in list(self._held.items()):
                self._renew_one(key, content)

    def _renew_one(self, key: Digest, content: bytes) -> None:
        renewed = seal("lease", msgspec.structs.replace(_record(content), nonce=secrets.token_hex(8)))
        try:
            kept = self._store.replace_lease(key, renewed, expected=content)
        except GraphKilnError as error:
            _log.warning("the lease of %s could not be renewed: %s", key[:12], error)
            return  # the next renewal tries again
        if kept:
            self._held[key] = renewed
        else:
            del self._held[key]

    def _hold(self, lease: LeaseRecord, content: bytes) -> LeaseRecord:
        with self._lock:
            self._held[lease.key] = content
            if self._renewer is None:
                self._renewer = threading.Thread(target=self._keep_renewing, name="graphkiln-leases", daemon=True)
                self._renewer.start()
        return lease

    def _keep_renewing(self) -> None:
        while not self._closing.wait(self._seconds / _RENEWALS_PER_LIFE):
            self.renew()


def _owner() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def _record(content: bytes) -> LeaseRecord:
    return unseal(content, "lease", LeaseRecord)


def _record_of(content: bytes) -> LeaseRecord | None:
    try:
        return _record(content)
    except DamagedStoreError:
        return None  # it cannot be renewed either, and expires
