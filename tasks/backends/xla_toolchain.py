"""Ties the compiler that a compile child imports to the one whose fingerprint is in the key.

The process that plans has another `sys.path` than the child that compiles: where two versions are installed, each
could find another one.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from graphkiln.storage.canonical import Json, canonical_json
from graphkiln.storage.errors import BadInputError
from graphkiln.storage.keys import KeyPart
from graphkiln.tasks.fingerprints import distribution_parts

VARIABLE = "GRAPHKILN_XLA_TOOLCHAIN"


def toolchain_parts(settings: Mapping[str, Json]) -> Sequence[KeyPart]:
    """Return the versions and digests of the distributions that compile for these settings.

    Raises:
        BadInputError: one of them is not installed.
    """
    names, extra = _distributions(settings)
    return [part for name in names for part in distribution_parts(name, extra=extra)]


def toolchain_variable(settings: Mapping[str, Json]) -> str:
    """Return what `VARIABLE` is to be in a compile child: `toolchain_parts` as this process finds them."""
    return canonical_json({part.name: part.value for part in toolchain_parts(settings)}).decode()


def check_toolchain(settings: Mapping[str, Json]) -> None:
    """Import what compiles, and refuse it if it is not what the key says.

    Raises:
        BadInputError: a module lies somewhere else than its distribution is installed, or a distribution is another
            one than the process that started this one found.
    """
    names, _ = _distributions(settings)
    for name in names:
        _check_place(name)
    expected: dict[str, str] = msgspec.json.decode(os.environ.get(VARIABLE, "{}"))
    for part in toolchain_parts(settings):
        if expected.get(part.name, part.value) != part.value:
            raise _other_toolchain(
                f"{part.name} is {part.value} where kernel graphs are compiled, and {expected[part.name]} where the "
                "key is made"
            )


def _distributions(settings: Mapping[str, Json]) -> tuple[tuple[str, ...], str]:
    return (("jax", "jaxlib", "libtpu"), "tpu") if settings["platform"] == "tpu" else (("jax", "jaxlib"), "jax")


def _check_place(name: str) -> None:
    file = importlib.import_module(name).__file__
    installed = Path(str(metadata.distribution(name).locate_file(f"{name}/__init__.py")))
    if file is None or Path(file).resolve() != installed.resolve():
        raise _other_toolchain(f"the module {name} is {file}, and the installed distribution is {installed}")


def _other_toolchain(what: str) -> BadInputError:
    return BadInputError(
        f"{what}: have one of them only, for example without PYTHONPATH and without editable installs",
        reason="other-toolchain",
    )
