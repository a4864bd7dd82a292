"""The file format of a bundle: a tar of which, given its first entry, every byte but the contents is known.

The first entry is a sealed document that lists all others by path, size and digest. The others follow in one order:
what names something comes before what it names. There are no times, owners or gaps, so that equal contents give
equal bytes, and a reader needs no parser: it compares each byte between the contents with the only one that can be
there. Whatever a hostile tar could hold, such as links, ``../`` or two entries of one name, is therefore refused.
"""

import contextlib
import itertools
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, BinaryIO

import msgspec

from graphkiln.storage import layout
from graphkiln.storage.digests import Digest, digest_bytes, is_digest
from graphkiln.storage.documents import seal, unseal
from graphkiln.storage.errors import BadInputError, DamagedStoreError
from graphkiln.storage.filesystem import Entry
from graphkiln.storage.readonly import ReadOnlyFilesystem

HEADER = "graphkiln-bundle.json"
FORMAT_VERSION = 1

_KIND = "bundle header"
_BY_DIGEST = (layout.MANIFESTS, layout.ACTIONS, layout.BLOBS)
_BY_VARIANT = (layout.REFS, layout.PLANS)
_ORDER = (*_BY_VARIANT, *_BY_DIGEST)
_SIZE_FIELD = slice(124, 135)


class BundleEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One object in a bundle.

    Attributes:
        path: where it belongs in a store.
        size: number of its stored bytes.
        digest: digest of its stored bytes.
    """

    path: str
    size: Annotated[int, msgspec.Meta(ge=0)]
    digest: Digest


class BundleHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first entry of a bundle.

    Attributes:
        format: version of the bundle's format.
        entries: all other entries, in their order.
    """

    format: int
    entries: tuple[BundleEntry, ...]


def sorted_entries(entries: Iterable[BundleEntry]) -> list[BundleEntry]:
    """Return entries in the order of a bundle."""
    return sorted(entries, key=lambda entry: _place(entry.path))


def write_bundle_file(out: BinaryIO, entries: Sequence[BundleEntry], contents: Iterable[bytes]) -> int:
    """Write a bundle, and return its size in bytes.

    Args:
        out: where to.
        entries: what it holds, in the order of a bundle.
        contents: the stored bytes of each, one after the other.
    """
    header = seal(_KIND, BundleHeader(FORMAT_VERSION, tuple(entries)))
    gaps = _gaps(len(header), entries)
    size = out.write(next(gaps)) + out.write(header)
    for data, gap in zip(contents, gaps, strict=False):  # there is one gap more
        size += out.write(gap) + out.write(data)
    return size + out.write(next(gaps))


class BundleFilesystem(ReadOnlyFilesystem):
    """The objects of a bundle, as a store has them. Each read is checked against the header.

    Implements `graphkiln.storage.filesystem.StoreFilesystem`.

    Attributes:
        url: the bundle's name, for messages.
        size: its size in bytes.
        entries: what it holds, by path, in its order.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Read the header, and check every byte of the file outside of the contents.

        Raises:
            DamagedStoreError: this is no bundle, or not a whole one.
            BadInputError: a newer GraphKiln wrote it.
            OSError: the file cannot be read.
        """
        self.url = name
        self.size = file.seek(0, os.SEEK_END)
        self._file = file
        header, end = self._read_header()
        _check_entries(header.entries)
        self.objects = {entry.path: entry for entry in header.entries}
        self._starts: dict[str, int] = {}
        self._check_gaps(end)

    def read(self, path: str) -> bytes:
        """Return the whole object; see the contract."""
        if path not in self.objects:
            raise FileNotFoundError(f"{path} is not in the bundle")
        entry = self.objects[path]
        data = self._read_at(self._starts[path], entry.size)
        if digest_bytes(data) != entry.digest:
            raise DamagedStoreError("its bytes do not match the bundle's header", reason="wrong-digest")
        return data

    def entries(self, folder: str) -> Iterator[Entry]:
        """Iterate over all objects, which have no age; see the contract."""
        for path, entry in sorted(self.objects.items()):
            if not folder or path.startswith(f"{folder}/"):
                yield Entry(path, entry.size, 0.0)

    def _read_header(self) -> tuple[BundleHeader, int]:
        """Return the header, and its size."""
        block = self._read_at(0, tarfile.BLOCKSIZE)
        size = -1
        with contextlib.suppress(ValueError):
            size = int(block[_SIZE_FIELD], 8)
        if not 0 <= size <= self.size or block != _frame(HEADER, size):
            raise DamagedStoreError("it does not start as a bundle does", reason="no-bundle")
        header = unseal(self._read_at(len(block), size), _KIND, BundleHeader)
        if header.format > FORMAT_VERSION:
            raise BadInputError(
                f"the bundle {self.url} has format {header.format}, and this GraphKiln reads up to format "
                f"{FORMAT_VERSION}: upgrade GraphKiln",
                reason="newer-format",
            )
        if header.format != FORMAT_VERSION:
            raise DamagedStoreError(f"there never was a format {header.format}", reason="wrong-schema")
        return header, size

    def _check_gaps(self, header_size: int) -> None:
        entries = list(self.objects.values())
        names = [HEADER, *self.objects, "end"]
        sizes = [header_size, *(entry.size for entry in entries), 0]
        position = 0
        for name, size, gap in zip(names, sizes, _gaps(header_size, entries), strict=True):
            if position + len(gap) > self.size:
                raise DamagedStoreError(f"it is cut off before its {name}", reason="wrong-size")
            if self._read_at(position, len(gap)) != gap:
                raise DamagedStoreError(f"it is altered before its {name}", reason="wrong-gap")
            self._starts[name] = position + len(gap)
            position += len(gap) + size
        if self.size != position:
            raise DamagedStoreError(f"it goes on for {self.size - position} bytes after its end", reason="wrong-size")

    def _read_at(self, position: int, size: int) -> bytes:
        self._file.seek(position)
        return self._file.read(size)


def _check_entries(entries: Sequence[BundleEntry]) -> None:
    places = [_place(entry.path) for entry in entries]
    if any(first >= second for first, second in itertools.pairwise(places)):
        raise DamagedStoreError("its entries are not in their order", reason="wrong-order")
    for entry in entries:
        # Actions have names that are digests of something else.
        if entry.path.startswith((f"{layout.MANIFESTS}/", f"{layout.BLOBS}/")) and entry.digest != entry.path[-64:]:
            raise DamagedStoreError(f"its header gives {entry.path} another digest", reason="wrong-digest")


def _place(path: str) -> tuple[int, str]:
    """Return where an object stands in the order of a bundle.

    Raises:
        DamagedStoreError: a bundle holds no such object.
    """
    folder, _, rest = path.partition("/")
    *parents, name = rest.split("/")
    if is_digest(name):
        digest = Digest(name)
        if folder in _BY_DIGEST and path == layout.by_digest(folder, digest):
            return _ORDER.index(folder), path
        if folder in _BY_VARIANT and len(parents) == 2 and all(layout.is_name(parent) for parent in parents):
            return _ORDER.index(folder), path
    raise DamagedStoreError(f"its header names {path!r}, which no bundle holds", reason="wrong-path")


def _gaps(header_size: int, entries: Sequence[BundleEntry]) -> Iterator[bytes]:
    """Iterate over all that is not content: what comes before the header, before each entry, and last."""
    position = 0
    before = b""
    for path, size in ((HEADER, header_size), *((entry.path, entry.size) for entry in entries)):
        gap = before + _frame(path, size)
        yield gap
        position += len(gap) + size
        before = bytes(-size % tarfile.BLOCKSIZE)
    position += len(before)
    yield before + bytes(2 * tarfile.BLOCKSIZE + -(position + 2 * tarfile.BLOCKSIZE) % tarfile.RECORDSIZE)


def _frame(path: str, size: int) -> bytes:
    """Return what stands before an entry. Times and owners are zero."""
    info = tarfile.TarInfo(path)
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
