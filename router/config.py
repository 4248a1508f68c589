"""Configuration of the HTTP edge and of the service classes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from sluice.router.tenancy.auth import (
    AbsolutePath,
    KeyEntry,
    check_bare,
    check_entries,
    digest_of,
)
from sluice.router.tenancy.limits import Milliseconds, OutputLimit, PromptLimit
from sluice.router.tenancy.tokens import MAX_ISSUERS, TokenIssuer, check_issuers
from sluice.router.wire import (
    LABEL,
    MAX_OBJECTIVE_MS,
    MAX_TOKENS,
    is_loopback,
)
from sluice.scheduling.fleet.node_labels import LabelName, LabelValue
from sluice.scheduling.placement.loops import IDLE_S
from sluice.scheduling.request.objective import MAX_PRIORITY, MIN_PRIORITY, SLO, TPOTAnchor

# Configuration of files and batches: their storage and limits.

HOUR_S = 3_600
DAY_S = 24 * HOUR_S

_BUCKET = re.compile(r"(?:s3|gs)://[^/?#@]+(?:/[^?#]*)?")
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([mhd])")


class BatchesConfig(BaseModel, extra="forbid", frozen=True):
    """Files and batches. Limits apply to the whole directory and not per router, unless they state
    otherwise."""

    directory: AbsolutePath | None = Field(
        default=None,
        description="Absolute path of the folder that holds files and batches; router replicas "
        "that share it share them. Null: `/v1/files` and `/v1/batches` are off.",
    )
    url: str | None = Field(
        default=None,
        description="Bucket and prefix of the files' bytes, such as `s3://bucket/sluice` or "
        "`gs://bucket/sluice`; the state stays in the directory. Credentials, region and endpoint "
        "come from the environment or the machine's role. Null: in the directory.",
    )
    service_class: str = Field(
        default="batch",
        description="Class of a line that names none. Must be one of router.classes. With its "
        "`when_unattainable` other than `best_effort`, a batch whose completion window cannot be "
        "promised is refused.",
    )
    completion_windows: tuple[str, ...] = Field(
        default=("24h",),
        min_length=1,
        max_length=16,
        description="Accepted values of `completion_window`, such as `30m`, `24h` or `7d`.",
    )
    max_bytes_per_key: int = Field(
        default=10 << 30,
        ge=1 << 10,
        le=1 << 50,
        description="Maximum bytes of one API key, results included. Batches wait while it is "
        "exceeded.",
    )
    max_bytes: int = Field(
        default=50 << 30,
        ge=1 << 10,
        le=1 << 50,
        description="Maximum bytes in total, results included. Batches wait while it is exceeded.",
    )
    min_free_bytes: int = Field(
        default=256 << 20,
        ge=0,
        le=1 << 50,
        description="Minimum free bytes on the directory's disk. With fewer, uploads are refused "
        "and batches wait, so that no answer is lost because it cannot be written.",
    )
    retention_s: float = Field(
        default=30.0 * DAY_S,
        ge=HOUR_S,
        le=3_650.0 * DAY_S,
        description="How long a file is kept if its client does not state it, and a batch after "
        "its end, seconds.",
    )
    max_running: int = Field(
        default=4, ge=1, le=256, description="Maximum batches that one router replica runs at once."
    )
    max_lines_in_flight: int = Field(
        default=32,
        ge=1,
        le=4_096,
        description="Maximum lines in flight in one router replica.",
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None and not _BUCKET.fullmatch(value):
            raise ValueError(
                "batches.url must look like s3://bucket/prefix or gs://bucket/prefix, without "
                "credentials"
            )
        return value

    @field_validator("completion_windows")
    @classmethod
    def _check_windows(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        bad = [window for window in value if not _WINDOW.fullmatch(window)]
        if bad:
            raise ValueError(f"completion_windows must look like 30m, 24h or 7d, got {bad}")
        return value


def window_s(window: str) -> int:
    """Seconds of a completion window that the configuration accepts."""
    found = _WINDOW.fullmatch(window)
    assert found is not None
    return int(found[1]) * {"m": 60, "h": HOUR_S, "d": DAY_S}[found[2]]


# Configuration of access to the admin API and the live page.


class AdminConfig(BaseModel, extra="forbid", frozen=True):
    """The admin API under `/admin/v1` and the live page at `/ui`."""

    access: Literal["off", "key", "open"] = Field(
        default="key",
        description="`off`: no admin API and no page; `key`: an admin key is required, and without "
        "configured keys access is refused; `open`: no key, only with `sluice serve` on a loopback "
        "`router.host`.",
    )
    keys: tuple[KeyEntry, ...] = Field(
        default=(),
        max_length=100,
        description="Keys for the admin API only; API keys do not give access to it.",
    )
    keys_file: AbsolutePath | None = Field(
        default=None,
        description="Absolute path of a YAML list of more such keys, on every node with a router. "
        "It is read again when it changes.",
    )

    @model_validator(mode="after")
    def _check_keys(self) -> AdminConfig:
        check_entries(self.keys, (), "admin.keys")
        check_bare(self.keys, "admin.keys")
        if self.access != "key" and (self.keys or self.keys_file is not None):
            raise ValueError(f"admin.access is {self.access}, so admin keys would open nothing")
        return self


# Configuration of the endpoint picker.


class PickerConfig(BaseModel, extra="forbid", frozen=True):
    """The endpoint picker: routers as the external processors of an Envoy that you already have."""

    port: int | None = Field(
        default=None,
        ge=1,
        le=65_535,
        description="Port where each router listens for Envoy's external processing (gRPC without "
        "TLS); routers of one node share it. Without one there is no picker.",
    )
    host: str = Field(default="127.0.0.1", description="Address that this port is bound to.")


Origin = Annotated[
    str,
    Field(
        max_length=300,
        pattern=r"^(\*|https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](:[0-9]{1,5})?)$",
    ),
]
"""A browser's ``Origin`` header: no path, and no slash at the end."""


class LoopTerms(BaseModel, extra="forbid", frozen=True):
    """A deadline for the tool loops of a class: the turns of one session, with those of its
    sub-agents. An objective for each turn, from the end of the tool on, is `e2e_ms` of the
    class."""

    deadline_ms: Milliseconds = Field(
        description="Time from the arrival of the first turn to the end of the last answer, ms; "
        "the time of tools counts."
    )
    idle_ms: float = Field(
        default=1000 * IDLE_S,
        ge=1_000,
        le=MAX_OBJECTIVE_MS,
        description="A loop is over this long after its last answer, ms; a later turn of the "
        "session begins another one. Longer than the longest tool.",
    )


class Alternative(BaseModel, extra="forbid", frozen=True):
    """What a class accepts of a request that cannot be promised as asked: these fields replace its
    own where they ask for less."""

    max_tokens: int | None = Field(
        default=None, ge=1, le=MAX_TOKENS, description="Maximum output tokens of each choice."
    )
    thinking_tokens: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOKENS,
        description="Maximum tokens of reasoning, of chats and completions: vLLM's "
        "`thinking_token_budget`, so every model needs `reasoning-parser` in engine.vllm_args.",
    )
    model: str | None = Field(
        default=None, max_length=128, description="Another model or adapter that is served here."
    )
    ttft_ms: Milliseconds | None = Field(
        default=None, description="A longer time to first token, ms."
    )
    tpot_ms: Milliseconds | None = Field(
        default=None, description="A longer time per output token, ms."
    )
    e2e_ms: Milliseconds | None = Field(
        default=None, description="A longer time to the last token, ms."
    )

    @model_validator(mode="after")
    def _check_any(self) -> Alternative:
        if not self.model_dump(exclude_none=True):
            raise ValueError(f"an alternative needs one of: {', '.join(type(self).model_fields)}")
        return self


class ServiceClass(BaseModel, extra="forbid", frozen=True):
    """The SLO of a request of this class that states none itself."""

    ttft_ms: Milliseconds | None = Field(default=None, description="Time to first token, ms.")
    tpot_ms: Milliseconds | None = Field(
        default=None, description="Time per output token after the first, ms."
    )
    tpot_anchor: TPOTAnchor = Field(
        default=TPOTAnchor.MEAN,
        description="How TPOT is measured, for the class's objective and for a client's own: "
        "`mean` from the first token to the last, `running_max` at every token, `window` over any "
        "10 tokens.",
    )
    e2e_ms: Milliseconds | None = Field(default=None, description="Time to the last token, ms.")
    loop: LoopTerms | None = Field(
        default=None, description="A deadline for whole tool loops, that is for sessions."
    )
    priority: int = Field(
        default=1,
        ge=MIN_PRIORITY,
        le=MAX_PRIORITY,
        description="Worth of a token: one of priority 2 is worth two of priority 1.",
    )
    service_tiers: tuple[str, ...] = Field(
        default=(),
        description="Values of OpenAI's `service_tier` that select this class.",
    )
    when_unattainable: Literal["best_effort", "reject", "queue"] = Field(
        default="best_effort",
        description="Handling of a request whose SLO no replica can guarantee: `best_effort` "
        "serves it with the capacity that guaranteed requests leave, `reject` answers 429, `queue` "
        "lets it wait at the router until a replica can.",
    )
    accepts: tuple[Alternative, ...] = Field(
        default=(),
        max_length=4,
        description="What is tried, in order, if no replica can guarantee the SLO of a request as "
        "it was asked, before `when_unattainable`; each alternative stands alone. The answer says "
        "what was applied in `x-sluice-degraded`.",
    )
    queue_limit_s: float = Field(
        default=10.0,
        gt=0,
        le=3_600,
        description="With `queue`: maximum wait, seconds; then 429. At most 256 requests of a "
        "class wait in one router replica.",
    )

    def objective(self, name: str) -> SLO:
        """The SLO of a request of this class that states none itself. ``name``: of the class."""
        ttft_s, tpot_s, e2e_s = (
            None if value_ms is None else value_ms / 1e3
            for value_ms in (self.ttft_ms, self.tpot_ms, self.e2e_ms)
        )
        return SLO(ttft_s, tpot_s, e2e_s, self.priority, name, self.tpot_anchor)


def _default_classes() -> dict[str, ServiceClass]:
    return {
        "interactive": ServiceClass(
            ttft_ms=500, tpot_ms=50, priority=4, service_tiers=("priority",)
        ),
        "standard": ServiceClass(
            ttft_ms=2_000, tpot_ms=100, priority=2, service_tiers=("auto", "default")
        ),
        "batch": ServiceClass(priority=1, service_tiers=("flex",)),
    }


class MetricsConfig(BaseModel, extra="forbid", frozen=True):
    """Access to `/metrics`."""

    access: Literal["key", "open"] = Field(
        default="key",
        description="`key`: a metrics key is required if there are API keys; `open`: no key, for a "
        "port that only the monitoring can reach, so not beside `router.picker`.",
    )
    keys: tuple[KeyEntry, ...] = Field(
        default=(), max_length=100, description="Keys for `/metrics` only."
    )
    keys_file: AbsolutePath | None = Field(
        default=None,
        description="Absolute path of a YAML list of more such keys. It is read again when it "
        "changes.",
    )


class TlsConfig(BaseModel, extra="forbid", frozen=True):
    """TLS of the port of HTTP."""

    certificate: AbsolutePath = Field(
        description="Absolute path of the certificate and its chain, PEM, on every node with a "
        "router. It is read again when it changes."
    )
    key: AbsolutePath = Field(
        description="Absolute path of its private key, PEM, without a password."
    )


HeaderName = Annotated[
    str, StringConstraints(to_lower=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")
]


class SessionsConfig(BaseModel, extra="forbid", frozen=True):
    """How requests name the session that they belong to."""

    headers: tuple[HeaderName, ...] = Field(
        default=(),
        max_length=16,
        description="Request headers that name a conversation, in addition to those that agents "
        "send. They go before these, after `x-sluice-session`.",
    )


class RouterConfig(BaseModel, extra="forbid", frozen=True):
    """The HTTP edge."""

    host: str = Field(
        default="127.0.0.1", description="Address that each router listens on, on its node."
    )
    port: int = Field(
        default=8000,
        ge=1,
        le=65_535,
        description="Port that each router listens on; routers of one node share it, and each "
        "application needs its own.",
    )
    tls: TlsConfig | None = Field(
        default=None, description="TLS on this port (1.2 or later), in place of plain HTTP."
    )
    replicas: int = Field(default=1, ge=1, le=64, description="Router replicas.")
    node_labels: dict[LabelName, LabelValue] = Field(
        default_factory=dict,
        max_length=16,
        description="Ray labels, by name, that a node must have for routers; default: any node.",
    )
    api_keys: tuple[KeyEntry, ...] = Field(
        default=(),
        max_length=1_000,
        description="Accepted keys, as `Authorization: Bearer`, `x-api-key` or `api-key`: each a "
        "string, or an object with the key or its digest and the limits of its client. With none "
        "here and in `api_keys_file`, and without `issuers`, every request is accepted.",
    )
    api_keys_file: AbsolutePath | None = Field(
        default=None,
        description="Absolute path of a YAML list of more such keys, on every node with a router. "
        "It is read again when it changes.",
    )
    issuers: dict[str, TokenIssuer] = Field(
        default_factory=dict,
        max_length=MAX_ISSUERS,
        description="Issuers whose tokens (JWTs) are accepted in place of API keys, by a name that "
        "labels metrics and owns their tenants' files and batches.",
    )
    metrics: MetricsConfig = Field(
        default_factory=MetricsConfig, description="Access to the page of metrics."
    )
    admin: AdminConfig = Field(
        default_factory=AdminConfig, description="The admin API and the live page."
    )
    gpu_hour_price: float | None = Field(
        default=None,
        ge=0,
        le=1_000_000,
        description="Price of one GPU for an hour, by which `sluice usage` gives costs; where "
        "engines run without GPUs, of one engine.",
    )
    currency: str = Field(
        default="USD", pattern="^[A-Z]{3}$", description="Its currency, by ISO 4217."
    )
    classes: dict[str, ServiceClass] = Field(
        default_factory=_default_classes,
        min_length=1,
        max_length=16,
        description="Service classes by name (at most 16: they label metrics).",
    )
    default_class: str = Field(
        default="standard", description="Class of a request that names none."
    )
    decision_timeout_s: float = Field(
        default=0.25,
        gt=0,
        le=10,
        description="Timeout of the controller's decision, seconds; then the local fallback "
        "decides.",
    )
    max_body_bytes: int = Field(
        default=4 << 20,
        ge=1 << 10,
        le=1 << 30,
        description="Maximum request body, bytes. All bodies in one router may have 512 MiB, "
        "or twice this if that is more; further ones get 503. One API key may use half.",
    )
    max_in_flight: int = Field(
        default=4096,
        ge=1,
        le=1_000_000,
        description="Maximum requests in flight in one router replica; further ones get 503.",
    )
    cors_origins: tuple[Origin, ...] = Field(
        default=(),
        max_length=100,
        description="Origins whose pages may call the API from a browser, such as "
        "`https://app.example`, or `*` for any. Never with cookies, and never the admin API, the "
        "page or the metrics.",
    )
    max_prompt_tokens: PromptLimit = None
    max_output_tokens: OutputLimit = None
    sessions: SessionsConfig = Field(
        default_factory=SessionsConfig, description="Names of sessions."
    )
    prefix_sharing: Literal["all", "key"] = Field(
        default="all",
        description="Which prompts share KV in the prefix caches: `all`: those of all clients, so "
        "that response times may reveal to one client what another has asked; `key`: only those of "
        "one API key.",
    )
    fetch_media: bool = Field(
        default=False,
        description="Whether engines may fetch images, audio and videos from clients' URLs, from "
        "inside your network: then restrict them with `allowed-media-domains` in "
        "engine.vllm_args. False: media must be `data:` URLs.",
    )
    structured_output: bool = Field(
        default=True,
        description="Whether clients may constrain outputs by schemas, grammars, patterns, choices "
        "or tools that must be called. Engines test each constraint first "
        "(engine.grammar_check_s), but a test is no proof. False: such requests get 403.",
    )
    max_attempts: int = Field(
        default=3,
        ge=1,
        le=10,
        description="Maximum attempts per request, those that resume its stream included.",
    )
    stall_after_s: float = Field(
        default=1.0,
        ge=0.1,
        le=3_600,
        description="Silence of a response after which its replica is probed, seconds. If the "
        "replica hangs or does not answer, and another one can serve, the attempt is abandoned.",
    )
    retry_budget: int = Field(
        default=100,
        ge=0,
        le=1_000_000,
        description="Retries, resumed streams included, that one router replica may make in 60 s, "
        "in addition to one per five requests. About the number of requests that a model replica "
        "serves at once: when it dies, all of these are retried.",
    )
    announce_misses: Literal["comment", "event", "off"] = Field(
        default="comment",
        description="How a stream says that its guarantee is going to be missed: `comment`: an SSE "
        "comment, which clients ignore; `event`: an SSE event `sluice.late`; `off`: not at all.",
    )
    batches: BatchesConfig = Field(
        default_factory=BatchesConfig, description="OpenAI's files and batches."
    )
    picker: PickerConfig = Field(
        default_factory=PickerConfig, description="The endpoint picker for Envoy."
    )

    @property
    def is_open(self) -> bool:
        """Whether the API needs neither a key nor a token."""
        return not (self.api_keys or self.api_keys_file or self.issuers)

    @model_validator(mode="after")
    def _check_keys(self) -> RouterConfig:
        check_entries(self.api_keys, self.classes, "api_keys")
        check_entries(self.metrics.keys, (), "metrics.keys")
        check_bare(self.metrics.keys, "metrics.keys")
        if set(map(digest_of, self.api_keys)) & set(map(digest_of, self.metrics.keys)):
            raise ValueError("a key is in both api_keys and metrics.keys; use different keys")
        return self

    @model_validator(mode="after")
    def _check_issuers(self) -> RouterConfig:
        check_issuers(self.issuers, self.classes)
        return self

    @model_validator(mode="after")
    def _check_admin(self) -> RouterConfig:
        if self.admin.access == "open" and not is_loopback(self.host):
            raise ValueError(
                f"admin.access is open, but host is {self.host!r}: without a key, host must be a "
                "loopback address such as 127.0.0.1"
            )
        if self.admin.access == "open" and self.picker.port is not None:
            raise ValueError(
                "admin.access is open, but clients of an Envoy would reach the admin API by "
                "picker.port: set admin.access to key or off"
            )
        if self.metrics.access == "open" and self.picker.port is not None:
            raise ValueError(
                "metrics.access is open, but clients of an Envoy would reach the metrics by "
                "picker.port: set metrics.access to key"
            )
        others = set(map(digest_of, (*self.api_keys, *self.metrics.keys)))
        if others & set(map(digest_of, self.admin.keys)):
            raise ValueError("a key of admin.keys is also an API or metrics key; use another")
        return self

    @model_validator(mode="after")
    def _check_classes(self) -> RouterConfig:
        if self.default_class not in self.classes:
            known = ", ".join(sorted(self.classes))
            raise ValueError(f"default_class {self.default_class!r} is not one of: {known}")
        bad = [name for name in self.classes if not LABEL.fullmatch(name)]
        if bad:
            raise ValueError(f"class names must match {LABEL.pattern}, got {bad}")
        tiers = [tier for entry in self.classes.values() for tier in entry.service_tiers]
        doubles = {tier for tier in tiers if tiers.count(tier) > 1}
        if doubles:
            raise ValueError(f"service_tiers name more than one class: {sorted(doubles)}")
        return self

    @model_validator(mode="after")
    def _check_batches(self) -> RouterConfig:
        name = self.batches.service_class
        if self.batches.directory is not None and name not in self.classes:
            known = ", ".join(sorted(self.classes))
            raise ValueError(f"batches.service_class {name!r} is not one of: {known}")
        return self
