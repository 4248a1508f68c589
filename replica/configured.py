"""The configured number of replicas, as Serve announces it to a replica.

The number is not a constructor argument of a replica: it may change while the replica runs. Serve
does not announce a change to replicas, only to holders of a handle to the deployment, by a long
poll. So the replica uses that long poll.
"""

from __future__ import annotations

import asyncio

import ray
from ray.serve._private.common import DeploymentID
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace


class ConfiguredReplicas:
    """The min number of replicas: the configured number, or ``min_replicas`` of autoscaling."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._client: LongPollClient | None = None

    @property
    def number(self) -> int | None:
        """The number that was received last; ``None`` before the first."""
        return self._number

    def start(self, deployment: DeploymentID) -> None:
        """Start the long poll on the running event loop.

        Raises:
            ValueError: Serve is not running.
        """
        self._client = LongPollClient(
            ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE),
            {(LongPollNamespace.DEPLOYMENT_CONFIG, deployment): self.hear},
            call_in_event_loop=asyncio.get_running_loop(),
            client_id=f"{type(self).__name__}:{deployment}",
        )

    def hear(self, config: DeploymentConfig) -> None:
        """Take the number from the deployment's configuration."""
        scaled = config.autoscaling_config
        self._number = config.num_replicas if scaled is None else scaled.min_replicas

    def stop(self) -> None:
        """Stop the long poll."""
        if self._client is not None:
            self._client.stop()
