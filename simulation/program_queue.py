"""llm-d's fairness of programs: a queue in the router, before replicas that serve in order.

It is the strategy ``las`` of the plug-in ``program-aware-fairness`` (llm-d/llm-d-router, pull
request 1534 and the plug-in's README), behind a saturation detector that counts what is in flight.
While that is below a limit, the program with the best score sends its next request: 0.8 times how
much less service it has attained than the one with most, and 0.2 times how long that request has
waited, each over its range in the programs that wait. Service is prompt tokens and twice the output
tokens, is known when a request ends, and is halved in 60 s."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from sluice.scheduling.tenancy.attained import ProgramTokens

HALF_LIFE_S = 60.0
OUTPUT_WEIGHT = 2.0
SERVICE_WEIGHT = 0.8
WAIT_WEIGHT = 0.2


class ProgramQueue:
    """The requests that wait, by program; ``limit``: most in flight. Each request without a program
    is one of its own."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Programs of what is in flight, by request.
        self._sent: dict[int, int] = {}
        self._waiting: dict[int, deque[tuple[int, float]]] = {}
        self._attained = ProgramTokens(half_life_s=HALF_LIFE_S)

    def join(self, key: int, program: int, now_s: float) -> None:
        """A request arrives; ``key`` >= 0."""
        self._waiting.setdefault(program or -1 - key, deque()).append((key, now_s))

    def next(self, now_s: float) -> int | None:
        """The request to send now, if one waits and another may be in flight. ``O(programs)``."""
        if len(self._sent) >= self._limit or not self._waiting:
            return None
        waiting = list(self._waiting)
        served = _normalized(-self._attained.of(program, now_s) for program in waiting)
        waits = _normalized(now_s - self._waiting[program][0][1] for program in waiting)
        scores = [
            SERVICE_WEIGHT * service + WAIT_WEIGHT * wait
            for service, wait in zip(served, waits, strict=True)
        ]
        program = waiting[scores.index(max(scores))]
        queue = self._waiting[program]
        key, _ = queue.popleft()
        if not queue:
            del self._waiting[program]
        self._sent[key] = program
        return key

    def ended(self, key: int, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        """A request has ended. One that was not sent is ignored."""
        program = self._sent.pop(key, None)
        if program is not None:
            tokens = prompt_tokens + OUTPUT_WEIGHT * output_tokens
            self._attained.add(program, tokens, now_s)


def _normalized(values: Iterable[float]) -> list[float]:
    """``values`` over their range; a half each if they are equal."""
    found = list(values)
    least, span = min(found), max(found) - min(found)
    return [(value - least) / span if span else 0.5 for value in found]
