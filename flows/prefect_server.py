"""Finding out whether a Prefect server is configured, without the cost of importing Prefect."""

import os
import tomllib
from pathlib import Path

_SETTING = "PREFECT_API_URL"


def server_configured() -> bool:
    """Tell whether Prefect would talk to a server rather than start one of its own.

    Reads what Prefect reads: the environment, and the active profile in ``profiles.toml``.
    """
    if os.environ.get(_SETTING):
        return True
    home = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()
    path = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml").expanduser()
    try:
        profiles = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # Prefect too goes on without profiles that it cannot read
    active = os.environ.get("PREFECT_PROFILE") or profiles.get("active")
    return bool(profiles.get("profiles", {}).get(active, {}).get(_SETTING))
