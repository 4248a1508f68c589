"""The systems of ``sluice bench peers``: Sluice, and what is used in its place, on real engines.

All of them have the same model, engine arguments and number of engines. On CPUs each engine has a
core and one thread, as Sluice's have. To add a system, extend :data:`SYSTEMS`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

import psutil

from sluice.benchmarks.live import systems as live
from sluice.benchmarks.live.application import ENGINE, router, simulated
from sluice.benchmarks.live.client import Json
from sluice.benchmarks.live.gateway.engine import MODEL
from sluice.benchmarks.live.processes import VLLM_ENVIRONMENT, LeftOutError, vllm_command
from sluice.benchmarks.live.resources import CORES, processes
from sluice.benchmarks.live.systems import Bench, Server, Start, System, engines, served, sluice
from sluice.controller.config import NO_ADMISSION
from sluice.router.config import ServiceClass

CPU_ARGS: Final[Json] = {
    "enforce-eager": True,
    "kv-cache-memory-bytes": 256 << 20,
    "dtype": "float32",
}
"""vLLM's arguments on CPUs, with which Sluice runs the local model. vLLM would choose bfloat16,
which is slow there, and take most of the memory."""

_CPU_STOCK_ARGS: Final[Json] = {"distributed-executor-backend": "uni"}
_STOCK_ARGS: Final[Json] = {"disable-log-stats": True, "disable-uvicorn-access-log": True}
_CPU_ENVIRONMENT: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""With it, and with vLLM's default executor, the model is in one more process, behind one more
queue; Sluice's engines have neither."""


class Setting(NamedTuple):
    """What all systems share: the model's path or hub id, vLLM's arguments by command-line name
    without dashes, the number of engines, the GPUs of this machine, and the service classes, which
    only Sluice can use."""

    model: str
    args: Json
    replicas: int
    gpus: int
    classes: Mapping[str, ServiceClass]

    @property
    def gpus_each(self) -> float:
        """GPUs of an engine; a share of one where engines share it."""
        wanted = int(self.args.get("tensor-parallel-size", 1))
        return min(float(wanted), self.gpus / self.replicas)

    def devices(self, number: int) -> str:
        """The GPUs of engine ``number``, as CUDA names them."""
        each = max(1, int(self.gpus_each))
        return ",".join(str((number * each + own) % self.gpus) for own in range(each))


class Peer(NamedTuple):
    """A system: what it is, in words; what starts it with a setting; whether requests state vLLM's
    priority of their class; and the system on which its idle times and capacity are measured."""

    words: str
    start: Callable[[Setting], Start]
    priorities: bool = False
    reference: str = "stock-round-robin"


def _stock(policy: str, more: Json, setting: Setting) -> Start:
    """vLLM's own servers with ``more`` arguments behind vllm-router with a policy; empty: one
    server without a router."""

    def engine_on(_: Bench, port: int, number: int) -> Server:
        args, variables = {**setting.args, **_STOCK_ARGS, **more}, dict(VLLM_ENVIRONMENT)
        if setting.gpus > 1:
            variables["CUDA_VISIBLE_DEVICES"] = setting.devices(number)
        elif not setting.gpus:
            args, variables = {**_CPU_STOCK_ARGS, **args}, {**variables, **_CPU_ENVIRONMENT}
        command = vllm_command(setting.model, MODEL, port, args)
        return Server(command, variables, live.START_LIMIT_S)

    @contextmanager
    def start(bench: Bench) -> Iterator[System]:
        if not policy and setting.replicas > 1:
            raise LeftOutError("it has one server and no router: take --replicas 1")
        # In front of a single engine all policies are one, and some refuse to start.
        chosen = policy if setting.replicas > 1 else "round_robin"
        router = served("vllm-router", partial(live.vllm_router, policy=chosen))
        with engines(bench, engine_on, setting.replicas) as found:
            own = dict.fromkeys(found, "")
            if not setting.gpus:
                _pin(own)
            if not policy:
                yield System(tuple(found.values()), own)
                return
            with router(bench._replace(engines=found)) as system:
                yield system._replace(processes={**system.processes, **own})

    return start


def _pin(roots: Mapping[int, str]) -> None:
    """Pin the engines below these processes to a core each, as Sluice pins its own: the process of
    each that has no other below it, which computes."""
    cores = sorted(os.sched_getaffinity(0))
    found = [pid for pid, each in processes(roots).items() if each.kind == CORES]
    parents = {psutil.Process(pid).ppid() for pid in found}
    for number, pid in enumerate(pid for pid in found if pid not in parents):
        os.sched_setaffinity(pid, {cores[number % len(cores)]})


def _serve_llm(prefix_aware: bool, setting: Setting) -> Start:
    """Ray Serve LLM with vLLM's engines, and one of its two routers."""

    def server_on(bench: Bench, port: int) -> Server:
        file = bench.folder / "serve-llm.json"
        arguments = {name.replace("-", "_"): value for name, value in setting.args.items()}
        given = {"model": setting.model, "args": arguments, "gpus": min(1.0, setting.gpus_each)}
        file.write_text(json.dumps({**given, "prefix_aware": prefix_aware}))
        options = ("--replicas", str(setting.replicas), "--vllm", str(file))
        return live.serve_llm(bench, port, *options)

    @contextmanager
    def start(bench: Bench) -> Iterator[System]:
        with served("ray-serve-llm", server_on)(bench) as system:
            if not setting.gpus:
                _pin(system.processes)
            yield system

    return start


def _sluice(engine: Json, controller: Json, setting: Setting) -> Start:
    """Sluice with these fields of its configuration."""
    return sluice("sluice", lambda _, port: sluice_config(engine, controller, setting, port))


def sluice_config(engine: Json, controller: Json, setting: Setting, port: int) -> Json:
    """The configuration of Sluice with these fields of its engine and controller."""
    model = {"model": setting.model, "served_model_name": MODEL, "vllm_args": setting.args}
    replica: Json = {"count": setting.replicas, "num_cpus": 0.1}
    if setting.gpus:
        replica["num_gpus"] = setting.gpus_each
    parts = {"controller": controller, "replica": replica, "router": router(port, setting.classes)}
    return {"engine": {**model, **engine}, **parts}


def _paper(batching: str, policy: str, admission: str = NO_ADMISSION) -> Peer:
    words = f"Sluice with the batching policy {batching}, routing {policy}, admission {admission}"
    controller = {"policy": policy, "admission": admission}
    return Peer(words, partial(_sluice, {"policy": batching}, controller))


def _plain(words: str, **controller: str) -> Peer:
    def start(setting: Setting) -> Start:
        fleet = ENGINE, setting.replicas, setting.classes
        return sluice("sluice", lambda _, port: simulated(port, *fleet, controller=controller))

    return Peer(f"Sluice with simulated engines, {words}", start, reference="simulated-round-robin")


def _router(policy: str) -> Peer:
    return Peer(f"vLLM, vllm-router {policy}", partial(_stock, policy, {}))


SYSTEMS: Final[dict[str, Peer]] = {
    "stock": Peer("vLLM's own server, alone", partial(_stock, "", {}), reference="stock"),
    "stock-round-robin": _router("round_robin"),
    "stock-power-of-two": _router("power_of_two"),
    "stock-cache-aware": _router("cache_aware"),
    "stock-priority": Peer(
        "vLLM with priorities by class, vllm-router power_of_two",
        partial(_stock, "power_of_two", {"scheduling-policy": "priority"}),
        priorities=True,
    ),
    "serve-llm": Peer("Ray Serve LLM, power of two", partial(_serve_llm, False)),
    "serve-llm-prefix": Peer("Ray Serve LLM, prefix-aware", partial(_serve_llm, True)),
    "sluice": Peer("Sluice with its defaults", partial(_sluice, {}, {})),
    "sluice-proserve": _paper("slidebatching", "go_routing"),
    "sluice-fairbatching": _paper("fairbatching", "pab", "pab"),
    "sluice-slos-serve": _paper("slos_serve", "slos_serve", "slos_serve"),
    "sluice-annealing": _paper("annealing", "least_memory"),
    "sluice-flowprefill": Peer(
        "prefills that are preempted at operators (FlowPrefill), Sluice's router",
        partial(_sluice, {"preemption": {"granularity": "operator"}}, {}),
    ),
    "simulated": _plain("its defaults"),
    "simulated-round-robin": _plain("round robin", policy="round_robin", admission=NO_ADMISSION),
    "simulated-min-load": _plain("fewest requests", policy="min_load", admission=NO_ADMISSION),
}
"""By name."""

DEFAULT: Final = (
    "stock-round-robin",
    "stock-power-of-two",
    "stock-cache-aware",
    "stock-priority",
    "serve-llm",
    "serve-llm-prefix",
    "sluice",
)
