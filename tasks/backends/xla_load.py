"""The half of the `xla` backend that runs in a trainer: outputs in, something to call out. Nothing is traced."""

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
from graphkiln.tasks.jax_contract import CallContract, decode_tree, decode_type


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

    Only `jax.experimental.serialize_executable` does this in public, by unpickling, and only for the devices that
    were compiled for. The internals are named in this function and nowhere else; a version of JAX that lacks them
    fails here, before anything runs.
    """
    import jax
    from jax._src.interpreters import pxla
    from jax._src.lib import xla_client

    call = contract.call
    device_list = xla_client.DeviceList(devices)
    argument_types = [decode_type(argument) for argument in call.argument_types]
    placements = [_sharding(placement, devices) for placement in contract.placements]
    unloaded = pxla.UnloadedMeshExecutable(
        xla_executable=devices[0].client.deserialize_executable(
            executable, device_list, _options_for(devices, xla_client)
        ),
        device_list=device_list,
        backend=devices[0].client,
        input_avals=[argument_types[position] for position in call.kept],
        input_shardings=[placements[index] for index in contract.arguments],
        output_avals=[decode_type(result) for result in call.result_types],
        output_shardings=[placements[index] for index in contract.results],
        committed=True,
        name="kernel_graph",
        unordered_effects=[],
        ordered_effects=[],
        keepalive=(),
        host_callbacks=(),
        kept_var_idx=set(call.kept),
        mut=None,
        # The frontend refuses layouts other than the default ones, for which None stands.
        xla_in_layouts=[None] * len(call.kept),
        dispatch_in_layouts=[None] * len(call.kept),
        xla_out_layouts=[None] * len(call.result_types),
        all_args_info=None,
        pgle_profiler=None,
    )
    return jax.stages.Compiled(
        unloaded.load(), [], _arguments_info(call, argument_types), decode_tree(call.results), no_kwargs=False
    )


def _options_for(devices: tuple[Any, ...], xla_client: Any) -> Any:
    # Without a device assignment an executable runs only on the ids that it was compiled for.
    import numpy as np

    options = xla_client.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = len(devices)
    options.executable_build_options.use_spmd_partitioning = True
    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    return options


def _arguments_info(call: CallContract, types: Sequence[Any]) -> Any:
    import jax

    donated = set(call.donated)
    return jax.tree_util.tree_unflatten(
        decode_tree(call.arguments),
        [jax.stages.ArgInfo(argument, position in donated) for position, argument in enumerate(types)],
    )


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
