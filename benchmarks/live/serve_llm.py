"""Ray Serve LLM with its own ingress: a program, as it imports what Sluice does not need."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click

from sluice.benchmarks.live.engine import MODEL, events
from sluice.benchmarks.live.systems import VLLM_ENVIRONMENT
from sluice.deploy import ray_start
from sluice.deploy.leftovers import Cleaner
from sluice.deploy.local import stop_signals
from sluice.replica.private_dir import make_private_dir


class Engine:
    """An engine for Serve LLM's server that computes nothing."""

    def __init__(self, llm_config: Any) -> None:
        self._step_s = llm_config.experimental_configs["step_s"]

    async def start(self) -> None:
        """Do nothing: there is nothing to start."""

    async def check_health(self) -> None:
        """Do nothing: the engine is always healthy."""

    def routing_stats(self) -> dict[str, Any]:
        """Nothing: the engine has no statistics."""
        return {}

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[str]:
        """The events of a chat completion."""
        tokens = request.max_completion_tokens or request.max_tokens
        for event in events(tokens, f"{id(request):x}"):
            yield event.decode()
            await asyncio.sleep(self._step_s)


@click.command()
@click.option("--port", required=True, type=click.IntRange(1, 65_535))
@click.option("--replicas", required=True, type=click.IntRange(1, 64))
@click.option("--step-ms", default=0.0, type=click.FloatRange(0, 10_000))
@click.option("--vllm", type=click.Path(exists=True, path_type=Path))
def main(port: int, replicas: int, step_ms: float, vllm: Path | None) -> None:
    """Serve until terminated; --vllm: a JSON file with model, args, gpus, prefix_aware."""
    local_dir = make_private_dir()
    cleaner = Cleaner(local_dir)
    try:
        with stop_signals() as stop:
            ray_start.apply(local_dir)
            given = json.loads(vllm.read_text()) if vllm is not None else None
            _serve(local_dir, port, replicas, step_ms / 1e3, given)
            while not stop.wait(1.0):
                pass
    finally:
        cleaner.clean()


def _serve(
    local_dir: Path, port: int, replicas: int, step_s: float, vllm: dict[str, Any] | None
) -> None:
    # Ray reads its environment on import.
    from ray import serve
    from ray.serve.llm import LLMConfig, LLMServer, build_openai_app

    from sluice.deploy.ray_start import start_ray

    class Server(LLMServer):  # type: ignore[misc]
        _default_engine_cls = Engine

        @classmethod
        def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
            """Without GPUs in the placement group."""
            return dict(llm_config.deployment_config)

    cpus = max(os.cpu_count() or 1, 4)
    start_ray(local_dir / "ray", num_cpus=cpus, logging_level=logging.WARNING)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployment = {"num_replicas": replicas, "ray_actor_options": {"num_cpus": 0.1}}
    if vllm is None:
        model = LLMConfig(
            model_loading_config={"model_id": MODEL},
            deployment_config=deployment,
            server_cls=Server,
            experimental_configs={"step_s": step_s},
        )
    else:
        model = _real(LLMConfig, deployment, vllm)
    ingress = {"autoscaling_config": None, "num_replicas": 1}
    app = build_openai_app({"llm_configs": [model], "ingress_deployment_config": ingress})
    serve.run(app, name="serve-llm")


def _real(config: Any, deployment: dict[str, Any], vllm: dict[str, Any]) -> Any:
    """Serve LLM's configuration with vLLM."""
    from ray.serve.config import RequestRouterConfig
    from ray.serve.llm.request_router import PrefixCacheAffinityRouter

    if vllm["prefix_aware"]:
        router = RequestRouterConfig(request_router_class=PrefixCacheAffinityRouter)
        deployment = {**deployment, "request_router_config": router}
    gpus = vllm["gpus"]
    bundle = {"CPU": 0.1, "GPU": gpus} if gpus else {"CPU": 0.1}
    # Two engines with all cores would take turns on them.
    variables = {} if gpus else {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return config(
        model_loading_config={"model_id": MODEL, "model_source": vllm["model"]},
        deployment_config=deployment,
        engine_kwargs=vllm["args"],
        placement_group_config={"bundle_per_worker": bundle},
        runtime_env={"env_vars": {**VLLM_ENVIRONMENT, **variables}},
        log_engine_metrics=False,
    )


if __name__ == "__main__":
    main()
