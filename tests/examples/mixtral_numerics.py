"""Runs the tiny Mixtral in several ways and prints how far they are apart, as JSON.

It is a program of its own, as the number of virtual devices must be set before JAX starts:
``python mixtral_numerics.py FOLDER``, where FOLDER holds the example.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np

FOLDER = Path(sys.argv[1])
sys.path.insert(0, str(FOLDER))

import network  # noqa: E402
import train  # noqa: E402
from mixtral_config import MixtralConfig  # noqa: E402
from mixtral_layers import Decoder, stage_mesh  # noqa: E402

STEPS = 3


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    split = tomllib.loads((FOLDER / "mixtral-tiny.toml").read_text(encoding="utf-8"))["parameters"]
    whole = split | {"data_parallel": 1, "model_parallel": 1, "expert_parallel": 1, "batch_size": 4}
    assert MixtralConfig.of(split).sequences == MixtralConfig.of(whole).sequences
    run_split = train.plain_runner(network.programs(**split))
    run_whole = train.plain_runner(network.programs(**whole))
    split_pipeline, split_losses = accumulated(split, run_split)
    whole_pipeline, whole_losses = accumulated(whole, run_whole)
    direct_gradients, direct_losses = direct(whole)
    by_numpy, skipped = numpy_loss(whole)
    found: dict[str, Any] = {
        "skipped_places": skipped,
        "split_to_direct_loss": difference(split_losses, direct_losses),
        "whole_to_direct_loss": difference(whole_losses, direct_losses),
        "numpy_to_direct_loss": difference([by_numpy], direct_losses[:1]),
        "split_to_direct_gradient": difference(split_pipeline.sums, direct_gradients),
        "whole_to_direct_gradient": difference(whole_pipeline.sums, direct_gradients),
    }
    for name, pipeline in (("split", split_pipeline), ("whole", whole_pipeline)):
        wanted = numpy_adamw(MixtralConfig.of(whole), pipeline)
        pipeline.update(0)
        found[f"{name}_update"] = difference(pipeline.weights, wanted)
        found[f"{name}_sums_after_update"] = max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(pipeline.sums))
    found["losses"] = list(train.train(split, run_split, devices(split), STEPS))
    json.dump(found, sys.stdout)


def devices(parameters: dict[str, Any]) -> Any:
    return train.stage_devices(MixtralConfig.of(parameters), jax.devices())


def difference(found: Any, wanted: Any) -> float:
    """The largest difference of two trees, relative to the largest value of the leaf that it is in."""

    def of_leaf(found: Any, wanted: Any) -> float:
        found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
        assert found.shape == wanted.shape
        return float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))

    differences: list[float] = jax.tree.leaves(jax.tree.map(of_leaf, found, wanted))
    return max(differences)


def accumulated(parameters: dict[str, Any], run_program: train.RunProgram) -> tuple[train.Pipeline, list[float]]:
    """A pipeline that has seen the micro-batches of one step, and their losses."""
    config = MixtralConfig.of(parameters)
    pipeline = train.Pipeline(config, network.programs(**parameters), run_program, devices(parameters))
    return pipeline, [float(pipeline.accumulate(*batch)) for batch in train.micro_batches(config, 0)]


def direct(parameters: dict[str, Any]) -> tuple[list[Any], list[float]]:
    """Gradients, added up over one step, and losses of the whole network as one function."""
    config = MixtralConfig.of(parameters)
    decoder = Decoder(config, stage_mesh(config))

    def loss(stages: list[Any], tokens: Any, labels: Any) -> Any:
        x = decoder.embed(stages[0], tokens)
        for stage in stages[1:-1]:
            x = decoder.run_layers(stage["layers"], x)
        return decoder.loss(stages[-1], x, labels)

    stages = initial_stages(config)
    differentiate = jax.jit(jax.value_and_grad(loss))
    found = [differentiate(stages, *batch) for batch in train.micro_batches(config, 0)]
    return jax.tree.map(lambda *leaves: sum(leaves), *(gradients for _, gradients in found)), [
        float(loss) for loss, _ in found
    ]


def initial_stages(config: MixtralConfig) -> list[Any]:
    return [
        train.initial_weights(config, network.stage_role(config, stage), stage)
        for stage in range(config.pipeline_stage)
    ]


def numpy_adamw(config: MixtralConfig, pipeline: train.Pipeline) -> Any:
    """The weights after the first step, by the book: at that step the moments' corrections cancel their factors."""

    def step(master: Any, total: Any) -> Any:
        master, gradient = np.asarray(master, np.float64), np.asarray(total, np.float64) / config.micro_batch_num
        change = gradient / (np.abs(gradient) + 1e-8)
        # Gains start as ones, and nothing else does.
        decay = 0 if np.all(master == 1) else config.weight_decay
        return master - config.learning_rate * (change + decay * master)

    return jax.tree.map(step, [state["master"] for state in pipeline.state], pipeline.sums)


def numpy_loss(parameters: dict[str, Any]) -> tuple[float, int]:
    """The loss of the first micro-batch, head by head and token by token, in float64.

    And how often a token found an expert full.
    """
    config = MixtralConfig.of(parameters)
    stages = jax.tree.map(lambda leaf: leaf.astype(np.float64), initial_stages(config))
    tokens, labels = next(train.micro_batches(config, 0))
    losses, skipped = [], 0
    for sequence, wanted in zip(tokens, labels, strict=True):
        x = stages[0]["embedding"][sequence]
        for stage in stages:
            for index in range(config.stage_layers):
                weights = {name: leaf[index] for name, leaf in stage["layers"].items()}
                x = x + numpy_attention(config, weights, numpy_norm(x) * weights["attention_norm"])
                mixed, full = numpy_experts(config, weights, numpy_norm(x) * weights["expert_norm"])
                x, skipped = x + mixed, skipped + full
        logits = (numpy_norm(x) * stages[-1]["norm"]) @ stages[-1]["head"]
        normaliser = np.log(np.sum(np.exp(logits), axis=-1))
        losses.append(normaliser - logits[np.arange(len(wanted)), wanted] + config.z_loss * normaliser**2)
    return float(np.mean(losses)), skipped


def numpy_norm(x: Any) -> Any:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5)


def numpy_attention(config: MixtralConfig, weights: Any, x: Any) -> Any:
    """Rotary embeddings as complex numbers of modulus one; each query head looks up its group's key and value."""
    half, length = config.head_size // 2, len(x)
    turns = np.exp(1j * np.outer(np.arange(length), config.rope_theta ** (-np.arange(half) / half)))
    out = np.zeros_like(x)
    for group in range(config.num_kv_heads):
        key, value = x @ weights["key"][:, group], x @ weights["value"][:, group]
        key = (key[:, :half] + 1j * key[:, half:]) * turns
        for head in range(config.num_heads // config.num_kv_heads):
            query = x @ weights["query"][:, group, head]
            query = (query[:, :half] + 1j * query[:, half:]) * turns
            scores = np.exp(np.real(query @ key.conj().T) / np.sqrt(config.head_size)) * np.tri(length)
            out += scores / scores.sum(axis=-1, keepdims=True) @ value @ weights["output"][group, head]
    return out


def numpy_experts(config: MixtralConfig, weights: Any, x: Any) -> tuple[Any, int]:
    """First all first choices, then all second ones, each as long as the expert has room."""
    logits = x @ weights["router"]
    choices = np.argsort(-logits, axis=-1)[:, : config.experts_per_token]
    gates = np.exp(np.take_along_axis(logits, choices, axis=-1))
    gates /= gates.sum(axis=-1, keepdims=True)
    room = [config.expert_capacity] * config.expert_num
    out, skipped = np.zeros_like(x), 0
    for rank in range(config.experts_per_token):
        for position, expert in enumerate(choices[:, rank]):
            if room[expert] == 0:
                skipped += 1
                continue
            room[expert] -= 1
            gate, up = x[position] @ weights["gate"][expert], x[position] @ weights["up"][expert]
            out[position] += gates[position, rank] * ((gate / (1 + np.exp(-gate)) * up) @ weights["down"][expert])
    return out, skipped


if __name__ == "__main__":
    main()
