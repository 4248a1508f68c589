"""Serves an application on this machine: starts Ray, waits until it answers, stops all of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shlex
import signal
import socket
import ssl
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import BaseModel, ValidationError

from sluice.deploy.config import (
    ROUTER_DEPLOYMENT,
    SluiceConfig,
    check_installed,
    check_model,
    engine_faults,
    has_odd_names,
)
from sluice.deploy.ray_start import apply, start_ray
from sluice.replica.engine import ConfigurationError
from sluice.router.ingress.access import Access
from sluice.router.ingress.http_server import Certificate
from sluice.telemetry.phases import phase

# Notes of the `sluice serve` runs of this user, by which other commands find them.
#
# A note is a file that only the user can read. Its `sluice serve` keeps it locked: a note without
# a lock is of a run that has ended.


class LocalRun(BaseModel):
    """Where an application of this machine is reached, and the admin key that was made for it."""

    address: str
    key: str | None


@contextmanager
def noted(run: LocalRun) -> Iterator[None]:
    """Keep a note of ``run`` until the block ends; no note where the folder cannot be written."""
    try:
        folder = state_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, draft = tempfile.mkstemp(dir=folder, prefix=".")
    except (OSError, RuntimeError):
        yield
        return
    note = folder / f"{_prefix()}{os.getpid()}.json"
    with open(descriptor, "w") as file:  # noqa: PTH123
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(run.model_dump_json())
        file.flush()
        Path(draft).replace(note)  # from here on it is seen, with its lock
        try:
            yield
        finally:
            note.unlink(missing_ok=True)


def local_runs() -> list[LocalRun]:
    """What this user serves on this machine now. Notes of runs that have ended are removed."""
    found = []
    with contextlib.suppress(OSError, RuntimeError):
        for note in sorted(state_folder().glob(f"{_prefix()}*.json")):
            with contextlib.suppress(OSError, ValidationError):
                found += [run] if (run := _read(note)) is not None else []
    return found


def _read(note: Path) -> LocalRun | None:
    with open(os.open(note, os.O_RDONLY | os.O_NOFOLLOW)) as file:  # noqa: PTH123
        facts = os.fstat(file.fileno())
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return LocalRun.model_validate_json(file.read())
        note.unlink(missing_ok=True)
        return None


def state_folder() -> Path:
    """Where this user's programs keep what outlives them (XDG). Raises RuntimeError: there is no
    home."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "sluice"


def _prefix() -> str:
    # Machines may share a home.
    return f"{socket.gethostname()}-"


KEY_VARIABLE = "SLUICE_KEY"
"""Holds an API key of the reader's in the command that is shown at the start."""

_POLL_S = 0.2
_REPORT_EVERY_S = 30.0
_DRAIN_ANSWER_S = 5.0

REASON_S = 2.0
"""How long a part that has ended while an application starts is waited for to say why, seconds."""

_MAX_REPLACED = 3
"""Processes that Serve may end and replace while an application starts: one that does not answer
its health checks may just get no processor time on a busy machine."""


class StartError(RuntimeError):
    """The application could not be started; the message says why."""


class RayEndedError(RuntimeError):
    """Ray ended while the application was served or started; the message names the process."""


class StoppedError(RuntimeError):
    """A stop was asked for while the application started."""


def base_url(config: SluiceConfig) -> str:
    """Where this machine reaches the application."""
    scheme = "http" if config.router.tls is None else "https"
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(
        config.router.host, config.router.host
    )
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.router.port}"


def curl_line(config: SluiceConfig) -> str:
    """A command that sends a request with an objective, and an API key from
    :data:`KEY_VARIABLE`."""
    body = {
        "model": config.fleets[0].model,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 16,
        "slo": {"ttft_ms": 500, "tpot_ms": 50},
    }
    key = "" if config.router.is_open else f' -H "authorization: Bearer ${KEY_VARIABLE}"'
    return (
        f"curl {base_url(config)}/v1/chat/completions -H 'content-type: application/json'{key}"
        f" -d {shlex.quote(json.dumps(body))}"
    )


class StopSignals:
    """How often SIGINT or SIGTERM has come.

    Without a lock, unlike ``threading.Event``: the main thread runs a handler between any two of
    its instructions, so also where it holds the lock that the handler would wait for."""

    def __init__(self) -> None:
        self._count = 0

    def is_set(self) -> bool:
        """Whether there was one."""
        return self._count > 0

    @property
    def again(self) -> bool:
        """Whether there was a second one."""
        return self._count > 1

    def wait(self, timeout_s: float) -> bool:
        """Sleep for ``timeout_s`` unless there was one; whether there was."""
        if not self.is_set():
            time.sleep(timeout_s)
        return self.is_set()

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Count one: a handler for ``signal.signal``."""
        self._count += 1


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Count SIGINT and SIGTERM in place of ending the process midway."""
    stop = StopSignals()
    previous = {
        number: signal.signal(number, stop.on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep this process's handler of SIGTERM in a block that starts Ray: Ray's would end it
    midway."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def check(config: SluiceConfig) -> None:
    """Refuse at once what would fail later: taken ports, missing files, parts that are for a
    cluster. :func:`check_models` takes longer. Raises StartError."""
    _check_port(config.router.host, config.router.port)
    _check_tls(config)
    _check_labels(config)
    try:
        check_installed(config)
    except ValueError as error:
        raise StartError(str(error)) from None
    _check_keys(config)
    # Replicas say what vLLM refuses, but not before Ray runs.
    if has_odd_names(config) and (faults := engine_faults(config)):
        raise StartError("\n".join(faults))


def start_ray_for(
    config: SluiceConfig, local_dir: Path, report: Callable[[str], None], **tries: int
) -> None:
    """Start a Ray for ``config`` with its files in ``local_dir``."""
    apply(local_dir)
    report("starting Ray")
    with own_sigterm(), phase("Ray: start"):
        _start_ray(config, local_dir, **tries)


def start_application(
    config: SluiceConfig, stop: StopSignals, report: Callable[[str], None]
) -> None:
    """Serve ``config`` on the Ray of this process; return once it answers. Raises StartError,
    StoppedError."""
    _check_gpus(config)
    faults = ThreadPoolExecutor(1, "ask-vllm").submit(engine_faults, config, idle_only=True)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    start_serve()
    deploy(config, stop, report, faults)


@phase("Serve: start")
def start_serve() -> None:
    """Start Serve on the Ray that this process has joined, without proxies: routers listen."""
    from ray import serve

    serve.start(proxy_location="Disabled")


def leave_ray() -> str:
    """Leave the Ray that this process has started, and leave that running. Returns its address."""
    import ray

    address: str = ray.get_runtime_context().gcs_address
    ray._private.worker._global_node = None
    ray.shutdown()
    return address


def end_application(name: str, address: str, drain_s: float) -> None:
    """Join the Ray at ``address``, have every router of the application ``name`` refuse new
    requests, wait until all others are answered, for ``drain_s`` seconds at most, and end Serve."""
    import ray
    from ray import serve

    ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    routers = serve.get_deployment_handle(ROUTER_DEPLOYMENT, name)
    routers._init(_run_router_in_separate_loop=True)  # this process has no event loop
    routers.broadcast("drain", drain_s).results(timeout_s=drain_s + _DRAIN_ANSWER_S)
    serve.shutdown()
    ray.shutdown()


def _start_ray(config: SluiceConfig, local_dir: Path, **tries: int) -> None:
    import ray

    # Ray's CPUs only place actors. A small machine must still place every replica; the engines pin
    # themselves.
    needed = config.router.replicas + sum(
        sum(pool.replica.most * pool.replica.num_cpus for pool in fleet.pools)
        + fleet.config.controller.cells  # the observer needs a part of one
        for fleet in config.fleets
    )
    start_ray(
        local_dir / "ray",
        num_cpus=max(os.cpu_count() or 1, int(needed) + 1),
        logging_level=logging.WARNING,
        **tries,
    )
    # Ray would print what its processes report, such as their end, on standard output.
    worker = ray._private.worker.global_worker
    worker.threads_stopped.set()
    worker.gcs_error_subscriber.close()


def _check_labels(config: SluiceConfig) -> None:
    """Ray would wait indefinitely for nodes with these labels."""
    pools = (pool.replica.node_labels for fleet in config.fleets for pool in fleet.pools)
    if config.router.node_labels or any(pools):
        raise StartError(
            "node_labels ask for nodes of a cluster, and this machine is one without labels: leave "
            "them out, or use `sluice deploy`"
        )


def check_models(config: SluiceConfig) -> None:
    """Refuse missing models. Raises StartError."""
    for fleet in config.fleets:
        for pool in fleet.pools:
            try:
                check_model(pool.engine)
            except ValueError as error:
                named = f"models.{fleet.model}." if config.models else ""
                raise StartError(f"{named}{error}") from None


def _check_keys(config: SluiceConfig) -> None:
    """Without this check routers would fail to start repeatedly."""
    try:
        Access(config.router)
    except OSError as error:
        raise StartError(f"cannot read the key file {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise StartError(str(error)) from None


def _check_gpus(config: SluiceConfig) -> None:
    import ray

    from sluice.deploy.app import gpus_per_replica

    pools = [pool for fleet in config.fleets for pool in fleet.pools]
    replicas = sum(pool.replica.first for pool in pools)
    wanted = sum(gpus_per_replica(pool) * pool.replica.first for pool in pools)
    seen = ray.cluster_resources().get("GPU", 0)
    if wanted > seen:
        raise StartError(
            f"{replicas} replicas want {wanted:g} GPUs and Ray sees {seen:g}; set "
            "--replicas, or num_gpus and the numbers of replicas in the configuration"
        )


def deploy(
    config: SluiceConfig,
    stop: StopSignals,
    report: Callable[[str], None],
    faults: Future[list[str]] | None = None,
) -> None:
    """Serve ``config`` on the Ray and Serve that this process has joined. ``faults``: what vLLM
    refuses of it, once known; nothing was served there before, so no old actor is waited for.
    Raises StartError, StoppedError."""
    from ray.serve.api import RunTarget, run_many

    from sluice.deploy.app import build

    # Waiting is left to _wait_ready, which says what it waits for. Without autoscaling the number
    # of replicas can be set from outside (Serve's scale call); Serve allows one or the other.
    pools = [pool for fleet in config.fleets for pool in fleet.pools]
    fixed = all(pool.replica.autoscaling is None for pool in pools)
    with phase("application: deploy"):
        target = RunTarget(
            build(config), name=config.name, route_prefix=None, external_scaler_enabled=fixed
        )
        run_many(
            [target],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
    _wait_ready(config, stop, report, faults)


def _wait_ready(
    config: SluiceConfig,
    stop: StopSignals,
    report: Callable[[str], None],
    faults: Future[list[str]] | None,
) -> None:
    from ray import serve

    started = last_report = sound_s = time.monotonic()
    last_line = ""
    while True:
        asked = faults is None or faults.done()
        if faults is not None and asked and (found := faults.result()):
            raise StartError("\n".join(found))
        dead, replaced = (None, 0) if faults is None else _dead_actors()
        application = serve.status().applications.get(config.name)
        status = None if application is None else application.status
        unhealthy = status == "UNHEALTHY" and not 0 < replaced <= _MAX_REPLACED
        if dead is None and not unhealthy:
            sound_s = time.monotonic()
        if application is not None and (
            status == "DEPLOY_FAILED" or (unhealthy and time.monotonic() - sound_s > REASON_S)
        ):
            # Serve says of a process that has ended no more than that its check failed.
            raise StartError(_failure(application) + (f"\n{dead} has ended" if dead else ""))
        if dead is not None and time.monotonic() - sound_s > REASON_S:
            raise StartError(f"{dead} has ended before the application was ready")
        if application is not None:
            _check_configured(application)
            if application.status == "RUNNING" and asked and _answers(config):
                return
            line = _progress(application)
            if replaced:
                line += f"; Serve has replaced {replaced} that did not answer"
            now = time.monotonic()
            if line != last_line or now - last_report > _REPORT_EVERY_S:
                report(f"{line} ({now - started:.0f} s)")
                last_line, last_report = line, now
        if stop.wait(_POLL_S):
            raise StoppedError("stopped before the application was ready")


def _dead_actors() -> tuple[str | None, int]:
    """An actor that has ended by itself, and Ray's reason; ``None``: there is none. The number of
    those that Serve has ended because they failed their health checks, and replaces."""
    from ray._private.state import actors

    replaced = 0
    for actor in actors().values():
        if actor["State"] in ("DEAD", "RESTARTING") or actor["NumRestarts"]:
            cause = actor["DeathCause"]
            context = getattr(cause, cause.WhichOneof("context") or "", None)
            reason = " ".join(getattr(context, "error_message", "").split()).partition(". ")[0]
            if "ray.kill" not in reason:
                return str(actor["ActorClassName"]) + (f" ({reason})" if reason else ""), replaced
            replaced += 1
    return None, replaced


def _check_configured(application: Any) -> None:
    """Raises StartError: a replica has said that its configuration is wrong; Serve would try three
    times."""
    for name, deployment in application.deployments.items():
        _, found, reason = deployment.message.rpartition(f"{ConfigurationError.__name__}: ")
        if found:
            raise StartError(f"{name.lower()}: {reason.strip()}")


def _progress(application: Any) -> str:
    parts = []
    for name, deployment in application.deployments.items():
        states = {str(state): count for state, count in deployment.replica_states.items()}
        ready = states.get("RUNNING", 0)
        parts.append(f"{name.lower()} {ready}/{max(sum(states.values()), 1)}")
    return "starting: " + (", ".join(parts) or "application")


def _failure(application: Any) -> str:
    messages = [application.message] + [
        f"{name}: {deployment.message}"
        for name, deployment in application.deployments.items()
        if deployment.message
    ]
    return "the application failed to start:\n" + "\n".join(text for text in messages if text)


def _answers(config: SluiceConfig) -> bool:
    # This machine asks itself, perhaps by a name that is not in the certificate.
    unchecked = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(
            f"{base_url(config)}/health", timeout=2, context=unchecked
        ) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _check_tls(config: SluiceConfig) -> None:
    """Without this check routers would fail to start repeatedly."""
    if config.router.tls is None:
        return
    try:
        Certificate(config.router.tls)
    except OSError as error:  # that of TLS is one, too
        tls = config.router.tls
        raise StartError(
            f"router.tls: cannot use {error.filename or f'{tls.certificate} with {tls.key}'}: "
            f"{error.strerror}"
        ) from None


def _check_port(host: str, port: int) -> None:
    """Without ``SO_REUSEPORT``, by which routers would share the port of other programs."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise StartError(
                f"cannot listen on {host}:{port}: {why}; --host and --port choose another address"
            ) from error
