"""Networks of C kernels, compiled by the real `cc` behind a script that writes down which kernel it was run on."""

import ctypes
import shlex
from collections.abc import Mapping
from pathlib import Path

from graphkiln.tasks.network import CompiledNetwork

NAME, TARGET = "kernels", "native"

_SPEC = """
[network]
name = "{name}"
frontend = "file"
entrypoint = "kernels/*.c"

[parameters]
ranks = "0-3"

[targets.native]
backend = "command"
argv = ["{compiler}", "-O1", "-shared", "-fPIC", "{{input}}", "-o", "{{output}}"]
output_name = "kernel.so"
version_argv = ["cc", "--version"]
tools = ["cc"]
"""

# {before} is shell code of the test; the kernel's name is in the first line of its source.
_SCRIPT = """#!/bin/sh
read -r kernel < input.c
echo "$kernel" >> {runs}
{before}
exec cc "$@"
"""


class CcNetwork:
    """A folder with a spec, its kernels, and a compiler that counts.

    Attributes:
        folder: where all of it is.
        spec: path of the spec.
    """

    def __init__(self, folder: Path, kernels: Mapping[str, str], *, before: str = "", name: str = NAME) -> None:
        """Write the network.

        Args:
            folder: where to; it must not exist.
            kernels: C source by kernel name.
            before: shell code that the compiler runs before it compiles; `$kernel` is the kernel's name.
            name: the network's name.
        """
        self.folder = folder
        self.spec = folder / "kernels.toml"
        self._runs = folder / "runs.txt"
        (folder / "kernels").mkdir(parents=True)
        for kernel, source in kernels.items():
            self.write_kernel(kernel, source)
        self.compiler = folder / "counting-cc"
        self.compiler.write_text(_SCRIPT.format(runs=shlex.quote(str(self._runs)), before=before))
        self.compiler.chmod(0o755)
        self._runs.touch()
        self.spec.write_text(_SPEC.format(name=name, compiler=self.compiler))

    def write_kernel(self, kernel: str, source: str) -> None:
        """Write, or change, the source of a kernel."""
        (self.folder / "kernels" / f"{kernel}.c").write_text(f"//{kernel}\n{source}\n")

    def limit(self, limits: str) -> None:
        """Give the spec a table of limits."""
        self.spec.write_text(f"{self.spec.read_text()}\n[limits]\n{limits}\n")

    def runs(self) -> list[str]:
        """Return the kernels that the compiler was run on since they were last taken, sorted."""
        return sorted(line.removeprefix("//") for line in self._runs.read_text().splitlines())

    def take_runs(self) -> list[str]:
        """Return the kernels that the compiler was run on since this was last called, sorted."""
        runs = self.runs()
        self._runs.write_text("")
        return runs


def outputs_of(network: CompiledNetwork) -> dict[str, dict[str, bytes]]:
    """Return every byte of a compiled network, by kernel graph and output."""
    return {graph: dict(network.load(graph).outputs) for graph in network.graphs()}


def call(network: CompiledNetwork, graph: str, folder: Path, argument: int) -> int:
    """Load a kernel as a shared library, and return what its function `run` makes of `argument`."""
    path = network.load(graph).write_to(folder / graph)["kernel.so"]
    result: int = ctypes.CDLL(str(path)).run(argument)
    return result
