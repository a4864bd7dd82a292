"""Bundles as scripts write and read them: committed networks in one file, for clusters without a network."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from graphkiln.flows.inspection import VariantState, variants_of
from graphkiln.storage import layout
from graphkiln.storage.bundles import Bundle, Bundled, Imported, Progress, put_bundle, write_bundle
from graphkiln.storage.digests import Digest
from graphkiln.storage.errors import BadInputError, NotCommittedError, StoreUnavailableError
from graphkiln.storage.local import TEMPORARY_PREFIX
from graphkiln.storage.records import VariantName
from graphkiln.storage.signing_keys import TrustedKeys
from graphkiln.storage.store import Store, open_for_writing, open_store

_NO_PLACE = (errno.EROFS, errno.ENAMETOOLONG, errno.EISDIR)


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A variant that is not in a bundle because it is not committed.

    Attributes:
        network: the network's name.
        target: the target's name.
        variant: the variant.
        state: ``"failed"``, ``"not committed"`` or ``"damaged"``.
    """

    network: str
    target: str
    variant: Digest
    state: VariantState


class ExportedBundle(Bundled, frozen=True, kw_only=True):
    """What was written to a bundle, and what was not.

    Attributes:
        file: the bundle.
        left_out: variants of the networks that are not committed.
    """

    file: str
    left_out: tuple[LeftOut, ...]


class ImportedBundle(Imported, frozen=True, kw_only=True):
    """What an import has done.

    Attributes:
        file: the bundle.
        store: where to.
    """

    file: str
    store: str


def export_bundle(
    networks: Sequence[str],
    file: str | Path,
    *,
    target: str | None = None,
    variant: str = "",
    overwrite: bool = False,
    store: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trusted_keys: TrustedKeys | None = None,
    progress: Progress | None = None,
) -> ExportedBundle:
    """Write every committed variant of some networks to one file, complete and verified.

    The file is there once it is whole. Equal variants give equal bytes.

    Args:
        networks: their names.
        file: the bundle to write.
        target: only of this target.
        variant: only variants that start with this.
        overwrite: whether to replace a file that is there.
        store: URL of the store; ``$GRAPHKILN_STORE`` or the user's cache folder if None.
        storage_options: what fsspec passes to the store's file system.
        trusted_keys: whose signatures count, as for `graphkiln.load`.
        progress: is told how many bytes of how many are done.

    Raises:
        BadInputError: a network, target or variant is unknown, or the file cannot be written.
        NotCommittedError: a network has no committed variant.
        DamagedStoreError: something that is to be exported is damaged. Compiling it again mends it.
        StoreUnavailableError: the medium of the store or of the file fails.
    """
    path = _destination(file, overwrite=overwrite)
    opened = open_store(store, storage_options, trusted_keys=trusted_keys)
    committed, left_out = _selected(opened, networks, target, variant)
    with _new_file(path) as out:
        made = write_bundle(opened, committed, out, progress)
    return ExportedBundle(**msgspec.structs.asdict(made), file=str(path), left_out=tuple(left_out))


def import_bundle(
    file: str | Path,
    *,
    store: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    trusted_keys: TrustedKeys | None = None,
    progress: Progress | None = None,
) -> ImportedBundle:
    """Put everything that a bundle holds into a store, once all of it has been checked.

    A damaged or incomplete bundle leaves the store as it is. Importing again changes nothing, and writes again what
    the store has lost. A variant of which the store has a newer commit is left alone.

    Args:
        file: the bundle.
        store: URL of the store; ``$GRAPHKILN_STORE`` or the user's cache folder if None.
        storage_options: what fsspec passes to the store's file system.
        trusted_keys: whose signatures count, as for `graphkiln.load`.
        progress: is told how many bytes of how many are done; there are two rounds, one to check and one to write.

    Raises:
        BadInputError: the bundle is damaged, is none, or a newer GraphKiln wrote it; or the store cannot be written.
        StoreUnavailableError: the medium of the store or of the file fails.
    """
    path = Path(file).expanduser()
    with _existing_file(path) as source:
        bundle = Bundle(source, str(path), progress)
        opened = open_for_writing(store, storage_options, trusted_keys=trusted_keys)
        made = put_bundle(bundle, opened, progress)
    return ImportedBundle(**msgspec.structs.asdict(made), file=str(path), store=opened.url)


def _selected(
    store: Store, networks: Sequence[str], target: str | None, variant: str
) -> tuple[list[VariantName], list[LeftOut]]:
    """Return what is committed of some networks, and what is not."""
    committed: list[VariantName] = []
    left_out: list[LeftOut] = []
    for network in dict.fromkeys(networks):
        refs = set(store.variants(layout.REFS, network, target))
        found = variants_of(store, network, target, variant)
        chosen = [name for item in found if (name := (item.network, item.target, item.variant)) in refs]
        others = [item for item in found if (item.network, item.target, item.variant) not in refs]
        if not chosen:
            told = ", ".join(f"for {item.target} (variant {item.variant[:12]}): {item.state}" for item in others)
            raise NotCommittedError(
                f"nothing of {network} is committed in {store.url}: {told}; compile it first", reason="not-committed"
            )
        committed += chosen
        left_out += [
            LeftOut(network=item.network, target=item.target, variant=item.variant, state=item.state) for item in others
        ]
    return committed, left_out


# ---------------------------------------------------------------------- the file


def _destination(file: str | Path, *, overwrite: bool) -> Path:
    """Return where a new file goes, links followed.

    Raises:
        BadInputError: something is there that is not to be replaced.
    """
    path = Path(os.path.realpath(Path(file).expanduser()))
    with _faults(path):
        taken, replaceable = path.exists(), path.is_file()
    if taken and not replaceable:
        raise BadInputError(f"{path} is there already, and is no file: name another one", reason="file-exists")
    if taken and not overwrite:
        raise BadInputError(
            f"there is a file {path} already: name another one, or replace it with --force (overwrite=True)",
            reason="file-exists",
        )
    return path


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file under another name, which becomes its own once it is whole and durable."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    with _faults(path):
        try:
            with temporary.open("xb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _existing_file(path: Path) -> Iterator[BinaryIO]:
    with _faults(path):
        if path.exists() and not path.is_file():
            raise BadInputError(f"{path} is no file: copy the bundle to one first", reason="bundle-unreadable")
        with path.open("rb") as source:
            yield source


@contextlib.contextmanager
def _faults(path: Path) -> Iterator[None]:
    """Say of every fault of a file what it is."""
    try:
        yield
    except OSError as error:
        if isinstance(error, PermissionError | FileNotFoundError | NotADirectoryError) or error.errno in _NO_PLACE:
            message = f"the bundle {path} cannot be used: {error.strerror or error}"
            raise BadInputError(message, reason="bundle-not-accessible") from error
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StoreUnavailableError(
            f"{'no space left for' if full else 'I/O error at'} the bundle {path}: {error}; "
            f"{'free some space' if full else 'check the medium'} and run again",
            reason="disk-full" if full else "bundle-io",
            retryable=True,
        ) from error
