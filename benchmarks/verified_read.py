"""(verified_read) Reading a large artifact with every digest checked, beside reading the same file."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import zstandard

from benchmarks.measure import Row, Table, rounds
from benchmarks.workspace import Workspace
from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.store import Store, open_for_writing

GOAL = 1.25
SIZE = 2**30
SMALL_SIZE, SMALL_COUNT = 1000, 10_000
ROUNDS = 7
BUDGET_SECONDS = 90.0


def measure(workspace: Workspace) -> Table:
    """Store an artifact that does not compress, one that does, and small ones; read each in turns with a plain read."""
    folder = workspace.new("store")
    store = open_for_writing(str(folder))
    noise = os.urandom(SIZE)
    started = time.perf_counter()
    large = store.put_blob(noise)
    stored_in = time.perf_counter() - started
    # Much of it repeats, as in executables.
    packed = store.put_blob(noise[: SIZE // 16] * 4)
    small = [store.put_blob(number.to_bytes(4, "big") + noise[:SMALL_SIZE]) for number in range(SMALL_COUNT)]
    del noise
    if (large.encoding, packed.encoding) != ("identity", "zstd"):
        raise RuntimeError(f"the artifacts are stored as {large.encoding} and {packed.encoding}")
    return Table(
        f"(verified_read) Verified reads of artifacts on a local disk, their pages in memory, {ROUNDS} rounds at most",
        ("get_blob", "plain read"),
        [
            _compared("1 GiB that does not compress: wall", [large], store, folder, Path.read_bytes, GOAL),
            _compared("256 MiB that does, read and decompressed: wall", [packed], store, folder, _decompressed),
            _compared(f"{SMALL_COUNT} of {SMALL_SIZE} bytes: wall", small, store, folder, Path.read_bytes),
            Row("storing the 1 GiB, for which compressing it is tried", stored_in),
        ],
    )


def _compared(
    what: str,
    refs: list[BlobRef],
    store: Store,
    folder: Path,
    plain: Callable[[Path], bytes],
    goal: float | None = None,
) -> Row:
    paths = [folder / layout.by_digest(layout.BLOBS, ref.digest) for ref in refs]
    ours, theirs = [], []
    for _ in rounds(ROUNDS, BUDGET_SECONDS / 3):
        theirs.append(_seconds(lambda: sum(len(plain(path)) for path in paths)))
        ours.append(_seconds(lambda: sum(len(store.get_blob(ref, "an artifact")) for ref in refs)))
    return Row(what, min(ours), min(theirs), goal)


def _seconds(do: Callable[[], object]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def _decompressed(path: Path) -> bytes:
    return zstandard.ZstdDecompressor(max_window_size=2**27).decompress(path.read_bytes())
