"""The example network computes what it should, in stages on a device each as in stages that devices share."""

from typing import Any

import pytest

pytestmark = [pytest.mark.jax, pytest.mark.slow, pytest.mark.xdist_group("mixtral-tiny")]
pytest.importorskip("jax")


def test_the_loss_is_that_of_a_plain_numpy_mixtral(numerics: dict[str, Any]) -> None:
    assert numerics["skipped_places"] > 0, "no expert was full, so that the capacity went untested"
    assert numerics["numpy_to_direct_loss"] < 1e-6


@pytest.mark.parametrize("pipeline", ["whole", "split"])
def test_the_pipeline_computes_what_the_whole_network_does(numerics: dict[str, Any], pipeline: str) -> None:
    """`whole` stages are on one device each, `split` ones on 2 x 2 devices."""
    assert numerics[f"{pipeline}_to_direct_loss"] < 1e-6
    assert numerics[f"{pipeline}_to_direct_gradient"] < 1e-5


@pytest.mark.parametrize("pipeline", ["whole", "split"])
def test_an_update_moves_the_weights_and_clears_the_sums(numerics: dict[str, Any], pipeline: str) -> None:
    assert numerics[f"{pipeline}_update"] < 1e-6
    assert numerics[f"{pipeline}_sums_after_update"] == 0


def test_training_makes_the_loss_fall(numerics: dict[str, Any]) -> None:
    first, second, third = numerics["losses"]
    assert first > second > third > 0
