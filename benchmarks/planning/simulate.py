"""``sluice simulate``: how many replicas hold the objectives of recorded traffic."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import MISSING, fields
from math import isfinite, isnan
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sluice.benchmarks.planning.capacity import PlannedFleet, SharedClass, Traffic, Windows
from sluice.benchmarks.planning.search import Question, answered
from sluice.benchmarks.report import ReportError, require_matplotlib
from sluice.deploy.config import SluiceConfig, load_config
from sluice.replica.config import EngineConfig as ReplicaEngine
from sluice.router.config import RouterConfig, ServiceClass
from sluice.scheduling import batching, routing
from sluice.scheduling.latency.model import FAMILIES, LatencyModel, LinearLatency
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.simulation.capacity import MOST_REPLICAS
from sluice.simulation.config import ClusterConfig, EngineConfig
from sluice.simulation.engine import StuckError
from sluice.simulation.metrics import TPOTMetric
from sluice.simulation.traces import MAX_REQUESTS, TraceError

MOST_CLASSES = 16
MAX_SHARE = 1e6

_SLO_FIELDS = ("name", "ttft_ms", "tpot_ms", "tpot_anchor", "e2e_ms", "priority", "share")

_VLLM_LIMITS = {
    "num-gpu-blocks-override": "kv_blocks",
    "block-size": "block_tokens",
    "max-num-batched-tokens": "max_batch_tokens",
    "max-num-seqs": "max_sequences",
}


M = TypeVar("M", bound=BaseModel)


class OptionError(ValueError):
    """An option's value is not allowed. The message names option, fault and valid values."""


def _pairs(option: str, text: str, known: Sequence[str]) -> dict[str, str]:
    """``name=value,name=value`` by name."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign or not value:
            raise OptionError(f"{option}: {part.strip()!r} is not of the form name=value")
        if name not in known:
            raise OptionError(f"{option}: unknown name {name!r}; known: {', '.join(known)}")
        if name in found:
            raise OptionError(f"{option}: {name} is given twice")
        found[name] = value
    return found


def _number(option: str, name: str, value: str, most: float) -> float:
    """A finite number from 0 to ``most``."""
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not (isfinite(number) and 0 <= number <= most):
        raise OptionError(f"{option}: {name} must be a number from 0 to {most:g}, got {value!r}")
    return number


def _share(option: str, name: str, value: str) -> float:
    share = _number(option, name, value, MAX_SHARE)
    if share == 0:
        raise OptionError(f"{option}: {name} must be above 0; leave the class out instead")
    return share


def classes_of(
    config: SluiceConfig, slos: Sequence[str], shares: Sequence[str]
) -> tuple[SharedClass, ...]:
    """The service classes that requests are drawn into.

    Args:
        config: its classes are used where ``slos`` is empty: those in ``shares``, and without any
            its default class alone, as for requests that name none.
        slos: texts such as ``ttft_ms=800,tpot_ms=80,priority=2,share=0.5``, each a class.
        shares: texts such as ``interactive=0.5``, classes of the configuration.

    Raises:
        OptionError: a text that is not allowed.
    """
    if slos and shares:
        raise OptionError("--share is for classes of --config; with --slo say share=... in it")
    if len(slos) > MOST_CLASSES:
        raise OptionError(f"--slo: at most {MOST_CLASSES} classes, got {len(slos)}")
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
        raise OptionError(f"a class is given twice: {', '.join(doubles)}")
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
        raise OptionError(f"--slo: {_problems(error)}") from None
    return SharedClass(made.objective(name), share)


def _problems(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, part['loc']))}: {part['msg']}".removeprefix(": ")
        for part in error.errors(include_url=False)
    )


def latency_of(config: SluiceConfig, profile: Path | None, stated: str | None) -> LatencyModel:
    """The step times of a replica.

    Args:
        config: where neither of the others is given: the profile that it names, or its simulated
            engine.
        profile: a file that a replica keeps.
        stated: coefficients such as ``a=0.009,b=8e-5``, of the linear family or another one that
            ``family=`` names.

    Raises:
        OptionError: none is given, more than one is, or it cannot be read.
    """
    if profile is not None and stated is not None:
        raise OptionError("give --profile or --latency, not both")
    if stated is not None:
        return _stated_latency(stated)
    path = profile or config.engine.latency_profile
    if path is not None:
        try:
            return LatencyProfile.from_json(path.read_text(encoding="utf-8")).model
        except OSError as error:
            raise OptionError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise OptionError(f"{path}: {error}") from error
    if config.engine.kind == "simulated":
        engine = config.engine.simulated
        constants = (engine.step_s, engine.token_s, engine.context_token_s, engine.quadratic_s)
        if not any(constants):
            raise OptionError("the simulated engine of the configuration takes no time at all")
        return LinearLatency(*constants)
    kept = config.engine.cache_dir / "profiles"
    raise OptionError(
        f"no latency is known: give --profile FILE (replicas keep theirs in {kept}) or --latency "
        "a=SECONDS,b=SECONDS"
    )


def _stated_latency(text: str) -> LatencyModel:
    everything = ["family", *dict.fromkeys(n for model in FAMILIES.values() for n in model.names)]
    given = _pairs("--latency", text, everything)
    family = given.pop("family", LinearLatency.family)
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise OptionError(f"--latency: unknown family {family!r}; known: {known}")
    model = FAMILIES[family]
    needed = {f.name for f in fields(model) if f.init and f.default is MISSING}
    if wrong := given.keys() - set(model.names) or needed - given.keys():
        raise OptionError(
            f"--latency: the family {family} has {', '.join(model.names)}, of which "
            f"{', '.join(n for n in model.names if n in needed)} must be given; "
            f"wrong or missing: {', '.join(sorted(wrong))}"
        )
    numbers = {name: _number("--latency", name, value, 1e3) for name, value in given.items()}
    try:
        return model(**numbers)
    except ValueError as error:
        raise OptionError(f"--latency: {error}") from error


def fleet_of(
    config: SluiceConfig,
    model: LatencyModel,
    policy: str | None,
    policy_options: str | None,
    router: str | None,
    limits: Mapping[str, int | None],
) -> PlannedFleet:
    """The fleet that serves the requests: as in ``config``, overridden by the other arguments.

    Args:
        config: of the fleet; its options of a policy count for that policy only.
        model: of step times.
        policy, router: names of policies.
        policy_options: a JSON object, options of the batch policy.
        limits: fields of :class:`~sluice.simulation.config.EngineConfig`; ``None`` leaves one as it
            is.

    Raises:
        OptionError: options that the policy has not, or limits that contradict each other.
    """
    engine, controller = config.engine, config.controller
    name = policy or engine.policy
    routed = router or controller.policy
    options = dict(engine.policy_options) if name == engine.policy else {}
    options |= _object("--policy-options", policy_options)
    routing_options = dict(controller.policy_options) if routed == controller.policy else {}
    try:
        batching.make_policy(name, options)
        routing.make_policy(routed, routing_options)
    except ValidationError as error:
        known = ", ".join(batching.POLICIES[name].Options.model_fields) or "none"
        raise OptionError(f"{name}: {_problems(error)}; its options: {known}") from None
    except ValueError as error:
        raise OptionError(str(error)) from error
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
                "reference_ttft_s": controller.reference_ttft_ms / 1e3,
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
    limits: dict[str, Any] = {
        name: getattr(simulated, name)
        for name in ("kv_blocks", "block_tokens", "max_batch_tokens", "max_sequences")
    }
    if engine.kind == "vllm":
        given = {name.replace("_", "-"): value for name, value in engine.vllm_args.items()}
        limits |= {ours: given[name] for name, ours in _VLLM_LIMITS.items() if name in given}
        limits["prefix_cache"] = given.get("enable-prefix-caching", True)
    return limits


def _checked(kind: type[M], values: Mapping[str, Any]) -> M:
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise OptionError(_problems(error)) from None


def _object(option: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{option}: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise OptionError(f'{option}: must be a JSON object such as {{"name": 1}}, got {text!r}')
    return found


NO_ANSWER = 3
"""Exit code where no count of replicas was found that holds the target."""

MOST_SEEDS = 100
MOST_JOBS = 256
MOST_WINDOWS = 1_000
MOST_WINDOW_S = 86_400.0

_METRICS = {
    "mean": TPOTMetric.MEAN,
    "max": TPOTMetric.RUNNING_MAX,
    "window": TPOTMetric.WINDOW,
    "envelope": TPOTMetric.ENVELOPE,
}


def _question(
    trace: Path,
    requests: int,
    rate_scale: float,
    stretch: float,
    windows: tuple[int, float] | None,
    margin_s: float,
    config: Path | None,
    slos: Sequence[str],
    shares: Sequence[str],
    profile: Path | None,
    latency: str | None,
    policy: str | None,
    policy_options: str | None,
    router: str | None,
    target: float,
    metric: str | None,
    seeds: int,
    first_seed: int,
    max_replicas: int,
    replicas: int | None,
    time_limit: float,
    jobs: int,
    disaggregated: bool,
    transfer_rate: float,
    **limits: int | None,
) -> Question:
    """The question that the command's options ask.

    Raises:
        OptionError: they cannot be understood, or contradict each other.
    """
    try:
        loaded = load_config(config)
    except (ValueError, OSError) as error:
        raise OptionError(str(error)) from error
    classes = classes_of(loaded, slos, shares)
    if not any(each.slo.stated for each in classes):
        raise OptionError("no class states an objective, so any number of replicas is enough")
    if disaggregated and max_replicas < 2:
        raise OptionError("--disaggregated needs --max-replicas of at least 2, one of each role")
    if disaggregated and replicas is not None:
        raise OptionError("--replicas and --disaggregated contradict each other: one is a search")
    model = latency_of(loaded, profile, latency)
    fleet = fleet_of(loaded, model, policy, policy_options, router, limits)
    cluster = fleet.cluster.model_copy(update={"transfer_tokens_per_s": transfer_rate})
    return Question(
        Traffic(
            trace,
            requests,
            rate_scale,
            stretch,
            classes,
            None if windows is None else Windows(*windows, margin_s),
        ),
        fleet._replace(cluster=cluster),
        None if metric is None else _METRICS[metric],
        target,
        max_replicas if replicas is None else replicas,
        replicas,
        disaggregated,
        tuple(range(first_seed, first_seed + seeds)),
        time_limit,
        jobs,
    )


class _NumberRange(click.FloatRange):
    """A float within bounds; click's own lets nan pass, as it is below and above nothing."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FACTOR = _NumberRange(0.001, 1000)


def _traffic_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(
        (
            click.option(
                "--trace", required=True, type=_FILE, help="Recorded traffic: CSV or JSON lines."
            ),
            click.option(
                "--requests",
                default=5_000,
                show_default=True,
                type=click.IntRange(1, MAX_REQUESTS),
                help="Most requests of the trace, from its start.",
            ),
            click.option(
                "--rate-scale",
                default=1.0,
                show_default=True,
                type=_FACTOR,
                help="Factor on the number of requests in the same time: below 1 thinned at "
                "random, above 1 with copies at other times.",
            ),
            click.option(
                "--stretch",
                default=1.0,
                show_default=True,
                type=_FACTOR,
                help="Factor on arrival times: above 1 the same bursts are slower.",
            ),
            click.option(
                "--windows",
                type=(click.IntRange(1, MOST_WINDOWS), _NumberRange(1, MOST_WINDOW_S)),
                metavar="COUNT SECONDS",
                help="For long traces: play and judge COUNT windows of SECONDS each, one in each "
                "of as many equal parts of the trace.",
            ),
            click.option(
                "--margin-s",
                default=30.0,
                show_default=True,
                type=_NumberRange(0, MOST_WINDOW_S),
                help="Seconds of traffic before and after each window, which are played, too.",
            ),
            click.option(
                "--slo",
                "slos",
                multiple=True,
                metavar="NAME=VALUE,...",
                help="A service class: ttft_ms, tpot_ms, tpot_anchor, e2e_ms, priority, share, "
                "name. Repeat it for several; they take the place of those of --config.",
            ),
            click.option(
                "--share",
                "shares",
                multiple=True,
                metavar="CLASS=SHARE",
                help="A class of --config and its share of the requests. Repeat it for several; "
                "without any, every request is of the default class.",
            ),
        )
    ):
        command = option(command)
    return command


def _fleet_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(
        (
            click.option("--config", type=_FILE, help="YAML configuration of the fleet."),
            click.option("--profile", type=_FILE, help="Latency profile that a replica keeps."),
            click.option(
                "--latency",
                metavar="a=..,b=..,c=..,d=..",
                help="Latency in place of a profile, seconds: a a step, b a new token, c a "
                "context token, d a pair of tokens.",
            ),
            click.option(
                "--policy", type=click.Choice(sorted(batching.POLICIES)), help="Batch policy."
            ),
            click.option("--policy-options", metavar="JSON", help="Its options, an object."),
            click.option(
                "--routing",
                "router",
                type=click.Choice(sorted(routing.POLICIES)),
                help="Routing policy.",
            ),
            click.option(
                "--kv-blocks",
                type=click.IntRange(1, 100_000_000),
                help="KV blocks of a replica.",
            ),
            click.option(
                "--block-tokens", type=click.IntRange(1, 4096), help="Tokens of a KV block."
            ),
            click.option(
                "--max-batch-tokens",
                type=click.IntRange(1, 10_000_000),
                help="Token limit of a batch.",
            ),
            click.option(
                "--max-sequences",
                type=click.IntRange(1, 65_536),
                help="Most running sequences of a replica.",
            ),
        )
    ):
        command = option(command)
    return command


def _search_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(
        (
            click.option(
                "--target",
                default=0.95,
                show_default=True,
                type=_NumberRange(0, 1, min_open=True),
                help="Share of the requests that must meet every objective.",
            ),
            click.option(
                "--tpot-metric",
                "metric",
                type=click.Choice(tuple(_METRICS)),
                help="Which TPOT is judged: a request's mean, its running maximum, 10-token "
                "windows, or every token's deadline. By default each class's tpot_anchor.",
            ),
            click.option(
                "--seeds", default=3, show_default=True, type=click.IntRange(1, MOST_SEEDS)
            ),
            click.option(
                "--first-seed", default=1, show_default=True, type=click.IntRange(0, 2**31)
            ),
            click.option(
                "--max-replicas",
                default=64,
                show_default=True,
                type=click.IntRange(1, MOST_REPLICAS),
                help="Largest count to try.",
            ),
            click.option(
                "--replicas",
                type=click.IntRange(1, MOST_REPLICAS),
                help="Simulate this count only, without a search.",
            ),
            click.option(
                "--time-limit",
                default=3600.0,
                show_default=True,
                type=_NumberRange(1, 7 * 86_400),
                help="Seconds after which the search is given up.",
            ),
            click.option(
                "--jobs",
                default=min(os.cpu_count() or 1, MOST_JOBS),
                show_default="processors",
                type=click.IntRange(1, MOST_JOBS),
                help="Processes; seeds and windows run in parallel.",
            ),
        )
    ):
        command = option(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@_traffic_options
@_fleet_options
@_search_options
@click.option(
    "--disaggregated",
    is_flag=True,
    help="Find the sizes of a prefill and a decode pool, too, with the count of replicas that do "
    "both for comparison.",
)
@click.option(
    "--transfer-rate",
    default=ClusterConfig().transfer_tokens_per_s,
    show_default=True,
    type=_NumberRange(1, 1e9),
    help="Tokens of KV per second from a prefill to a decode replica.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for simulate.json and simulate.png.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def simulate(out: Path | None, as_json: bool, **options: Any) -> None:
    """Find how many replicas hold the objectives of recorded traffic, in the simulator.

    With --disaggregated also how many prefill and how many decode replicas do. Exit code 3 says
    that nothing within --max-replicas and --time-limit does.

    \b
    Example:
      sluice simulate --trace traffic.csv --profile h100.json --slo ttft_ms=500,tpot_ms=50
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        if out is not None:
            require_matplotlib()
        question = _question(**options)
        with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
            report = answered(question, progress)
        written = report.write(out) if out is not None else []
    except BrokenProcessPool as error:
        raise click.ClickException(
            "a process was killed, most often for want of memory; try fewer --jobs or --requests"
        ) from error
    except (OptionError, ReportError, StuckError, TraceError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(report.model_dump_json(indent=2))
    else:
        report.show()
    for path in written:
        click.echo(f"wrote {path}", err=True)
    if not report.answers:
        if as_json:
            click.echo(report.verdict(), err=True)
        raise click.exceptions.Exit(NO_ANSWER)
