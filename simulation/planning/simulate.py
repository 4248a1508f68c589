"""``sluice simulate``: how many replicas hold the objectives of recorded traffic."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from math import isnan
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sluice.deploy.config import load_config
from sluice.scheduling import batching, routing
from sluice.simulation.capacity import MOST_REPLICAS
from sluice.simulation.config import ClusterConfig
from sluice.simulation.engine import StuckError
from sluice.simulation.metrics import TPOTMetric
from sluice.simulation.planning import options
from sluice.simulation.planning.options import OptionError
from sluice.simulation.planning.plots import ReportError, require_matplotlib
from sluice.simulation.planning.search import Question, answered
from sluice.simulation.planning.traffic import Traffic, Windows
from sluice.simulation.workloads.traces import MAX_REQUESTS, TraceError

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
    classes = options.classes(loaded, slos, shares)
    if not any(each.slo.stated for each in classes):
        raise OptionError("no class states an objective, so any number of replicas is enough")
    if disaggregated and max_replicas < 2:
        raise OptionError("--disaggregated needs --max-replicas of at least 2, one of each role")
    if disaggregated and replicas is not None:
        raise OptionError("--replicas and --disaggregated contradict each other: one is a search")
    model = options.latency(loaded, profile, latency)
    fleet = options.fleet(loaded, model, policy, policy_options, router, limits)
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
