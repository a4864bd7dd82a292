"""The example network: what its programs are, what each parameter changes, and that it computes what it should."""

import dataclasses
import importlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.jax
jax = pytest.importorskip("jax")
np = pytest.importorskip("numpy")

FOLDER = Path(__file__).parents[2] / "examples" / "mixtral"
MODULES = ("network", "mixtral_config", "mixtral_layers", "mixtral_optimizer")

FORWARD = {"first_fwd", "mid_fwd"}
COMPUTE = FORWARD | {"first_bwd", "mid_bwd", "last_step"}
OPTIMIZERS = {"first_opt", "mid_opt", "last_opt"}
ALL = COMPUTE | OPTIMIZERS
OUTER = {name for name in ALL if not name.startswith("mid")}


def parameters_of(spec: str) -> dict[str, Any]:
    parameters: dict[str, Any] = tomllib.loads((FOLDER / spec).read_text(encoding="utf-8"))["parameters"]
    return parameters


TINY, FULL = parameters_of("mixtral-tiny.toml"), parameters_of("mixtral-8x7b.toml")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    """The example's modules, for as long as the tests of this file run: their names are common ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(name) for name in MODULES}
        for name in MODULES:
            sys.modules.pop(name, None)


def lowered(modules: dict[str, Any], parameters: dict[str, Any]) -> dict[str, str]:
    texts = {}
    for name, program in modules["network"].programs(**parameters).items():
        jitted = jax.jit(program.function, donate_argnums=program.donate, out_shardings=program.out_shardings)
        texts[name] = jitted.trace(*program.arguments).lower(lowering_platforms=("cpu",)).as_text()
    return texts


@pytest.fixture(scope="module")
def tiny_texts(modules: dict[str, Any]) -> dict[str, str]:
    return lowered(modules, TINY)


@pytest.mark.parametrize(("spec", "parameters"), [("8x7b", FULL), ("tiny", TINY)])
def test_a_spec_names_every_parameter(modules: dict[str, Any], spec: str, parameters: dict[str, Any]) -> None:
    fields = dataclasses.fields(modules["mixtral_config"].MixtralConfig)
    assert list(parameters) == [field.name for field in fields]


def test_readme_explains_every_parameter_and_program() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in [*FULL, *ALL] if f"`{name}`" not in text] == []


def test_eight_kernel_graphs_serve_176_rank_programs(modules: dict[str, Any]) -> None:
    programs = modules["network"].programs(**FULL)
    ranks = {name: program.ranks for name, program in programs.items()}
    assert ranks == {
        **dict.fromkeys(("first_fwd", "first_bwd", "first_opt"), range(16)),
        **dict.fromkeys(("mid_fwd", "mid_bwd", "mid_opt"), range(16, 48)),
        **dict.fromkeys(("last_step", "last_opt"), range(48, 64)),
    }
    assert sum(map(len, ranks.values())) == 176
    assert set().union(*ranks.values()) == set(range(64))


def test_all_programs_are_distinct(tiny_texts: dict[str, str]) -> None:
    assert set(tiny_texts) == ALL
    assert len(set(tiny_texts.values())) == 8


def test_two_stages_need_no_program_for_the_middle(modules: dict[str, Any]) -> None:
    programs = modules["network"].programs(**TINY | {"pipeline_stage": 2})
    assert set(programs) == OUTER
    assert programs["last_step"].ranks == range(4, 8)


def test_more_stages_change_ranks_only(modules: dict[str, Any], tiny_texts: dict[str, str]) -> None:
    deeper = TINY | {"pipeline_stage": 6, "num_layers": 6}
    assert lowered(modules, deeper) == tiny_texts
    assert modules["network"].programs(**deeper)["mid_bwd"].ranks == range(4, 20)


@pytest.mark.parametrize(
    ("parameter", "value", "changed"),
    [
        ("data_parallel", 4, ALL),
        ("model_parallel", 1, ALL),
        ("expert_num", 8, ALL),
        ("expert_parallel", 1, ALL),
        ("seq_length", 64, COMPUTE),
        ("batch_size", 1, COMPUTE),
        ("micro_batch_num", 3, OPTIMIZERS),
        ("enable_parallel_optimizer", False, OPTIMIZERS),
        ("use_seq_parallel", False, COMPUTE),
        ("hidden_size", 128, ALL),
        ("intermediate_size", 256, ALL),
        ("num_layers", 8, ALL),
        ("num_heads", 8, ALL),
        ("num_kv_heads", 4, ALL),
        ("vocab_size", 512, OUTER),
        ("experts_per_token", 1, COMPUTE),
        ("capacity_factor", 1.5, COMPUTE),
        ("rope_theta", 1e6, COMPUTE),
        ("dtype", "bfloat16", ALL),
        ("z_loss", 2e-4, {"last_step"}),
        ("learning_rate", 1e-3, OPTIMIZERS),
        ("weight_decay", 0.0, OPTIMIZERS),
    ],
)
def test_a_parameter_changes_what_depends_on_it(
    modules: dict[str, Any], tiny_texts: dict[str, str], parameter: str, value: object, changed: set[str]
) -> None:
    texts = lowered(modules, TINY | {parameter: value})
    assert {name for name, text in texts.items() if text != tiny_texts[name]} == changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_parallel": 3}, "num_kv_heads 2 is not divisible by model_parallel 3"),
        ({"num_heads": 5}, "hidden_size 64 is not divisible by num_heads 5"),
        ({"num_layers": 6}, "num_layers 6 is not divisible by pipeline_stage 4"),
        ({"expert_parallel": 4}, "data_parallel 2 is not divisible by expert_parallel 4"),
        ({"expert_num": 3}, "expert_num 3 is not divisible by expert_parallel 2"),
        ({"seq_length": 33}, "seq_length 33 is not divisible by model_parallel 2"),
        ({"pipeline_stage": 1}, "pipeline_stage is 1, but the first and the last stage must be two stages"),
        ({"batch_size": 0}, "batch_size is 0, but must be at least 1"),
        ({"experts_per_token": 5}, "experts_per_token is 5, more than expert_num 4"),
        ({"dtype": "float16"}, 'dtype is "float16", but must be "bfloat16" or "float32"'),
        ({"z_loss": -1.0}, "z_loss is -1.0, but must be finite and not negative"),
        ({"z_loss": float("nan")}, "z_loss is nan, but must be finite and not negative"),
        ({"learning_rate": 0}, "learning_rate is 0, but must be positive"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0, but must be a whole number"),
        ({"use_seq_parallel": 1}, "use_seq_parallel is 1, but must be true or false"),
        ({"micro_batch_num": True}, "micro_batch_num is True, but must be a whole number"),
        (
            {"num_heads": 64, "num_kv_heads": 64},
            "hidden_size / num_heads is 1, but rotary embeddings need an even number",
        ),
    ],
)
def test_a_bad_value_gives_one_clear_sentence(modules: dict[str, Any], change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        modules["network"].programs(**TINY | change)
    assert str(caught.value) == message


def test_an_unknown_parameter_is_named(modules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^unknown parameter heads; the network has batch_size, "):
        modules["network"].programs(**TINY, heads=4)


def test_a_missing_parameter_is_named(modules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^parameter z_loss is missing$"):
        modules["network"].programs(**{name: value for name, value in TINY.items() if name != "z_loss"})


def test_optimizer_state_is_shared_where_weights_are_replicated(modules: dict[str, Any]) -> None:
    config = modules["mixtral_config"].MixtralConfig.of(FULL)
    shares = modules["mixtral_optimizer"].state_weight
    weights = modules["mixtral_layers"].stage_weights(config, "first")
    devices = {"data": 1, "expert": 2, "model": 8}

    def pieces(weight: Any) -> int:
        axes = [axis for entry in weight.spec for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis]
        assert len(axes) == len(set(axes))
        return int(np.prod([devices[axis] for axis in axes]))

    leaves = {**weights["layers"], "embedding": weights["embedding"]}
    found = {name: (pieces(weight), pieces(shares(config, weight))) for name, weight in leaves.items()}
    replicated, split, expert = (1, 2), (8, 16), (16, 16)
    assert found == {
        **dict.fromkeys(("attention_norm", "expert_norm", "router"), replicated),
        **dict.fromkeys(("query", "key", "value", "output", "embedding"), split),
        **dict.fromkeys(("gate", "up", "down"), expert),
    }


def test_adamw_is_the_published_one(modules: dict[str, Any]) -> None:
    config = modules["mixtral_config"].MixtralConfig.of(TINY)
    weight = modules["mixtral_layers"].Weight((3,), jax.sharding.PartitionSpec())
    random = np.random.default_rng(0)
    master, total = random.standard_normal((2, 3))
    mean, square = np.abs(random.standard_normal((2, 3)))
    state = {"master": {"w": master}, "mean": {"w": mean}, "square": {"w": square}}
    found = modules["mixtral_optimizer"].adamw(config, {"w": weight}, state, {"w": total}, np.int32(6))
    gradient = total / config.micro_batch_num
    mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
    change = (mean / (1 - 0.9**7)) / (np.sqrt(square / (1 - 0.95**7)) + 1e-8)
    master = master - config.learning_rate * change - config.learning_rate * config.weight_decay * master
    for name, wanted in (("master", master), ("mean", mean), ("square", square)):
        np.testing.assert_allclose(found[name]["w"], wanted, rtol=1e-5)
