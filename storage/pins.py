"""Pins: what collection must keep, besides what refs and plans name.

A run pins what it is about to use before it looks anything up, and its pin expires unless it is renewed, so that a
killed run holds nothing for ever. Whoever has written a pin then waits until no collector is deleting that may have
decided before it saw the pin (`wait_for_sweep`). The two writes and two reads make it safe on any store that shows
what was written: either the collector sees the pin, or the run sees the collector.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta

import msgspec

from graphkiln.storage import layout
from graphkiln.storage.digests import Digest, is_digest
from graphkiln.storage.documents import seal, unseal
from graphkiln.storage.errors import BadInputError, DamagedStoreError, GraphKilnError
from graphkiln.storage.leases import this_process
from graphkiln.storage.periodic import Periodic
from graphkiln.storage.records import PinRecord, SweepRecord, VariantName
from graphkiln.storage.store import Store

RUN_PIN_LIFE = timedelta(hours=1)
# How long what was removed is kept for a trainer that may still be loading it.
REMOVED_PIN_LIFE = timedelta(days=1)
_RENEWALS_PER_LIFE = 3

# How far the clocks of two hosts may be apart.
CLOCK_SKEW = timedelta(minutes=2)

# How long a run waits for a batch of a collector of which it hears nothing more, unless the batch says otherwise.
SWEEP_SECONDS = 120.0
# However long a sweep says that it takes, nobody waits longer: the record may be planted.
LONGEST_SWEEP_SECONDS = 3600.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.05, 1.0
_TOLD_AFTER_SECONDS = 5.0

_log = logging.getLogger("graphkiln")


class RunPin:
    """What one run uses, pinned from before its first look-up until it is closed. Safe to share between threads."""

    def __init__(
        self,
        store: Store,
        variant: VariantName,
        *,
        sleep: Callable[[float], object] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare a pin; nothing is written before `add`.

        Args:
            store: the store.
            variant: network, target and variant that the run is about.
            sleep: waits for a collector, in seconds.
            monotonic: the clock by which a collector that was killed is told, in seconds.
        """
        self._store, self._variant = store, variant
        self._sleep, self._monotonic = sleep, monotonic
        self._path = f"{layout.RUN_PINS}/{secrets.token_hex(16)}"
        self._record: PinRecord | None = None
        self._content = b""
        self._lock = threading.Lock()
        self._closed = False
        self._renewing = Periodic(RUN_PIN_LIFE.total_seconds() / _RENEWALS_PER_LIFE, self.renew, "graphkiln-pins")

    def add(
        self,
        *,
        actions: Iterable[Digest] = (),
        blobs: Iterable[Digest] = (),
        manifests: Iterable[Digest] = (),
    ) -> None:
        """Pin more, and return once no collector can take it away any more.

        Raises:
            StoreUnavailableError: the medium fails.
        """
        with self._lock:
            before = self._record or self._empty()
            self._write(
                msgspec.structs.replace(
                    before,
                    actions=tuple(sorted({*before.actions, *actions})),
                    blobs=tuple(sorted({*before.blobs, *blobs})),
                    manifests=tuple(sorted({*before.manifests, *manifests})),
                )
            )
        self._renewing.start()
        wait_for_sweep(self._store, sleep=self._sleep, monotonic=self._monotonic)

    def renew(self) -> None:
        """Put the expiry off; a medium that fails is warned of, and the next renewal tries again."""
        try:
            with self._lock:
                if self._record is not None and not self._closed:
                    self._write(self._record)
        except GraphKilnError as error:
            _log.warning("a pin could not be renewed: %s", error)

    def leave(self, manifest: Digest) -> None:
        """Let the pin hold this manifest until it expires, though the run ends: its trainer is about to load it."""
        with self._lock:
            if self._record is None:
                return
            self._closed = True
            try:
                self._write(msgspec.structs.replace(self._record, manifests=(manifest,), actions=(), blobs=()))
            except GraphKilnError as error:
                _log.warning("a pin could not be renewed, and holds until it expires: %s", error)

    def close(self) -> None:
        """Take the pin away, unless it was left."""
        self._renewing.close()
        with self._lock:
            if self._record is None or self._closed:
                return
            self._closed = True
            try:
                self._store.remove(self._path, expected=self._content)
            except GraphKilnError as error:
                _log.warning("a pin could not be taken away, and expires: %s", error)

    def _empty(self) -> PinRecord:
        now = self._store.now()
        return PinRecord(*self._variant, reason=f"a run of {this_process()}", created_at=now, expires_at=None)

    def _write(self, record: PinRecord) -> None:
        record = msgspec.structs.replace(record, expires_at=self._store.now() + RUN_PIN_LIFE)
        content = seal("pin", record)
        if self._record is None:
            written = self._store.create(self._path, content)
        else:
            written = self._store.swap(self._path, content, expected=self._content)
            # A pin that has expired in spite of all may have been collected.
            written = written or self._store.create(self._path, content)
        if not written and self._store.peek(self._path) != content:  # else the answer was lost, and it is ours
            raise DamagedStoreError(
                f"{self._store.url}/{self._path} (the pin of this run) is damaged: somebody else has written it",
                reason="misplaced",
                path=self._path,
            )
        self._record, self._content = record, content


def wait_for_sweep(
    store: Store, *, sleep: Callable[[float], object] = time.sleep, monotonic: Callable[[], float] = time.monotonic
) -> None:
    """Return once no collector is deleting that may not have seen what was pinned before this call.

    A collector writes another record before each batch, and reads the pins after that. One that was killed is
    recognised by a record that has not changed for as long as it says, on this process's own clock.
    """
    first = store.peek(layout.SWEEP)
    if first is None:
        return
    begun = monotonic()
    deadline = begun + _sweep_seconds(first)
    wait, told = _FIRST_WAIT_SECONDS, False
    while monotonic() < deadline:
        if not told and monotonic() > begun + _TOLD_AFTER_SECONDS:
            told = True
            _log.warning("waiting for a collection of %s that is deleting, at most %.0f s", store.url, deadline - begun)
        sleep(wait)
        if store.peek(layout.SWEEP) != first:
            return
        wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
    store.remove(layout.SWEEP, expected=first)


def pins_of(store: Store) -> Iterator[tuple[str, PinRecord]]:
    """Iterate over all pins that hold now, with their paths.

    Raises:
        DamagedStoreError: one that may still hold cannot be read, so that nobody knows what it was to keep.
    """
    now = store.now()
    for entry in list(store.entries(layout.PINS)):
        if not is_pin_path(entry.path):
            continue
        try:
            pin = store.read_pin(entry.path)
        except DamagedStoreError as error:
            of_a_run = entry.path.startswith(f"{layout.RUN_PINS}/")
            if of_a_run and entry.modified + (RUN_PIN_LIFE + CLOCK_SKEW).total_seconds() < now.timestamp():
                continue  # whatever it said, it has expired
            remedy = f"it expires within {RUN_PIN_LIFE}" if of_a_run else "pin that variant again, or delete the file"
            message = f"{error}: nobody knows what it keeps; {remedy}"
            raise DamagedStoreError(message, reason=error.reason, path=error.path) from error
        if pin is not None and (pin.expires_at is None or pin.expires_at + CLOCK_SKEW > now):
            yield entry.path, pin


def pin_variant(store: Store, variant: VariantName, *, reason: str, life: timedelta | None) -> PinRecord:
    """Keep a variant, and the manifest that its ref names now, until the pin expires or is taken away.

    Raises:
        BadInputError: the variant is not committed.
    """
    ref = store.read_ref(*variant)
    if ref is None:
        raise _not_committed(variant)
    record = _pin(store, _kept_path(variant), variant, ref.manifest, reason, life)
    if store.read_ref(*variant) is None:  # dropped before the collector could see the pin
        unpin_variant(store, variant)
        raise _not_committed(variant)
    store.read_manifest(ref.manifest)
    return record


def unpin_variant(store: Store, variant: VariantName) -> bool:
    """Take away what `pin_variant` wrote; tell whether there was anything."""
    return _remove(store, _kept_path(variant))


def remove_variant(store: Store, variant: VariantName) -> bool:
    """Remove the ref and the plan of a variant. What it needs is collected later, and not within a day.

    Returns:
        Whether there was anything to remove.

    Raises:
        BadInputError: it is pinned.
    """
    pin = store.read_pin(_kept_path(variant))
    if pin is not None and (pin.expires_at is None or pin.expires_at > store.now()):
        network, target, digest = variant
        message = f"{network} for {target} (variant {digest[:12]}) is pinned ({pin.reason}): unpin it first"
        raise BadInputError(message, reason="pinned")
    ref = store.mend(lambda: store.for_everybody().read_ref(*variant))
    if ref is not None:
        pin_manifest(store, variant, ref.manifest, reason="removed a short time ago", life=REMOVED_PIN_LIFE)
    removed = [_remove(store, layout.by_variant(folder, *variant)) for folder in (layout.REFS, layout.PLANS)]
    return any(removed)


def pin_manifest(store: Store, variant: VariantName, manifest: Digest, *, reason: str, life: timedelta) -> None:
    """Keep one manifest and what it names for some time, whatever becomes of its variant."""
    _pin(store, f"{layout.MANIFEST_PINS}/{secrets.token_hex(16)}", variant, manifest, reason, life)


def _not_committed(variant: VariantName) -> BadInputError:
    network, target, digest = variant
    message = f"{network} for {target} (variant {digest[:12]}) is not committed: there is nothing to pin"
    return BadInputError(message, reason="not-committed")


def _remove(store: Store, path: str) -> bool:
    """Delete an object, unless somebody changes it meanwhile; tell whether it was there."""
    content = store.peek(path)
    return content is not None and store.remove(path, expected=content)


def _pin(
    store: Store, path: str, variant: VariantName, manifest: Digest, reason: str, life: timedelta | None
) -> PinRecord:
    now = store.now()
    expires_at: datetime | None = None if life is None else now + life
    record = PinRecord(*variant, reason=reason, created_at=now, expires_at=expires_at, manifests=(manifest,))
    store.write_pin(path, record)
    wait_for_sweep(store)
    return record


def _kept_path(variant: VariantName) -> str:
    return layout.by_variant(layout.KEPT_PINS, *variant)


def _sweep_seconds(content: bytes) -> float:
    try:
        return min(unseal(content, "sweep", SweepRecord).seconds, LONGEST_SWEEP_SECONDS)
    except DamagedStoreError:
        return SWEEP_SECONDS


def is_pin_path(path: str) -> bool:
    """Tell whether a path is one at which pins are written."""
    folder, _, rest = path.partition("/")
    kind, _, name = rest.partition("/")
    if folder != layout.PINS:
        return False
    if f"{folder}/{kind}" == layout.KEPT_PINS:
        parts = name.split("/")
        return len(parts) == 3 and layout.is_name(parts[0]) and layout.is_name(parts[1]) and is_digest(parts[2])
    return f"{folder}/{kind}" in (layout.RUN_PINS, layout.MANIFEST_PINS) and layout.is_name(name)
