"""How many replicas of its model there should be, as a replica hears it from Serve.

The number is no part of what a replica is built with: it may change while the replica runs, and
Serve tells replicas nothing of that. It tells whoever holds a handle to the deployment, by a long
poll, so the replica listens there.
"""

from __future__ import annotations

import asyncio

import ray
from ray.serve._private.common import DeploymentID
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.long_poll import LongPollClient, LongPollNamespace


class ConfiguredReplicas:
    """The fewest replicas that there should be: as many as are configured, or the least of
    autoscaling."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._client: LongPollClient | None = None

    @property
    def number(self) -> int | None:
        """The number as it was told last; ``None`` before that."""
        return self._number

    def start(self, deployment: DeploymentID) -> None:
        """Listen, on the running event loop.

        Raises:
            ValueError: Serve does not run.
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
        """Listen no longer."""
        if self._client is not None:
            self._client.stop()
