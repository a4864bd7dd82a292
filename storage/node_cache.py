"""A cache on this host of what has been read from a remote store, shared by all processes of a user.

It holds stored bytes under their digest, and every copy is checked against it whenever it is read: what is damaged is
dropped and fetched again, so that the cache can only ever cost time. Of all processes that miss a digest at once, one
fetches it and the others wait for the copy. Nothing that happens to the cache fails a run: one that is full, damaged,
deleted or on a full disk is done without, after a warning.

The lock of a digest is held while it is fetched, with `flock`, which the system drops when its owner dies. Nobody who
holds a lock ever waits for another one, and nobody waits for ever: after `PATIENCE_SECONDS` without news a process
fetches what it needs itself.
"""

import contextlib
import errno
import functools
import logging
import os
import random
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from graphkiln.storage.digests import Digest, is_digest
from graphkiln.storage.errors import BadInputError, DamagedStoreError, GraphKilnError
from graphkiln.storage.file_locks import FileLock, locked_soon
from graphkiln.storage.filesystem import Hashed
from graphkiln.storage.local import TEMPORARY_PREFIX, LocalFilesystem
from graphkiln.storage.locations import user_cache_folder
from graphkiln.storage.quantities import parse_size

PLACE, SIZE = "GRAPHKILN_NODE_CACHE", "GRAPHKILN_NODE_CACHE_SIZE"

# Unless told otherwise, the cache takes this part of its disk, but not more than so many bytes.
_PART_OF_DISK, _LARGEST_DEFAULT = 0.1, 50 * 10**9

# How long a process waits for what another one fetches.
PATIENCE_SECONDS = 120.0

# What is freed once the cache is full, as a part of its size: else the next copy would look for space again.
_FREED_AT_ONCE = 0.1

# A temporary or a lock that is older, in seconds, is one of a process that was killed.
_LEFTOVER_SECONDS = 86_400.0

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.05

_PRIVATE = 0o700
_LOCK_PREFIX = ".lock-"

# Holds how many bytes the copies take. Whoever adds one holds its lock for a moment, or for one look at all of them.
_TOTAL, _TOTAL_DIGITS, _TOTAL_PATIENCE_SECONDS = ".total", 20, 10.0

Fetch = Callable[[list[Digest]], Sequence[Hashed]]

_log = logging.getLogger("graphkiln")


class NodeCache:
    """Copies of stored bytes in a folder of this user, the least recently used of which make room for others.

    Attributes:
        folder: where they are. It need not exist.
        max_bytes: how much they may take together; what is being written at the moment may come on top.
    """

    def __init__(self, folder: Path, max_bytes: int, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Remember where the copies are; nothing is touched yet.

        Args:
            folder: see above.
            max_bytes: see above.
            patience_seconds: how long to wait for what another process fetches.
        """
        self.folder = folder
        self.max_bytes = max_bytes
        self._patience_seconds = patience_seconds
        self._files = LocalFilesystem(folder)
        self._usable = True
        self._patient = True

    def read(self, digests: Iterable[Digest], fetch: Fetch) -> list[Hashed]:
        """Return what is stored under each digest, from here or from where `fetch` gets it, which leaves copies.

        Args:
            digests: what is wanted.
            fetch: returns for each of a list of digests the bytes that are stored under it and the digest that they
                have, or why there are none. What does not match is returned, and not kept.
        """
        wanted = list(digests)
        found: dict[Digest, Hashed] = {}
        pause, awaited, last_news = _FIRST_PAUSE_SECONDS, 0, time.monotonic()
        while missing := self._without_copy(wanted, found):
            with contextlib.ExitStack() as locks:
                mine = [digest for digest in missing if self._is_mine(digest, locks)]
                # Who held a lock until a moment ago has left a copy.
                if due := self._without_copy(mine, found):
                    fetched = dict(zip(due, fetch(due), strict=True))
                    found |= fetched
                    self.keep(fetched.items())
            if mine or len(missing) != awaited:
                pause, awaited, last_news = _FIRST_PAUSE_SECONDS, len(missing) - len(mine), time.monotonic()
            elif time.monotonic() > last_news + self._patience_seconds:
                self._lose_patience()
            if not mine:
                time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311  # nothing secret about it
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return [found[digest] for digest in wanted]

    def keep(self, fetched: Iterable[tuple[Digest, Hashed]]) -> None:
        """Leave copies of what matches its digest for later readers of this host."""
        for digest, item in fetched:
            if not isinstance(item, tuple) or item[1] != digest or len(item[0]) > self.max_bytes or not self._usable:
                continue
            path = _place(digest)
            with self._doing_without():
                self._prepare(path)
                if not (self.folder / path).exists() and self._make_room(len(item[0])):
                    self._files.create(path, item[0])

    # ------------------------------------------------------------------ copies

    def _without_copy(self, wanted: Iterable[Digest], found: dict[Digest, Hashed]) -> list[Digest]:
        """Read the copies of what is wanted and not found yet, and return what has none."""
        missing = []
        for digest in dict.fromkeys(wanted):
            if digest in found:
                continue
            copy = self._copy_of(digest)
            if copy is None:
                missing.append(digest)
            else:
                found[digest] = copy, digest
        return missing

    def _copy_of(self, digest: Digest) -> bytes | None:
        path = _place(digest)
        try:
            copy, actual = self._files.read_with_digest(path)
            if actual == digest:
                with contextlib.suppress(OSError):  # it may have been evicted meanwhile
                    os.utime(self.folder / path)
                return copy
            what = "its bytes do not match its digest"
        except FileNotFoundError:
            return None
        except OSError as error:
            self._do_without(error)
            return None
        except DamagedStoreError as error:
            what = str(error)
        _log.warning("the copy %s/%s is damaged: %s; it is fetched again", self.folder, path, what)
        # If somebody else has mended it meanwhile, that is one more time to fetch.
        with self._doing_without():
            try:
                self._files.delete(path)
            except DamagedStoreError:  # a folder
                self._files.move(path, f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}", expected=None)
        return None

    # ------------------------------------------------------------------ locks

    def _is_mine(self, digest: Digest, locks: contextlib.ExitStack) -> bool:
        """Tell whether this process is to fetch a digest; if so, nobody else does until `locks` are closed."""
        if not (self._usable and self._patient):
            return True
        path = _place(digest, _LOCK_PREFIX)
        with self._doing_without():
            self._prepare(path)
            lock = FileLock.try_to_take(self.folder / path)
            if lock is None:
                return False
            locks.callback(lock.release)
        return True

    def _lose_patience(self) -> None:
        self._patient = False
        _log.warning(
            "another process has kept this one waiting for %.0f s for what it fetches into the node cache %s: "
            "waiting no longer",
            self._patience_seconds,
            self.folder,
        )

    # ------------------------------------------------------------------ room

    def _make_room(self, size: int) -> bool:
        """Tell whether `size` more bytes fit; what was used least recently is removed for them."""
        descriptor = os.open(self.folder / _TOTAL, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        with (
            open(descriptor, "r+b", buffering=0) as file,  # noqa: PTH123  # a descriptor has no path
            locked_soon(descriptor, _TOTAL_PATIENCE_SECONDS) as locked,
        ):
            if not locked:
                return False
            known = file.read(_TOTAL_DIGITS) or b""
            total = int(known) if known.isdigit() else None
            if total is None or total + size > self.max_bytes:
                total = self._evict(self.max_bytes - size)
            fits = total + size <= self.max_bytes
            file.seek(0)
            file.truncate()
            file.write(b"%d" % (total + size * fits))
        return fits

    def _evict(self, room: int) -> int:
        """Remove copies until the others take at most `room` bytes, and return how much is left."""
        entries = [entry for entry in self._files.entries("") if entry.path != _TOTAL]
        total = sum(entry.size for entry in entries)
        if total <= room:
            return total
        leftover = time.time() - _LEFTOVER_SECONDS
        for entry in sorted(entries, key=lambda entry: entry.modified):
            name = entry.path.rpartition("/")[2]
            killed = name.startswith((TEMPORARY_PREFIX, _LOCK_PREFIX)) and entry.modified < leftover
            if is_digest(name) or killed:
                self._files.delete(entry.path)
                total -= entry.size
            if total <= room - _FREED_AT_ONCE * self.max_bytes:
                break
        return total

    # ------------------------------------------------------------------ the folder

    def _prepare(self, path: str) -> None:
        """Make the folder of a path, in a folder that belongs to this user alone."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=_PRIVATE, exist_ok=True)
        status = self.folder.lstat()
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, "it belongs to another user", str(self.folder))
        if stat.S_IMODE(status.st_mode) != _PRIVATE:
            self.folder.chmod(_PRIVATE)
        (self.folder / path).parent.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def _doing_without(self) -> Iterator[None]:
        """Do nothing more with the cache but read what is there, once something cannot be written."""
        try:
            yield
        except (OSError, GraphKilnError) as error:
            self._do_without(error)

    def _do_without(self, error: Exception) -> None:
        if self._usable:
            _log.warning(
                "going on without the node cache %s: %s; set %s to a folder on a disk of this host, or to off",
                self.folder,
                error,
                PLACE,
            )
        self._usable = False


def default_node_cache() -> NodeCache | None:
    """Return the cache that the environment names, else one below the user's cache folder; None if there is to be none.

    Raises:
        BadInputError: the environment names no folder, or no size.
    """
    folder = _default_folder()
    if folder is None:
        return None
    text = os.environ.get(SIZE)
    try:
        max_bytes = parse_size(text) if text else _default_size(folder)
    except BadInputError as error:
        raise BadInputError(f"{SIZE}: {error}", reason="node-cache") from error
    if max_bytes == 0:
        raise BadInputError(f"{SIZE}={text} leaves no space: set {PLACE}=off for no cache", reason="node-cache")
    return _node_cache(folder / "blobs", max_bytes)


def _default_folder() -> Path | None:
    place = os.environ.get(PLACE)
    if place == "off":
        return None
    try:
        if not place:
            return user_cache_folder() / "graphkiln-node"
        if "://" not in place:
            return Path(place).expanduser().absolute()
    except RuntimeError:
        if not place:
            return None  # a user without a home
    raise BadInputError(f"{PLACE}={place} is neither a folder of this host nor off", reason="node-cache")


@functools.cache
def _node_cache(folder: Path, max_bytes: int) -> NodeCache:
    # One for the whole process, so that it warns once.
    return NodeCache(folder, max_bytes)


@functools.cache
def _default_size(folder: Path) -> int:
    try:
        disk = next(parent for parent in (folder, *folder.parents) if parent.exists())
        return min(int(shutil.disk_usage(disk).total * _PART_OF_DISK), _LARGEST_DEFAULT)
    except OSError:
        return _LARGEST_DEFAULT  # the first copy will show what is the matter


def _place(digest: Digest, prefix: str = "") -> str:
    if not is_digest(digest):
        raise ValueError(f"{digest!r} is not a digest")
    return f"{digest[:2]}/{prefix}{digest}"
