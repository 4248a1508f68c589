"""The bridge from Serve's autoscaler to :mod:`scheduling.autoscaling`.

Serve asks its policy ten times a second. The policy looks whenever a replica has told a newer load,
and else keeps what there is: without news from the controller nothing is scaled.

Serve pickles this module by value into its own controller, so all that is shared is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig
from ray.serve.config import AutoscalingContext
from ray.serve.config import AutoscalingPolicy as ServePolicy

from replica.config import AutoscalingConfig
from scheduling.autoscaling import Load, Pool, make_policy

LOOK_BACK_LOOKS = 5
"""Serve records metrics five times in the time that it looks back, and keeps them for so long."""

_STATE, _TOLD_S = "sluice_state", "sluice_told_s"

_log = logging.getLogger("ray.serve")


class ObjectivePolicy:
    """An autoscaling policy of ours as Serve calls one: with a context, for a number and a state.

    Whatever goes wrong keeps the number of replicas and is logged: an exception would stop Serve's
    control loop from looking after the replicas.

    Args:
        policy: registered name.
        options: of the policy.
    """

    def __init__(self, policy: str, options: Mapping[str, Any]) -> None:
        self._policy = make_policy(policy, options)
        self._failed = False

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and what to remember until the next call."""
        kept = {
            name: context.policy_state[name]
            for name in (_STATE, _TOLD_S)
            if name in context.policy_state
        }
        try:
            return self._decide(context, kept)
        except Exception:
            if not self._failed:
                _log.exception("the autoscaling policy failed; the number of replicas stays")
            self._failed = True
            return context.target_num_replicas, kept

    def _decide(
        self, context: AutoscalingContext, kept: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        target = context.target_num_replicas
        told = latest_load(context.raw_metrics or {})
        if told is None or told[0] == kept.get(_TOLD_S):
            return target, kept
        told_s, load = told
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        decision = self._policy.decide(load, Pool(target, least, most), kept.get(_STATE, {}))
        if decision.replicas != target:
            _log.info(
                "autoscaling %s: %d -> %d replicas, %s",
                context.deployment_name,
                target,
                decision.replicas,
                decision.reason,
            )
        self._failed = False
        return decision.replicas, {_STATE: dict(decision.state), _TOLD_S: told_s}


def latest_load(metrics: Mapping[str, Mapping[Any, Any]]) -> tuple[float, Load] | None:
    """The load that was told last and when, on the clock of the host that told it; ``None`` where
    none was.

    Args:
        metrics: by field of :class:`Load` and replica, the values with the times at which they were
            told, in their order, as Serve keeps them.
    """
    told = metrics.get("now_s", {})
    times = {replica: series[-1].timestamp for replica, series in told.items() if series}
    for replica in sorted(times, key=lambda each: times[each], reverse=True):
        at_s = times[replica]
        fields = {}
        for name in Load._fields:
            series = metrics.get(name, {}).get(replica)
            if series and series[-1].timestamp == at_s:
                fields[name] = float(series[-1].value)
        if len(fields) == len(Load._fields):
            return at_s, Load(**fields)
    return None


def serve_autoscaling(config: AutoscalingConfig) -> ServeAutoscalingConfig:
    """Serve's settings for ``config``. Delays and factors of its own are off: a policy has its own
    idea of both."""
    return ServeAutoscalingConfig(
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        initial_replicas=config.first,
        look_back_period_s=LOOK_BACK_LOOKS * config.interval_s,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=ServePolicy(
            policy_function="deploy.autoscaling:ObjectivePolicy",
            policy_kwargs={"policy": config.policy, "options": config.policy_options},
        ),
    )
