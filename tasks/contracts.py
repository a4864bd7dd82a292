"""What a frontend and a backend must offer, and the values that pass between them and the stages.

An adapter is one file that can be copied. It is found by its entry point (`graphkiln.frontends` or
`graphkiln.backends`), and its class is made without arguments. Two of its methods run in the caller's process
and must import no framework: `fingerprint` and `resolve`. The others run where the framework is wanted anyway:
`parse` and `compile` in a child process, `load` in the trainer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec

from graphkiln.storage.canonical import Json
from graphkiln.storage.keys import KeyPart
from graphkiln.storage.ranks import RankSet


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of a network, as an entrypoint of the `jax` frontend returns it.

    Attributes:
        function: a function that `jax.jit` takes, an already jitted one, a `jax.stages.Traced`, or a
            `jax.stages.Lowered`. The last three hold part of what follows already: `donate` and `out_shardings`
            stay unset for them, and `arguments` for the last two.
        arguments: positional arguments, pytrees of `jax.ShapeDtypeStruct`; a leaf's `sharding` may be a
            `NamedSharding` on an `AbstractMesh`, so that no device is needed.
        donate: positions of arguments whose memory the program may overwrite.
        out_shardings: pytree (or prefix) of the shardings of the result; None leaves them to the compiler.
        ranks: the ranks that run this program.
    """

    function: Any
    arguments: tuple[Any, ...] = ()
    donate: tuple[int, ...] = ()
    out_shardings: Any = None
    ranks: Iterable[int] = (0,)


class ParseRequest(msgspec.Struct, frozen=True):
    """What a frontend gets.

    Attributes:
        network: the network's name.
        folder: absolute path of the folder that relative paths in the spec start from.
        entrypoint: what the spec says, such as ``"network.py:programs"``.
        parameters: the network's parameters, defaults and overrides merged.
        platform: what to lower for, as the backend named it: ``"cpu"``, ``"tpu"``, or ``""`` if it has no such
            notion.
    """

    network: str
    folder: str
    entrypoint: str
    parameters: dict[str, Json]
    platform: str


class KernelGraph(msgspec.Struct, frozen=True):
    """One program for a backend, as a frontend gives it.

    Attributes:
        name: unique in its network; letters, digits, ``.``, ``_`` and ``-``.
        payload: canonical bytes: equal for equal programs, whatever the folder, process or hash seed.
        payload_format: name and revision of the encoding, such as ``"jax-export/1"``.
        ranks: the ranks that run it.
    """

    name: str
    payload: bytes
    payload_format: str
    ranks: RankSet


class Frontend(Protocol):
    """Turns a network into kernel graphs."""

    name: ClassVar[str]

    def fingerprint(self) -> Sequence[KeyPart]:
        """Name the toolchain: versions and digests of what turns the network into payloads.

        Raises:
            BadInputError: it is not installed; the message names the extra.
        """

    def parse(self, request: ParseRequest) -> Sequence[KernelGraph]:
        """Return the kernel graphs of the network. Runs in a fresh child process.

        Raises:
            BadInputError: the entrypoint is missing, raises, or returns something else than kernel graphs.
        """


class Resolution(msgspec.Struct, frozen=True):
    """A target as a backend understands it on this host.

    Attributes:
        platform: what the frontend lowers for; see `ParseRequest.platform`.
        settings: every option with its default filled in, and what the result depends on besides, such as CPU
            features. Each entry is a part of the action key.
    """

    platform: str
    settings: dict[str, Json]


@dataclass(frozen=True)
class CompileRequest:
    """What a backend gets.

    Attributes:
        graph: the kernel graph's name, for messages; the result must not depend on it.
        payload: the kernel graph's payload.
        payload_format: its encoding; one of the backend's `payload_formats`.
        settings: `Resolution.settings` of the target.
        folder: an empty folder for the backend's temporary files; removed afterwards.
    """

    graph: str
    payload: bytes
    payload_format: str
    settings: Mapping[str, Json]
    folder: Path


class Backend(Protocol):
    """A real compiler: kernel graph and target in, artifact out."""

    name: ClassVar[str]
    payload_formats: ClassVar[frozenset[str]]

    def resolve(self, options: Mapping[str, Json]) -> Resolution:
        """Check a target's options and fill in what they leave open.

        Raises:
            BadInputError: an option is unknown or has a wrong type or value.
        """

    def fingerprint(self, settings: Mapping[str, Json]) -> Sequence[KeyPart]:
        """Name the toolchain: versions and digests of what turns payloads into artifacts.

        Raises:
            BadInputError: it is not installed; the message says how to install it.
        """

    def environment(self, settings: Mapping[str, Json]) -> Mapping[str, str]:
        """Return the environment variables of the compile child, besides the few that every child gets."""

    def compile(self, request: CompileRequest) -> Mapping[str, bytes]:
        """Return the artifact: named outputs, none of them empty. Runs in a child process.

        Whatever it raises fails this kernel graph, and the message of the exception is what the user reads.
        """

    def load(self, settings: Mapping[str, Json], outputs: Mapping[str, bytes], devices: Sequence[Any] | None) -> Any:
        """Return something the trainer can use, bound to its `devices`. Digests have been checked.

        Raises:
            BadInputError: `devices` do not suit the artifact, or the target cannot be loaded on this host.
        """
