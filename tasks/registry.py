"""Finds adapters by their entry points and makes them."""

import importlib.metadata
from importlib.metadata import EntryPoint
from typing import Any, Literal, cast

from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.checks import refuse_unknown
from graphkiln.tasks.contracts import Backend, Frontend

_Kind = Literal["frontend", "backend"]


def load_frontend(name: str) -> Frontend:
    """Return a new instance of the frontend that is registered as `name`.

    Raises:
        BadInputError: there is no such frontend (``unknown-frontend``), more than one (``ambiguous-frontend``), it
            needs a package that is not installed (``missing-package``), or it cannot be made
            (``broken-frontend``).
    """
    return cast(Frontend, _load("frontend", name))


def load_backend(name: str) -> Backend:
    """Return a new instance of the backend that is registered as `name`.

    Raises:
        BadInputError: as `load_frontend`, with the reasons ``unknown-backend``, ``ambiguous-backend``,
            ``missing-package`` and ``broken-backend``.
    """
    return cast(Backend, _load("backend", name))


def _load(kind: _Kind, name: str) -> Any:
    entry_point = _find(kind, name)
    try:
        return entry_point.load()()
    except ModuleNotFoundError as error:
        raise BadInputError(_missing_package(kind, entry_point, error), reason="missing-package") from error
    except (ImportError, AttributeError, TypeError) as error:
        message = f"{kind} {name!r} ({entry_point.value}) cannot be used: {error}"
        raise BadInputError(message, reason=f"broken-{kind}") from error


def _find(kind: _Kind, name: str) -> EntryPoint:
    known = importlib.metadata.entry_points(group=f"graphkiln.{kind}s")
    refuse_unknown([name], known.names, what=kind, reason=f"unknown-{kind}", listed=True)
    found = {entry_point.value: entry_point for entry_point in known.select(name=name)}
    if len(found) > 1:
        # Taking the first would let the order of sys.path choose the compiler.
        message = f"{kind} {name!r} is registered by more than one package: {', '.join(sorted(found))}; uninstall one"
        raise BadInputError(message, reason=f"ambiguous-{kind}")
    return next(iter(found.values()))


def _missing_package(kind: _Kind, entry_point: EntryPoint, error: ModuleNotFoundError) -> str:
    module = error.name or str(error)
    package = module.partition(".")[0]
    message = f"{kind} {entry_point.name!r} needs {module!r}, which is not installed"
    distribution = entry_point.dist
    if distribution is not None and package in (distribution.metadata.get_all("Provides-Extra") or ()):
        return f"{message}; install it with: pip install '{distribution.name}[{package}]'"
    return f"{message}; install the package that provides it"
