"""A file system of fsspec, `faulty://`, that fails at one chosen operation: the product's own client runs over it."""

from collections.abc import Callable, Mapping
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from tests.storage.faults import ERRORS, Answer, FaultPoint

URL = "faulty://store"


class Medium(MemoryFileSystem):  # type: ignore[misc]
    """What lies below: objects in memory, of this instance alone."""

    cachable = False

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        """Make it.

        Args:
            objects: what is stored, by path below the store's root.
        """
        super().__init__()
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]
        for path, data in (objects or {}).items():
            self.pipe_file(f"/store/{path}", data)

    def objects(self) -> dict[str, bytes]:
        """Return what is stored, by path below the store's root."""
        return {path.removeprefix("/store/"): file.getvalue() for path, file in self.store.items()}


class SlowDownError(Exception):
    """How a library that has errors of its own tells of a server that throttles its clients."""


class FaultyFsspec(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Passes on to a medium what clients of fsspec ask for. What it does not know raises `NotImplementedError`."""

    protocol = "faulty"
    root_marker = "/"
    cachable = False

    def __init__(self, medium: Medium, point: FaultPoint, **options: Any) -> None:
        """Make it.

        Args:
            medium: where the objects are.
            point: counts the operations, and says which of them fails.
            options: what fsspec passes to every file system.
        """
        super().__init__(**options)
        self._medium, self._point = medium, point

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("faulty://").strip("/")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        def read() -> bytes:
            data: bytes = self._medium.cat_file(path, start, end)
            return data

        def read_half() -> bytes:
            data = read()
            return data[: len(data) // 2]

        return self._do("read", path, read, read_half)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._do(
            "create" if mode == "create" else "write",
            path,
            lambda: self._medium.pipe_file(path, value, mode=mode),
            half=lambda: self._medium.pipe_file(path, value[: len(value) // 2], mode=mode),
        )

    def rm_file(self, path: str) -> None:
        self._do("remove", path, lambda: self._medium.rm_file(path))

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any) -> Any:
        return self._do("list", path, lambda: self._medium.find(path, maxdepth, withdirs, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self._do("list", path, lambda: self._medium.ls(path, detail))

    def info(self, path: str, **options: Any) -> Any:
        return self._do("look", path, lambda: self._medium.info(path))

    def exists(self, path: str, **options: Any) -> bool:
        return self._do("look", path, lambda: bool(self._medium.exists(path)))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._do("make folder", path, lambda: self._medium.makedirs(path, exist_ok=exist_ok))

    def _do(
        self, operation: str, path: str, act: Callable[[], Answer], half: Callable[[], Answer] | None = None
    ) -> Answer:
        try:
            return self._point.do(operation, path.removeprefix("/store/"), act, half)
        except OSError as error:
            if error.errno == ERRORS["throttled"]:
                raise SlowDownError("reduce your request rate") from error
            raise


fsspec.register_implementation("faulty", FaultyFsspec)
