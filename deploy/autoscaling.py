"""The bridge from Serve's autoscaler to ``sluice.scheduling.autoscaling``.

Serve calls its policy ten times a second; it decides when a replica has reported a newer load,
and otherwise keeps the number. Where no replica runs, a request that waits in a handle of the
deployment starts one (Serve's own rule). Serve pickles this module by value into its controller,
so everything shared is imported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import inf
from typing import Any

from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig
from ray.serve.config import AutoscalingContext
from ray.serve.config import AutoscalingPolicy as ServePolicy

from sluice.replica.config import AutoscalingConfig
from sluice.scheduling.autoscaling import Load, Pool, ToZero, make_policy

OLD_NEWS_S = 60.0
"""Largest age of a reported load, seconds."""

_STATE, _LAST_S = "sluice_state", "sluice_last_s"

_log = logging.getLogger("ray.serve")


class ObjectivePolicy:
    """Adapts a Sluice autoscaling policy to Serve: context in, number and state out. On any
    error the number of replicas stays: an exception would stop Serve's control loop.
    ``zero_after_s``: see ``ToZero``; unused with a minimum of one replica or more."""

    def __init__(self, policy: str, options: Mapping[str, Any], zero_after_s: float) -> None:
        self._policy = make_policy(policy, options)
        self._to_zero = ToZero(self._policy, zero_after_s)
        self._failed = False

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and the state for the next call."""
        kept = {
            name: context.policy_state[name]
            for name in (_STATE, _LAST_S)
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
        load = latest_load(context.raw_metrics or {})
        if load is None or not is_news(load.now_s, kept.get(_LAST_S, -inf)):
            return target, kept
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        decide = self._policy.decide if least else self._to_zero.decide
        decision = decide(load, Pool(target, least, most), kept.get(_STATE, {}))
        if decision.replicas != target:
            _log.info(
                "autoscaling %s: %d -> %d replicas, %s",
                context.deployment_name,
                target,
                decision.replicas,
                decision.reason,
            )
        self._failed = False
        return decision.replicas, {_STATE: dict(decision.state), _LAST_S: load.now_s}


def is_news(now_s: float, last_s: float) -> bool:
    """Whether a load of ``now_s`` is newer than one of ``last_s``, on the controller's clock. A
    clock that is far behind is another one: the controller was restarted on another host."""
    return now_s > last_s or now_s < last_s - OLD_NEWS_S


def latest_load(metrics: Mapping[str, Mapping[Any, Any]]) -> Load | None:
    """The latest of the replicas' last reported loads; ``None`` without one. ``metrics``: by
    field of ``Load`` and replica, timed values in order, as Serve keeps them."""
    loads = []
    for replica, series in metrics.get("now_s", {}).items():
        fields = {}
        for name in Load._fields:
            values = metrics.get(name, {}).get(replica)
            if series and values and values[-1].timestamp == series[-1].timestamp:
                fields[name] = float(values[-1].value)
        if len(fields) == len(Load._fields):
            loads.append(Load(**fields))
    return max(loads, key=lambda load: load.now_s, default=None)


def serve_autoscaling(config: AutoscalingConfig) -> ServeAutoscalingConfig:
    """Serve's settings for ``config``, without Serve's own delays and factors: a policy has its
    own."""
    return ServeAutoscalingConfig(
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        # If set, Serve returns to this number with every change of the application.
        initial_replicas=config.initial_replicas,
        # Replicas report as often as they sample, a fifth of the look-back period. Ray names an
        # environment variable that is to replace this field; no code of this version reads it.
        metrics_interval_s=2.5,
        look_back_period_s=12.5,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=ServePolicy(
            policy_function="sluice.deploy.autoscaling:ObjectivePolicy",
            policy_kwargs={
                "policy": config.policy,
                "options": config.policy_options,
                "zero_after_s": config.zero_after_s,
            },
        ),
    )
