"""From what the user wrote to one variant: adapters found, target resolved, toolchain fingerprinted."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphkiln.storage.canonical import Json
from graphkiln.storage.digests import Digest
from graphkiln.storage.keys import KeyPart
from graphkiln.storage.plans import toolchain, variant_digest
from graphkiln.storage.records import NetworkRecord, TargetRecord
from graphkiln.tasks.contracts import Backend, ParseRequest
from graphkiln.tasks.registry import load_backend, load_frontend
from graphkiln.tasks.spec import LimitsSpec, NetworkSpec, check_json, load_spec


@dataclass(frozen=True)
class ResolvedNetwork:
    """One network for one target, known down to its variant, before anything runs.

    Attributes:
        network: the network, with its parameters.
        target: the target, with its options resolved on this host.
        toolchain: fingerprints of frontend and backend.
        variant: digest of the parameters, the target and the toolchain.
        backend: the backend's adapter.
        limits: what the child processes may use.
        folder: where relative paths of the spec start from.
    """

    network: NetworkRecord
    target: TargetRecord
    toolchain: tuple[KeyPart, ...]
    variant: Digest
    backend: Backend
    limits: LimitsSpec
    folder: str

    @property
    def title(self) -> str:
        """How messages call this variant: network, target and the start of the variant."""
        return f"{self.network.name} for {self.target.name} (variant {self.variant[:12]})"

    def parse_request(self) -> ParseRequest:
        """Return what the frontend gets."""
        return ParseRequest(
            network=self.network.name,
            folder=self.folder,
            entrypoint=self.network.entrypoint,
            parameters=self.network.parameters,
            platform=self.target.platform,
        )


def resolve(
    spec: NetworkSpec | str | Path, target: str | None = None, parameters: Mapping[str, Json] | None = None
) -> ResolvedNetwork:
    """Resolve one network for one target. Imports no framework and runs no user code.

    Args:
        spec: a `NetworkSpec`, or the path of one in TOML.
        target: one of the spec's targets; the first if None.
        parameters: what to set over the spec's parameters.

    Raises:
        BadInputError: something in the spec, the target or the parameters is wrong, or not installed.
    """
    if not isinstance(spec, NetworkSpec):
        spec = load_spec(spec)
    target_name, target_spec = spec.target(target)
    merged = spec.merged_parameters(parameters or {})
    frontend = load_frontend(spec.frontend)
    backend = load_backend(target_spec.backend)
    for name, value in target_spec.options.items():
        check_json(f"option {name} of target {target_name}", value)
    network = NetworkRecord(
        name=spec.name,
        frontend=spec.frontend,
        entrypoint=spec.entrypoint,
        defaults=dict(spec.parameters),
        parameters=merged,
    )
    record = resolve_target(backend, target_name, target_spec.backend, target_spec.options)
    tools = toolchain(frontend.fingerprint(), backend.fingerprint(record.settings))
    return ResolvedNetwork(
        network=network,
        target=record,
        toolchain=tools,
        variant=variant_digest(network, record, tools),
        backend=backend,
        limits=spec.limits,
        folder=str(Path(spec.folder).absolute()),
    )


def resolve_target(backend: Backend, name: str, backend_name: str, options: Mapping[str, Json]) -> TargetRecord:
    """Return the target as the backend understands its options on this host.

    Raises:
        BadInputError: an option is wrong.
    """
    resolution = backend.resolve(options)
    return TargetRecord(
        name=name,
        backend=backend_name,
        options=dict(options),
        platform=resolution.platform,
        settings=resolution.settings,
    )
