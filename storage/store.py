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
from graphkiln.storage.errors import BadInputError, DamagedStoreError
from graphkiln.storage.filesystem import Stored
from graphkiln.storage.keys import action_key
from graphkiln.storage.local import TEMPORARY_PREFIX
from graphkiln.storage.locations import default_url, open_filesystem, open_node_cache
from graphkiln.storage.objects import REPLACE_TRIES, NodeCacheUse, ObjectStore, wrong_digest
from graphkiln.storage.records import (
    ActionResult,
    FailureRecord,
    Manifest,
    PlanDocument,
    RefRecord,
    StoreFormat,
)

FORMAT_VERSION = 1

VariantName = tuple[str, str, Digest]


def open_store(url: str | None = None, options: Mapping[str, Any] | None = None, *, checked: bool = True) -> "Store":
    """Return a store, which need not exist yet; nothing is written.

    Args:
        url: where it is; `default_url()` if None.
        options: what fsspec passes to the file system.
        checked: whether to read the store's format first, else the caller does if what it looks for is not there.

    Raises:
        BadInputError: the URL cannot be opened, a newer GraphKiln wrote the store, or the environment names a node
            cache that cannot be.
        DamagedStoreError: the store's format file is damaged, or missing though the store is in use.
        StoreUnavailableError: the medium fails.
    """
    store = _opened(url, options)
    if checked:
        store.read_format()
    return store


def open_for_writing(url: str | None = None, options: Mapping[str, Any] | None = None) -> "Store":
    """Return a store that can be written; a damaged format file is written again, with a warning.

    Raises:
        BadInputError: the URL cannot be opened, the store cannot be written, a newer GraphKiln wrote it, or the
            environment names a node cache that cannot be.
        StoreUnavailableError: the medium fails.
    """
    store = _opened(url, options)
    store.prepare_for_writing()
    return store


def _opened(url: str | None, options: Mapping[str, Any] | None) -> "Store":
    filesystem = open_filesystem(url or default_url(), options)
    return Store(filesystem, node_cache=open_node_cache(filesystem))


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

    # ------------------------------------------------------------------ actions and failures

    def read_action(self, key: Digest) -> ActionResult | None:
        """Return the result of an action, or None. Its blobs are not checked by this."""
        path = layout.by_digest(layout.ACTIONS, key)
        return self._action(key, self.read_all([path])[0])

    def read_actions(self, keys: Sequence[Digest]) -> dict[Digest, ActionResult | None]:
        """Return what `read_action` does of each action but those whose results are damaged."""
        paths = [layout.by_digest(layout.ACTIONS, key) for key in keys]
        results: dict[Digest, ActionResult | None] = {}
        for key, found in zip(keys, self.read_all(paths), strict=True):
            with contextlib.suppress(DamagedStoreError):
                results[key] = self._action(key, found)
        return results

    def _action(self, key: Digest, found: Stored) -> ActionResult | None:
        path = layout.by_digest(layout.ACTIONS, key)
        result = self._document(path, found, "action result", ActionResult)
        if result is not None and result.key != key:
            raise self._misplaced(path, f"the action {result.key}")
        if result is not None and action_key(result.parts) != key:
            raise self._misplaced(path, f"the action {action_key(result.parts)}, as its key parts say")
        return result

    def write_action(self, result: ActionResult) -> ActionResult:
        """Store the result of an action; the first writer wins.

        Returns:
            The result that is stored now.
        """
        path = layout.by_digest(layout.ACTIONS, result.key)
        data = seal("action result", result)
        for _ in range(REPLACE_TRIES):
            with self._medium(path):
                if self._fs.create(path, data):
                    return result
            found = self.mend(lambda: self.read_action(result.key))
            if found is not None:
                return found
        raise self._contended(path)

    def replace_action(self, result: ActionResult) -> None:
        """Store the result of an action in place of the one that is there."""
        self._replace(layout.by_digest(layout.ACTIONS, result.key), seal("action result", result))

    def drop_action(self, key: Digest) -> None:
        """Forget the result of an action, because something that it names is lost."""
        self._drop(layout.by_digest(layout.ACTIONS, key), "action result")

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

    # ------------------------------------------------------------------ leases

    def create_lease(self, key: Digest, content: bytes) -> bool:
        """Store the lease of an action unless there is one; tell whether it was stored."""
        path = layout.by_digest(layout.LEASES, key)
        with self._medium(path):
            return self._fs.create(path, content)

    def read_lease(self, key: Digest) -> bytes | None:
        """Return the lease of an action as it is stored, or None. What is no file is set aside."""
        try:
            return self.mend(lambda: self.read_raw(layout.by_digest(layout.LEASES, key)))
        except FileNotFoundError:
            return None

    def replace_lease(self, key: Digest, content: bytes, *, expected: bytes) -> bool:
        """Store the lease of an action if it is still `expected`; tell whether it was stored."""
        path = layout.by_digest(layout.LEASES, key)
        with self._medium(path):
            return self._fs.replace(path, content, expected=expected)

    def remove_lease(self, key: Digest, *, expected: bytes) -> None:
        """Delete the lease of an action if it is still `expected`."""
        path = layout.by_digest(layout.LEASES, key)
        with self._medium(path):
            self._fs.remove(path, expected=expected)

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
        ref = self._read_document(path, "ref", RefRecord)
        if ref is not None and (ref.network, ref.target, ref.variant) != (network, target, variant):
            raise self._misplaced(path, f"{ref.network} for {ref.target} (variant {ref.variant[:12]})")
        return ref

    def write_ref(self, ref: RefRecord) -> None:
        """Durably move the commit point of a variant. Its manifest must be durable already."""
        path = layout.by_variant(layout.REFS, ref.network, ref.target, ref.variant)
        self._replace(path, seal("ref", ref))

    def variants(self, folder: str, network: str | None = None, target: str | None = None) -> list[VariantName]:
        """Return (network, target, variant) of every plan or ref.

        Args:
            folder: `layout.PLANS` or `layout.REFS`.
            network: only of this network.
            target: only of this target; needs `network`.
        """
        below = folder
        if network is not None:
            below = f"{folder}/{layout.check_name('network', network)}"
            if target is not None:
                below = layout.by_target(folder, network, target)
        found = [path.split("/")[1:] for path in self.names(below)]
        return [
            (item[0], item[1], Digest(item[2]))
            for item in found
            if len(item) == 3 and layout.is_name(item[0]) and layout.is_name(item[1]) and is_digest(item[2])
        ]
