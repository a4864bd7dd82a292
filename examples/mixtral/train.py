"""Trains a Mixtral on this host's CPU, each pipeline stage on virtual devices of its own.

``python train.py --steps 3`` runs kernel graphs that GraphKiln compiled, or found in its store;
``python train.py --steps 3 --plain`` runs the same programs through `jax.jit`. Both print the same losses.
"""

import argparse
import functools
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import network
from graphkiln import Program, ensure
from mixtral_config import MixtralConfig
from mixtral_layers import Role, Tree, Weight, stage_weights

SPEC = Path(__file__).with_name("mixtral-tiny.toml")
INITIAL_DEVIATION = 0.02

# Runs a program, by its name, on the devices of a stage.
RunProgram = Callable[[str, int, tuple[Any, ...]], Any]


def train(
    parameters: Mapping[str, Any], run_program: RunProgram, devices: Sequence[Sequence[Any]], steps: int
) -> Iterator[float]:
    """Yield the mean loss of each step.

    Args:
        parameters: the network's.
        run_program: runs a program by name, on the devices of a stage, with arguments that lie there.
        devices: the devices of each stage; stages may share them.
        steps: how many.
    """
    config = MixtralConfig.of(parameters)
    pipeline = Pipeline(config, network.programs(**parameters), run_program, devices)
    for step in range(steps):
        losses = [pipeline.accumulate(tokens, labels) for tokens, labels in micro_batches(config, step)]
        pipeline.update(step)
        yield sum(map(float, losses)) / len(losses)


class Pipeline:
    """All stages, driven by one process.

    Attributes:
        weights: weights of each stage.
        state: state of each stage's optimizer.
        sums: gradients of each stage, added up since the last update.
    """

    def __init__(
        self,
        config: MixtralConfig,
        programs: Mapping[str, Program],
        run_program: RunProgram,
        devices: Sequence[Sequence[Any]],
    ) -> None:
        self._programs = programs
        self._run_program = run_program
        self._roles: list[Role] = [network.stage_role(config, stage) for stage in range(config.pipeline_stage)]
        self._devices = devices
        self.weights: list[Tree] = []
        self.state: list[Tree] = []
        self.sums: list[Tree] = []
        for stage, role in enumerate(self._roles):
            master = initial_weights(config, role, stage)
            zeros = jax.tree.map(np.zeros_like, master)
            self.weights.append(jax.tree.map(lambda value: value.astype(jax.numpy.dtype(config.dtype)), master))
            self.state.append({"master": master, "mean": zeros, "square": zeros})
            self.sums.append(zeros)

    def accumulate(self, tokens: Any, labels: Any) -> Any:
        """Add the gradients of one micro-batch, and return its loss."""
        last = len(self._roles) - 1
        x = self._run(0, "fwd", self.weights[0], tokens)
        inputs = {}
        for stage in range(1, last):
            inputs[stage] = x
            x = self._run(stage, "fwd", self.weights[stage], x)
        loss, gradient, self.sums[last] = self._run(last, "step", self.weights[last], x, labels, self.sums[last])
        for stage in range(last - 1, 0, -1):
            gradient, self.sums[stage] = self._run(
                stage, "bwd", self.weights[stage], inputs[stage], gradient, self.sums[stage]
            )
        self.sums[0] = self._run(0, "bwd", self.weights[0], tokens, gradient, self.sums[0])
        return loss

    def update(self, step: int) -> None:
        """Let every stage's optimizer do its step, which also sets the sums of gradients to zero."""
        for stage in range(len(self._roles)):
            self.state[stage], self.weights[stage], self.sums[stage] = self._run(
                stage, "opt", self.state[stage], self.sums[stage], np.int32(step)
            )

    def _run(self, stage: int, action: str, *arguments: Any) -> Any:
        """Run a program of a stage; what lies elsewhere, such as another stage's result, is brought there first."""
        name = f"{self._roles[stage]}_{action}"
        structs = self._programs[name].arguments
        abstract = jax.tree.leaves(structs)[0].sharding.mesh
        mesh = Mesh(np.array(self._devices[stage]).reshape(abstract.axis_sizes), abstract.axis_names)
        placed = jax.tree.map(
            lambda struct, value: jax.device_put(value, NamedSharding(mesh, struct.sharding.spec)), structs, arguments
        )
        return self._run_program(name, stage, placed)


def initial_weights(config: MixtralConfig, role: Role, stage: int) -> Any:
    """Return the master weights that a stage starts from: gains of one, the rest normally distributed."""
    random = np.random.default_rng(stage)

    def draw(weight: Weight) -> Any:
        if weight.gain:
            return np.ones(weight.shape, np.float32)
        return random.standard_normal(weight.shape, np.float32) * np.float32(INITIAL_DEVIATION)

    return jax.tree.map(draw, stage_weights(config, role))


def micro_batches(config: MixtralConfig, step: int) -> Iterator[tuple[Any, Any]]:
    """Yield tokens and labels of each micro-batch: sequences that count, from and by random numbers."""
    random = np.random.default_rng(step)
    for _ in range(config.micro_batch_num):
        start = random.integers(config.vocab_size, size=(config.sequences, 1))
        stride = random.integers(1, 5, size=(config.sequences, 1))
        counted = (start + stride * np.arange(config.seq_length + 1)) % config.vocab_size
        yield counted[:, :-1].astype(np.int32), counted[:, 1:].astype(np.int32)


def plain_runner(programs: Mapping[str, Program]) -> RunProgram:
    """Return what runs programs through `jax.jit`, which compiles them when they are first called."""
    jitted = {
        name: jax.jit(program.function, donate_argnums=program.donate, out_shardings=program.out_shardings)
        for name, program in programs.items()
    }
    return lambda name, _stage, arguments: jitted[name](*arguments)


def compiled_runner(compiled: Any, devices: Sequence[Sequence[Any]]) -> RunProgram:
    """Return what runs the kernel graphs of a network that `graphkiln.ensure` returned."""
    load = functools.cache(lambda name, stage: compiled.load(name, devices=devices[stage]))
    return lambda name, stage, arguments: load(name, stage)(*arguments)


def stage_devices(config: MixtralConfig, devices: Sequence[Any]) -> list[Sequence[Any]]:
    """Return the devices of each stage: stages take turns if there are too few for all."""
    size = config.stage_devices
    slices = [devices[start : start + size] for start in range(0, len(devices) - size + 1, size)]
    if not slices:
        raise ValueError(f"a stage needs {size} devices, and there are {len(devices)}")
    return [slices[stage % len(slices)] for stage in range(config.pipeline_stage)]


def main() -> None:
    """Train, and print each step's loss with all its digits."""
    parser = argparse.ArgumentParser(description="Train a small Mixtral on this host's CPU.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--spec", type=Path, default=SPEC, help="the network; mixtral-tiny.toml unless told otherwise")
    parser.add_argument("--plain", action="store_true", help="compile with jax.jit, without GraphKiln")
    parser.add_argument("--store", help="GraphKiln's store")
    options = parser.parse_args()
    parameters = tomllib.loads(options.spec.read_text(encoding="utf-8"))["parameters"]
    config = MixtralConfig.of(parameters)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", config.pipeline_stage * config.stage_devices)
    devices = stage_devices(config, jax.devices())
    if options.plain:
        run_program = plain_runner(network.programs(**parameters))
    else:
        run_program = compiled_runner(ensure(options.spec, target="cpu", store=options.store), devices)
    for step, loss in enumerate(train(parameters, run_program, devices, options.steps), start=1):
        print(f"step {step} loss {loss!r}", flush=True)


if __name__ == "__main__":
    main()
