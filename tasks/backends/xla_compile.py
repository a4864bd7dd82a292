"""The half of the `xla` backend that runs in a compile child: payload in, serialized executable out."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

from graphkiln.storage.canonical import Json
from graphkiln.storage.errors import BadInputError
from graphkiln.tasks.backends.xla_artifact import CONTRACT, EXECUTABLE, encode_contract
from graphkiln.tasks.jax_contract import MODULE_NAME, CallContract, decode_payload, strip_module

# XLA's numbers for its effort levels; JAX hands them on under one name in all its versions, but takes their names
# only in newer ones.
_EFFORT_LEVELS = {"O0": 9, "O1": 19, "O2": 29, "O3": 39}


def compile_payload(payload: bytes, settings: Mapping[str, Json]) -> dict[str, bytes]:
    """Compile a payload for a target.

    Raises:
        BadInputError: the payload is damaged, or for another platform or number of devices; or the topology is
            unknown.
        jax.errors.JaxRuntimeError: XLA's own message.
    """
    import jax
    from jax import export

    call, serialized = decode_payload(payload)
    devices = _devices(settings)
    _check_suits(call, settings, len(devices))
    # Without this, 64-bit arguments would silently become 32-bit ones.
    with jax.enable_x64(True):  # noqa: FBT003
        lowered = _lower(call, export.deserialize(bytearray(serialized)), devices)
    try:
        compiled = lowered.compile(compiler_options=_compiler_options(settings))
    finally:
        # A compile child lives for many programs, and JAX would keep them all.
        jax.clear_caches()
    arguments, _ = compiled.input_shardings
    contract = encode_contract(call, arguments, compiled.output_shardings)
    return {EXECUTABLE: bytes(compiled.runtime_executable().serialize()), CONTRACT: contract}


def _devices(settings: Mapping[str, Json]) -> tuple[Any, ...]:
    if settings["platform"] == "tpu":
        return _topology_devices(str(settings["topology"]))
    import jax

    flag = f"--xla_cpu_max_isa={settings['isa']}"
    if settings["isa"] is not None and flag not in os.environ.get("XLA_FLAGS", "").split():
        raise RuntimeError(f"this process was started without {flag} in XLA_FLAGS, and XLA reads it only then")
    count = int(settings["devices"])  # type: ignore[arg-type]
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise RuntimeError(f"this process was started with {len(devices)} CPU devices, and the target has {count}")
    return tuple(devices[:count])


def _topology_devices(name: str) -> tuple[Any, ...]:
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(name, platform="tpu").devices
    except Exception as error:  # what libtpu raises differs between versions
        raise BadInputError(
            f"libtpu does not know the topology {name!r} (one that it knows is 'v5e:4x4'): {error}",
            reason="unknown-topology",
        ) from error
    return tuple(sorted(found, key=lambda device: device.id))


def _check_suits(call: CallContract, settings: Mapping[str, Json], devices: int) -> None:
    if call.platform != settings["platform"]:
        raise BadInputError(
            f"the program is lowered for {call.platform}, and the target is {settings['platform']}",
            reason="platform-mismatch",
        )
    if call.devices == devices:
        return
    target = f"the topology {settings['topology']}" if "topology" in settings else "the target"
    # What has no sharding at all is lowered for one device, whatever it does inside.
    hint = "; give its arguments or results a NamedSharding on a mesh of that size" if call.devices == 1 else ""
    raise BadInputError(
        f"the program is made for {_counted(call.devices)}, and {target} has {_counted(devices)}{hint}",
        reason="device-count-mismatch",
    )


def _counted(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"


def _lower(call: CallContract, exported: Any, devices: tuple[Any, ...]) -> Any:
    """Return the exported program as a `jax.stages.Lowered` on `devices` that takes its kept arguments only."""
    import jax

    def kernel_graph(*kept: Any) -> Any:
        given = dict(zip(call.kept, kept, strict=True))
        # The module does not take what it does not keep, so that these zeros are never made.
        return exported.call(
            *(
                given[position] if position in given else jax.lax.full(aval.shape, 0, aval.dtype)
                for position, aval in enumerate(exported.in_avals)
            )
        )

    kernel_graph.__name__ = MODULE_NAME
    shardings = exported.in_shardings_jax(None)
    arguments = [
        jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, sharding=_on_devices(shardings[position], devices), weak_type=aval.weak_type
        )
        for position, aval in enumerate(exported.in_avals)
        if position in set(call.kept)
    ]
    jitted = jax.jit(
        kernel_graph,
        donate_argnums=tuple(index for index, position in enumerate(call.kept) if position in set(call.donated)),
        out_shardings=tuple(_on_devices(sharding, devices) for sharding in exported.out_shardings_jax(None)),
        keep_unused=True,
    )
    with warnings.catch_warnings():
        # That a donated buffer is of no use was said when the network was parsed.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        lowered = jitted.trace(*arguments).lower(lowering_platforms=(call.platform,))
    # Else the paths of this installation would stand in the executable.
    strip_module(lowered.compiler_ir("stablehlo"))
    return lowered


def _on_devices(sharding: Any, devices: tuple[Any, ...]) -> Any:
    """Return the sharding with `devices`, in their order, instead of its abstract mesh."""
    import jax
    import numpy as np

    if len(devices) == 1 and (sharding is None or sharding.mesh.empty):
        memory = None if sharding is None else sharding.memory_kind
        return jax.sharding.SingleDeviceSharding(devices[0], memory_kind=memory)
    if sharding is None:
        return None
    mesh = jax.sharding.Mesh(
        np.array(devices).reshape(sharding.mesh.axis_sizes),
        sharding.mesh.axis_names,
        axis_types=sharding.mesh.axis_types,
    )
    return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _compiler_options(settings: Mapping[str, Json]) -> dict[str, Any]:
    options: dict[str, Any] = dict(settings["compiler_options"])  # type: ignore[arg-type]
    effort = str(settings["effort"])
    if effort != "default":
        options["optimization_level"] = _EFFORT_LEVELS[effort]
    return options
