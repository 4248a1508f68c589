"""How a replica learns how many there should be; tests/e2e/test_several_nodes.py has the rest."""

from __future__ import annotations

import pytest
from ray.serve._private.config import DeploymentConfig

from sluice.deploy.autoscaling import serve_autoscaling
from sluice.replica.config import AutoscalingConfig
from sluice.replica.deployment import ConfiguredReplicas


@pytest.mark.parametrize("count", [1, 5])
def test_a_fixed_number_is_what_was_deployed_last(count: int) -> None:
    it = ConfiguredReplicas()
    assert it.number is None
    it.hear(DeploymentConfig.from_default(num_replicas=9))
    it.hear(DeploymentConfig.from_default(num_replicas=count))
    assert it.number == count


def test_an_autoscaled_one_has_a_least() -> None:
    scaled = serve_autoscaling(
        AutoscalingConfig(min_replicas=3, initial_replicas=4, max_replicas=8)
    )
    it = ConfiguredReplicas()
    it.hear(DeploymentConfig.from_default(num_replicas=None, autoscaling_config=scaled))
    assert it.number == 3
