"""Collection: what no variant and no pin needs any more is taken away.

Everything is marked from refs, plans and pins; the rest is swept once it is older than the grace period. A run pins
what it uses before it looks anything up (`graphkiln.storage.pins`); the collector says that it deletes, reads all
roots again, and only then deletes for a bounded time. What names something goes before what it names, so that a
collector that is killed leaves nothing that names what is gone, and can be run again.
"""

import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from graphkiln.storage import layout
from graphkiln.storage.digests import digest_bytes
from graphkiln.storage.documents import seal
from graphkiln.storage.errors import StoreUnavailableError
from graphkiln.storage.filesystem import Entry
from graphkiln.storage.leases import TIME_TO_LIVE_SECONDS, LeaseRecord, Leases, Observation, this_process
from graphkiln.storage.local import TEMPORARY_PREFIX
from graphkiln.storage.pins import LONGEST_SWEEP_SECONDS, SWEEP_SECONDS
from graphkiln.storage.reach import Reach, Roots
from graphkiln.storage.records import SweepRecord, VariantName
from graphkiln.storage.retention import Policy, VariantFacts, dropped_variants
from graphkiln.storage.store import Store

# What is kept longer than the grace period may say: damaged objects for a look, and what a run at work may have.
QUARANTINE_LIFE = timedelta(days=7)
LEFTOVER_LIFE = timedelta(days=1)

# In this order: what names something goes before what it names.
_SWEPT = (
    *(layout.REFS, layout.PLANS, layout.MANIFESTS, layout.FAILURES, layout.ACTIONS, layout.BLOBS),
    *(layout.LEASES, layout.PINS, layout.QUARANTINE),
)
_COLLECTOR = digest_bytes(b"collector")
_CHUNK = 200
# Of the time that runs wait for a batch, the part in which a deletion may start: the last may have to be repeated for a
# minute until a server answers.
_DELETING_PART = 1 / 8
_WAIT_SECONDS = 1.0

_log = logging.getLogger("graphkiln")


class Freed(msgspec.Struct, frozen=True):
    """What a collection took away of one network.

    Attributes:
        network: the network; empty for what no manifest or plan names.
        objects: number of objects.
        bytes: their stored size.
    """

    network: str
    objects: int
    bytes: int


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection did, or would do.

    Attributes:
        dry_run: whether nothing was taken away.
        dropped: network, target and variant that the policy dropped.
        freed: what was taken away, by network.
        kept_objects: number of objects that are left.
        kept_bytes: their stored size.
    """

    dry_run: bool
    dropped: tuple[VariantName, ...]
    freed: tuple[Freed, ...]
    kept_objects: int
    kept_bytes: int

    @property
    def freed_bytes(self) -> int:
        """Stored size of all that was taken away."""
        return sum(item.bytes for item in self.freed)


class Collector:
    """Collects one store."""

    def __init__(
        self,
        store: Store,
        policy: Policy,
        *,
        sleep: Callable[[float], object] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        """Prepare a collection.

        Args:
            store: the store.
            policy: what to take away.
            sleep: waits for another collector, in seconds.
            monotonic: the clock that bounds how long is deleted after a look at the roots, in seconds.
            tell: is told what happens.
        """
        # What one user does not trust, another may.
        self._store, self._policy = store.for_everybody(), policy
        self._sleep, self._monotonic = sleep, monotonic
        self._tell = tell or _log.debug
        self._reach = Reach(self._store)
        self._deleted: set[str] = set()
        self._seconds = SWEEP_SECONDS
        self._announced = b""
        self._make_sure_to_be_alone: Callable[[], object] = lambda: None

    def plan(self) -> Collection:
        """Return what `run` would do now. Nothing is written.

        Raises:
            DamagedStoreError: a pin cannot be read.
            StoreUnavailableError: the medium fails.
        """
        listing, roots, dropped = self._look()
        doomed = self._doomed(listing, roots, dropped)
        return self._summary(listing, dropped, self._owners(listing, roots, dropped), doomed, dry_run=True)

    def run(self) -> Collection:
        """Collect. Killed at any moment, it can be run again.

        Raises:
            DamagedStoreError: a pin cannot be read, so that nothing was taken away.
            StoreUnavailableError: the medium fails, or another collection is at work.
        """
        with self._alone():
            listing, roots, dropped = self._look()
            owners = self._owners(listing, roots, dropped)
            try:
                self._sweep(listing, roots, dropped)
            finally:
                self._end_sweep()
            gone = [name for name in dropped if self._deleted.intersection(_own_documents(name))]
            return self._summary(listing, gone, owners, self._deleted, dry_run=False)

    # ------------------------------------------------------------------ what to take away

    def _look(self) -> tuple[dict[str, Entry], Roots, list[VariantName]]:
        # Listed before the roots are read: what is written meanwhile is not in it.
        own = (layout.SWEEP, layout.by_digest(layout.LEASES, _COLLECTOR))
        listing = {entry.path: entry for entry in self._store.entries("") if entry.path not in own}
        roots = self._roots()
        self._tell(f"{len(listing)} objects, {len(roots.variants)} variants, {len(roots.pins)} pins")
        facts = [
            VariantFacts(
                name=name,
                used_at=max([variant.used_at, *_written(name, listing)]),
                pinned=name in roots.held,
                sizes={path: listing[path].size for path in variant.needs - roots.pinned if path in listing},
            )
            for name, variant in roots.variants.items()
        ]
        of_variants = {path for item in facts for path in item.sizes}
        rest = listing.keys() - of_variants - self._doomed(listing, roots, [])
        kept_anyway = sum(listing[path].size for path in rest)
        return listing, roots, dropped_variants(facts, self._policy, self._store.now(), kept_anyway)

    def _roots(self) -> Roots:
        return self._reach.roots(self._store.now() - self._policy.grace)

    def _doomed(self, listing: Mapping[str, Entry], roots: Roots, dropped: Iterable[VariantName]) -> set[str]:
        needed = roots.needed(without=dropped)
        now = self._store.now().timestamp()
        found = {path for name in dropped for path in _own_documents(name) if path in listing}
        for path, entry in listing.items():
            life = self._life(path)
            if life is not None and path not in needed and now - _written_at(entry, listing) > life.total_seconds():
                found.add(path)
        return found

    def _life(self, path: str) -> timedelta | None:
        """Return how old an object must be to be taken away if nobody needs it; None if it is none of ours."""
        folder = path.partition("/")[0]
        if folder == layout.LEASES or _is_temporary(path):
            return max(LEFTOVER_LIFE, self._policy.grace)
        if folder == layout.QUARANTINE:
            return max(QUARANTINE_LIFE, self._policy.grace)
        # Refs and plans are only ever dropped by a policy.
        return self._policy.grace if folder in _SWEPT and folder not in (layout.REFS, layout.PLANS) else None

    # ------------------------------------------------------------------ taking it away

    def _sweep(self, listing: Mapping[str, Entry], seen: Roots, dropped: list[VariantName]) -> None:
        """Delete, and look at the roots again every so often."""
        while True:
            started = self._begin_batch()
            roots = self._roots()
            took = self._monotonic() - started
            if took > LONGEST_SWEEP_SECONDS * _DELETING_PART / 4:
                message = f"reading what {self._store.url} needs took {took:.0f} s, too long to delete beside runs"
                raise StoreUnavailableError(message, reason="too-slow", retryable=True)
            if took > self._seconds * _DELETING_PART / 2:
                # Nothing could be deleted in the time that was announced: announce more.
                self._seconds = 4 * took / _DELETING_PART
                continue
            # A variant that is pinned or used now, or gone already, is not given up (any more).
            dropped = [
                name for name in dropped if name not in roots.held and roots.variants.get(name) == seen.variants[name]
            ]
            doomed = self._doomed(listing, roots, dropped) - self._deleted
            for chunk in _chunks(_in_order(doomed)):
                if self._monotonic() - started > self._seconds * _DELETING_PART:
                    break
                self._delete(chunk, listing)
                self._deleted.update(chunk)
                self._tell(f"{len(self._deleted)} of {len(self._deleted | doomed)} objects deleted")
            if doomed <= self._deleted:
                return

    def _delete(self, chunk: list[str], listing: Mapping[str, Entry]) -> None:
        """Delete what is never written again under its name; pins and leases, only if nobody has written them since."""
        folder = chunk[0].partition("/")[0]
        if folder not in (layout.PINS, layout.LEASES):
            self._store.delete_many(chunk)
            return
        contents = {path: self._store.peek(path) for path in chunk}
        # Listed after they were read: what is still as it was listed first was read as it was judged.
        now = {entry.path: entry for entry in self._store.entries(folder)}
        for path, content in contents.items():
            if content is not None and now.get(path) == listing[path]:
                self._store.remove(path, expected=content)

    def _begin_batch(self) -> float:
        self._make_sure_to_be_alone()
        started = self._monotonic()
        record = SweepRecord(owner=this_process(), nonce=secrets.token_hex(8), seconds=self._seconds)
        self._announced = seal("sweep", record)
        self._store.put(layout.SWEEP, self._announced)
        return started

    def _end_sweep(self) -> None:
        self._store.remove(layout.SWEEP, expected=self._announced)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the collector's lease: two collectors at once would not see each other's batches end."""
        with Leases(self._store, monotonic=self._monotonic) as leases:
            deadline = self._monotonic() + 2 * TIME_TO_LIVE_SECONDS
            taken = leases.take(_COLLECTOR)
            while isinstance(taken, Observation):
                if self._monotonic() > deadline:
                    message = f"another collection of {self._store.url} is at work, by {taken.owner}: run again later"
                    raise StoreUnavailableError(message, reason="collecting", retryable=True)
                self._tell(f"waiting for another collection, by {taken.owner}")
                self._sleep(_WAIT_SECONDS)
                taken = leases.take(_COLLECTOR, taken)
            self._make_sure_to_be_alone = lambda: _require(leases, taken, self._store.url)
            with leases.holding(taken):
                yield

    # ------------------------------------------------------------------ what to say

    def _owners(self, listing: Mapping[str, Entry], roots: Roots, dropped: Iterable[VariantName]) -> dict[str, str]:
        """Return which network an object belonged to, of those that may be taken away."""
        owners: dict[str, str] = {}
        for name in dropped:
            owners.update(dict.fromkeys(roots.variants[name].needs, name[0]))
        needed = roots.needed()
        for path in listing:
            if path.startswith(f"{layout.MANIFESTS}/") and path not in needed and not _is_temporary(path):
                digest = layout.digest_of(path)
                manifest = None if digest is None else self._reach.manifest(digest)
                if digest is not None and manifest is not None:
                    owners.update(dict.fromkeys(self._reach.of_manifest(digest), manifest.plan.network.name))
        return owners

    def _summary(
        self,
        listing: Mapping[str, Entry],
        dropped: Iterable[VariantName],
        owners: Mapping[str, str],
        taken: Iterable[str],
        *,
        dry_run: bool,
    ) -> Collection:
        taken = set(taken)
        freed: dict[str, Freed] = {}
        for path in taken:
            network = owners.get(path, "")
            before = freed.get(network, Freed(network, 0, 0))
            freed[network] = Freed(network, before.objects + 1, before.bytes + listing[path].size)
        kept = [entry.size for path, entry in listing.items() if path not in taken]
        return Collection(
            dry_run=dry_run,
            dropped=tuple(dropped),
            freed=tuple(freed[network] for network in sorted(freed)),
            kept_objects=len(kept),
            kept_bytes=sum(kept),
        )


def _written(variant: VariantName, listing: Mapping[str, Entry]) -> list[datetime]:
    """Return when a variant's documents came to this store, which for an imported one is long after its commit."""
    found = [listing[path] for path in _own_documents(variant) if path in listing]
    return [datetime.fromtimestamp(entry.modified, UTC) for entry in found]


def _require(leases: Leases, lease: LeaseRecord, url: str) -> None:
    """Stop if this collector has slept for so long that another one has taken its place."""
    leases.renew()
    if not leases.holds(lease):
        message = f"another collection of {url} has taken the place of this one, which did not renew its lease in time"
        raise StoreUnavailableError(message, reason="collecting", retryable=True)


def _own_documents(variant: VariantName) -> list[str]:
    return [layout.by_variant(folder, *variant) for folder in (layout.REFS, layout.PLANS)]


def _is_temporary(path: str) -> bool:
    return path.rpartition("/")[2].startswith(TEMPORARY_PREFIX)


def _written_at(entry: Entry, listing: Mapping[str, Entry]) -> float:
    """Return when an object was written; a quarantined one keeps its old time, and its note tells the new one."""
    note = listing.get(f"{entry.path}.note")
    return entry.modified if note is None else max(entry.modified, note.modified)


def _in_order(paths: Iterable[str]) -> list[str]:
    rank = {folder: number for number, folder in enumerate(_SWEPT)}
    return sorted(paths, key=lambda path: (rank.get(path.partition("/")[0], len(rank)), path))


def _chunks(paths: list[str]) -> Iterator[list[str]]:
    """Yield parts of what is sorted, none with objects of two folders: what names must be gone before what is named."""
    for _, group in itertools.groupby(paths, key=lambda path: path.partition("/")[0]):
        members = list(group)
        for start in range(0, len(members), _CHUNK):
            yield members[start : start + _CHUNK]
