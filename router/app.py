"""The router as a Serve deployment: it builds the API over the replicas' handles."""

from __future__ import annotations

import asyncio
import errno
import gc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

import psutil
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from sluice.controller.client import ControllerClient, fleet_name
from sluice.controller.config import ControllerConfig
from sluice.controller.observability.metrics import MetricsPusher
from sluice.router.admin.api import AdminService
from sluice.router.api import make_api
from sluice.router.config import RouterConfig
from sluice.router.dispatch.access_log import Telemetry
from sluice.router.dispatch.dispatcher import Dispatcher
from sluice.router.dispatch.models import Catalog, Model, ModelRegistry
from sluice.router.ingress.http_server import HttpServer, bound
from sluice.router.metrics.instruments import RouterMetrics
from sluice.router.metrics.page import NO_MODEL, ControllerMetricsPage, rendered
from sluice.router.picker.server import PickerServer
from sluice.router.serve.replicas import ServeReplicas
from sluice.scheduling.autoscaling.base import STARTUP_S
from sluice.scheduling.roles import Role
from sluice.telemetry.logs import TelemetryConfig, configure_logs
from sluice.telemetry.phases import phase
from sluice.telemetry.tracing import make_tracer


class ServedModel(NamedTuple):
    """A model's configuration. ``adapters``: names of its LoRA adapters. ``controller``: to create
    its controller if there is none. ``key``: names it if the application has several models."""

    name: str
    controller: ControllerConfig
    roles: Mapping[str, Role]
    adapters: Sequence[str] = ()
    key: str | None = None
    dynamic: bool = False
    transfers_kv: bool = False


class _Part:
    """One model in this process: access to its controller and to its replicas."""

    def __init__(
        self, model: ServedModel, pools: Mapping[str, DeploymentHandle], config: RouterConfig
    ) -> None:
        context = serve.get_replica_context()
        self.metrics = metrics = RouterMetrics()
        with phase("router: find the controller"):
            self.client = ControllerClient(
                fleet_name(context.app_name, model.key),
                model.controller,
                config.decision_timeout_s,
                registry=metrics.registry,
            )
        self.pusher = MetricsPusher(
            self.client.push_metrics, metrics.registry, f"router-{context.replica_id.unique_id}"
        )
        self.page = ControllerMetricsPage(self.client, self.pusher, metrics.registry)
        by_role: dict[Role, list[DeploymentHandle]] = {}
        for name, handle in pools.items():
            by_role.setdefault(model.roles[name], []).append(handle)
        serve_replicas = ServeReplicas(
            by_role,
            lambda: self.client.closed,
            lambda: self.client.quarantined,
            metrics.sent,
            scales_to_zero=model.controller.startup_s is not None,
            startup_s=model.controller.startup_s or STARTUP_S,
        )
        self.fleet = Model(
            model.name,
            Dispatcher(
                self.client, serve_replicas, metrics, config, transfers_kv=model.transfers_kv
            ),
            Catalog(serve_replicas, (model.name, *model.adapters), dynamic=model.dynamic),
            metrics,
            model.adapters,
            model.dynamic,
        )


class Router:
    """One router replica. ``models``: the same models. ``drain_s``: how long its requests may run
    on when it stops, seconds; the handles after it are of deployments that run beside it. Raises
    OSError: another program has the address. Raises ValueError: tracing is configured, and
    OpenTelemetry is not installed."""

    async def __init__(  # type: ignore[misc]
        self,
        replicas: Mapping[str, Mapping[str, DeploymentHandle]],
        models: Sequence[ServedModel],
        config: RouterConfig,
        telemetry: TelemetryConfig,
        drain_s: float,
        *_of_the_application: DeploymentHandle,
    ) -> None:
        listener = bound(config.host, config.port)
        _check_not_shared(config.port)
        process = f"router-{serve.get_replica_context().replica_id.unique_id}"
        configure_logs(telemetry.logs, process)
        tracer = make_tracer(telemetry.tracing, process)
        parts = [_Part(model, replicas[model.name], config) for model in models]
        pushers = [part.pusher for part in parts]
        edge = parts[0].metrics
        render_page = parts[0].page.render
        if models[0].key is not None:
            edge = RouterMetrics()
            for part in parts:
                for of_the_edge in part.metrics.of_the_edge:
                    part.metrics.registry.unregister(of_the_edge)
            source = f"edge-{serve.get_replica_context().replica_id.unique_id}"
            push, labels = parts[0].client.push_metrics, {"model": NO_MODEL}
            pushers.append(MetricsPusher(push, edge.registry, source, labels=labels))
            render_page = partial(rendered, {part.fleet.model: part.page for part in parts})

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            for pusher in pushers:
                pusher.start()
            syncs = [asyncio.create_task(part.client.sync_repeatedly()) for part in parts]
            if config.picker.port is not None:
                await picker.start(config.picker.host, config.picker.port)
            yield
            await picker.stop()
            for pusher in pushers:
                await pusher.stop()
            for part, task in zip(parts, syncs, strict=True):
                task.cancel()
                part.client.sync()
                await part.client.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.shutdown)

        fleets = ModelRegistry([part.fleet for part in parts], edge)
        admin_service = AdminService(
            {part.fleet.model: part.client for part in parts},
            gpu_hour_price=config.gpu_hour_price,
            currency=config.currency,
        )
        api = make_api(
            config,
            fleets,
            render_page,
            lifespan,
            share=parts[0].client.share_quotas,
            loop_service=parts[0].client,
            telemetry=Telemetry(telemetry.logs, tracer),
            admin_service=admin_service,
        )
        picker = PickerServer(api, fleets.health, config.max_body_bytes, config.max_in_flight)

        self._drain_s = drain_s
        self._server = HttpServer(api, config)
        await self._server.start(listener)
        # A collection would look at all that was imported, which holds up every request, and then
        # at all requests in flight: an ended one leaves no reference cycle.
        gc.freeze()
        gc.set_threshold(700, 10, 100)

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests (503); return when all have ended, with an error after
        ``limit_s``."""
        await self._server.drain(limit_s, listening=True)

    def check_health(self) -> None:
        """Called by Serve. Raises RuntimeError: it neither listens nor stops."""
        if not (self._server.listens or self._server.clients.stops):
            raise RuntimeError("the router does not listen")

    async def __del__(self) -> None:
        """Serve awaits this when it stops the router."""
        await self._server.stop(self._drain_s)


def _check_not_shared(port: int) -> None:
    """Raises OSError: another program of the user would get a part of the connections."""
    ours = f"ray::ServeReplica:{serve.get_replica_context().app_name}:"
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN
        if not listens or not connection.laddr or connection.laddr.port != port:
            continue
        try:
            other = psutil.Process(connection.pid)
            if other.cmdline()[0].startswith(ours):
                continue
            name = other.name()
        except (psutil.Error, IndexError, TypeError):
            name = "another process"
        raise OSError(
            errno.EADDRINUSE, f"cannot listen on port {port}: {name} ({connection.pid}) does"
        )
