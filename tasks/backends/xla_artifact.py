"""What stands beside a serialized XLA executable: how it is called, and where its arguments and results live.

Plain JSON, made when a program is compiled and read when it is loaded.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from graphkiln.storage.canonical import canonical_json, parse_json
from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.jax_contract import CallContract

EXECUTABLE = "executable"
CONTRACT = "contract"


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where an array lives: a `NamedSharding` on a mesh that takes the artifact's devices in order.

    Attributes:
        names: names of the mesh's axes; none at all stands for an array on a single device, without a mesh.
        sizes: their sizes; the product is the number of devices.
        types: their types: ``"Auto"``, ``"Explicit"`` or ``"Manual"``.
        split: for each dimension of the array, the axes it is split over.
        memory: the kind of memory, or None for the device's own.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    types: tuple[str, ...]
    split: tuple[tuple[str, ...], ...]
    memory: str | None


class ArtifactContract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a compiled program is called.

    Attributes:
        call: the contract of its payload.
        placements: every placement that occurs, once.
        arguments: for each kept argument its index in `placements`.
        results: the same for each result.
    """

    call: CallContract
    placements: tuple[Placement, ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...]


def encode_contract(call: CallContract, arguments: Sequence[Any], results: Sequence[Any]) -> bytes:
    """Return the contract of a compiled program as canonical JSON.

    Args:
        call: the contract of its payload.
        arguments: shardings of the kept arguments, as the compiler settled them.
        results: shardings of the results.

    Raises:
        NotImplementedError: the compiler settled on a sharding that has no mesh, or that cannot be written down.
    """
    index: dict[Placement, int] = {}
    used = [
        [index.setdefault(_placement(sharding), len(index)) for sharding in shardings]
        for shardings in (arguments, results)
    ]
    contract = ArtifactContract(call, tuple(index), tuple(used[0]), tuple(used[1]))
    return canonical_json(msgspec.to_builtins(contract))


def decode_contract(data: bytes) -> ArtifactContract:
    """Return the contract that `encode_contract` wrote.

    Raises:
        BadInputError: the bytes are something else.
    """
    try:
        return msgspec.convert(parse_json(data), ArtifactContract)
    except (ValueError, msgspec.ValidationError) as error:
        raise BadInputError(f"the artifact's contract cannot be read: {error}", reason="bad-contract") from error


def _placement(sharding: Any) -> Placement:
    import jax

    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return Placement((), (), (), (), sharding.memory_kind)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise NotImplementedError(f"the compiler chose {sharding}, which has no mesh: give out_shardings")
    mesh, spec = sharding.mesh, sharding.spec
    if spec.unreduced or spec.reduced:
        raise NotImplementedError(f"{sharding} leaves sums unreduced: reduce them in the program")
    return Placement(
        names=tuple(mesh.axis_names),
        sizes=tuple(mesh.axis_sizes),
        types=tuple(kind.name for kind in mesh.axis_types),
        split=tuple(_axes(entry) for entry in spec),
        memory=sharding.memory_kind,
    )


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple):
        return entry
    raise NotImplementedError(f"the compiler left {entry} in a sharding: give out_shardings")
