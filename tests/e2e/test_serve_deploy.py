"""The application as an operator deploys it on a running cluster: from Serve's configuration."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import ray
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from tests.e2e.conftest import system, wait_until

pytestmark = pytest.mark.ray

_SIMULATED = {"kind": "simulated", "model": "sim"}


def test_a_serve_configuration_deploys() -> None:
    """Serve builds the application in a process of its own from ``import_path`` and ``args``."""
    first = {"name": "first", "engine": _SIMULATED, "replica": {"count": 1, "num_cpus": 0.1}}
    with system(first) as serving:
        url = f"{serving.url}/second/v1/completions"
        _deploy({"engine": _SIMULATED, "replica": {"count": 2, "num_cpus": 0.1}})
        body = {"model": "sim", "prompt": "one", "max_tokens": 3}
        wait_until(lambda: httpx.post(url, json=body, timeout=30).status_code == 200, "it answers")
        own = ray.get_actor("second-controller", namespace="sluice")
        wait_until(
            lambda: len(ray.get(own.snapshot.remote())["replicas"]) == 2,
            "its replicas are with its own controller",
        )
        refused = httpx.post(url, json={**body, "slo": {"tpot_ms": 0}}, timeout=30)
        assert refused.status_code == 400
        assert "slo.tpot_ms" in refused.json()["error"]["message"]


def _schema(args: dict[str, Any]) -> ServeDeploySchema:
    application = {
        "name": "second",
        "route_prefix": "/second",
        "import_path": "deploy.app:build",
        "args": args,
    }
    text = json.dumps({"applications": [application]})
    return ServeDeploySchema.model_validate(json.loads(text))


def _deploy(args: dict[str, Any]) -> None:
    _get_global_client().deploy_apps(_schema(args), _blocking=True)
