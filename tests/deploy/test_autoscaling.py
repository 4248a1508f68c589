from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext

from sluice.deploy.app import build
from sluice.deploy.autoscaling import latest_load, serve_autoscaling
from sluice.deploy.commands.deploy import application_of
from sluice.deploy.config import parse_config
from sluice.replica.config import AutoscalingConfig
from sluice.scheduling.autoscaling import Load

OPTIONS = {"smoothing_s": 1.0, "startup_s": 5.0, "down_after_s": 10.0}
CONFIG = AutoscalingConfig(min_replicas=1, max_replicas=6, policy_options=OPTIONS)


def reported(*loads: tuple[str, float, Load]) -> dict[str, dict[str, Any]]:
    """Metrics as Serve keeps them: loads by replica and time."""
    metrics: dict[str, dict[str, Any]] = {}
    for replica, at_s, load in loads:
        for name, value in load._asdict().items():
            series = metrics.setdefault(name, {}).setdefault(replica, [])
            series.append(TimeStampedValue(at_s, value))
    return metrics


class Serve:
    """Calls a policy as Serve's controller does, with its own wrapper around it."""

    def __init__(self, config: AutoscalingConfig = CONFIG) -> None:
        self.config = serve_autoscaling(config)
        self.policy: Callable[[AutoscalingContext], tuple[int, dict[str, Any]]] = (
            _apply_autoscaling_config(_resolve_policy_callable(self.config.policy))
        )
        self.target = self.running = config.first
        self.state: dict[str, Any] = {}
        self.now_s = 1000.0

    def tick(self, metrics: Any, running: int | None = None, waiting: float = 0.0) -> int:
        self.now_s += 0.1
        context = AutoscalingContext(
            deployment_id=DeploymentID(name="Replica", app_name="sluice"),
            deployment_name="Replica",
            app_name="sluice",
            current_num_replicas=self.target if running is None else running,
            target_num_replicas=self.target,
            running_replicas=[],
            total_num_requests=waiting,
            total_queued_requests=waiting,
            aggregated_metrics={},
            raw_metrics=metrics,
            capacity_adjusted_min_replicas=self.config.min_replicas,
            capacity_adjusted_max_replicas=self.config.max_replicas,
            policy_state=dict(self.state),
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now_s,
            config=self.config,
        )
        self.target, self.state = self.policy(context)
        return self.target


def demanding(at_s: float, demand: float, ready: float = 1.0) -> Load:
    """A load since 0 of which all is prefill."""
    return Load(at_s, ready, asked=10 * at_s, asked_s=demand * at_s, head_room=0.5)


def test_serve_gets_the_policys_number_at_once_and_in_bounds() -> None:
    serve = Serve()
    for second in range(1, 30):
        serve.tick(reported(("r1", 50.0 + second, demanding(second, 2.0))))
    assert serve.target == 3
    for second in range(30, 60):
        serve.tick(reported(("r1", 50.0 + second, demanding(second, 20.0))))
    assert serve.target == 6


def test_it_goes_down_by_the_policys_own_delay() -> None:
    serve = Serve()
    serve.target = 4
    sizes = [
        serve.tick(reported(("r1", float(second), demanding(second, 0.5))))
        for second in range(1, 60)
    ]
    assert sizes[:10] == [4] * 10
    assert sizes[-1] == 1


def test_without_news_nothing_changes() -> None:
    serve = Serve()
    for second in range(1, 30):
        serve.tick(reported(("r1", 50.0 + second, demanding(second, 2.0))))
    last = reported(("r1", 79.0, demanding(29.0, 2.0)))
    state = serve.state
    assert {serve.tick(last) for _ in range(500)} == {3}
    assert {serve.tick({}) for _ in range(500)} == {3}
    assert serve.state["sluice_state"] == state["sluice_state"]


def test_a_failing_policy_keeps_the_number_and_says_so_once() -> None:
    serve = Serve()
    serve.target = 4
    broken = reported(("r1", 1.0, demanding(1, 2.0)))
    broken["asked"]["r1"] = [TimeStampedValue(1.0, "a word")]
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener(logging.ERROR)
    logging.getLogger("ray.serve").addHandler(listener)
    try:
        assert {serve.tick(broken) for _ in range(5)} == {4}
    finally:
        logging.getLogger("ray.serve").removeHandler(listener)
    assert said == ["the autoscaling policy failed; the number of replicas stays"]


def test_the_latest_load_counts_whoever_reported_it() -> None:
    old, new = demanding(3.0, 1.0), demanding(4.0, 1.0)
    assert latest_load({}) is None
    assert latest_load(reported(("r1", 13.0, old), ("r1", 14.0, new))) == new
    # The clocks of replicas need not agree.
    assert latest_load(reported(("r1", 14.0, new), ("r2", 999.0, old))) == new
    torn = reported(("r1", 13.0, old), ("r2", 14.0, new))
    del torn["asked"]["r2"]
    assert latest_load(torn) == old


def test_a_replica_that_leaves_with_the_latest_news_is_no_restart() -> None:
    serve = Serve()
    serve.target = 2
    for second in range(1, 30):
        serve.tick(
            reported(
                ("r1", 50.0 + second, demanding(second, 1.2)),
                ("r2", 50.0 + second, demanding(second + 0.5, 1.2)),
            )
        )
    learnt = serve.state["sluice_state"]["demand_s"]
    serve.tick(reported(("r1", 79.0, demanding(29.0, 1.2))))
    assert serve.state["sluice_state"]["demand_s"] == learnt > 1
    # Another host's clock is a new controller's.
    serve.tick(reported(("r1", 79.0, demanding(3_000.0, 1.2))))
    serve.tick(reported(("r1", 80.0, demanding(3.0, 1.2))))
    assert serve.state["sluice_state"]["demand_s"] < 0
    assert serve.target == 2


def test_the_last_replica_goes_and_one_request_brings_it_back() -> None:
    """Serve's own rule starts one where a request waits in a handle and no replica runs."""
    scaled = {"min_replicas": 0, "initial_replicas": 1, "zero_after_s": 20}
    serve = Serve(CONFIG.model_copy(update=scaled))
    idle = [reported(("r1", float(second), Load(float(second), 1.0))) for second in range(1, 30)]
    sizes = [serve.tick(each) for each in idle]
    assert (sizes[19], sizes[20:]) == (1, [0] * 9)
    assert [serve.tick({}) for _ in range(5)] == [0] * 5
    assert serve.tick({}, waiting=1.0) == 1
    # It takes a while until the replica runs, and the client may leave before.
    assert [serve.tick({}, running=0) for _ in range(5)] == [1] * 5
    sizes = [serve.tick(reported(("r2", 99.0 + n, Load(99.0 + n, 1.0)))) for n in range(22)]
    assert sizes == [1] * 20 + [0] * 2


def test_a_model_that_may_have_no_replica_says_so_to_those_that_need_to_know() -> None:
    scaled = {"min_replicas": 0, "max_replicas": 3, "policy_options": {"startup_s": 90}}
    fields = {"replica": {"autoscaling": scaled}}
    config = parse_config(fields)
    (fleet,) = config.fleets
    assert fleet.controller.startup_s == 90
    (pools,) = build(fields)._bound_deployment.init_args[0].values()
    deployed = pools["mixed"]._bound_deployment._deployment_config
    assert (deployed.autoscaling_config.min_replicas, config.replica.first) == (0, 0)
    hints = deployed.request_router_config.request_router_kwargs
    assert (hints["scales_to_zero"], hints["no_replica_wait_s"]) == (True, 600)
    assert hints["controller"]["startup_s"] == 90
    # What was measured elsewhere comes first; and a policy without the option has a usual time.
    own = parse_config({**fields, "controller": {"startup_s": 40}})
    assert own.fleets[0].controller.startup_s == 40
    plain = {**scaled, "policy": "ongoing_requests", "policy_options": {}}
    assert parse_config({"replica": {"autoscaling": plain}}).fleets[0].controller.startup_s == 60
    assert parse_config({}).fleets[0].controller.startup_s is None
    with pytest.raises(ValueError, match="startup_s has no effect"):
        parse_config({"controller": {"startup_s": 40}})
    pool = {"count": 1, "engine": {}}
    two = {"prefill": pool, "decode": {"autoscaling": {"min_replicas": 0, "max_replicas": 2}}}
    with pytest.raises(ValueError, match=r"pools\.decode\.autoscaling\.min_replicas"):
        parse_config({"replica": {"pools": two}})


def test_the_application_autoscales_where_it_is_asked_to() -> None:
    fields = {"replica": {"autoscaling": {"min_replicas": 2, "max_replicas": 5}}}
    (pools,) = build(fields)._bound_deployment.init_args[0].values()
    made = pools["mixed"]._bound_deployment._deployment_config.autoscaling_config
    # With a number of its own, Serve would fall back to it whenever the application changes.
    assert (made.min_replicas, made.initial_replicas, made.max_replicas) == (2, None, 5)
    scaled = parse_config(fields).replica
    assert (scaled.first, scaled.most) == (2, 5)
    assert application_of(fields, "a")["deployments"] == []
    assert (made.upscale_delay_s, made.downscale_delay_s) == (0, 0)
    fixed = {"replica": {"count": 3}}
    (pools,) = build(fixed)._bound_deployment.init_args[0].values()
    assert pools["mixed"]._bound_deployment._deployment_config.autoscaling_config is None
    number = [{"name": "Replica", "num_replicas": 3}]
    assert application_of(fixed, "a")["deployments"] == number


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "max_replicas"),
        ({"max_replicas": 2, "min_replicas": 3}, "need min_replicas <= initial_replicas"),
        ({"max_replicas": 2, "initial_replicas": 3}, "need min_replicas <= initial_replicas"),
        ({"max_replicas": 2, "policy": "most"}, "unknown autoscaling policy 'most'"),
        ({"max_replicas": 2, "policy_options": {"target": 1}}, "target"),
        ({"max_replicas": 2, "maximum": 3}, "maximum"),
        ({"max_replicas": 2, "min_replicas": -1}, "min_replicas"),
        ({"max_replicas": 2, "min_replicas": 0, "zero_after_s": 0}, "zero_after_s"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AutoscalingConfig.model_validate(fields)
    with pytest.raises(ValueError, match=r"replica\.autoscaling"):
        parse_config({"replica": {"autoscaling": fields}})
