"""The `xla` backend: compiles exported JAX programs with XLA, for host CPUs and for TPU slices that are elsewhere.

Options of a target:

- `platform`: ``"cpu"`` or ``"tpu"``.
- `devices` (cpu): how many virtual devices the program runs on; 1 unless told otherwise.
- `topology` (tpu): the slice, such as ``"v5e:4x4"``; its devices are taken in the order of their ids.
- `effort`: ``"default"``, or ``"O0"`` (compiles fastest) to ``"O3"``.
- `isa` (cpu): the newest instruction set to use, so that more hosts share an artifact.
- `compiler_options`: table of further XLA options.
"""

import difflib
import platform as host_platform
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from graphkiln.storage.canonical import Json, canonical_json
from graphkiln.storage.errors import BadInputError
from graphkiln.storage.keys import KeyPart
from graphkiln.tasks.backends.xla_toolchain import VARIABLE, check_toolchain, toolchain_parts, toolchain_variable
from graphkiln.tasks.contracts import CompileRequest, Resolution
from graphkiln.tasks.fingerprints import cpu_features
from graphkiln.tasks.jax_contract import PAYLOAD_FORMAT

_OPTIONS = {
    "cpu": ("platform", "devices", "effort", "isa", "compiler_options"),
    "tpu": ("platform", "topology", "effort", "compiler_options"),
}
_EFFORTS = ("default", "O0", "O1", "O2", "O3")
# The CPU flags that each choice of `isa` forbids, as prefixes. XLA leaves all others on, so they stay in the key.
_RULED_OUT = {
    "SSE4_2": ("avx", "amx", "fma", "f16c", "vaes", "vpclmulqdq"),
    "AVX2": ("avx512", "amx"),
    "AVX512": ("avx512_vnni", "avx512_bf16", "amx"),
}
# Options of ours under XLA's own names: one thing, one way to say it.
_OWN_NAMES = {
    "optimization_level": "effort",
    "exec_time_optimization_effort": "effort",
    "xla_cpu_max_isa": "isa",
}


class XlaBackend:
    """Backend for payloads of the `jax` frontend; the module's text lists its options."""

    name: ClassVar[str] = "xla"
    payload_formats: ClassVar[frozenset[str]] = frozenset({PAYLOAD_FORMAT})

    def resolve(self, options: Mapping[str, Json]) -> Resolution:
        """Check the options of a target, and add for `cpu` what the code depends on of this host's CPU.

        Without `isa` that is its model and all its flags. With `isa` it is the flags which that leaves on: hosts
        that differ in the model, or in what is ruled out, share artifacts.

        Raises:
            BadInputError: an option is unknown, missing, or has a wrong type or value.
        """
        platform = _one_of("platform", options.get("platform"), tuple(_OPTIONS))
        for name in options:
            if name not in _OPTIONS[platform]:
                raise BadInputError(_unknown_option(name, platform), reason="unknown-option")
        settings: dict[str, Json] = {
            "platform": platform,
            "effort": _one_of("effort", options.get("effort", "default"), _EFFORTS),
            "compiler_options": _checked_compiler_options(options.get("compiler_options", {})),
        }
        if platform == "cpu":
            settings["devices"] = _checked_devices(options.get("devices", 1))
            settings["isa"] = _checked_isa(options.get("isa"))
            settings["cpu"] = _cpu_settings(options.get("isa"))
        else:
            settings["topology"] = _checked_topology(options.get("topology"))
        return Resolution(platform=platform, settings=settings)

    def fingerprint(self, settings: Mapping[str, Json]) -> Sequence[KeyPart]:
        """Return the versions and digests of jax, jaxlib and, for `tpu`, libtpu, which holds the compiler.

        Raises:
            BadInputError: one of them is not installed.
        """
        return toolchain_parts(settings)

    def environment(self, settings: Mapping[str, Json]) -> Mapping[str, str]:
        """Return what makes JAX compile for the target, with no cache of its own and no question to the network."""
        variables = {
            # TPU slices are compiled for from their description, without a TPU.
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "XLA_FLAGS": " ".join(_xla_flags(settings)),
            VARIABLE: toolchain_variable(settings),
        }
        if settings["platform"] == "tpu":
            variables |= {
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                # libtpu would ask the cloud's metadata server what TPU this host has. The answers go into no
                # executable: the slice comes from the topology.
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_ACCELERATOR_TYPE": "v5litepod-16",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_WORKER_ID": "0",
                "TPU_LOG_DIR": "disabled",
            }
        return variables

    def compile(self, request: CompileRequest) -> Mapping[str, bytes]:
        """Return the outputs ``executable`` (XLA's serialized form) and ``contract`` (what `load` needs beside it).

        Raises:
            BadInputError: the payload is damaged, or for another platform or number of devices; or the compiler that
                is found here is not the one in the key.
            jax.errors.JaxRuntimeError: XLA's own message.
        """
        from graphkiln.tasks.backends.xla_compile import compile_payload

        check_toolchain(request.settings)
        return compile_payload(request.payload, request.settings)

    def load(self, settings: Mapping[str, Json], outputs: Mapping[str, bytes], devices: Sequence[Any] | None) -> Any:
        """Return a `jax.stages.Compiled`, which is called like the original function.

        Args:
            settings: the target's.
            outputs: what `compile` returned.
            devices: as many devices as the program was compiled for; None takes the first of `jax.devices()`.

        Raises:
            BadInputError: this host has no such CPU or no TPU, or `devices` do not suit the artifact.
        """
        from graphkiln.tasks.backends.xla_load import load_executable

        if settings["platform"] == "cpu" and settings["cpu"] != _cpu_settings(settings["isa"]):
            raise BadInputError(
                "the artifact was compiled for another CPU, and could crash on this one: compile it here, or give "
                "the target an `isa` that both have",
                reason="other-cpu",
            )
        return load_executable(str(settings["platform"]), outputs, devices)


def _xla_flags(settings: Mapping[str, Json]) -> list[str]:
    flags = []
    if settings["platform"] == "cpu":
        flags.append(f"--xla_force_host_platform_device_count={settings['devices']}")
        if settings["isa"] is not None:
            # As an option of one compile it is ignored: XLA reads it when the process starts.
            flags.append(f"--xla_cpu_max_isa={settings['isa']}")
    return flags


def _cpu_settings(isa: Json) -> dict[str, Json]:
    features = cpu_features()
    if not isinstance(isa, str):
        return {**features}
    flags = features.get("flags", "").split()
    left = [flag for flag in flags if not flag.startswith(_RULED_OUT[isa])]
    return {"machine": features["machine"], "flags": " ".join(left)}


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"it knows {', '.join(known)}"


def _unknown_option(name: str, platform: str) -> str:
    others = [other for other, names in _OPTIONS.items() if other != platform and name in names]
    if others:
        return f"the option {name} is for platform {others[0]}, not for {platform}"
    return f"the xla backend has no option {name}: {_did_you_mean(name, _OPTIONS[platform])}"


def _bad_option(name: str, what: str) -> BadInputError:
    return BadInputError(f"option {name} of the xla backend: {what}", reason="bad-option")


def _one_of(name: str, value: Json, choices: Sequence[str]) -> str:
    if value is None:
        raise _bad_option(name, f"missing; give one of {', '.join(choices)}")
    if not isinstance(value, str):
        raise _bad_option(name, f"{value!r} is not text; give one of {', '.join(choices)}")
    if value not in choices:
        raise _bad_option(name, f"unknown value {value!r}: {_did_you_mean(value, choices)}")
    return value


def _checked_devices(value: Json) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _bad_option("devices", f"{value!r} is not a whole number from 1")
    return value


def _checked_topology(value: Json) -> str:
    if value is None:
        raise _bad_option("topology", "missing; give the slice to compile for, such as 'v5e:4x4'")
    if not isinstance(value, str) or not value:
        raise _bad_option("topology", f"{value!r} is not the name of a slice, such as 'v5e:4x4'")
    return value


def _checked_isa(value: Json) -> str | None:
    if value is None:
        return None
    if host_platform.machine() != "x86_64":
        raise _bad_option("isa", f"it is only known for x86_64, and this host is {host_platform.machine()}")
    return _one_of("isa", value, tuple(_RULED_OUT))


def _checked_compiler_options(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise _bad_option("compiler_options", f"{value!r} is not a table")
    for name, setting in value.items():
        if name in _OWN_NAMES:
            raise _bad_option("compiler_options", f"{name} is what the option {_OWN_NAMES[name]} sets")
        if not isinstance(setting, bool | int | float | str):
            raise _bad_option("compiler_options", f"{name} is {setting!r}, not a text, a number, true or false")
    try:
        canonical_json(value)
    except ValueError as error:
        raise _bad_option("compiler_options", str(error)) from error
    return dict(value)
