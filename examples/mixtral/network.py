"""The kernel graphs of one Mixtral training step: the entrypoint that the specs beside this file name.

A pipeline stage runs its own programs on its own devices. The first stage turns tokens into activations, the ones in
the middle pass activations on, the last one computes the loss and starts the way back. All stages in the middle run
the same programs, so that eight kernel graphs serve any number of stages.
"""

from typing import Any

import jax
import jax.numpy as jnp

from graphkiln import Program
from mixtral_config import MixtralConfig
from mixtral_layers import BATCH, Decoder, Role, Tree, Weight, stage_mesh, stage_weights
from mixtral_optimizer import adamw, state_weight


def programs(**parameters: object) -> dict[str, Program]:
    """Return the programs of a network by name; lowering them needs no device.

    Args:
        **parameters: the fields of `MixtralConfig`, all of them.

    Raises:
        ValueError: a parameter is missing, unknown, of a wrong type, or does not go with the others.
    """
    config = MixtralConfig.of(parameters)
    decoder = Decoder(config, stage_mesh(config))
    found = first_stage(decoder)
    if config.pipeline_stage > 2:
        found |= mid_stage(decoder)
    return found | last_stage(decoder)


def first_stage(decoder: Decoder) -> dict[str, Program]:
    """Return the programs of the stage that holds the embedding."""
    weights, tokens, stream, sums = _arguments(decoder, "first")

    def first_fwd(weights: Tree, tokens: jax.Array) -> jax.Array:
        return decoder.embed(weights, tokens)

    def first_bwd(weights: Tree, tokens: jax.Array, gradient: jax.Array, sums: Tree) -> Any:
        _, pull_back = jax.vjp(lambda weights: decoder.embed(weights, tokens), weights)
        return _add(sums, *pull_back(gradient))

    ranks = stage_ranks(decoder.config, "first")
    return {
        "first_fwd": Program(
            function=first_fwd, arguments=(weights, tokens), out_shardings=decoder.stream, ranks=ranks
        ),
        "first_bwd": Program(
            function=first_bwd,
            arguments=(weights, tokens, stream, sums),
            donate=(3,),
            out_shardings=_shardings(sums),
            ranks=ranks,
        ),
        "first_opt": _optimizer(decoder, "first"),
    }


def mid_stage(decoder: Decoder) -> dict[str, Program]:
    """Return the programs of every stage but the first and the last."""
    weights, _, stream, sums = _arguments(decoder, "mid")

    def mid_fwd(weights: Tree, x: jax.Array) -> jax.Array:
        return decoder.run_layers(weights["layers"], x)

    def mid_bwd(weights: Tree, x: jax.Array, gradient: jax.Array, sums: Tree) -> tuple[jax.Array, Tree]:
        _, pull_back = jax.vjp(mid_fwd, weights, x)
        found, gradient = pull_back(gradient)
        return gradient, _add(sums, found)

    ranks = stage_ranks(decoder.config, "mid")
    return {
        "mid_fwd": Program(function=mid_fwd, arguments=(weights, stream), out_shardings=decoder.stream, ranks=ranks),
        "mid_bwd": Program(
            function=mid_bwd,
            arguments=(weights, stream, stream, sums),
            donate=(2, 3),
            out_shardings=(decoder.stream, _shardings(sums)),
            ranks=ranks,
        ),
        "mid_opt": _optimizer(decoder, "mid"),
    }


def last_stage(decoder: Decoder) -> dict[str, Program]:
    """Return the programs of the stage that computes the loss; forward and backward pass are one program."""
    weights, labels, stream, sums = _arguments(decoder, "last")

    def last_step(weights: Tree, x: jax.Array, labels: jax.Array, sums: Tree) -> tuple[jax.Array, jax.Array, Tree]:
        loss, (found, gradient) = jax.value_and_grad(decoder.loss, argnums=(0, 1))(weights, x, labels)
        return loss, gradient, _add(sums, found)

    return {
        "last_step": Program(
            function=last_step,
            arguments=(weights, stream, labels, sums),
            donate=(1, 3),
            out_shardings=(decoder.sharding(), decoder.stream, _shardings(sums)),
            ranks=stage_ranks(decoder.config, "last"),
        ),
        "last_opt": _optimizer(decoder, "last"),
    }


def stage_role(config: MixtralConfig, stage: int) -> Role:
    """Return which programs a stage runs."""
    if stage == 0:
        return "first"
    return "last" if stage == config.pipeline_stage - 1 else "mid"


def stage_ranks(config: MixtralConfig, role: Role) -> range:
    """Return the ranks of the stages with this role: stage after stage, the devices of a mesh in row-major order."""
    last = config.pipeline_stage - 1
    start, stop = {"first": (0, 1), "mid": (1, last), "last": (last, last + 1)}[role]
    return range(start * config.stage_devices, stop * config.stage_devices)


def _optimizer(decoder: Decoder, role: Role) -> Program:
    """Return the program that ends a step: new state, new weights, and gradient sums of zero for the next one."""
    config, dtype = decoder.config, decoder.config.dtype
    weights = stage_weights(config, role)
    shares = jax.tree.map(lambda weight: state_weight(config, weight), weights)

    def step_optimizer(state: Tree, sums: Tree, step: jax.Array) -> tuple[Tree, Tree, Tree]:
        state = adamw(config, weights, state, sums, step)
        cast = jax.tree.map(lambda master: master.astype(dtype), state["master"])
        return state, cast, jax.tree.map(jnp.zeros_like, sums)

    share = _structs(decoder, shares, "float32")
    state = {"master": share, "mean": share, "square": share}
    sums = _structs(decoder, weights, "float32")
    step = jax.ShapeDtypeStruct((), "int32", sharding=decoder.sharding())
    return Program(
        function=step_optimizer,
        arguments=(state, sums, step),
        donate=(0, 1),
        out_shardings=(_shardings(state), _shardings(sums), _shardings(sums)),
        ranks=stage_ranks(config, role),
    )


def _arguments(decoder: Decoder, role: Role) -> tuple[Tree, Any, Any, Tree]:
    """Return what the programs of a stage take: weights, token ids, activations, and sums of gradients.

    Gradients add up in float32, as bfloat16 would lose the later ones of many micro-batches.
    """
    config = decoder.config
    weights = stage_weights(config, role)
    tokens = (config.sequences, config.seq_length)
    return (
        _structs(decoder, weights, config.dtype),
        jax.ShapeDtypeStruct(tokens, "int32", sharding=decoder.sharding(BATCH)),
        jax.ShapeDtypeStruct((*tokens, config.hidden_size), config.dtype, sharding=decoder.stream),
        _structs(decoder, weights, "float32"),
    )


def _structs(decoder: Decoder, weights: Tree, dtype: str) -> Any:
    """Return the shapes of a tree of weights, as values of this type."""

    def struct(weight: Weight) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(weight.shape, dtype, sharding=decoder.sharding(*weight.spec))

    return jax.tree.map(struct, weights)


def _shardings(structs: Any) -> Any:
    return jax.tree.map(lambda struct: struct.sharding, structs)


def _add(sums: Tree, gradients: Tree) -> Any:
    return jax.tree.map(lambda total, gradient: total + gradient.astype(total.dtype), sums, gradients)
