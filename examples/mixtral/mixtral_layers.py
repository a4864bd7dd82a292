"""The Mixtral decoder (arXiv:2401.04088) on the devices of one pipeline stage, in plain JAX.

The devices of a stage form a mesh with three axes. A micro-batch is split over `data` and `expert`; experts over
`expert`; heads, the experts' inner width and the vocabulary over `model`. Shapes in comments and einsums use
b sequences, s and t tokens, d hidden size, h key-value heads, r query heads per key-value head, k head size,
e experts, n experts per token, c expert capacity, f intermediate size, v vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mixtral_config import MixtralConfig

DATA, EXPERT, MODEL = "data", "expert", "model"
BATCH = (DATA, EXPERT)
NORM_EPSILON = 1e-5
MASKED = -1e30

Role = Literal["first", "mid", "last"]
Tree = dict[str, Any]


def stage_mesh(config: MixtralConfig) -> AbstractMesh:
    """Return the mesh of one stage: its shape and axis names, without devices."""
    shape = (config.data_parallel // config.expert_parallel, config.expert_parallel, config.model_parallel)
    return AbstractMesh(shape, (DATA, EXPERT, MODEL), axis_types=(AxisType.Auto,) * 3)


@dataclass(frozen=True)
class Weight:
    """One weight of a stage: an unregistered class, so that `jax.tree` takes it for a leaf.

    Attributes:
        shape: its global shape.
        spec: mesh axes that split its dimensions.
        gain: it scales a normalised vector: starts as ones and does not decay.
    """

    shape: tuple[int, ...]
    spec: P
    gain: bool = False


def layer_weights(config: MixtralConfig) -> dict[str, Weight]:
    """Return the weights of one decoder layer."""
    d, f, e = config.hidden_size, config.intermediate_size, config.expert_num
    h, r, k = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_size
    return {
        "attention_norm": Weight((d,), P(), gain=True),
        "query": Weight((d, h, r, k), P(None, MODEL)),
        "key": Weight((d, h, k), P(None, MODEL)),
        "value": Weight((d, h, k), P(None, MODEL)),
        "output": Weight((h, r, k, d), P(MODEL)),
        "expert_norm": Weight((d,), P(), gain=True),
        "router": Weight((d, e), P()),
        "gate": Weight((e, d, f), P(EXPERT, None, MODEL)),
        "up": Weight((e, d, f), P(EXPERT, None, MODEL)),
        "down": Weight((e, f, d), P(EXPERT, MODEL)),
    }


def stage_weights(config: MixtralConfig, role: Role) -> Tree:
    """Return the weights of one stage; those of its layers are stacked along a new first dimension."""
    weights: Tree = {
        "layers": {
            name: Weight((config.stage_layers, *weight.shape), P(None, *weight.spec), weight.gain)
            for name, weight in layer_weights(config).items()
        }
    }
    if role == "first":
        weights["embedding"] = Weight((config.vocab_size, config.hidden_size), P(MODEL))
    if role == "last":
        weights["norm"] = Weight((config.hidden_size,), P(), gain=True)
        weights["head"] = Weight((config.hidden_size, config.vocab_size), P(None, MODEL))
    return weights


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Scale vectors to a root mean square of one (arXiv:1910.07467), in float32 whatever their type."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + NORM_EPSILON)
    return (wide * scale).astype(x.dtype) * gain


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Turn pairs of components by an angle that grows with the position (RoPE, arXiv:2104.09864).

    Component i of the first half of a head goes with component i of the second half.

    Args:
        x: [b, s, ..., k].
        theta: base of the wavelengths.
    """
    positions, half = x.shape[1], x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.outer(jnp.arange(positions, dtype=jnp.float32), frequencies)
    angles = angles.reshape(positions, *(1,) * (x.ndim - 3), half)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


@dataclass(frozen=True)
class Decoder:
    """The forward computation of one stage.

    Attributes:
        config: the network's parameters.
        mesh: the stage's devices; abstract ones will do.
    """

    config: MixtralConfig
    mesh: AbstractMesh

    def sharding(self, *axes: Any) -> NamedSharding:
        """Return the sharding whose i-th dimension is split over the i-th of these axes."""
        return NamedSharding(self.mesh, P(*axes))

    @property
    def stream(self) -> NamedSharding:
        """Sharding of the residual stream [b, s, d] between blocks and between stages."""
        return self.sharding(BATCH, MODEL if self.config.use_seq_parallel else None)

    def split(self, x: jax.Array, *axes: Any) -> jax.Array:
        """Have an intermediate value split over these mesh axes."""
        return jax.lax.with_sharding_constraint(x, self.sharding(*axes))

    def attend(self, weights: Tree, x: jax.Array) -> jax.Array:
        """Causal grouped-query attention: [b, s, d] -> [b, s, d]; scores and softmax in float32."""
        theta = self.config.rope_theta
        query = rotate(jnp.einsum("bsd,dhrk->bshrk", x, weights["query"]), theta)
        key = rotate(jnp.einsum("bsd,dhk->bshk", x, weights["key"]), theta)
        value = jnp.einsum("bsd,dhk->bshk", x, weights["value"])
        query, key, value = (self.split(part, BATCH, None, MODEL) for part in (query, key, value))
        scores = jnp.einsum("bshrk,bthk->bhrst", query, key, preferred_element_type=jnp.float32)
        position = jnp.arange(x.shape[1])
        causal = position[:, None] >= position[None, :]
        scores = jnp.where(causal, scores * self.config.head_size**-0.5, MASKED)
        mixed = jnp.einsum("bhrst,bthk->bshrk", jax.nn.softmax(scores).astype(x.dtype), value)
        return jnp.einsum("bshrk,hrkd->bsd", mixed, weights["output"])

    def route(self, router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Choose experts for each token, and a place among the tokens of each expert.

        As in GShard, each sequence is a group of its own, and first choices are served before second ones; a
        token that finds its expert full is not sent there. As in Mixtral, the gates are a softmax over the chosen.

        Returns:
            Which token goes to which place, zeros and ones, and the same with gates instead of ones, both
            [b, s, e, c].
        """
        config = self.config
        logits = jnp.einsum("bsd,de->bse", x, router, preferred_element_type=jnp.float32)
        best, choice = jax.lax.top_k(logits, config.experts_per_token)
        chosen = jax.nn.one_hot(choice, config.expert_num, dtype=jnp.float32)  # b s n e
        queue = chosen.swapaxes(1, 2).reshape(x.shape[0], -1, config.expert_num)  # b (n s) e
        ahead = jnp.sum((jnp.cumsum(queue, axis=1) - queue) * queue, axis=-1)
        ahead = ahead.reshape(x.shape[0], config.experts_per_token, x.shape[1]).swapaxes(1, 2)  # b s n
        # Beyond the capacity, `one_hot` gives zeros.
        place = jax.nn.one_hot(ahead.astype(jnp.int32), config.expert_capacity, dtype=jnp.float32)
        dispatch = jnp.einsum("bsne,bsnc->bsec", chosen, place)
        combine = jnp.einsum("bsn,bsne,bsnc->bsec", jax.nn.softmax(best), chosen, place)
        return dispatch.astype(x.dtype), combine.astype(x.dtype)

    def mix_experts(self, weights: Tree, x: jax.Array) -> jax.Array:
        """Sparse mixture of SwiGLU experts (arXiv:2002.05202): [b, s, d] -> [b, s, d]."""
        dispatch, combine = self.route(weights["router"], x)
        # Two all-to-alls: tokens travel to the devices that hold their experts, and back.
        sent = self.split(jnp.einsum("bsec,bsd->ebcd", dispatch, x), EXPERT, DATA)
        inner = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", sent, weights["gate"]))
        inner = inner * jnp.einsum("ebcd,edf->ebcf", sent, weights["up"])
        inner = self.split(inner, EXPERT, DATA, None, MODEL)
        done = self.split(jnp.einsum("ebcf,efd->ebcd", inner, weights["down"]), None, BATCH)
        return jnp.einsum("bsec,ebcd->bsd", combine, done)

    def layer(self, x: jax.Array, weights: Tree) -> jax.Array:
        """One decoder layer; the norms work on the split stream, attention and experts on whole sequences."""
        stream = self.stream
        whole = self.split(rms_norm(x, weights["attention_norm"]), BATCH)
        x = x + jax.lax.with_sharding_constraint(self.attend(weights, whole), stream)
        whole = self.split(rms_norm(x, weights["expert_norm"]), BATCH)
        return x + jax.lax.with_sharding_constraint(self.mix_experts(weights, whole), stream)

    def run_layers(self, layers: Tree, x: jax.Array) -> jax.Array:
        """All layers of a stage; the backward pass keeps only what lies between them and recomputes the rest."""
        step = jax.checkpoint(self.layer)
        return jax.lax.scan(lambda carry, weights: (step(carry, weights), None), x, layers)[0]

    def embed(self, weights: Tree, tokens: jax.Array) -> jax.Array:
        """The first stage: tokens [b, s] -> stream [b, s, d]."""
        x = jax.lax.with_sharding_constraint(weights["embedding"][tokens], self.stream)
        return self.run_layers(weights["layers"], x)

    def loss(self, weights: Tree, x: jax.Array, labels: jax.Array) -> jax.Array:
        """The last stage: stream [b, s, d] and labels [b, s] -> mean loss of a token.

        It is the cross entropy plus PaLM's z-loss, which keeps the log-normaliser of the softmax near zero.
        """
        x = self.run_layers(weights["layers"], x)
        x = self.split(rms_norm(x, weights["norm"]), BATCH)
        logits = jnp.einsum("bsd,dv->bsv", x, weights["head"], preferred_element_type=jnp.float32)
        logits = self.split(logits, BATCH, None, MODEL)
        # A product with one-hot rows, as a gather would bring the split vocabulary together.
        hot = jax.nn.one_hot(labels, self.config.vocab_size, dtype=logits.dtype)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        cross_entropy = normaliser - jnp.sum(logits * hot, axis=-1)
        return jnp.mean(cross_entropy + self.config.z_loss * jnp.square(normaliser))
