"""Prometheus, a span collector and Ray's logs follow an application that has just started."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml

from sluice.deploy.ray_start import free_port
from tests.documents import ROOT
from tests.e2e.conftest import System, wait_until
from tests.lacking import lacking
from tests.otlp_collector import Collector

KEY = "key-of-a-client-0123456789abcdef"
CLIENT = "followed"
METRICS_KEY = "key-of-prometheus-0123456789abcdef"
COLLECTOR_KEY = "key-of-the-collector-0123456789"
SECRET = "nobody else may read this prompt"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
PROMETHEUS = ROOT / "deploy" / "prometheus"


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """A Prometheus with the project's configuration, more eager: its address."""
    program = shutil.which("prometheus")
    if program is None:
        lacking("prometheus is missing: install the Debian package of this name")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    job["authorization"] = {"type": "Bearer", "credentials_file": str(folder / "key")}
    job["static_configs"] = [{"targets": [target]}]
    (folder / "key").write_text(METRICS_KEY)
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    shutil.copy(PROMETHEUS / "alerts.yaml", folder)
    address = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(timeout=120)


def ask(address: str, path: str, **parameters: str) -> Any:
    try:
        answer = httpx.get(f"{address}/api/v1/{path}", params=parameters, timeout=120)
    except httpx.TransportError:
        return None  # not up yet
    if answer.status_code != 200:
        return None
    return answer.json()["data"]


def value(address: str, query: str) -> float | None:
    """The one number that ``query`` gives, or nothing."""
    found = ask(address, "query", query=query)
    return float(found["result"][0]["value"][1]) if found and found["result"] else None


def send(serving: System, **extra: Any) -> httpx.Response:
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 5,
        "slo": {"class": "interactive", "ttft_ms": 60_000, "tpot_ms": 60_000},
    }
    headers = {
        "authorization": f"Bearer {KEY}",
        "traceparent": f"00-{extra.pop('trace', '1' * 32)}-{PARENT}-01",
    }
    url = f"{serving.url}/v1/chat/completions"
    return httpx.post(url, json={**body, **extra}, headers=headers, timeout=120)


def check_spans(at: Collector, answer: httpx.Response) -> None:
    """One trace from the client's span to the decode in the replica."""
    names = {"chat", "decision", "attempt", "generate", "queue", "prefill", "decode"}
    wait_until(lambda: set(at.of_trace(TRACE)) == names, "all spans have arrived")
    spans = at.of_trace(TRACE)
    parents = {
        "chat": bytes.fromhex(PARENT),
        "decision": spans["chat"][1].span_id,
        "attempt": spans["chat"][1].span_id,
        "generate": spans["attempt"][1].span_id,
        **dict.fromkeys(("queue", "prefill", "decode"), spans["generate"][1].span_id),
    }
    assert {name: span.parent_span_id for name, (_, span) in spans.items()} == parents
    services = {name: service for name, (service, _) in spans.items()}
    assert services["chat"] == "sluice-router" and services["generate"] == "sluice-replica"
    attributes = {each.key: each.value for each in spans["chat"][1].attributes}
    request_id = attributes["sluice.request_id"].string_value
    assert request_id == answer.headers["x-sluice-request-id"]
    assert attributes["sluice.replica"].string_value == answer.headers["x-sluice-replica"]
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5
    assert at.authorizations == {f"Bearer {COLLECTOR_KEY}"}
    assert SECRET not in str(at.spans) and KEY not in str(at.spans)


def check_logs(answer: httpx.Response) -> None:
    """A line of the request among Ray's logs at once, and nothing that is secret."""
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    request_id = answer.headers["x-sluice-request-id"]

    def written() -> str:
        return "".join(path.read_text(errors="replace") for path in folder.glob("worker-*.err"))

    def lines() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in written().splitlines() if line.startswith("{")]
        return [line for line in found if line.get("request_id") == request_id]

    wait_until(lambda: bool(lines()), "the request's line is there")
    (line,) = lines()
    assert line["outcome"] == "ok" and line["client"] == CLIENT and line["trace_id"] == TRACE
    assert line["replica"] == answer.headers["x-sluice-replica"] and line["output_tokens"] == 5
    assert not [secret for secret in (SECRET, KEY, COLLECTOR_KEY) if secret in written()]


def check_prometheus(address: str) -> None:
    """The scrape works, every rule is evaluated, and every query of the dashboards runs."""
    up = 'sluice_controller_up{job="sluice"}'
    wait_until(lambda: value(address, up) == 1, "the page is scraped")
    wait_until(lambda: value(address, "sum(sluice_attained_total)") == 2, "the counts are there")
    wait_until(
        lambda: (
            value(address, 'sum(sluice_replicas{state="fresh"})') == 1
            and value(address, "max(sluice_configured_replicas)") == 1
        ),
        "the replica is there",
    )

    def rules() -> list[dict[str, Any]]:
        return [rule for group in ask(address, "rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] == "ok" for rule in rules()), "rules work", show=rules)
    assert not [rule["name"] for rule in rules() if rule.get("state") == "firing"]
    for path in (ROOT / "deploy" / "grafana").glob("*.json"):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"].replace("$__rate_interval", "1m")
                for variable in ("$model", "$class", "$replica"):
                    query = query.replace(variable, ".*")
                assert ask(address, "query", query=query) is not None, query


def telemetry(at: Collector) -> dict[str, Any]:
    """Spans for ``at``, and logs as JSON: a part of a configuration."""
    return {"tracing": {"endpoint": at.url}, "logs": {"format": "json"}}


def check_followed(serving: System, at: Collector, folder: Path) -> None:
    """Two requests, the first of the application, can be followed in all three."""
    with prometheus(folder, serving.url.removeprefix("http://")) as address:
        answer = send(serving, trace=TRACE)
        assert answer.status_code == 200, answer.text
        assert send(serving, stream=True).status_code == 200
        check_prometheus(address)
    check_spans(at, answer)
    check_logs(answer)
