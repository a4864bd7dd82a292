"""Finding out whether a Prefect server is configured, without the cost of importing Prefect."""

import importlib.util
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphkiln.storage.errors import BadInputError

if TYPE_CHECKING:
    from graphkiln.tasks.session import CompileSession

_SETTING = "PREFECT_API_URL"
_PROFILES = "profiles.toml"


def server_configured() -> bool:
    """Tell whether Prefect would talk to a server rather than start one of its own.

    Reads what Prefect reads, and lets the same source win: the environment; ``.env``, ``prefect.toml`` and
    ``pyproject.toml`` in the working directory; and the active profile. A setting that is there but empty counts as
    Prefect counts it: no server, whatever the sources below it say.

    Raises:
        BadInputError: one of these files is not TOML; Prefect does not start with such a file.
    """
    settings = _read_toml(Path("prefect.toml"))
    project = _table(_read_toml(Path("pyproject.toml")), "tool", "prefect")
    dotenv = _dotenv()
    profiles_path = (
        os.environ.get("PREFECT_PROFILES_PATH")
        or dotenv.get("PREFECT_PROFILES_PATH")
        or settings.get("profiles_path")
        or project.get("profiles_path")
    )
    sources = (
        os.environ.get(_SETTING),
        dotenv.get(_SETTING),
        _table(settings, "api").get("url"),
        _table(project, "api").get("url"),
        _active_profile(Path(profiles_path) if profiles_path else _default_profiles()).get(_SETTING),
    )
    return bool(next((url for url in sources if url is not None), None))


def import_flow() -> "Callable[[CompileSession, int], bool]":
    """Import Prefect, and return `graphkiln.flows.compile_network.run_as_flow`.

    Raises:
        BadInputError: Prefect does not accept its settings.
    """
    try:
        from graphkiln.flows.compile_network import run_as_flow
    except (OSError, ValueError) as error:  # what reading and checking its settings raises
        told = " ".join(str(error).split())
        raise BadInputError(f"Prefect does not accept its settings: {told}", reason="prefect-settings") from error
    return run_as_flow


def _dotenv() -> dict[str, str | None]:
    path = Path(".env")
    if not path.is_file():
        return {}
    # What Prefect itself reads the file with, and installs.
    from dotenv import dotenv_values

    return dotenv_values(path)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"Prefect's settings in {path} cannot be read: {error}", reason="prefect-settings"
        ) from error


def _default_profiles() -> Path:
    if home := os.environ.get("PREFECT_HOME"):
        return Path(home) / _PROFILES
    try:
        path = Path.home() / ".prefect" / _PROFILES
    except RuntimeError:  # a user without a home, as in some containers, has no profiles either
        path = Path(_PROFILES)
    if path.exists():
        return path
    # The profiles that come with Prefect. Finding the package does not import it.
    package = importlib.util.find_spec("prefect")
    return Path(package.origin).parent / "settings" / _PROFILES if package and package.origin else path


def _active_profile(path: Path) -> dict[str, Any]:
    document = _read_toml(path)
    active = os.environ.get("PREFECT_PROFILE") or document.get("active")
    return _table(document, "profiles", str(active))


def _table(document: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return a table of a TOML document, which is empty if it is not there."""
    for name in names:
        found = document.get(name)
        document = found if isinstance(found, dict) else {}
    return document
