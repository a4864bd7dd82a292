"""The parameters of the Mixtral network, checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MixtralConfig:
    """Everything that shapes the network. Nothing has a default: the spec says it all.

    Attributes:
        data_parallel: replicas of a stage that share a micro-batch between them.
        model_parallel: devices that share heads, expert width and vocabulary (Megatron-LM, arXiv:1909.08053).
        pipeline_stage: pipeline stages; each has the same number of layers.
        expert_num: experts of a layer.
        expert_parallel: devices along the data axis that share the experts (GShard, arXiv:2006.16668).
        seq_length: tokens of a sequence.
        batch_size: sequences per data-parallel rank and micro-batch.
        micro_batch_num: micro-batches whose gradients make one optimizer step.
        enable_parallel_optimizer: data-parallel ranks share the optimizer's state (ZeRO stage 1, arXiv:1910.02054).
        use_seq_parallel: between blocks, model-parallel ranks share the tokens of a sequence (arXiv:2205.05198).
        hidden_size: width of the residual stream.
        intermediate_size: inner width of one expert.
        num_layers: layers of all stages together.
        num_heads: query heads of a layer.
        num_kv_heads: key and value heads of a layer (grouped-query attention, arXiv:2305.13245).
        vocab_size: entries of the vocabulary.
        experts_per_token: experts that each token is sent to.
        capacity_factor: how many more tokens an expert takes than an even spread would give it (GShard).
        rope_theta: base of the rotary position embedding's wavelengths (RoPE, arXiv:2104.09864).
        dtype: type of weights and activations.
        z_loss: weight of the squared log-normaliser of the output softmax in the loss (PaLM, arXiv:2204.02311).
        learning_rate: AdamW's, constant.
        weight_decay: AdamW's, decoupled (arXiv:1711.05101).
    """

    data_parallel: int
    model_parallel: int
    pipeline_stage: int
    expert_num: int
    expert_parallel: int
    seq_length: int
    batch_size: int
    micro_batch_num: int
    enable_parallel_optimizer: bool
    use_seq_parallel: bool
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    experts_per_token: int
    capacity_factor: float
    rope_theta: float
    dtype: str
    z_loss: float
    learning_rate: float
    weight_decay: float

    @staticmethod
    def of(parameters: Mapping[str, object]) -> "MixtralConfig":
        """Make a config out of a spec's parameters.

        Raises:
            ValueError: a parameter is missing, unknown, of a wrong type, or does not go with the others.
        """
        types: dict[str, Any] = {field.name: field.type for field in fields(MixtralConfig)}
        if unknown := sorted(parameters.keys() - types.keys()):
            raise ValueError(f"unknown parameter {unknown[0]}; the network has {', '.join(sorted(types))}")
        if missing := sorted(types.keys() - parameters.keys()):
            raise ValueError(f"parameter {missing[0]} is missing")
        return MixtralConfig(**{name: _typed(name, parameters[name], kind) for name, kind in types.items()})

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(f"{field.name} is {value}, but must be at least 1")
            if field.type is float and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name} is {value}, but must be finite and not negative")
        for name in ("capacity_factor", "rope_theta", "learning_rate"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0, but must be positive")
        if self.pipeline_stage < 2:
            raise ValueError("pipeline_stage is 1, but the first and the last stage must be two stages")
        if self.experts_per_token > self.expert_num:
            raise ValueError(f"experts_per_token is {self.experts_per_token}, more than expert_num {self.expert_num}")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f'dtype is "{self.dtype}", but must be "bfloat16" or "float32"')
        self._check_divisions()

    def _check_divisions(self) -> None:
        divisions = [
            ("num_layers", "pipeline_stage"),
            ("hidden_size", "num_heads"),
            ("num_heads", "num_kv_heads"),
            ("num_kv_heads", "model_parallel"),
            ("intermediate_size", "model_parallel"),
            ("vocab_size", "model_parallel"),
            ("expert_num", "expert_parallel"),
            ("data_parallel", "expert_parallel"),
        ]
        if self.use_seq_parallel:
            divisions.append(("seq_length", "model_parallel"))
        for whole, parts in divisions:
            if getattr(self, whole) % getattr(self, parts):
                raise ValueError(f"{whole} {getattr(self, whole)} is not divisible by {parts} {getattr(self, parts)}")
        if self.head_size % 2:
            raise ValueError(f"hidden_size / num_heads is {self.head_size}, but rotary embeddings need an even number")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def stage_layers(self) -> int:
        """Layers of one pipeline stage."""
        return self.num_layers // self.pipeline_stage

    @property
    def stage_devices(self) -> int:
        """Devices, hence ranks, of one pipeline stage."""
        return self.data_parallel * self.model_parallel

    @property
    def sequences(self) -> int:
        """Sequences of one micro-batch, over all data-parallel ranks."""
        return self.data_parallel * self.batch_size

    @property
    def expert_capacity(self) -> int:
        """Tokens of one sequence that one expert takes; what is above it skips the expert (GShard)."""
        even_spread = self.seq_length * self.experts_per_token / self.expert_num
        return min(self.seq_length, max(1, int(even_spread * self.capacity_factor)))


def _typed(name: str, value: object, kind: type) -> Any:
    """Return the value as its field's type; a whole number will do for a float, a boolean for nothing else."""
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
        raise ValueError(f"{name} is {value!r}, but must be {wanted}")
    return value
