"""Settings for every test. Ray reads its environment on import, so they are set here, first."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from httpx._transports import default as transports

from sluice.controller.config import ControllerConfig
from sluice.deploy import ray_start
from sluice.replica.config import EngineConfig
from sluice.replica.private_dir import make_private_dir
from sluice.scheduling.batching.warm_up import warm_up
from sluice.scheduling.placement.warm_up import warm_up_placement
from sluice.simulation.rows import compile_now

_TEST_SETTINGS = {
    # The address of the machine, as on a cluster: some tests start several nodes.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    # Programs and workers of Ray that tests start may import the tests, and start sooner.
    "PYTHONSAFEPATH": "",
    "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).with_name('site')}",
    # They keep the bytecode of the sources, whatever is usual here: each would compile them again.
    "PYTHONDONTWRITEBYTECODE": "",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.2",
    "RAY_health_check_period_ms": "500",
    # Ray and Serve measure themselves seldom, and no call is recorded: no test looks at that.
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    # The key of the collector of traces in tests/e2e/followed.py.
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20key-of-the-collector-0123456789",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

# As in the programs that tests start: tests/site/ says why.
gc.set_threshold(100_000, 50, 100)

os.environ.update(_TEST_SETTINGS)
sys.dont_write_bytecode = False

# The certificates of all authorities are read once, and not by each client of HTTP, in 20 ms.
transports.create_ssl_context = cache(transports.create_ssl_context)


def pytest_configure(config: pytest.Config) -> None:
    """Ports and a folder for this process's Rays; the process that distributes has none."""
    if not config.getoption("numprocesses", None):
        private_dir = make_private_dir()
        atexit.register(shutil.rmtree, private_dir, ignore_errors=True)
        # What `sluice serve` keeps for its user.
        os.environ["XDG_STATE_HOME"] = str(private_dir / "state")
        ray_start.apply(private_dir)


# Property tests are judged by what they find, not by how long an example takes. Every run draws
# other examples, so few are enough; `make test-release` tries as many as the tests ask for.
hypothesis.settings.register_profile("release", deadline=None)
hypothesis.settings.register_profile("short", deadline=None, max_examples=20)
hypothesis.settings.load_profile("short")


_GROUPS = ("own_ray", "ray", "vllm")


@pytest.hookimpl(tryfirst=True)  # before what shares the tests out reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The shared Ray, own Rays and vLLM each in one process, the longest first."""
    for item in items:
        marked = (mark for mark in _GROUPS if item.get_closest_marker(mark))
        item.add_marker(pytest.mark.xdist_group(next(marked, str(item.path))))
    items.sort(key=_begins)


_LONG = ("test_docs.py", "test_experiments.py")


def _begins(item: pytest.Item) -> int:
    if item.get_closest_marker("ray"):
        return 1 if item.get_closest_marker("own_ray") else 0
    if item.get_closest_marker("vllm"):
        return 2
    return 3 if item.path.name in _LONG else 4


def pytest_collection_finish() -> None:
    """Freeze what all tests have imported, so no garbage search looks through it again."""
    if found := sys.modules.keys() & {"schemathesis", "torch", "transformers", "vllm"}:
        raise pytest.UsageError(f"imported by a file of tests, not where it is used: {found}")
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compile loops before actors start, and end the shared Ray before another one starts."""
    if item.get_closest_marker("ray"):
        _compile()
    if item.get_closest_marker("own_ray"):
        _end_shared_ray()


@cache
def _compile() -> None:
    config = ControllerConfig()
    warm_up_placement(config.make_routing, config.make_admission)
    warm_up(EngineConfig().policy)
    compile_now()


@pytest.fixture(scope="session", autouse=True)
def shared_ray_ends() -> Iterator[None]:
    """The Ray that tests share ends with the last of them."""
    yield
    _end_shared_ray()


def _end_shared_ray() -> None:
    if "tests.own_ray" in sys.modules:
        sys.modules["tests.own_ray"].shared_ray.end()
