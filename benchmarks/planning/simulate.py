"""``sluice simulate``: how many replicas hold the objectives of recorded traffic."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import MISSING, fields
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sluice.benchmarks.options import NumberRange, as_json, number_option
from sluice.benchmarks.planning.capacity import PlannedFleet, SharedClass, Traffic, Windows
from sluice.benchmarks.planning.search import Question, answered
from sluice.deploy.config import SluiceConfig, load_config
from sluice.replica.config import EngineConfig as ReplicaEngine
from sluice.router.config import RouterConfig, ServiceClass
from sluice.scheduling import batching, routing
from sluice.scheduling.latency.model import FAMILIES, LatencyModel, LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.simulation.capacity import MAX_REPLICAS
from sluice.simulation.config import ClusterConfig, EngineConfig
from sluice.simulation.engine import StuckError
from sluice.simulation.mixes import MIXES
from sluice.simulation.traces import MAX_REQUESTS

MAX_CLASSES = 16

_SLO_FIELDS = ("name", "ttft_ms", "tpot_ms", "tpot_anchor", "e2e_ms", "priority", "share")

_OF_VLLM = {
    "num-gpu-blocks-override": "kv_blocks",
    "block-size": "block_tokens",
    "max-num-batched-tokens": "max_batch_tokens",
    "max-num-seqs": "max_sequences",
}


M = TypeVar("M", bound=BaseModel)


def _pairs(option: str, text: str, known: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign or not value:
            raise ValueError(f"{option}: {part.strip()!r} is not of the form name=value")
        if name not in known:
            raise ValueError(f"{option}: unknown name {name!r}; known: {', '.join(known)}")
        if name in found:
            raise ValueError(f"{option}: {name} is given twice")
        found[name] = value
    return found


def _number(option: str, name: str, value: str, most: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not (isfinite(number) and 0 <= number <= most):
        raise ValueError(f"{option}: {name} must be a number from 0 to {most:g}, got {value!r}")
    return number


def _share(option: str, name: str, value: str) -> float:
    share = _number(option, name, value, 1e6)
    if share == 0:
        raise ValueError(f"{option}: {name} must be above 0; leave the class out instead")
    return share


def classes_of(
    config: SluiceConfig, slos: Sequence[str], shares: Sequence[str]
) -> tuple[SharedClass, ...]:
    """The service classes to draw from: ``slos`` (``ttft_ms=800,share=0.5``), or those of
    ``shares`` (``interactive=0.5``), or the default. Raises :class:`ValueError`."""
    if slos and shares:
        raise ValueError("--share is for classes of --config; with --slo say share=... in it")
    if len(slos) > MAX_CLASSES:
        raise ValueError(f"--slo: at most {MAX_CLASSES} classes, got {len(slos)}")
    if slos:
        return _distinct([_stated(text, number) for number, text in enumerate(slos, 1)])
    known = config.router.classes
    if not shares:
        name = config.router.default_class
        return (SharedClass(known[name].objective(name), 1.0),)
    chosen = []
    for text in shares:
        ((name, value),) = _pairs("--share", text, list(known)).items()
        chosen.append(SharedClass(known[name].objective(name), _share("--share", name, value)))
    return _distinct(chosen)


def _distinct(chosen: Sequence[SharedClass]) -> tuple[SharedClass, ...]:
    names = [each.slo.service_class for each in chosen]
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ValueError(f"a class is given twice: {', '.join(doubles)}")
    return tuple(chosen)


def _stated(text: str, number: int) -> SharedClass:
    given = _pairs("--slo", text, _SLO_FIELDS)
    name = given.pop("name", f"class-{number}")
    share = _share("--slo", "share", given.pop("share", "1"))
    try:
        # Refuse what a router's configuration refuses, such as a name that is invalid in a header.
        made = ServiceClass.model_validate(given)
        RouterConfig(classes={name: made}, default_class=name)
    except ValidationError as error:
        raise ValueError(f"--slo: {_problems(error)}") from None
    return SharedClass(made.objective(name), share)


def _problems(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, part['loc']))}: {part['msg']}".removeprefix(": ")
        for part in error.errors(include_url=False)
    )


def latency_of(config: SluiceConfig, profile: Path | None, stated: str | None) -> LatencyModel:
    """The step times of a replica: a ``profile``, or ``stated`` (``a=0.009,b=8e-5``), or the
    configuration's. Raises :class:`ValueError`."""
    if profile is not None and stated is not None:
        raise ValueError("give --profile or --latency, not both")
    if stated is not None:
        return _stated_latency(stated)
    path = profile or config.engine.latency_profile
    if path is not None:
        try:
            return LatencyProfile.from_json(path.read_text(encoding="utf-8")).model
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    if config.engine.kind == "simulated":
        engine = config.engine.simulated
        constants = (engine.step_s, engine.token_s, engine.context_token_s, engine.quadratic_s)
        if not any(constants):
            raise ValueError("the simulated engine of the configuration takes no time at all")
        return LinearLatency(*constants)
    kept = config.engine.cache_dir / "profiles"
    raise ValueError(
        f"no latency is known: give --profile FILE (replicas keep theirs in {kept}) or --latency "
        "a=SECONDS,b=SECONDS"
    )


def _stated_latency(text: str) -> LatencyModel:
    everything = ["family", *dict.fromkeys(n for model in FAMILIES.values() for n in model.names)]
    given = _pairs("--latency", text, everything)
    family = given.pop("family", LinearLatency.family)
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"--latency: unknown family {family!r}; known: {known}")
    model = FAMILIES[family]
    needed = {f.name for f in fields(model) if f.init and f.default is MISSING}
    if wrong := given.keys() - set(model.names) or needed - given.keys():
        raise ValueError(
            f"--latency: the family {family} has {', '.join(model.names)}, of which "
            f"{', '.join(n for n in model.names if n in needed)} must be given; "
            f"wrong or missing: {', '.join(sorted(wrong))}"
        )
    numbers = {name: _number("--latency", name, value, 1e3) for name, value in given.items()}
    try:
        return model(**numbers)
    except ValueError as error:
        raise ValueError(f"--latency: {error}") from error


def fleet_of(
    config: SluiceConfig,
    model: LatencyModel,
    policy: str | None,
    router: str | None,
    limits: Mapping[str, int | None],
) -> PlannedFleet:
    """The fleet as in ``config``, overridden by given arguments; its options of a policy count for
    that policy only. Raises :class:`ValueError`."""
    engine, controller = config.engine, config.controller
    name = policy or engine.policy
    routed = router or controller.policy
    options = dict(engine.policy_options) if name == engine.policy else {}
    routing_options = dict(controller.policy_options) if routed == controller.policy else {}
    given = {field: value for field, value in limits.items() if value is not None}
    return PlannedFleet(
        model,
        _checked(EngineConfig, _limits(engine) | given),
        _checked(
            ClusterConfig,
            {
                "report_interval_s": config.replica.report_interval_s,
                "heartbeat_s": config.replica.heartbeat_s,
                "stale_after_s": controller.stale_after_s,
                "reservation_ttl_s": controller.reservation_ttl_s,
            },
        ),
        name,
        options,
        routed,
        routing_options,
        engine.headroom,
    )


def _limits(engine: ReplicaEngine) -> dict[str, Any]:
    """A replica's limits: those of the simulated engine, overridden by vLLM's arguments."""
    simulated = engine.simulated
    limits: dict[str, Any] = {name: getattr(simulated, name) for name in _LIMITS}
    if engine.kind == "vllm":
        given = {name.replace("_", "-"): value for name, value in engine.vllm_args.items()}
        limits |= {ours: given[name] for name, ours in _OF_VLLM.items() if name in given}
        limits["prefix_cache"] = given.get("enable-prefix-caching", True)
    return limits


def _checked(kind: type[M], values: Mapping[str, Any]) -> M:
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ValueError(_problems(error)) from None


NO_ANSWER = 3
"""Exit code where no count of replicas was found that holds the target."""

MAX_JOBS = 256
MAX_WINDOW_S = 86_400.0

_LIMITS = ("kv_blocks", "block_tokens", "max_batch_tokens", "max_sequences")


def _question(**given: Any) -> Question:
    """The question of the command's options; raises :class:`ValueError`."""
    config = load_config(given["config"])
    trace, mix = given["trace"], given["mix"]
    if (trace is None) == (mix is None):
        raise click.UsageError("give --trace or --mix, one of them")
    if mix is None:
        classes = classes_of(config, given["slos"], given["shares"])
    elif given["slos"] or given["shares"]:
        raise click.UsageError("--mix has classes of its own, without --slo and --share")
    else:
        classes = tuple(SharedClass(each.slo, each.share) for each in MIXES[mix].classes)
    only, most, disaggregated = given["replicas"], given["max_replicas"], given["disaggregated"]
    if not any(each.slo.stated for each in classes):
        raise ValueError("no class states an objective, so any number of replicas is enough")
    if disaggregated and most < 2:
        raise ValueError("--disaggregated needs --max-replicas of at least 2, one of each role")
    if disaggregated and only is not None:
        raise ValueError("--replicas and --disaggregated contradict each other: one is a search")
    model = latency_of(config, given["profile"], given["latency"])
    policies = given["policy"], given["router"]
    fleet = fleet_of(config, model, *policies, {name: given[name] for name in _LIMITS})
    cluster = fleet.cluster.model_copy(update={"transfer_tokens_per_s": given["transfer_rate"]})
    windows = None
    if given["windows"] is not None:
        count, seconds = given["windows"]
        windows = Windows(count, seconds, given["margin_s"])
    scale = given["rate_scale"], given["stretch"]
    return Question(
        Traffic(trace or mix, given["requests"], *scale, classes, windows),
        fleet._replace(cluster=cluster),
        given["target"],
        most if only is None else only,
        only,
        disaggregated,
        tuple(range(given["first_seed"], given["first_seed"] + given["seeds"])),
        given["time_limit"],
        given["jobs"],
    )


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_WINDOWS = (click.IntRange(1, 1_000), NumberRange(1, MAX_WINDOW_S))
_TRAFFIC = {
    "mix": "In place of a trace, published lengths and objectives at 1 request a second; --stretch "
    "0.1 makes it 10.",
    "rate": "Factor on the number of requests in the same time: below 1 thinned at random, above 1 "
    "with copies at other times.",
    "windows": "For long traces: play and judge COUNT windows of SECONDS each, one in each of as "
    "many equal parts of the trace.",
    "slo": "A service class: ttft_ms, tpot_ms, tpot_anchor, e2e_ms, priority, share, name. Repeat "
    "it for several; they take the place of those of --config.",
    "share": "A class of --config and its share of the requests. Repeat it for several; without "
    "any, every request is of the default class.",
}
_LATENCY = (
    "Latency in place of a profile, seconds: a a step, b a new token, c a context token, d a pair "
    "of tokens."
)
_BOTH = (
    "Find the sizes of a prefill and a decode pool, too, with the count of replicas that do both "
    "for comparison."
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--trace", type=_FILE, help="Recorded traffic: CSV or JSON lines.")
@click.option("--mix", type=click.Choice(sorted(MIXES)), help=_TRAFFIC["mix"])
@number_option(
    "--requests", default=5_000, least=1, most=MAX_REQUESTS, words="Most, from its start."
)
@number_option("--rate-scale", default=1.0, least=0.001, most=1000, words=_TRAFFIC["rate"])
@number_option("--stretch", default=1.0, least=0.001, most=1000, words="Factor on arrival times.")
@click.option("--windows", type=_WINDOWS, metavar="COUNT SECONDS", help=_TRAFFIC["windows"])
@number_option(
    "--margin-s", default=30.0, least=0, most=MAX_WINDOW_S, words="Played around a window, too."
)
@click.option("--slo", "slos", multiple=True, metavar="NAME=VALUE,...", help=_TRAFFIC["slo"])
@click.option("--share", "shares", multiple=True, metavar="CLASS=SHARE", help=_TRAFFIC["share"])
@click.option("--config", type=_FILE, help="YAML configuration of the fleet.")
@click.option("--profile", type=_FILE, help="Latency profile that a replica keeps.")
@click.option("--latency", metavar="a=..,b=..,c=..,d=..", help=_LATENCY)
@click.option("--policy", type=click.Choice(sorted(batching.POLICIES)), help="Batch policy.")
@click.option("--routing", "router", type=click.Choice(sorted(routing.POLICIES)))
@number_option("--kv-blocks", default=None, least=1, most=100_000_000, words="Of a replica.")
@number_option("--block-tokens", default=None, least=1, most=4096, words="Tokens of a KV block.")
@number_option("--max-batch-tokens", default=None, least=1, most=10_000_000, words="Of a batch.")
@number_option("--max-sequences", default=None, least=1, most=65_536, words="Of a replica.")
@click.option(
    "--target",
    default=0.95,
    show_default=True,
    type=NumberRange(0, 1, min_open=True),
    help="Share of the requests that must meet every objective.",
)
@number_option("--seeds", default=3, least=1, most=100)
@number_option("--first-seed", default=1, least=0, most=2**31)
@number_option("--max-replicas", default=64, least=1, most=MAX_REPLICAS, words="To try.")
@number_option(
    "--replicas", default=None, least=1, most=MAX_REPLICAS, words="This count only, no search."
)
@number_option("--time-limit", default=3600.0, least=1, most=7 * 86_400, words="Of it, seconds.")
@number_option(
    "--jobs", default=min(os.cpu_count() or 1, MAX_JOBS), least=1, most=MAX_JOBS, words="Processes."
)
@click.option("--disaggregated", is_flag=True, help=_BOTH)
@number_option(
    "--transfer-rate",
    default=ClusterConfig().transfer_tokens_per_s,
    least=1,
    most=1e9,
    words="Tokens of KV per second from a prefill to a decode replica.",
)
@as_json
def simulate(as_json: bool, **options: Any) -> None:
    """Find how many replicas recorded traffic needs.

    The simulator finds how many hold its objectives. With --disaggregated also how many prefill and
    how many decode replicas do. Exit code 3 says that nothing within --max-replicas and
    --time-limit does.

    \b
    Example:
      sluice simulate --trace traffic.csv --profile h100.json --slo ttft_ms=500,tpot_ms=50
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        question = _question(**options)
        with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
            report = answered(question, progress)
    except BrokenProcessPool as error:
        raise click.ClickException(
            "a process was killed, most often for want of memory; try fewer --jobs or --requests"
        ) from error
    except (StuckError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(report.model_dump_json(indent=2))
    else:
        report.show()
    if not report.answers:
        if as_json:
            click.echo(report.answer(), err=True)
        raise click.exceptions.Exit(NO_ANSWER)
