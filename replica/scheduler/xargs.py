"""How a request's SLO travels through vLLM: keys in ``SamplingParams.extra_args``, which vLLM's
OpenAI layer takes as ``vllm_xargs`` (strings and numbers) and hands to the scheduler."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta
from pydantic import BaseModel, ConfigDict, Field

from sluice.protocol.requests import EngineRequest, Turn
from sluice.scheduling.batching import BatchPolicy, BestEffortOptions, make_policy
from sluice.scheduling.fleet.prefix import CHUNK_ENDS, NO_PREFIX, PromptPrefix
from sluice.scheduling.preemption import TaskBounds
from sluice.scheduling.request.job import MAX_CHUNKS, MAX_MESSAGE_ENDS
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.roles import Role

MAX_HASH: Final = (1 << 63) - 1

CONFIG_KEY = "sluice"
TABLE_FOLDER = "SLUICE_TABLE_FOLDER"
BATCH_LOG = "SLUICE_BATCH_LOG"
"""Environment variables, with the engine's number appended, that stand for the start of its files'
paths: vLLM finds compiled code by all settings, and paths differ at each start."""

KEY_PREFIX = "sluice_"
ID = "sluice_id"
ARGS = "sluice_args"

_PATHS = ("state_table", "batch_log")


class RequestArgs(NamedTuple):
    """What Sluice adds to an engine request. ``request_id``: shared by all sequences of one API
    call; ``arrival_s``: on the host's monotonic clock, ``waited_s`` before it reached the replica;
    ``tenant``: a hash of 63 bits; ``resumed``: tokens of its own output that have joined the
    prompt; ``client``: as in ``EngineRequest``."""

    request_id: str
    arrival_s: float
    slo: SLO
    best_effort: bool = False
    prefix: PromptPrefix = NO_PREFIX
    tenant: Annotated[int, Meta(ge=0, le=MAX_HASH)] = 0
    weight: Annotated[float, Meta(gt=0)] = 1.0
    promised: bool = False
    reasoning_ends: frozenset[int] = frozenset()
    turn: Turn | None = None
    resumed: Annotated[int, Meta(ge=0)] = 0
    client: Annotated[str, Meta(max_length=64)] = ""
    waited_s: Annotated[float, Meta(ge=0)] = 0.0

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
            request.turn,
            request.resumed_tokens,
            request.client,
            request.waited_s,
        )


_decode = msgspec.json.Decoder(RequestArgs).decode


def to_xargs(args: RequestArgs) -> dict[str, str]:
    """The keys of ``args``: its id, by which the call is found, and all of it as JSON."""
    return {ID: args.request_id, ARGS: msgspec.json.encode(args).decode()}


def from_xargs(xargs: Mapping[str, Any] | None, default_id: str, now_s: float) -> RequestArgs:
    """Read the keys back; without any there is no SLO. Raises ValueError: a key is wrong."""
    own = reserved_keys(xargs)
    if not own:
        return RequestArgs(default_id, now_s, SLO())
    unknown = sorted({*own} - {ID, ARGS})
    if unknown:
        raise ValueError(f"unknown keys: {', '.join(unknown)}")
    try:
        args = _decode((xargs or {}).get(ARGS, ""))
    except (msgspec.DecodeError, TypeError) as error:
        raise ValueError(f"{ARGS} must be JSON of a request's arguments: {error}") from None
    hashes, size, ends = args.prefix
    if len(hashes) > MAX_CHUNKS or len(ends) > MAX_MESSAGE_ENDS:
        most = f"{MAX_CHUNKS} chunks and {MAX_MESSAGE_ENDS} ends of messages"
        raise ValueError(f"{ARGS}: a prefix has at most {most}")
    if not all(0 < each <= MAX_HASH for each in (*hashes, *ends)):
        raise ValueError(f"{ARGS}: a prefix has hashes of 63 bits, none of 0")
    if hashes and size < CHUNK_ENDS[len(hashes) - 1]:
        raise ValueError(f"{ARGS}: a prompt of size {size} does not have {len(hashes)} chunks")
    return args._replace(arrival_s=min(args.arrival_s, now_s))


def reserved_keys(xargs: Mapping[str, Any] | None) -> list[str]:
    """Keys of a client's own extra arguments that only Sluice may set."""
    return sorted(key for key in xargs or {} if key.startswith(KEY_PREFIX))


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
    preemption: TaskBounds | None = Field(
        default=None, description="Bounds where running prefills are preempted."
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
        """Paths may begin with an environment variable. Raises ValueError: missing or wrong."""
        given = additional_config.get(CONFIG_KEY) if isinstance(additional_config, dict) else None
        if not isinstance(given, dict):
            raise ValueError(
                f"additional_config must hold {CONFIG_KEY!r}: a mapping with state_table and policy"
            )
        own = {name: given.get(name) for name in _PATHS}
        paths = {x: os.path.expandvars(path) for x, path in own.items() if isinstance(path, str)}
        return cls.model_validate({**given, **paths})
