"""Entrypoints that are Python callables: how they are found and called, and how their errors read.

Whatever the user's code raises becomes one `BadInputError` that names the exception and the user's own line.
"""

import importlib
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from graphkiln.storage.errors import BadInputError, GraphKilnError
from graphkiln.storage.layout import check_name
from graphkiln.tasks.contracts import ParseRequest

Result = TypeVar("Result")

_LONGEST_MESSAGE = 800
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
_OWN_PACKAGE = Path(__file__).resolve().parents[2]


def check_program_name(entrypoint: str, name: Any) -> None:
    """Refuse what cannot name a kernel graph.

    Raises:
        BadInputError: `name` is not text, or `graphkiln.storage.layout.check_name` refuses it.
    """
    if not isinstance(name, str):
        raise BadInputError(f"{entrypoint} returned a program named {name!r}, which is no text", reason="bad-name")
    check_name(f"{entrypoint} returned a program whose name", name)


class Entrypoint:
    """A Python callable named by ``file.py:callable`` or ``package.module:callable``.

    Attributes:
        text: what the spec says.
    """

    def __init__(self, request: ParseRequest) -> None:
        """Split the entrypoint's text.

        Raises:
            BadInputError: it has not the form of an entrypoint.
        """
        self.text = request.entrypoint
        self._folder = Path(request.folder)
        self._parameters = request.parameters
        self._source, _, self._attribute = request.entrypoint.rpartition(":")
        if not self._source or not self._attribute:
            raise BadInputError(
                f"the entrypoint {self.text!r} is neither file.py:callable nor package.module:callable",
                reason="bad-entrypoint",
            )
        self._file = self._folder / self._source if self._source.endswith(".py") else None

    @contextmanager
    def import_path(self) -> Iterator[None]:
        """Let the network import what lies beside its file and in the spec's folder, while the context lasts."""
        before = list(sys.path)
        sys.path[:0] = [str(folder) for folder in self._own_folders()]
        try:
            with _network_from_source():
                yield
        finally:
            sys.path[:] = before

    def call(self) -> Any:
        """Import the callable, call it with the network's parameters and return what it returns.

        Raises:
            BadInputError: the file, module or attribute is missing, the parameters do not fit, or it raises.
        """
        module = self._import_file(self._file) if self._file is not None else self._import_module()
        function: Any = module
        for part in self._attribute.split("."):
            if not hasattr(function, part):
                raise BadInputError(
                    f"entrypoint {self.text}: {self._source} has no {self._attribute}", reason="no-such-attribute"
                )
            function = getattr(function, part)
        if not callable(function):
            raise BadInputError(
                f"entrypoint {self.text}: {self._attribute} is of type {type(function).__name__}, not callable",
                reason="entrypoint-not-callable",
            )
        self._check_parameters(function)
        return self.guard("calling it", lambda: function(**self._parameters))

    def guard(self, doing: str, action: Callable[[], Result]) -> Result:
        """Run `action`, which runs the user's code; `doing` says in the error what was going on.

        Raises:
            BadInputError: `action` raised anything. Our own errors, an interrupt and a lack of memory pass unchanged.
        """
        try:
            return action()
        except (GraphKilnError, KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # noqa: BLE001  a network that calls sys.exit() must not end us quietly
            # The message says it all; a chain of tracebacks would bury it.
            raise BadInputError(
                f"entrypoint {self.text}: {doing}: {_described(error)}{self._where(error)}", reason="network-raised"
            ) from None

    def _own_folders(self) -> list[Path]:
        if self._file is None:
            return [self._folder]
        return list(dict.fromkeys([self._file.resolve().parent, self._folder]))

    def _import_module(self) -> ModuleType:
        if self.guard("importing it", self._find_module) is None:
            raise BadInputError(
                f"entrypoint {self.text}: there is no module {self._source} on sys.path, nor in {self._folder}",
                reason="no-such-module",
            )
        return self.guard("importing it", lambda: importlib.import_module(self._source))

    def _find_module(self) -> ModuleSpec | None:
        try:
            return importlib.util.find_spec(self._source)
        except ModuleNotFoundError as error:
            # A parent is missing, rather than something that a parent imports.
            if error.name is not None and f"{self._source}.".startswith(f"{error.name}."):
                return None
            raise

    def _import_file(self, file: Path) -> ModuleType:
        if not file.is_file():
            raise BadInputError(f"entrypoint {self.text}: there is no file {file}", reason="no-such-file")
        return self.guard("importing it", lambda: _import_path(file.resolve()))

    def _check_parameters(self, function: Callable[..., Any]) -> None:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # written in C
            return
        try:
            signature.bind(**self._parameters)
        except TypeError as error:
            accepted = ", ".join(signature.parameters) or "none"
            raise BadInputError(
                f"entrypoint {self.text}: its parameters do not fit: {error} (it takes: {accepted})",
                reason="bad-parameters",
            ) from None

    def _where(self, error: BaseException) -> str:
        """Return `` (file:line)`` of the user's deepest frame, or nothing if the error never was in the user's code."""
        if isinstance(error, SyntaxError) and error.filename:
            return f" ({self._shown(Path(error.filename))}:{error.lineno})"
        frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        own = [frame for frame in frames if any(frame[0].is_relative_to(folder) for folder in self._own_folders())]
        other = [frame for frame in frames if not _is_tooling(frame[0])]
        if not own and not other:
            return ""
        file, line = (own or other)[-1]
        return f" ({self._shown(file)}:{line})"

    def _shown(self, file: Path) -> str:
        return str(file.relative_to(self._folder) if file.is_relative_to(self._folder) else file)


@contextmanager
def _network_from_source() -> Iterator[None]:
    """Compile every module that is not installed from its source, while the context lasts.

    Python takes bytecode for current if the source has the same size and time of change: after ``cp -p`` or two edits
    within a second it would run what was there before. It does without bytecode if it cannot ask for the time.
    """
    ask = SourceFileLoader.path_stats
    # What tells the folders imports modules itself, which must not ask for the folders in their turn.
    _installation()

    def ask_if_installed(loader: SourceFileLoader, path: str) -> Mapping[str, Any]:
        if not _is_installed(Path(path)):
            raise OSError(f"no bytecode is read or written for {path}")
        return ask(loader, path)

    setattr(SourceFileLoader, "path_stats", ask_if_installed)  # noqa: B010  # it is no method of a subclass
    try:
        yield
    finally:
        setattr(SourceFileLoader, "path_stats", ask)  # noqa: B010


def _is_installed(file: Path) -> bool:
    """Tell whether an installer has put a file there, which sees to its bytecode."""
    file = Path(os.path.abspath(file))  # noqa: PTH100  # links are looked at below
    if not any(file.is_relative_to(folder) for folder in _installation()):
        return False
    # A link in the installation may lead to a folder in which somebody edits; some installers link all they install.
    real = file.resolve()
    return any(real.is_relative_to(folder.resolve()) for folder in _installation()) or not _PACKAGE_FOLDERS.isdisjoint(
        real.parts
    )


@cache
def _installation() -> frozenset[Path]:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return frozenset(map(Path, folders.union(site.getsitepackages(), [site.getusersitepackages()])))


def _import_path(file: Path) -> ModuleType:
    name = file.stem
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is not None and found.origin is not None and Path(found.origin).resolve() == file:
        # The name by which its siblings and the trainer import it, so that its classes have one identity.
        return importlib.import_module(name)
    # Another module has that name, or none can. Nothing can import the name that it gets instead.
    spec = importlib.util.spec_from_file_location(f"<network {name}>", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and annotations look their module up here.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _is_tooling(file: Path) -> bool:
    """Tell whether a frame belongs to the interpreter, JAX or GraphKiln, rather than to the user or a library."""
    if file.name.startswith("<") or file.is_relative_to(_OWN_PACKAGE):
        return True
    site_packages = Path(sysconfig.get_path("purelib"))
    if file.is_relative_to(site_packages):
        return file.relative_to(site_packages).parts[0] in ("jax", "jaxlib")
    return file.is_relative_to(sysconfig.get_path("stdlib"))


def _described(error: BaseException) -> str:
    # The text of a SyntaxError repeats where it is.
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    if len(text) > _LONGEST_MESSAGE:
        text = text[:_LONGEST_MESSAGE] + " …"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
