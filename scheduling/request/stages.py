"""Stages of a request with objectives of their own (SLOs-Serve §2.1), such as thinking and
answering. TTFT and end-to-end time count from the stage before. A stage that ends has a token: a
model that does not think never ends a reasoning stage."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from sluice.scheduling.request.deadline import paced

MAX_STAGES: Final = 8
"""Most stages of a request."""

MAX_STAGE_TOKENS: Final = 1 << 30


class Stage(NamedTuple):
    """Seconds from its start, None without an objective. ``tokens`` 0: it ends with the reasoning,
    the last one with the request. ``prompt_tokens``: new ones before it, such as a tool result."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    tokens: int = 0
    prompt_tokens: int = 0

    @property
    def times_s(self) -> tuple[float | None, float | None, float | None]:
        """TTFT, TPOT and end-to-end time as stated, seconds."""
        return self.ttft_s, self.tpot_s, self.e2e_s

    def scaled(self, shares: Sequence[float]) -> Stage:
        """With these shares of its TTFT, TPOT and end-to-end time."""
        ttft_s, tpot_s, e2e_s = [
            None if time_s is None else time_s * share
            for time_s, share in zip(self.times_s, shares, strict=True)
        ]
        return self._replace(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)

    def paced(self) -> tuple[float, float]:
        """TTFT and TPOT, infinite for none, that hold its end-to-end time where its length is
        stated."""
        ttft_s = inf if self.ttft_s is None else self.ttft_s
        tpot_s = inf if self.tpot_s is None else self.tpot_s
        if self.e2e_s is None or self.tokens == 0:
            return ttft_s, tpot_s
        return paced(ttft_s, tpot_s, self.e2e_s, self.tokens)

    @property
    def planned_s(self) -> tuple[float | None, float | None, float | None]:
        """The times to work by: a known length makes the end-to-end time a TPOT."""
        ttft_s, tpot_s = [None if time_s == inf else time_s for time_s in self.paced()]
        return ttft_s, tpot_s, None if self.tokens else self.e2e_s


def check_stages(stages: Sequence[Stage]) -> None:
    """Raises ValueError for impossible stages, such as a last one that ends before the request."""
    if len(stages) > MAX_STAGES:
        raise ValueError(f"a request has at most {MAX_STAGES} stages, got {len(stages)}")
    for stage in stages:
        for time_s in stage.times_s:
            if time_s is not None and not 0 < time_s < inf:
                raise ValueError(f"a stage's times must be positive and finite, got {time_s}")
        for tokens in stage[3:]:
            if type(tokens) is not int or not 0 <= tokens <= MAX_STAGE_TOKENS:
                raise ValueError(f"a stage's tokens must be an integer from 0 on, got {tokens!r}")
    if stages and stages[-1].tokens:
        raise ValueError("the last stage ends with the request, so its tokens must be 0")


class StagePosition:
    """The stage of the next token: its ``number``, the ``tokens`` of it so far, and how many are
    ``left`` (None: unknown)."""

    __slots__ = ("_stages", "left", "number", "reasoned", "tokens")

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self.reasoned = False
        self.left: int | None
        self._begin(0)

    def emit(self, tokens: int, reasoned: int = 0) -> list[int]:
        """Count ``tokens``, as ``TokenClock.emit``. Returns how many are of the stage so far, and
        of each that begins with or after them."""
        left = self.left
        if not reasoned and (left is None or tokens < left):
            self.tokens += tokens
            self.left = None if left is None else left - tokens
            return [tokens]
        parts = [0]
        if 0 < reasoned <= tokens:
            self._count(reasoned, parts)
            self.reasoned = True
            if self.left is None and self.number < len(self._stages) - 1:
                # A stage of which nothing has left ends with its first token.
                self.left = max(0, 1 - self.tokens)
            self._end_stage(parts)
            tokens -= reasoned
        self._count(tokens, parts)
        return parts

    def _begin(self, number: int) -> None:
        self.number, self.tokens, self.left = number, 0, None
        if number < len(self._stages) - 1:
            self.left = self._stages[number].tokens or (1 if self.reasoned else None)

    def _count(self, tokens: int, parts: list[int]) -> None:
        while tokens > 0:
            part = tokens if self.left is None else min(tokens, self.left)
            self.tokens += part
            self.left = None if self.left is None else self.left - part
            parts[-1] += part
            tokens -= part
            self._end_stage(parts)

    def _end_stage(self, parts: list[int]) -> None:
        if self.left == 0:
            self._begin(self.number + 1)
            parts.append(0)


class Later(NamedTuple):
    """Of stages to come: tightest TPOT, number, and tokens that enter before the next with any."""

    tpot_s: float = inf
    stages: int = 0
    tokens: int = 0


def later_of(stages: Sequence[Stage], number: int) -> Later:
    """What comes after one of the stages, from 0 on."""
    rest = stages[number + 1 :]
    tokens = next((stage.prompt_tokens for stage in rest if stage.prompt_tokens), 0)
    return Later(min((stage.paced()[1] for stage in rest), default=inf), len(rest), tokens)


def strictest(
    stages: Sequence[Stage], e2e_s: float | None = None
) -> tuple[float | None, float | None, float | None]:
    """TTFT, TPOT and end-to-end time before the request begins: the first TTFT, the tightest TPOT
    (§3.2.1), and all time there is (``e2e_s``: stated for the whole)."""
    paced_s = [stage.paced() for stage in stages]
    ttft_s, tpot_s = paced_s[0][0], min(tpot_s for _, tpot_s in paced_s)
    whole_s = sum(inf if stage.e2e_s is None else stage.e2e_s for stage in stages)
    if e2e_s is not None:
        whole_s = min(whole_s, e2e_s)
    found = [None if time_s == inf else time_s for time_s in (ttft_s, tpot_s, whole_s)]
    return found[0], found[1], found[2]
