"""Of all runs that miss a kernel graph, on one host or on many, one compiles it and the others wait."""

import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from graphkiln.storage.digests import Digest
from graphkiln.storage.leases import LeaseRecord, Leases, Observation
from graphkiln.storage.records import FailureRecord
from graphkiln.storage.store import Store
from graphkiln.tasks.outcome import GraphOutcome

_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 2.0
_GROWTH = 1.5


class SingleFlight:
    """Gets one action done, by this run or by another.

    Its parts are passed in: how to look the action up, how to compile it under a lease, and how to read the failure
    of another run.
    """

    def __init__(
        self,
        store: Store,
        leases: Leases,
        stopping: threading.Event,
        slot: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Remember what all actions share.

        Args:
            store: where failures are recorded.
            leases: the leases of that store.
            stopping: set when the run ends early.
            slot: bounds how many compilers work at once; who waits for another run holds none.
        """
        self._store = store
        self._leases = leases
        self._stopping = stopping
        self._slot = slot

    def obtain(
        self,
        key: Digest,
        *,
        look_up: Callable[[], GraphOutcome | None],
        compile_under: Callable[[str], GraphOutcome],
        failed_elsewhere: Callable[[FailureRecord], GraphOutcome],
        tell_waiting: Callable[[str], None],
    ) -> GraphOutcome | None:
        """Return what becomes of an action; None if the run ends early.

        Args:
            key: the action.
            look_up: returns its outcome if its result is in the store.
            compile_under: compiles it, given the token of the lease.
            failed_elsewhere: makes an outcome of the failure of the run that was waited for.
            tell_waiting: is told once for each owner for whom this run waits.
        """
        seen: Observation | None = None
        told: set[str] = set()
        awaited: set[str] = set()
        wait = _FIRST_WAIT_SECONDS
        while not self._stopping.is_set():
            found = look_up()
            if found is not None:
                return found
            failure = self._failure_of(key, awaited)
            if failure is not None:
                return failed_elsewhere(failure)
            with self._slot():
                taken = self._leases.take(key, seen)
                if isinstance(taken, LeaseRecord):
                    with self._leases.holding(taken):
                        # The last owner may have finished between the look-up and the lease.
                        return look_up() or compile_under(taken.token)
            seen = taken
            if seen.record is not None and seen.record.token not in told:
                told.add(seen.record.token)
                # One that has failed already and died before it gave its lease back fails nobody who comes later.
                if self._failure_of(key, {seen.record.token}) is None:
                    awaited.add(seen.record.token)
                tell_waiting(seen.owner)
            # Spread out, so that many ranks do not ask at the same moments.
            self._stopping.wait(wait * random.uniform(0.5, 1.0))  # noqa: S311  # nothing secret about it
            wait = min(wait * _GROWTH, _LONGEST_WAIT_SECONDS)
        return None

    def _failure_of(self, key: Digest, awaited: set[str]) -> FailureRecord | None:
        """Return the failure of a run that was waited for, if trying again would not help."""
        if not awaited:
            return None
        failure = self._store.mend(lambda: self._store.read_failure(key))
        if failure is None or failure.lease not in awaited or failure.retryable:
            return None
        return failure
