"""AdamW (arXiv:1711.05101) on float32 master weights, its state optionally shared by the data-parallel ranks."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mixtral_config import MixtralConfig
from mixtral_layers import DATA, EXPERT, Tree, Weight

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


def state_weight(config: MixtralConfig, weight: Weight) -> Weight:
    """Return how a weight's optimizer state is split: ZeRO stage 1 (arXiv:1910.02054).

    The mesh axes that replicate the weight over data-parallel ranks split the first dimension that is still whole
    and divides. If none does, or without `enable_parallel_optimizer`, the state lies as the weight does.
    """
    sizes = {DATA: config.data_parallel // config.expert_parallel, EXPERT: config.expert_parallel}
    free = tuple(axis for axis in sizes if axis not in weight.spec)
    replicas = 1
    for axis in free:
        replicas *= sizes[axis]
    if not config.enable_parallel_optimizer or replicas == 1:
        return weight
    axes: list[Any] = [*weight.spec, *(None,) * (len(weight.shape) - len(weight.spec))]
    for dimension, (size, axis) in enumerate(zip(weight.shape, axes, strict=True)):
        if axis is None and size % replicas == 0:
            axes[dimension] = free
            return replace(weight, spec=P(*axes))
    return weight


def adamw(config: MixtralConfig, weights: Tree, state: Tree, gradients: Tree, step: jax.Array) -> Tree:
    """Return the state after one step.

    Args:
        config: gives learning rate, weight decay and number of micro-batches.
        weights: what the leaves are, as `stage_weights` gives them; gains do not decay.
        state: trees `master`, `mean` and `square`: weights and the two moments, in float32.
        gradients: sums over the micro-batches of a step.
        step: steps done before this one.
    """
    count = step.astype(jnp.float32) + 1
    mean_correction, square_correction = 1 - BETA1**count, 1 - BETA2**count

    def moments(gradient: jax.Array, mean: jax.Array, square: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient = gradient / config.micro_batch_num
        return BETA1 * mean + (1 - BETA1) * gradient, BETA2 * square + (1 - BETA2) * jnp.square(gradient)

    def update(weight: Weight, master: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        change = (mean / mean_correction) / (jnp.sqrt(square / square_correction) + EPSILON)
        decay = 0.0 if weight.gain else config.weight_decay
        return master - config.learning_rate * (change + decay * master)

    pairs = jax.tree.map(moments, gradients, state["mean"], state["square"])
    mean, square = jax.tree.transpose(jax.tree.structure(gradients), None, pairs)
    return {"master": jax.tree.map(update, weights, state["master"], mean, square), "mean": mean, "square": square}
