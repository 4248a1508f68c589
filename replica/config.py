"""Configuration of a replica and of the engine inside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    field_validator,
    model_serializer,
    model_validator,
)

from sluice.replica.scheduler.speculation import with_all_lengths
from sluice.replica.vllm_args import by_option, check_names
from sluice.scheduling.autoscaling import AutoscalingPolicy
from sluice.scheduling.autoscaling import make_policy as make_autoscaling
from sluice.scheduling.batching import BestEffortOptions, make_policy
from sluice.scheduling.fleet.node_labels import LabelName, LabelValue
from sluice.scheduling.roles import ROLES, Role


class AutoscalingConfig(BaseModel):
    """Number of replicas, by their load."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(
        default=1,
        ge=0,
        le=4096,
        description="Min replicas. 0: the last one is removed after `zero_after_s` without "
        "requests, and the next request waits until one has started.",
    )
    max_replicas: int = Field(ge=1, le=4096, description="Max replicas.")
    initial_replicas: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Replicas at the start, and again after each change of the application. "
        "Default: `min_replicas` at the start, and the current number after a change.",
    )
    policy: str = Field(
        default="head_room", description="Autoscaling policy, see `sluice policies`."
    )
    policy_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the autoscaling policy."
    )
    zero_after_s: float = Field(
        default=600.0,
        ge=1,
        le=604_800,
        description="With `min_replicas: 0`: time without a request after which the last replica "
        "is removed, seconds.",
    )

    @model_validator(mode="after")
    def _check(self) -> AutoscalingConfig:
        if not self.min_replicas <= self.first <= self.max_replicas:
            raise ValueError(
                "need min_replicas <= initial_replicas <= max_replicas, got "
                f"{self.min_replicas}, {self.first} and {self.max_replicas}"
            )
        self.make()
        return self

    @property
    def first(self) -> int:
        """Replicas at the start."""
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas

    def make(self) -> AutoscalingPolicy:
        """A new policy. Raises ValueError: no such policy, or an unknown option or value."""
        return make_autoscaling(self.policy, self.policy_options)


class TransferConfig(BaseModel):
    """How engines transfer the KV of prompts and of running streams, and how long they keep it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    connector: Literal["auto", "tcp", "nixl"] = Field(
        default="auto",
        description="Transport of the KV. `tcp`: Sluice's own, over plain TCP, on any hardware. "
        "`nixl`: vLLM's NixlConnector, where its package is installed. `auto`: `nixl` on CUDA "
        "where its package is installed, else `tcp`.",
    )
    max_bytes: int = Field(
        default=1 << 30,
        ge=1 << 20,
        description="Max memory for KV kept or in transfer, per worker and direction, bytes. "
        "Beyond it the oldest KV is dropped, and its prompt is recomputed; of a longer prompt the "
        "beginning travels.",
    )


# LoRA adapters by vLLM's naming: requests ask for one by its name in place of the model's.

ADAPTERS_ARGUMENT = "lora-modules"
_FORMS = "a list of 'name=path' or of objects with name and path"


def adapter_names(vllm_args: Mapping[str, Any]) -> tuple[str, ...]:
    """Names in vLLM's argument ``lora-modules``. Raises ValueError: vLLM does not accept its
    form."""
    given = by_option(vllm_args).get(ADAPTERS_ARGUMENT)
    if given is None:
        return ()
    entries = given if isinstance(given, list | tuple) else [given]
    names = tuple(_name_of(entry) for entry in entries)
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise ValueError(f"{ADAPTERS_ARGUMENT} name two adapters alike: {', '.join(doubles)}")
    return names


def _name_of(entry: Any) -> str:
    if isinstance(entry, str) and entry.lstrip().startswith("{"):
        try:
            entry = json.loads(entry)
        except ValueError as error:
            raise ValueError(f"an entry of {ADAPTERS_ARGUMENT} is not JSON: {error}") from None
    if isinstance(entry, str):
        name, _, path = entry.partition("=")
        entry = {"name": name, "path": path}
    if isinstance(entry, Mapping):
        parts = [entry.get(part) for part in ("name", "path")]
        if all(isinstance(part, str) and part for part in parts):
            return str(parts[0])
    raise ValueError(f"{ADAPTERS_ARGUMENT} must be {_FORMS}, got {entry!r}")


PoolName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
"""Name of a pool, which its deployment's name contains."""

_NODE_LABELS = "Ray labels, by name, that a node must have for these replicas; default: any node."


class SimulatedEngineConfig(BaseModel):
    """An engine with a latency model in place of a GPU; for scale and for tests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_s: float = Field(default=0.004, ge=0, description="Fixed time of a step, seconds.")
    token_s: float = Field(default=0.0002, ge=0, description="Time per new token, seconds.")
    context_token_s: float = Field(
        default=0.000001, ge=0, description="Time per context token, seconds."
    )
    quadratic_s: float = Field(
        default=0.0, ge=0, description="Time per unit of the quadratic prefill term, seconds."
    )
    kv_blocks: int = Field(default=4096, ge=8, description="KV blocks.")
    block_tokens: int = Field(default=16, ge=1, description="Tokens per KV block.")
    max_model_tokens: int = Field(
        default=8192, ge=16, description="Max prompt + output tokens of a request."
    )
    max_batch_tokens: int = Field(default=2048, ge=1, description="Max new tokens of a batch.")
    max_sequences: int = Field(default=256, ge=1, description="Max running sequences.")
    transfer_s: float = Field(
        default=0.002,
        ge=0,
        description="Fixed time of a KV transfer from another engine, seconds.",
    )


class EngineConfig(BaseModel):
    """The engine of a replica and its local batch policy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["vllm", "simulated"] = Field(
        default="vllm", description="`vllm`: real inference. `simulated`: a latency model."
    )
    model: str = Field(
        default="local",
        min_length=1,
        description="Path or hub id of the model; `local` makes a small random-weight Llama, "
        "which CPUs compute in float32 unless `vllm_args` has another `dtype`.",
    )
    served_model_name: str | None = Field(
        default=None, description="Name that requests use; default: the model's."
    )
    policy: str = Field(
        default="deadline_triage", description="Local batch policy, see `sluice policies`."
    )
    policy_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the batch policy."
    )
    best_effort: BestEffortOptions = Field(
        default_factory=BestEffortOptions,
        description="How best-effort requests are served, under any policy.",
    )
    preemption: bool = Field(
        default=False,
        description="A more urgent prefill preempts a running one before its next operator; "
        "`policy` then has no effect: prefills run by S-EDF. Experimental.",
    )
    transfer: TransferConfig | None = Field(
        default=None,
        description="KV transfer between engines: of prompts, of what is cached of a session's "
        "prompt, and of running streams, which move to another replica when theirs is drained or "
        "stopped, or too slow. Default: off; with prefill and decode pools, on with the defaults "
        "below.",
    )
    vllm_args: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM engine arguments by their command-line name without dashes, "
        "for example `max-model-len: 8192`. Arguments that Sluice sets itself are refused.",
    )
    adapters_dir: Path | None = Field(
        default=None,
        description="Directory of LoRA adapters that are loaded and unloaded while serving: each "
        "subfolder with an `adapter_config.json` is one, named as the folder. The same on every "
        "node with a replica. Needs `enable-lora` in `vllm_args`, where `max-loras` is the most "
        "that are loaded, those of `lora-modules` included.",
    )
    grammar_check_s: float = Field(
        default=2.0,
        ge=0,
        le=60,
        description="CPU time limit of each phase of a grammar check, seconds. A separate process "
        "first parses, compiles and follows for some hundred tokens each new grammar, schema, "
        "pattern or choice list of structured output; it is refused if one of these three phases "
        "exceeds the limit. That process takes about 0.2 GiB. 0: no check; a costly grammar stalls "
        "the engine until the engine stops its request.",
    )
    pin_cpu: bool = Field(
        default=True,
        description="On CPUs, pin the engine to one core, with one OpenMP thread. No effect on a "
        "GPU.",
    )
    latency_profile: Path | None = Field(
        default=None,
        description="JSON latency profile for the planner; default: measured at start, and cached.",
    )
    headroom: float = Field(
        default=1.05,
        ge=1,
        le=2,
        description="Factor on predicted step times in the planner. Without headroom it would miss "
        "every second deadline for which it plans no slack.",
    )
    cache_dir: Path = Field(
        default=Path("~/.cache/sluice"),
        description="Directory for latency profiles and locally made models.",
    )
    batch_log: Path | None = Field(
        default=None,
        description="Directory for a log of each engine's batches, a JSON line each: the queue as "
        "it was planned, the plan, what ran, and its time; at most 100,000 lines and 1 GiB. "
        "`sluice bench replay` plans it again.",
    )
    simulated: SimulatedEngineConfig = Field(
        default_factory=SimulatedEngineConfig, description="Options of the simulated engine."
    )

    @model_validator(mode="after")
    def _check_policy(self) -> EngineConfig:
        make_policy(self.policy, self.policy_options)
        return self

    @field_validator("vllm_args")
    @classmethod
    def _check_vllm_args(cls, vllm_args: dict[str, Any]) -> dict[str, Any]:
        check_names(vllm_args)
        return vllm_args

    @model_validator(mode="after")
    def _check_adapters(self) -> EngineConfig:
        if self.served_name in self.adapters:
            raise ValueError(f"an adapter has the model's own name, {self.served_name!r}")
        together = str(by_option(self.vllm_args).get("max-loras") or 1)  # vLLM's default
        if together.isdigit() and len(self.adapters) > int(together):
            # vLLM ends when a batch has more, and a plan may have a request wait beside others.
            raise ValueError(
                f"vllm_args: max-loras is {together}, but must be at least {len(self.adapters)}, "
                "the number of lora-modules"
            )
        if self.adapters_dir is not None:
            if not self.adapters_dir.expanduser().is_absolute():
                raise ValueError("adapters_dir must be an absolute path: nodes read it")
            if self.kind != "vllm" or not by_option(self.vllm_args).get("enable-lora"):
                raise ValueError("adapters_dir needs vLLM with enable-lora: true in vllm_args")
            if self.preemption:
                raise ValueError(
                    "adapters_dir needs preemption: false, as an adapter is loaded between two "
                    "batches, and a suspended prefill may still need another one"
                )
        return self

    @model_validator(mode="after")
    def _check_preemption(self) -> EngineConfig:
        if not self.preemption:
            return self
        if self.kind != "vllm":
            raise ValueError("preemption must be false: only vLLM's prefills are preempted")
        if self.draft_method not in (None, "ngram"):
            raise ValueError(
                f"preemption must be false with drafts by {self.draft_method}, or the "
                "method of speculative-config ngram: other drafters keep KV or tokens of the "
                "requests, which a preempting prefill would not share"
            )
        return self

    @property
    def served_name(self) -> str:
        """The name that requests use."""
        return self.served_model_name or self.model

    @property
    def draft_method(self) -> str | None:
        """vLLM's name of the drafting method, or ``None``. Raises ValueError: it is invalid."""
        given = by_option(self.vllm_args).get("speculative-config")
        return (
            None if given is None else str(with_all_lengths(given).get("method", "a draft model"))
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that vLLM loads at start."""
        return adapter_names(self.vllm_args)


class PoolConfig(BaseModel):
    """Replicas of one role and kind; an option left out is that of the enclosing section."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Role | None = Field(
        default=None,
        description="Phases of a request that the replicas serve. Default: the pool's name, if it "
        "is a role; a pool of another name needs it.",
    )

    count: int = Field(
        default=1, ge=1, le=4096, description="Replicas. With `autoscaling` it has no effect."
    )
    autoscaling: AutoscalingConfig | None = Field(
        default=None,
        description="Autoscale the replicas by the load of their role, of which there must be no "
        "other pool; default: fixed at `count`.",
    )
    num_gpus: float | None = Field(default=None, ge=0, description="Ray GPUs per replica.")
    node_labels: dict[LabelName, LabelValue] = Field(
        default_factory=dict, max_length=16, description=_NODE_LABELS
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="Overrides of the model's `engine` section, such as `policy`. `vllm_args` and "
        "other mappings are merged: only the keys that are named here change.",
    )


class ReplicaConfig(BaseModel):
    """The replicas of a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    count: int = Field(
        default=2, ge=1, le=4096, description="Replicas. With `autoscaling` it has no effect."
    )
    autoscaling: AutoscalingConfig | None = Field(
        default=None,
        description="Autoscale the replicas by load; default: fixed at `count`.",
    )
    num_cpus: float = Field(default=0.5, ge=0, description="Ray CPUs per replica.")
    num_gpus: float | None = Field(
        default=None,
        ge=0,
        description="Ray GPUs per replica; default: for the CUDA build of vLLM one for each worker "
        "(`tensor-parallel-size` x `pipeline-parallel-size` in `vllm_args`), else 0.",
    )
    placement_strategy: Literal["PACK", "STRICT_PACK"] = Field(
        default="PACK",
        description="Where Ray reserves the GPUs of a replica with `distributed-executor-backend: "
        "ray` in `vllm_args`. `PACK`: on as few nodes as it can. `STRICT_PACK`: on one node.",
    )
    max_per_node: int | None = Field(
        default=None,
        ge=1,
        le=100,
        description="Max replicas of the model on one node, which bounds the loss when a node "
        "fails; default: as many as fit. Ray spreads replicas over nodes as well as it can in "
        "either case.",
    )
    node_labels: dict[LabelName, LabelValue] = Field(
        default_factory=dict, max_length=16, description=_NODE_LABELS
    )
    pools: dict[PoolName, PoolConfig] = Field(
        default_factory=dict,
        max_length=16,
        description="Replicas by role, each with its own number of replicas: `mixed` serves both "
        "phases of a request, `prefill` and `decode` one phase each, so both roles are required "
        "together. Pools of other names, with a `role`, are further replicas of it, as on other "
        "GPUs. `count` and `autoscaling` are then set in the pools only. Default: all replicas are "
        "mixed.",
    )
    elastic: bool = Field(
        default=False,
        description="Replicas change between the roles `mixed`, `prefill` and `decode` while they "
        "run, by the load; all begin as `mixed`. `controller.roles` says when. Excludes `pools`.",
    )
    max_live_requests: int = Field(
        default=2048,
        ge=1,
        le=65_536,
        description="Max live requests of a replica; further requests get 503.",
    )
    report_interval_s: float = Field(
        default=0.025,
        gt=0,
        le=1,
        description="Min time between two reports to the controller, seconds; a replica without "
        "news reports after 20 times this, one whose requests only have further tokens after 4 "
        "times. Below a fortieth of `controller.stale_after_s`.",
    )
    hung_after_s: float = Field(
        default=5.0,
        ge=0.1,
        le=3_600,
        description="Min time without a step, while requests wait for one, after which an engine "
        "counts as hung, seconds. On slow machines the limit is longer, by the predicted step "
        "time.",
    )
    drain_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Max wait for live requests when a replica is stopped, seconds.",
    )
    surge_percent: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Extra replicas that an update may start before it stops old ones, in percent "
        "of their number, rounded up. The update waits until there are free GPUs for them. 0: each "
        "replica is stopped before its successor starts.",
    )

    @model_validator(mode="after")
    def _check_pools(self) -> ReplicaConfig:
        if not self.pools:
            return self
        if self.elastic:
            raise ValueError(
                "elastic and pools exclude each other: replicas of a pool keep its role, and a "
                "pool's engine settings cannot change without a restart"
            )
        roles = [self.role_of(name) for name in self.pools]
        if ("prefill" in roles) != ("decode" in roles):
            raise ValueError(
                "the pools prefill and decode are required together: configure both or neither"
            )
        for name, pool in self.pools.items():
            if len(self.pools) < 2 or pool.autoscaling is None:
                continue
            if not pool.autoscaling.min_replicas:
                raise ValueError(
                    f"pools.{name}.autoscaling.min_replicas must be at least 1: only a model with "
                    "one pool can be scaled to zero"
                )
            if roles.count(self.role_of(name)) > 1:
                raise ValueError(
                    f"pools.{name}.autoscaling: another pool has the same role, and the load of a "
                    "role is not known by pool: set count"
                )
        beside = [
            name
            for name in ("count", "autoscaling")
            if name in self.model_fields_set and getattr(self, name) is not None
        ]
        if beside:
            raise ValueError(
                f"{' and '.join(beside)} cannot be set beside pools: each pool has its own"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_count(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit ``count`` where there are pools: the printed configuration can be read back."""
        data: dict[str, Any] = plain(self)
        if self.pools:
            data.pop("count", None)
        return data

    def role_of(self, name: str) -> Role:
        """The role of a pool. Raises ValueError: none, or named as another role."""
        role = self.pools[name].role
        named = next((each for each in ROLES if each == name), None)
        if role is None and named is None:
            raise ValueError(f"pools.{name}: role must be given: 'mixed', 'prefill' or 'decode'")
        if None not in (role, named) and role != named:
            raise ValueError(f"pools.{name}: role is {role!r}: give the pool another name")
        return role or named  # type: ignore[return-value]

    @property
    def heartbeat_s(self) -> float:
        """Max time between two reports, seconds, also when nothing changed."""
        return 20 * self.report_interval_s

    @property
    def first(self) -> int:
        """Replicas at the start. Of a pool: see :func:`sluice.replica.pools.pools_of`."""
        return self.count if self.autoscaling is None else self.autoscaling.first

    @property
    def most(self) -> int:
        """Max replicas. Valid for a pool, too."""
        return self.count if self.autoscaling is None else self.autoscaling.max_replicas
