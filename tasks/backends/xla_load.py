"""The half of the `xla` backend that runs in a trainer: outputs in, something to call out. Nothing is traced."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.backends.xla_artifact import (
    CONTRACT,
    EXECUTABLE,
    ArtifactContract,
    Placement,
    decode_contract,
)
from graphkiln.tasks.jax_contract import MODULE_NAME, decode_tree, decode_type

# Stands in an XLA:CPU executable that calls LAPACK, as the start of the kernel's name.
_LAPACK_CALL = b"lapack_"


def load_executable(platform: str, outputs: Mapping[str, bytes], devices: Sequence[Any] | None) -> Any:
    """Return a `jax.stages.Compiled` bound to `devices`, or to the first of this platform.

    Raises:
        BadInputError: there is no such device here, or `devices` are too few, too many or of another platform.
    """
    contract = decode_contract(outputs[CONTRACT])
    bound = _checked_devices(platform, contract.call.devices, devices)
    return _compiled(contract, outputs[EXECUTABLE], bound)


def _checked_devices(platform: str, count: int, devices: Sequence[Any] | None) -> tuple[Any, ...]:
    import jax

    if devices is None:
        try:
            found = jax.devices(platform)
        except RuntimeError as error:
            raise BadInputError(f"this host has no {platform} device: {error}", reason="no-such-device") from error
        if len(found) < count:
            remedy = (
                f": set XLA_FLAGS=--xla_force_host_platform_device_count={count} before JAX starts"
                if platform == "cpu"
                else ""
            )
            raise BadInputError(
                f"the artifact needs {count} {platform} devices, and JAX has {len(found)} here{remedy}",
                reason="too-few-devices",
            )
        return tuple(sorted(found, key=lambda device: device.id)[:count])
    if len(devices) != count or len(set(devices)) != count:
        raise BadInputError(
            f"the artifact runs on {count} different devices, and {len(devices)} were given",
            reason="device-count-mismatch",
        )
    others = sorted({device.platform for device in devices} - {platform})
    if others:
        raise BadInputError(
            f"the artifact runs on {platform}, and the devices given are of {', '.join(others)}",
            reason="platform-mismatch",
        )
    return tuple(devices)


def _compiled(contract: ArtifactContract, executable: bytes, devices: tuple[Any, ...]) -> Any:
    """Put together what JAX itself makes after a compile.

    In public, only `jax.experimental.serialize_executable` does this: it unpickles, and for no other devices than
    were compiled for. Internals of JAX are named only here and in the functions that this one calls.
    """
    import jax
    from jax._src.interpreters import pxla

    call = contract.call
    arguments = decode_tree(call.arguments)
    types = [decode_type(argument) for argument in call.argument_types]
    placements = [_sharding(placement, devices) for placement in contract.placements]
    fields = {
        "xla_executable": _deserialized(executable, devices),
        "device_list": _device_list(devices),
        "backend": devices[0].client,
        "input_avals": [types[position] for position in call.kept],
        "input_shardings": [placements[index] for index in contract.arguments],
        "output_avals": [decode_type(result) for result in call.result_types],
        "output_shardings": [placements[index] for index in contract.results],
        "committed": True,
        "name": MODULE_NAME,
        "kept_var_idx": set(call.kept),
        # The frontend refuses layouts other than the default ones, for which None stands.
        "xla_in_layouts": [None] * len(call.kept),
        "dispatch_in_layouts": [None] * len(call.kept),
        "xla_out_layouts": [None] * len(call.result_types),
        "all_args_info": _named_arguments(arguments, types),
        # The frontend refuses side effects, callbacks and mutable references.
        "unordered_effects": [],
        "ordered_effects": [],
        "keepalive": (),
        "host_callbacks": (),
        "mut": None,
        "pgle_profiler": None,
    }
    _check_known(pxla.UnloadedMeshExecutable, fields)
    info = [jax.stages.ArgInfo(kind, position in call.donated) for position, kind in enumerate(types)]
    loaded = pxla.UnloadedMeshExecutable(**fields).load()
    return jax.stages.Compiled(loaded, [], arguments.unflatten(info), decode_tree(call.results))


def _check_known(kind: Any, fields: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(kind)}
    if known != fields.keys():
        import jax

        raise BadInputError(
            f"jax {jax.__version__} keeps its executables in a form that this version of graphkiln does not know "
            f"({', '.join(sorted(known ^ fields.keys()))}): install another version of either",
            reason="unknown-jax-version",
        )


def _named_arguments(arguments: Any, types: Sequence[Any]) -> Any:
    """Return the types with what error messages call each argument: ``[0]['w']`` for the ``w`` of the first."""
    import jax
    from jax._src import core
    from jax._src.interpreters import pxla

    paths, _ = jax.tree_util.tree_flatten_with_path(arguments.unflatten(range(len(types))))
    # The first step of a path only chooses between (args, kwargs).
    names = tuple(jax.tree_util.keystr(path[1:]) for path, _ in paths)
    return pxla.AllArgsInfo(types, core.DebugInfo(MODULE_NAME, "<compiled>", names, None))


def _device_list(devices: tuple[Any, ...]) -> Any:
    from jax._src.lib import xla_client

    return xla_client.DeviceList(devices)


def _deserialized(executable: bytes, devices: tuple[Any, ...]) -> Any:
    """Return XLA's executable for `devices`. Without the device assignment it runs only where it was compiled for."""
    import numpy as np
    from jax._src.lax import linalg
    from jax._src.lib import xla_client

    if _LAPACK_CALL in executable:
        # Lowering does this otherwise; without it the program calls through null pointers.
        linalg.initialize_lapack()
    options = xla_client.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = len(devices)
    options.executable_build_options.use_spmd_partitioning = True
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    return devices[0].client.deserialize_executable(executable, _device_list(devices), options)


def _sharding(placement: Placement, devices: tuple[Any, ...]) -> Any:
    import jax
    import numpy as np

    if not placement.names:
        return jax.sharding.SingleDeviceSharding(devices[0], memory_kind=placement.memory)
    mesh = jax.sharding.Mesh(
        np.array(devices).reshape(placement.sizes),
        placement.names,
        axis_types=tuple(jax.sharding.AxisType[kind] for kind in placement.types),
    )
    spec = jax.sharding.PartitionSpec(*(axes or None for axes in placement.split))
    return jax.sharding.NamedSharding(mesh, spec, memory_kind=placement.memory)
