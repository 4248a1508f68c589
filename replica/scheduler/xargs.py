"""How a request's SLO travels through vLLM: flat keys in ``SamplingParams.extra_args``.

vLLM's OpenAI layer takes them as ``vllm_xargs`` (strings and numbers only) and hands them to the
scheduler unchanged, in another process. The settings of that scheduler travel in
``additional_config``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from sluice.protocol.requests import EngineRequest
from sluice.scheduling.batching import BatchPolicy, BestEffortOptions, make_policy
from sluice.scheduling.fleet.prefix import CHUNK_ENDS, NO_PREFIX, PromptPrefix
from sluice.scheduling.preemption import PreemptionConfig
from sluice.scheduling.request.job import MAX_CHUNKS
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage
from sluice.scheduling.roles import Role

_Parsed = TypeVar("_Parsed")

CONFIG_KEY = "sluice"
TABLE_FOLDER = "SLUICE_TABLE_FOLDER"
BATCH_LOG = "SLUICE_BATCH_LOG"
"""Environment variables, followed by the number of the engine in its process, with which the paths
of an engine's files begin: vLLM finds compiled code by all of its settings, these among them, and
the files have other names at each start."""

KEY_PREFIX = "sluice_"
ID = "sluice_id"
ARRIVAL_S = "sluice_arrival_s"
TTFT_S = "sluice_ttft_s"
TPOT_S = "sluice_tpot_s"
E2E_S = "sluice_e2e_s"
PRIORITY = "sluice_priority"
SERVICE_CLASS = "sluice_class"
BEST_EFFORT = "sluice_best_effort"
PROMISED = "sluice_promised"
TENANT = "sluice_tenant"
WEIGHT = "sluice_weight"
PROMPT_PREFIX = "sluice_prefix"
STAGES = "sluice_stages"
REASONING_ENDS = "sluice_reasoning_ends"

_PROMPT_PREFIX = re.compile(rf"([0-9a-f]{{1,15}}),((?:[0-7][0-9a-f]{{15}}){{1,{MAX_CHUNKS}}})")

_TENANT = re.compile(r"[0-7]?[0-9a-f]{1,15}")

_PATHS = ("state_table", "batch_log")

_OBJECTIVES = ((TTFT_S, "ttft_s"), (TPOT_S, "tpot_s"), (E2E_S, "e2e_s"))


class RequestArgs(NamedTuple):
    """What Sluice adds to an engine request.

    Attributes:
        request_id: in the fleet, shared by all sequences of one API call.
        arrival_s: when the edge received it, on the host's monotonic clock.
        tenant: hash of its tenant, 63 bits. weight: of the tenant's share, > 0.
        reasoning_ends: tokens that end its reasoning, if one of its stages ends with that.
    """

    request_id: str
    arrival_s: float
    slo: SLO
    best_effort: bool = False
    prefix: PromptPrefix = NO_PREFIX
    tenant: int = 0
    weight: float = 1.0
    promised: bool = False
    reasoning_ends: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, request: EngineRequest, received_s: float, ends: frozenset[int] = frozenset()
    ) -> RequestArgs:
        """Those of an API call that reached the replica at ``received_s``."""
        return cls(
            request.request_id,
            received_s - request.waited_s,
            request.slo,
            request.best_effort,
            request.prefix,
            request.tenant,
            request.weight,
            request.promised,
            ends,
        )


def to_xargs(args: RequestArgs) -> dict[str, str | int | float]:
    """The keys of ``args``; an SLO that is not stated has no key."""
    xargs: dict[str, str | int | float] = {
        ID: args.request_id,
        ARRIVAL_S: args.arrival_s,
        PRIORITY: args.slo.priority,
        SERVICE_CLASS: args.slo.service_class,
    }
    for key, field in _OBJECTIVES:
        value = getattr(args.slo, field)
        if value is not None:
            xargs[key] = value
    if args.best_effort:
        xargs[BEST_EFFORT] = 1
    if args.promised:
        xargs[PROMISED] = 1
    if args.tenant:
        # As text: readers of the keys may hold numbers as floats.
        xargs[TENANT], xargs[WEIGHT] = f"{args.tenant:x}", args.weight
    if args.prefix.hashes:
        hashes = "".join(f"{chunk:016x}" for chunk in args.prefix.hashes)
        xargs[PROMPT_PREFIX] = f"{args.prefix.size:x},{hashes}"
    if args.slo.stages:
        xargs[STAGES] = msgspec.json.encode(args.slo.stages).decode()
        if args.reasoning_ends:
            xargs[REASONING_ENDS] = msgspec.json.encode(sorted(args.reasoning_ends)).decode()
    return xargs


def from_xargs(xargs: Mapping[str, Any] | None, default_id: str, now_s: float) -> RequestArgs:
    """Read the keys back. Missing keys have defaults: no SLO, the id ``default_id``, arrival at
    ``now_s``. Direct use of the engine has no keys at all. Raises ValueError: a key holds what
    :func:`to_xargs` cannot have written."""
    given = {key: value for key, value in (xargs or {}).items() if key.startswith(KEY_PREFIX)}
    if not given:
        return RequestArgs(default_id, now_s, SLO())
    request_id = given.pop(ID, default_id)
    service_class = given.pop(SERVICE_CLASS, "standard")
    for key, value in ((ID, request_id), (SERVICE_CLASS, service_class)):
        if not isinstance(value, str):
            raise ValueError(f"{key} must be a string, got {value!r}")
    arrival_s = _number(ARRIVAL_S, given.pop(ARRIVAL_S, now_s))
    priority = given.pop(PRIORITY, 1)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"{PRIORITY} must be an integer, got {priority!r}")
    best_effort, promised = (_flag(key, given.pop(key, 0)) for key in (BEST_EFFORT, PROMISED))
    tenant, weight = _tenant(given.pop(TENANT, "0")), _number(WEIGHT, given.pop(WEIGHT, 1.0))
    if weight <= 0:
        raise ValueError(f"{WEIGHT} must be above 0, got {weight}")
    prefix = _prompt_prefix(given.pop(PROMPT_PREFIX, None))
    ttft_s, tpot_s, e2e_s = (
        _number(key, given.pop(key)) if key in given else None for key, _ in _OBJECTIVES
    )
    stages = _parsed(STAGES, given.pop(STAGES, "[]"), tuple[Stage, ...])
    ends = _parsed(REASONING_ENDS, given.pop(REASONING_ENDS, "[]"), frozenset[int])
    if given:
        raise ValueError(f"unknown keys: {', '.join(sorted(given))}")
    slo = SLO(ttft_s, tpot_s, e2e_s, priority, service_class, stages=stages)
    arrival_s = min(arrival_s, now_s)
    return RequestArgs(
        request_id, arrival_s, slo, best_effort, prefix, tenant, weight, promised, ends
    )


def _parsed(key: str, value: Any, kind: type[_Parsed]) -> _Parsed:
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, TypeError) as error:
        raise ValueError(f"{key} must be JSON: {error}") from None


def _flag(key: str, value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError(f"{key} must be 0 or 1, got {value!r}")
    return bool(value == 1)


def reserved_keys(xargs: Mapping[str, Any] | None) -> list[str]:
    """Keys of a client's own extra arguments that only Sluice may set."""
    return sorted(key for key in xargs or {} if key.startswith(KEY_PREFIX))


def _tenant(value: Any) -> int:
    if not isinstance(value, str) or not _TENANT.fullmatch(value):
        raise ValueError(f"{TENANT} must be a hash of 63 bits in hexadecimal, got {value!r}")
    return int(value, 16)


def _prompt_prefix(value: Any) -> PromptPrefix:
    if value is None:
        return NO_PREFIX
    match = _PROMPT_PREFIX.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(
            f"{PROMPT_PREFIX} must be a size and 1 to {MAX_CHUNKS} hashes of 63 bits in hexadecimal"
        )
    size, digits = int(match[1], 16), match[2]
    hashes = tuple(int(digits[at : at + 16], 16) for at in range(0, len(digits), 16))
    if 0 in hashes:
        raise ValueError(f"{PROMPT_PREFIX} must not have a hash of 0")
    if size < CHUNK_ENDS[len(hashes) - 1]:
        raise ValueError(f"{PROMPT_PREFIX} has more chunks than a prompt of size {size}")
    return PromptPrefix(hashes, size)


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{key} must be a finite number of seconds, got {value!r}")
    return float(value)


def rank_path(path: Path, rank: int) -> Path:
    """The file of a rank, beside that of the first one."""
    return path.with_stem(f"{path.stem}.{rank}") if rank else path


class SchedulerSettings(BaseModel):
    """Settings of the scheduler inside the engine, in ``additional_config["sluice"]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state_table: Path = Field(description="File of the state table; it exists already.")
    policy: str = Field(description="Batch policy.")
    policy_options: dict[str, Any] = Field(default_factory=dict, description="Its options.")
    role: Role = Field(default="mixed", description="What the replica does of a request.")
    best_effort: BestEffortOptions = Field(
        default_factory=BestEffortOptions, description="How best-effort requests are served."
    )
    preemption: PreemptionConfig = Field(
        default_factory=PreemptionConfig, description="Whether running prefills are preempted."
    )
    batch_log: Path | None = Field(default=None, description="File of the batch log.")
    cpu_core: int | None = Field(
        default=None, ge=0, description="Core that the scheduling thread is pinned to."
    )

    def of_rank(self, rank: int) -> SchedulerSettings:
        """The settings of a rank, which has files of its own beside those of the first one."""
        log = self.batch_log and rank_path(self.batch_log, rank)
        changed = {"state_table": rank_path(self.state_table, rank), "batch_log": log}
        return self.model_copy(update=changed)

    def make_policy(self, role: Role | None = None) -> BatchPolicy:
        """A new policy of these settings, for another ``role`` if one is given."""
        role = role or self.role
        return make_policy(self.policy, self.policy_options, self.best_effort, role)

    def to_additional_config(self) -> dict[str, Any]:
        """The value of vLLM's ``additional_config``."""
        return {CONFIG_KEY: self.model_dump(mode="json")}

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> SchedulerSettings:
        """Read it back; paths may begin with an environment variable. Raises ValueError: it is
        missing or wrong."""
        given = additional_config.get(CONFIG_KEY) if isinstance(additional_config, dict) else None
        if not isinstance(given, dict):
            raise ValueError(
                f"additional_config must hold {CONFIG_KEY!r}: a mapping with state_table and policy"
            )
        own = {name: given.get(name) for name in _PATHS}
        paths = {x: os.path.expandvars(path) for x, path in own.items() if isinstance(path, str)}
        return cls.model_validate({**given, **paths})
