"""The store: its documents, each at its place. Nothing here decides what to compile."""

import contextlib
import errno
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from graphkiln.storage import layout
from graphkiln.storage.digests import ALGORITHM, Digest, digest_bytes, is_digest
from graphkiln.storage.documents import seal, unseal
from graphkiln.storage.errors import BadInputError, DamagedStoreError, UntrustedError
from graphkiln.storage.filesystem import Stored
from graphkiln.storage.keys import action_key
from graphkiln.storage.local import TEMPORARY_PREFIX
from graphkiln.storage.locations import default_url, open_filesystem, open_node_cache
from graphkiln.storage.objects import REPLACE_TRIES, NodeCacheUse, ObjectStore, wrong_digest
from graphkiln.storage.records import (
    ActionResult,
    FailureRecord,
    Manifest,
    PinRecord,
    PlanDocument,
    RefRecord,
    Signed,
    StoreFormat,
    VariantName,
)
from graphkiln.storage.signing import configured_trust
from graphkiln.storage.signing_keys import TrustedKeys
from graphkiln.storage.spill import SpillingFilesystem

FORMAT_VERSION = 1


def open_store(
    url: str | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    checked: bool = True,
    trusted_keys: TrustedKeys | None = None,
) -> "Store":
    """Return a store, which need not exist yet; nothing is written.

    Args:
        url: where it is; `default_url()` if None.
        options: what fsspec passes to the file system.
        checked: whether to read the store's format first, else the caller does if what it looks for is not there.
        trusted_keys: whose signatures count, as files or lines of OpenSSH; ``$GRAPHKILN_TRUSTED_KEYS`` if None.

    Raises:
        BadInputError: the URL cannot be opened, a key cannot be used, a newer GraphKiln wrote the store, or the
            environment names a node cache that cannot be.
        DamagedStoreError: the store's format file is damaged, or missing though the store is in use.
        StoreUnavailableError: the medium fails.
    """
    store = _opened(url, options, trusted_keys)
    if checked:
        store.read_format()
    return store


def open_for_writing(
    url: str | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    trusted_keys: TrustedKeys | None = None,
    spills: bool = False,
) -> "Store":
    """Return a store that can be written; a damaged format file is written again, with a warning.

    Args:
        url: where it is; `default_url()` if None.
        options: what fsspec passes to the file system.
        trusted_keys: whose signatures count, as for `open_store`.
        spills: whether to go on in memory once there is no space left, with a warning; nothing is committed then.

    Raises:
        BadInputError: the URL cannot be opened, a key cannot be used, the store cannot be written, a newer GraphKiln
            wrote it, or the environment names a node cache that cannot be.
        StoreUnavailableError: the medium fails.
    """
    store = _opened(url, options, trusted_keys, spills=spills)
    store.prepare_for_writing()
    return store


def _opened(
    url: str | None, options: Mapping[str, Any] | None, trusted_keys: TrustedKeys | None, *, spills: bool = False
) -> "Store":
    filesystem = open_filesystem(url or default_url(), options)
    return Store(
        SpillingFilesystem(filesystem) if spills else filesystem,
        trust=configured_trust(trusted_keys),
        node_cache=open_node_cache(filesystem),
    )


class Store(ObjectStore):
    """Actions, failures, plans, manifests and refs, besides the blobs of `ObjectStore`."""

    # ------------------------------------------------------------------ the store as a whole

    def read_format(self) -> StoreFormat | None:
        """Return what the store is written in, or None if it is empty.

        Raises:
            BadInputError: a newer GraphKiln wrote it.
            DamagedStoreError: the format file is damaged, or missing though the store is in use.
        """
        found = self._read_document(layout.FORMAT, "store format", StoreFormat)
        if found is None:
            if any(True for folder in layout.IN_USE for _ in self.names(folder)):
                raise DamagedStoreError(
                    f"{self.url}/{layout.FORMAT} is missing, though the store is in use",
                    reason="missing",
                    path=layout.FORMAT,
                )
        elif found.format > FORMAT_VERSION or found.digest != ALGORITHM:
            raise BadInputError(
                f"the store {self.url} has format {found.format} with {found.digest} digests, and this GraphKiln "
                f"reads up to format {FORMAT_VERSION} with {ALGORITHM}: upgrade GraphKiln, or use another store",
                reason="newer-format",
            )
        return found

    def prepare_for_writing(self) -> None:
        """Make sure that the store can be written, and write its format file if it has none (any more).

        Raises:
            BadInputError: it cannot be written, or a newer GraphKiln wrote it.
        """
        self._probe()
        self._check_folders()
        if self.mend(self.read_format) is None:
            wanted = seal("store format", StoreFormat(FORMAT_VERSION, ALGORITHM))
            with self._medium(layout.FORMAT):
                self._fs.replace(layout.FORMAT, wanted, expected=None)
            self.read_format()

    def _probe(self) -> None:
        """Write an object, and see whether conditions hold: without them two writers could overwrite each other."""
        path = f"{TEMPORARY_PREFIX}probe-{secrets.token_hex(8)}"
        with self._medium(path):
            try:
                self._fs.create(path, b"first")
            except FileNotFoundError as error:  # a parent folder cannot be made, as below /proc
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from error
            try:
                overwritten = self._fs.create(path, b"second") or self._fs.replace(path, b"third", expected=b"second")
            finally:
                self._fs.delete(path)
        if overwritten:
            raise BadInputError(
                f"the store {self.url} ignores conditional writes, so that two runs could overwrite each other there: "
                "use a server that honours If-None-Match and If-Match",
                reason="no-conditional-writes",
            )

    def _check_folders(self) -> None:
        """Find the folder that another user has made and this one cannot write to, before a compile is in vain."""
        with self._medium(""):
            found = self._fs.unwritable((layout.PLANS, layout.REFS, layout.RUN_PINS), layout.BY_DIGEST)
        if found is not None:
            with self._medium(found):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # ------------------------------------------------------------------ actions and failures

    def read_action(self, key: Digest) -> ActionResult | None:
        """Return the result of an action, or None. Its blobs are not checked by this."""
        path = layout.by_digest(layout.ACTIONS, key)
        return self._action(key, self.read_all([path])[0])

    def read_actions(self, keys: Sequence[Digest]) -> dict[Digest, ActionResult | None]:
        """Return what `read_action` does of each action but those whose results are damaged or not trusted."""
        paths = [layout.by_digest(layout.ACTIONS, key) for key in keys]
        results: dict[Digest, ActionResult | None] = {}
        for key, found in zip(keys, self.read_all(paths), strict=True):
            with contextlib.suppress(DamagedStoreError, UntrustedError):
                results[key] = self._action(key, found)
        return results

    def _action(self, key: Digest, found: Stored) -> ActionResult | None:
        path = layout.by_digest(layout.ACTIONS, key)
        result = self._document(path, found, "action result", ActionResult)
        if result is not None and result.key != key:
            raise self._misplaced(path, f"the action {result.key}")
        if result is not None and (derived := _derived_key(result)) != key:
            raise self._misplaced(path, f"the action {derived}, as its key parts say")
        return result

    def write_action(self, result: ActionResult) -> ActionResult:
        """Store the result of an action; the first writer wins, unless what is there is not trusted.

        Returns:
            The result that is stored now.

        Raises:
            UntrustedError: signatures are required, and the result has none that is trusted.
        """
        path = layout.by_digest(layout.ACTIONS, result.key)
        data = self._sealed(path, "action result", result)

        def read_or_replace() -> ActionResult | None:
            try:
                return self.read_action(result.key)
            except UntrustedError as error:
                with self._medium(path):
                    return result if self._fs.replace(path, data, expected=error.stored) else None

        for _ in range(REPLACE_TRIES):
            with self._medium(path):
                if self._fs.create(path, data):
                    return result
            found = self.mend(read_or_replace)
            if found is not None:
                return found
        raise self._contended(path)

    def replace_action(self, result: ActionResult) -> None:
        """Store the result of an action in place of the one that is there."""
        path = layout.by_digest(layout.ACTIONS, result.key)
        self._replace(path, self._sealed(path, "action result", result))

    def drop_action(self, result: ActionResult) -> None:
        """Forget a result, because something that it names is lost. One that has taken its place stays."""
        path = layout.by_digest(layout.ACTIONS, result.key)

        def remove() -> None:
            stored = self.read_raw(path)
            if self.read_action(result.key) == result:
                with self._medium(path):
                    self._fs.remove(path, expected=stored)

        with contextlib.suppress(FileNotFoundError):
            self.mend(remove)

    def read_failure(self, key: Digest) -> FailureRecord | None:
        """Return how an action last failed, or None."""
        path = layout.by_digest(layout.FAILURES, key)
        failure = self._read_document(path, "failure record", FailureRecord)
        if failure is not None and failure.key != key:
            raise self._misplaced(path, f"the action {failure.key}")
        return failure

    def write_failure(self, failure: FailureRecord) -> None:
        """Store how an action failed, in place of how it failed before."""
        self._replace(layout.by_digest(layout.FAILURES, failure.key), seal("failure record", failure))

    def drop_failure(self, key: Digest) -> None:
        """Forget how an action failed, because it has succeeded."""
        self._drop(layout.by_digest(layout.FAILURES, key), "failure record")

    # ------------------------------------------------------------------ pins

    def read_pin(self, path: str) -> PinRecord | None:
        """Return a pin, or None."""
        return self._read_document(path, "pin", PinRecord)

    def write_pin(self, path: str, pin: PinRecord) -> None:
        """Store a pin in place of the one that is there."""
        self._replace(path, seal("pin", pin))

    # ------------------------------------------------------------------ plans, manifests, refs

    def read_plan(self, network: str, target: str, variant: Digest) -> PlanDocument | None:
        """Return the plan of a variant, or None."""
        path = layout.by_variant(layout.PLANS, network, target, variant)
        document = self._read_document(path, "plan", PlanDocument)
        if document is not None:
            plan = document.plan
            if (plan.network.name, plan.target.name, plan.variant) != (network, target, variant):
                raise self._misplaced(path, plan.title())
        return document

    def write_plan(self, document: PlanDocument) -> None:
        """Store a plan in place of the one that the variant had."""
        plan = document.plan
        path = layout.by_variant(layout.PLANS, plan.network.name, plan.target.name, plan.variant)
        self._replace(path, seal("plan", document))

    def read_manifest(self, digest: Digest, *, node_cache: NodeCacheUse = "bypass") -> Manifest:
        """Return a manifest.

        Args:
            digest: its name.
            node_cache: what this host's copies are to it.

        Raises:
            DamagedStoreError: it is missing or does not match its digest.
        """
        path = layout.by_digest(layout.MANIFESTS, digest)
        with self._about(path, "a manifest"):
            found = self._fetch(layout.MANIFESTS, [digest], node_cache)[0]
            if isinstance(found, FileNotFoundError):
                raise DamagedStoreError("it is missing", reason="missing")
            if isinstance(found, DamagedStoreError):
                raise found
            data, actual = found
            if actual != digest:
                raise wrong_digest()
            manifest = unseal(data, "manifest", Manifest)
            planned = {graph.name for graph in manifest.plan.graphs}
            if planned != manifest.artifacts.keys() or not all(manifest.artifacts.values()):
                raise DamagedStoreError("it does not name an artifact for each kernel graph", reason="incomplete")
            return manifest

    def holds_manifest(self, manifest: Manifest) -> bool:
        """Tell whether a manifest has been stored before, however it is now."""
        try:
            self.read_raw(layout.by_digest(layout.MANIFESTS, digest_bytes(seal("manifest", manifest))))
        except FileNotFoundError:
            return False
        except DamagedStoreError:
            pass  # something is there, and will be set aside
        return True

    def write_manifest(self, manifest: Manifest) -> Digest:
        """Durably store a manifest and return its digest. What it names must be durable already."""
        data = seal("manifest", manifest)
        digest = digest_bytes(data)
        path = layout.by_digest(layout.MANIFESTS, digest)
        self._create_or_mend({path: data})
        self.sync([path])
        return digest

    def read_ref(self, network: str, target: str, variant: Digest) -> RefRecord | None:
        """Return the commit point of a variant, or None."""
        path = layout.by_variant(layout.REFS, network, target, variant)
        latest = self.trust.latest_commit(self.url, (network, target, variant))
        ref = self._read_document(path, "ref", RefRecord)
        if ref is not None and ref.variant_name != (network, target, variant):
            raise self._misplaced(path, f"{ref.network} for {ref.target} (variant {ref.variant[:12]})")
        if ref is not None:
            with self._about(path, "the ref"):
                self.trust.check_not_older(self.url, ref, latest)
        return ref

    def write_ref(self, ref: RefRecord) -> bool:
        """Durably move the commit point of a variant. Its manifest must be durable already.

        Returns:
            False where signatures are required and a trusted ref is there that is no older, and stays.

        Raises:
            UntrustedError: signatures are required, and the ref has none that is trusted.
        """
        path = layout.by_variant(layout.REFS, ref.network, ref.target, ref.variant)

        def stays(stored: bytes) -> bool:
            try:
                return self.trust.required and self._opened(stored, "ref", RefRecord).committed_at >= ref.committed_at
            except (DamagedStoreError, UntrustedError):
                return False

        if not self._replace(path, self._sealed(path, "ref", ref), stays=stays):
            return False
        self.trust.remember(self.url, ref)
        return True

    def variants(self, folder: str, network: str | None = None, target: str | None = None) -> list[VariantName]:
        """Return (network, target, variant) of every plan, ref or kept pin.

        Args:
            folder: `layout.PLANS`, `layout.REFS` or `layout.KEPT_PINS`.
            network: only of this network.
            target: only of this target; needs `network`.
        """
        below = folder
        if network is not None:
            below = f"{folder}/{layout.check_name('network', network)}"
            if target is not None:
                below = layout.by_target(folder, network, target)
        found = [path.removeprefix(f"{folder}/").split("/") for path in self.names(below)]
        return [
            (item[0], item[1], Digest(item[2]))
            for item in found
            if len(item) == 3 and layout.is_name(item[0]) and layout.is_name(item[1]) and is_digest(item[2])
        ]

    def _sealed(self, path: str, kind: str, record: Signed) -> bytes:
        data = seal(kind, record)
        with self._about(path, f"the {kind}, not written yet"):
            self.trust.check(kind, data, record)
        return data


def _derived_key(result: ActionResult) -> str:
    try:
        return action_key(result.parts)
    except ValueError:
        return "of two parts with one name, which no action has"
