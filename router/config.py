"""Configuration of the HTTP edge and of the service classes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from router.admin_config import AdminConfig, is_loopback
from router.batches_config import BatchesConfig
from router.tenancy.keys import KeyEntry, KeyFile, check_bare, check_entries, digest_of
from router.tenancy.limits import OutputLimit, PromptLimit
from router.wire import LABEL, MAX_OBJECTIVE_MS, MIN_OBJECTIVE_MS
from scheduling.objective import MAX_PRIORITY, MIN_PRIORITY, SLO
from scheduling.tpot import TPOTAnchor

Origin = Annotated[
    str,
    Field(
        max_length=300,
        pattern=r"^(\*|https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](:[0-9]{1,5})?)$",
    ),
]
"""What a browser sends as ``Origin``: no path, and no slash at the end."""


class ServiceClass(BaseModel):
    """What a request of this class is promised where it states nothing itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_ms: float | None = Field(
        default=None,
        ge=MIN_OBJECTIVE_MS,
        le=MAX_OBJECTIVE_MS,
        description="Time to first token, ms.",
    )
    tpot_ms: float | None = Field(
        default=None,
        ge=MIN_OBJECTIVE_MS,
        le=MAX_OBJECTIVE_MS,
        description="Time per output token after the first, ms.",
    )
    tpot_anchor: TPOTAnchor = Field(
        default=TPOTAnchor.MEAN,
        description="How TPOT is measured, of the class's objective as of a client's own: `mean` "
        "from the first token to the last, `running_max` at every token, `window` over any 10 "
        "tokens.",
    )
    e2e_ms: float | None = Field(
        default=None,
        ge=MIN_OBJECTIVE_MS,
        le=MAX_OBJECTIVE_MS,
        description="Time to the last token, ms.",
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
        description="What becomes of a request whose objective no replica can promise: "
        "`best_effort` serves it on what the promised ones leave, `reject` answers 429, `queue` "
        "lets it wait at the router until one can.",
    )
    queue_limit_s: float = Field(
        default=10.0,
        gt=0,
        le=3_600,
        description="With `queue`: longest wait, seconds; then 429.",
    )
    queue_length: int = Field(
        default=256,
        ge=1,
        le=100_000,
        description="With `queue`: most requests that wait in one router replica; more get 429.",
    )

    def objective(self, name: str) -> SLO:
        """That of a request of this class, whose name is ``name``, which states nothing itself."""
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


class MetricsConfig(BaseModel):
    """Who may read `/metrics`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    access: Literal["key", "open"] = Field(
        default="key",
        description="`key`: one of these keys, where there are API keys; `open`: no key, for a "
        "port that only the monitoring reaches.",
    )
    keys: tuple[KeyEntry, ...] = Field(
        default=(), max_length=100, description="Keys that open `/metrics` and nothing else."
    )
    keys_file: KeyFile | None = Field(
        default=None,
        description="Absolute path of a YAML list of more such keys. It is read again when it "
        "changes.",
    )


class RetryBudgetConfig(BaseModel):
    """Bounds the attempts after first ones, resumed streams included, in each router replica."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ratio: float = Field(
        default=0.2,
        ge=0,
        le=10,
        description="Further attempts for each request of the window. 0 leaves the floor.",
    )
    floor: int = Field(
        default=100,
        ge=0,
        le=1_000_000,
        description="Further attempts in a window that are allowed besides, however few requests "
        "there are. About what one replica serves at once: when it dies, all of that is tried "
        "again.",
    )
    window_s: float = Field(
        default=60.0, gt=0, le=3_600, description="Over which they are counted, seconds."
    )


class RouterConfig(BaseModel):
    """The HTTP edge."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(default="127.0.0.1", description="Address that HTTP listens on.")
    port: int = Field(default=8000, ge=1, le=65_535, description="Port that HTTP listens on.")
    replicas: int = Field(default=1, ge=1, le=64, description="Router replicas.")
    api_keys: tuple[KeyEntry, ...] = Field(
        default=(),
        max_length=1_000,
        description="Accepted `Authorization: Bearer` keys: each a text, or an object with the "
        "key or its digest and the most that who holds it may ask for. With none here and in "
        "`api_keys_file` every request is accepted.",
    )
    api_keys_file: KeyFile | None = Field(
        default=None,
        description="Absolute path of a YAML list of more such keys, on every node with a router. "
        "It is read again when it changes.",
    )
    metrics: MetricsConfig = Field(
        default_factory=MetricsConfig, description="Who may read the page of metrics."
    )
    admin: AdminConfig = Field(
        default_factory=AdminConfig, description="The admin API and the live page."
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
        description="Longest wait for the controller, seconds; then the local fallback decides.",
    )
    max_body_bytes: int = Field(
        default=4 << 20, ge=1 << 10, le=1 << 30, description="Largest request body, bytes."
    )
    max_held_bytes: int = Field(
        default=512 << 20,
        ge=1 << 10,
        le=1 << 40,
        description="Most bytes of request bodies in one router replica at once; more get 503. A "
        "body counts until its request has ended. Those of one API key may take half.",
    )
    max_in_flight: int = Field(
        default=4096,
        ge=1,
        le=1_000_000,
        description="Most requests in one router replica at once; more get 503.",
    )
    refusals_per_s: float = Field(
        default=100.0,
        gt=0,
        le=1e6,
        description="Refusals that leave one router replica in a second: more wait for their turn, "
        "5 s at most, so that clients which come again at once cannot keep it busy.",
    )
    stalled_reader_s: float = Field(
        default=60.0,
        ge=1,
        le=3_600,
        description="After so long a client that takes nothing of its stream is dropped, seconds.",
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
    prefix_sharing: Literal["all", "key"] = Field(
        default="all",
        description="Whose prompts share KV in the prefix caches: `all` clients', so that response "
        "times may tell one what another has asked; `key`: only those of one API key.",
    )
    fetch_media: bool = Field(
        default=False,
        description="Whether engines may fetch images, sounds and videos from addresses that "
        "clients give, from inside your network: then bound them with `allowed-media-domains` in "
        "engine.vllm_args. False: media come as `data:` URLs.",
    )
    structured_output: bool = Field(
        default=True,
        description="Whether clients may constrain outputs by schemas, grammars, patterns, choices "
        "or tools that must be called. Engines try each of them first (engine.grammar_check_s), "
        "but no trial is proof. False: they get 403.",
    )
    max_attempts: int = Field(
        default=3,
        ge=1,
        le=10,
        description="Attempts at a request, those that go on with its stream included.",
    )
    stall_after_s: float = Field(
        default=1.0,
        ge=0.1,
        le=3_600,
        description="Silence of a response after which its replica is asked whether it goes on, "
        "seconds. One that hangs or does not answer is left, where another one can serve.",
    )
    retry_budget: RetryBudgetConfig = Field(
        default_factory=RetryBudgetConfig,
        description="Bounds the attempts after first ones of all requests together.",
    )
    batches: BatchesConfig = Field(
        default_factory=BatchesConfig, description="OpenAI's files and batches."
    )

    @model_validator(mode="after")
    def _check_keys(self) -> RouterConfig:
        check_entries(self.api_keys, self.classes, "api_keys")
        check_entries(self.metrics.keys, (), "metrics.keys")
        check_bare(self.metrics.keys, "metrics.keys")
        if set(map(digest_of, self.api_keys)) & set(map(digest_of, self.metrics.keys)):
            raise ValueError("a key is in api_keys and in metrics.keys: each opens one of them")
        return self

    @model_validator(mode="after")
    def _check_bytes(self) -> RouterConfig:
        least = 2 * self.max_body_bytes
        if self.max_held_bytes < least:
            raise ValueError(
                f"max_held_bytes must be at least twice max_body_bytes, {least}, or the largest "
                f"body of an API key is never taken; got {self.max_held_bytes}"
            )
        return self

    @model_validator(mode="after")
    def _check_admin(self) -> RouterConfig:
        if self.admin.access == "open" and not is_loopback(self.host):
            raise ValueError(
                f"admin.access is open, but host is {self.host!r}: without a key only a loopback "
                "address such as 127.0.0.1 may be listened on"
            )
        others = set(map(digest_of, (*self.api_keys, *self.metrics.keys)))
        if others & set(map(digest_of, self.admin.keys)):
            raise ValueError("a key of admin.keys opens something else, too: each opens one thing")
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
