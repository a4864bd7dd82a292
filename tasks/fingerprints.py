"""Fingerprints of a toolchain, taken without importing it.

An installed distribution is the digest of its RECORD (which lists the digest of every file), a tool is the
digest of its binary, a CPU is what the operating system says of it.
"""

import platform
import shutil
from importlib import metadata
from pathlib import Path

from graphkiln.storage.digests import Digest, digest_bytes, digest_file
from graphkiln.storage.errors import BadInputError
from graphkiln.storage.keys import KeyPart

_CPU_INFO = Path("/proc/cpuinfo")


def distribution_parts(name: str, *, extra: str) -> list[KeyPart]:
    """Return the version and the digest of the RECORD of an installed distribution.

    Args:
        name: the distribution's name, such as ``"jaxlib"``.
        extra: the extra of graphkiln that installs it, for the error message.

    Raises:
        BadInputError: it is not installed.
    """
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        raise BadInputError(
            f"{name} is not installed: run  pip install 'graphkiln[{extra}]'", reason="extra-not-installed"
        ) from error
    record = distribution.read_text("RECORD")
    parts = [KeyPart.text(f"{name}.version", distribution.version)]
    if record is not None:
        parts.append(KeyPart.digest(f"{name}.record", _record_digest(record)))
    return parts


def _record_digest(record: str) -> Digest:
    # Installers add compiled files and their own notes, which differ from host to host.
    lines = [
        line
        for line in record.splitlines()
        if not (
            ".pyc," in line
            or "/INSTALLER," in line
            or "/REQUESTED," in line
            or "/RECORD," in line
            or "/direct_url.json," in line
            or line.startswith("../")
        )
    ]
    return digest_bytes("\n".join(sorted(lines)).encode())


def tool_parts(command: str) -> list[KeyPart]:
    """Return the digest of the binary that `command` starts.

    Raises:
        BadInputError: there is no such command.
    """
    return [KeyPart.digest(f"{Path(command).name}.binary", digest_file(tool_path(command)))]


def tool_path(command: str) -> Path:
    """Return the absolute path, links resolved, of the binary that `command` starts.

    Raises:
        BadInputError: there is no such command.
    """
    found = shutil.which(command)
    if found is None:
        raise BadInputError(
            f"the command {command!r} is not on PATH: install it, or give its full path",
            reason="tool-not-found",
        )
    return Path(found).resolve()


def cpu_features() -> dict[str, str]:
    """Return the machine type, the model and the digest of the feature flags of this host's CPU.

    Source: ``/proc/cpuinfo`` (`flags` on x86, `Features` on Arm), of the first processor.
    """
    found = {"machine": platform.machine()}
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().split("\n\n", 1)[0].splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                found["flags"] = " ".join(sorted(value.split()))
            elif name.strip() in ("model name", "CPU part"):
                found["model"] = value.strip()
    return found
