"""Tests that share what is slow to start are sent to one worker, which a version of pytest has silently undone."""

import pytest


@pytest.mark.xdist_group("packaging")
def test_groups_are_seen(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("loadgroup", default=False):
        assert request.node.nodeid.endswith("@packaging")
