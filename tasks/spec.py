"""What users write: a network, its parameters and its targets, as TOML or as a `NetworkSpec`."""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from graphkiln.storage import layout
from graphkiln.storage.canonical import Json, canonical_json
from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.checks import refuse_unknown

_GIB = 1024**3
_NETWORK_KEYS = ("name", "frontend", "entrypoint")


class TargetSpec(BaseModel):
    """What to compile for. Every key besides `backend` is an option of that backend, which checks it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    backend: str = Field(description="Name of the backend, such as xla or command.")

    @property
    def options(self) -> dict[str, Json]:
        """The backend's options."""
        return dict(self.model_extra or {})


class LimitsSpec(BaseModel):
    """What a child process may use. Limits are no part of any key: they decide whether, not what."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parse_seconds: float = Field(
        default=3600, gt=0, allow_inf_nan=False, description="Wall time of a frontend run, in seconds."
    )
    compile_seconds: float = Field(
        default=6 * 3600, gt=0, allow_inf_nan=False, description="Wall time of one compile, in seconds."
    )
    lease_seconds: float = Field(
        default=30,
        ge=1,
        le=3600,
        allow_inf_nan=False,
        description="How long runs that wait for another's compile wait after its last sign of life.",
    )
    memory_gib: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Resident memory of one child's process tree, in GiB; unset, nine tenths of the host's.",
    )

    def memory_bytes(self) -> int:
        """Return the limit on resident memory, in bytes."""
        if self.memory_gib is not None:
            return math.ceil(self.memory_gib * _GIB)
        import psutil

        return int(psutil.virtual_memory().total * 0.9)


class NetworkSpec(BaseModel):
    """A network to compile. Relative paths in it start from `folder`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="Name of the network in the store.")
    frontend: str = Field(description="Name of the frontend, such as jax or file.")
    entrypoint: str = Field(description="What the frontend reads, such as network.py:programs.")
    parameters: dict[str, Any] = Field(default_factory=dict, description="The network's parameters.")
    targets: dict[str, TargetSpec] = Field(min_length=1, description="Targets by name; the first is the default.")
    limits: LimitsSpec = Field(default_factory=LimitsSpec, description="Limits of the child processes.")
    folder: str = Field(default=".", description="Where relative paths start from.")

    @field_validator("name")
    @classmethod
    def _name_is_a_path_part(cls, name: str) -> str:
        return layout.check_name("network", name)

    @field_validator("targets")
    @classmethod
    def _target_names_are_path_parts(cls, targets: dict[str, TargetSpec]) -> dict[str, TargetSpec]:
        for name in targets:
            layout.check_name("target", name)
        return targets

    @field_validator("parameters")
    @classmethod
    def _parameters_are_json(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        canonical_json(parameters)
        return parameters

    def target(self, name: str | None) -> tuple[str, TargetSpec]:
        """Return the target of that name with the name, or the first one if None.

        Raises:
            BadInputError: there is no such target.
        """
        if name is None:
            return next(iter(self.targets.items()))
        refuse_unknown([name], self.targets, what=f"target of network {self.name}", reason="unknown-target")
        return name, self.targets[name]

    def merged_parameters(self, overrides: Mapping[str, Json]) -> dict[str, Json]:
        """Return the parameters with `overrides` over them.

        Raises:
            BadInputError: an override names no parameter of the spec, or has another type.
        """
        refuse_unknown(overrides, self.parameters, what=f"parameter of network {self.name}", reason="unknown-parameter")
        given = {name: _like(name, self.parameters[name], value) for name, value in overrides.items()}
        return {**self.parameters, **given}


def load_spec(path: str | Path) -> NetworkSpec:
    """Read a spec from a TOML file.

    Raises:
        BadInputError: it is missing, not TOML, or not a spec; the message says where.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BadInputError(f"there is no spec {path}", reason="spec-missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"the spec {path} cannot be read: {error}", reason="spec-unreadable") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"{path} is not TOML: {error}", reason="spec-syntax") from error
    network = document.pop("network", None)
    if not isinstance(network, dict):
        raise BadInputError(f"{path} has no [network] table", reason="spec-invalid")
    try:
        return NetworkSpec.model_validate({**document, **network, "folder": str(path.absolute().parent)})
    except ValidationError as error:
        raise BadInputError(f"{path}: {_first_mistake(error, network)}", reason="spec-invalid") from error
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}", reason=error.reason) from error


def parse_assignment(text: str) -> tuple[str, Json]:
    """Read ``key=value`` from a command line; the value is TOML, or else text as it stands.

    Raises:
        BadInputError: there is no ``=`` or no key.
    """
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise BadInputError(f"{text!r} is not of the form key=value", reason="bad-assignment")
    try:
        found = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        found = {}
    return name.strip(), found["value"] if list(found) == ["value"] else value


def _like(name: str, default: Json, value: Json) -> Json:
    """Return a parameter's value as the type of the spec's: 1 for a number with a point is the same as 1.0."""
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(default) and default is not None:
        raise BadInputError(
            f"parameter {name} is a {type(default).__name__} in the spec ({default!r}), and {value!r} is not",
            reason="parameter-type",
        )
    return check_json(f"parameter {name}", value)


def check_json(what: str, value: Json) -> Json:
    """Return a value that documents can hold.

    Raises:
        BadInputError: it is none: not a number, infinite, a date, a whole number of more than 64 bits.
    """
    try:
        canonical_json(value)
    except ValueError as error:
        raise BadInputError(f"{what}: {value!r} {error}", reason="bad-value") from error
    return value


def _first_mistake(error: ValidationError, network: Mapping[str, object]) -> str:
    # A misspelt key also makes the right one missing, so it is named first.
    mistakes = sorted(error.errors(include_url=False), key=lambda mistake: mistake["type"] != "extra_forbidden")
    first = mistakes[0]
    place = [str(item) for item in first["loc"]]
    if first["type"] == "extra_forbidden":
        fields = LimitsSpec.model_fields if place[0] == "limits" else NetworkSpec.model_fields
        try:
            refuse_unknown([place[-1]], fields, what="key", reason="unknown-key")
        except BadInputError as unknown:
            return str(unknown)
    if place and (place[0] in network or place[0] in _NETWORK_KEYS):
        place.insert(0, "network")
    more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
    return f"{'.'.join(place)}: {first['msg'].removeprefix('Value error, ')}{more}"
