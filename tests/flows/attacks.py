"""What somebody can do to a store who can write to its bucket, but has no trusted key.

Every document that is planted has the right digest of itself: only signatures can tell.
"""

import subprocess
from pathlib import Path

import msgspec

from graphkiln.storage import layout
from graphkiln.storage.blobs import BlobRef
from graphkiln.storage.digests import Digest, digest_bytes
from graphkiln.storage.documents import seal, unseal
from graphkiln.storage.records import ActionResult, Manifest, RefRecord
from graphkiln.storage.store import Store, open_store

# Whoever loads it has run the attacker's code, before calling anything.
_EVIL = """
#include <stdio.h>
__attribute__((constructor)) static void mark(void) {{ FILE *file = fopen("{mark}", "w"); if (file) fclose(file); }}
int run(int a) {{ return 666; }}
"""


def evil_library(folder: Path) -> tuple[bytes, Path]:
    """Return a shared library that leaves a mark when it is loaded, and the mark."""
    folder.mkdir()
    mark = folder / "mark"
    (folder / "evil.c").write_text(_EVIL.format(mark=mark))
    library = folder / "evil.so"
    subprocess.run(["cc", "-shared", "-fPIC", folder / "evil.c", "-o", library], check=True)  # noqa: S607
    return library.read_bytes(), mark


class Attacker:
    """Writes to the files of a store, past everything that checks."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def opened(self) -> Store:
        """The store, as somebody without keys opens it."""
        return open_store(str(self.store))

    def plant_blob(self, content: bytes) -> BlobRef:
        return self.opened().put_blob(content)

    def actions(self) -> list[ActionResult]:
        paths = [path for path in (self.store / layout.ACTIONS).rglob("*") if path.is_file()]
        return [unseal(path.read_bytes(), "action result", ActionResult) for path in sorted(paths)]

    def plant_action(self, result: ActionResult) -> None:
        self._write(layout.by_digest(layout.ACTIONS, result.key), seal("action result", result))

    def refs(self) -> list[RefRecord]:
        paths = [path for path in (self.store / layout.REFS).rglob("*") if path.is_file()]
        return [unseal(path.read_bytes(), "ref", RefRecord) for path in sorted(paths)]

    def path_of(self, ref: RefRecord) -> Path:
        return self.store / layout.by_variant(layout.REFS, *ref.variant_name)

    def plant_ref(self, ref: RefRecord) -> None:
        self._write(layout.by_variant(layout.REFS, *ref.variant_name), seal("ref", ref))

    def plant_manifest(self, like: RefRecord, content: bytes) -> Digest:
        """Store a manifest of the same network in which every output is `content`."""
        honest = self.opened().read_manifest(like.manifest)
        planted = self.plant_blob(content)
        artifacts = {name: dict.fromkeys(outputs, planted) for name, outputs in honest.artifacts.items()}
        data = seal("manifest", Manifest(honest.plan, artifacts))
        self._write(layout.by_digest(layout.MANIFESTS, digest_bytes(data)), data)
        return digest_bytes(data)

    def replace_outputs(self, content: bytes) -> list[ActionResult]:
        """Plant, for every action of the store, a result whose outputs are `content`. It has no signature."""
        blob = self.plant_blob(content)
        planted = [
            msgspec.structs.replace(result, outputs=dict.fromkeys(result.outputs, blob), signature=None)
            for result in self.actions()
        ]
        for result in planted:
            self.plant_action(result)
        return planted

    def _write(self, path: str, data: bytes) -> None:
        final = self.store / path
        final.parent.mkdir(parents=True, exist_ok=True)
        final.unlink(missing_ok=True)
        final.write_bytes(data)
