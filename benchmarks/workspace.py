"""The temporary folder of one run, and the commands that the parts have in common."""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, Cost, Done, run

MIXTRAL = ROOT / "examples" / "mixtral" / "mixtral-8x7b.toml"
NETWORK, TARGET, DEVICES = "mixtral-8x7b", "cpu", 16
JOBS = 2

# One kernel graph that takes no time, so that what is left is the way there.
_TINY_SPEC = """
[network]
name = "tiny"
frontend = "file"
entrypoint = "tiny.c"

[targets.native]
backend = "command"
argv = ["cc", "-shared", "-fPIC", "{input}", "-o", "{output}"]
"""
# Whatever is set for Prefect, JAX or GraphKiln outside does not count.
_FOREIGN = ("PREFECT_", "GRAPHKILN_", "JAX_", "XLA_", "PYTHON")


@dataclass
class Workspace:
    """Where everything of one run lies.

    Attributes:
        folder: a temporary folder.
        committed: a store that holds Mixtral, once there is one, and the report of the run that filled it.
    """

    folder: Path
    committed: tuple[Path, dict[str, Any]] | None = None
    _made: int = field(default=0, init=False)

    def new(self, name: str) -> Path:
        """Return a path in the folder that nothing has."""
        self._made += 1
        return self.folder / f"{name}-{self._made}"

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the environment of a command. Prefect's database is in the folder as well, one for the whole run."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        return {
            **inherited,
            "TMPDIR": str(self.folder),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            **variables,
        }

    def jax_environment(self, **variables: str) -> dict[str, str]:
        """Return the environment in which JAX has the devices of a stage."""
        flags = f"--xla_force_host_platform_device_count={DEVICES}"
        return self.environment(JAX_PLATFORMS="cpu", XLA_FLAGS=flags, **variables)

    def script(self, module: str, *arguments: str | Path, environment: dict[str, str]) -> Done:
        """Run a module of this folder in a fresh process."""
        return run([sys.executable, "-m", f"benchmarks.{module}", *arguments], environment)

    def compile(self, spec: Path, store: Path | str, *options: str, **variables: str) -> tuple[Cost, dict[str, Any]]:
        """Run `graphkiln compile`, and return what it took and its report."""
        command = (sys.executable, "-P", "-m", "graphkiln", "compile", spec, "--store", store, "--jobs", str(JOBS))
        done = run([*command, "--json", *options], self.environment(**variables))
        report: dict[str, Any] = json.loads(done.output)
        return done.cost, report

    def mixtral_store(self) -> tuple[Path, dict[str, Any]]:
        """Return a store that holds Mixtral, filled now if no part has filled one, and the report of that."""
        if self.committed is None:
            store = self.new("store")
            self.committed = store, self.compile(MIXTRAL, store, "--no-prefect")[1]
        return self.committed

    def tiny_spec(self) -> Path:
        """Write a network whose one kernel graph is an empty C file, and return its spec."""
        folder = self.new("tiny")
        folder.mkdir()
        (folder / "tiny.c").write_text("int answer(void) { return 42; }\n")
        spec = folder / "tiny.toml"
        spec.write_text(_TINY_SPEC)
        return spec
