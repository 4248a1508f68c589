"""Questions that wait for others for a short time, so that they are decided together.

Which requests get the guarantees of a burst depends on all of them
(:mod:`sluice.scheduling.placement.together`), and a burst comes from several routers, in several
messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

from sluice.controller.messages import RouteQuery, RouteReply
from sluice.controller.transport.frames import Frames
from sluice.controller.transport.wire_format import Refused, Routed, encode
from sluice.scheduling.placement.together import MOST_TOGETHER

_log = logging.getLogger(__name__)

Decide = Callable[[list[RouteQuery | None]], RouteReply]


_Answer = Routed | Refused | None
"""``None``: the decision failed."""


class _Message(NamedTuple):
    """Queries that came in one message, on a connection or by an actor call, which waits for a
    future; ``due_s``: when its sender stops waiting for the answer."""

    sender: Frames | asyncio.Future[_Answer]
    number: int
    queries: list[RouteQuery | None]
    heard_s: float
    due_s: float

    def aged(self, now_s: float) -> _Message:
        """The same with the age of each request now."""
        held_s = now_s - self.heard_s
        queries = [q and q._replace(waited_s=q.waited_s + held_s) for q in self.queries]
        return self._replace(queries=queries)

    @property
    def abandoned(self) -> bool:
        """Whether its connection has ended, or its call."""
        sender = self.sender
        return sender.done() if isinstance(sender, asyncio.Future) else sender.closed

    def answer(self, answer: _Answer) -> None:
        """Send the answer; a connection ends where the decision failed."""
        if isinstance(self.sender, asyncio.Future):
            self.sender.set_result(answer)
        elif answer is None:
            self.sender.abort()
        else:
            self.sender.send(encode(answer))


class Window:
    """Decides on the queries of all messages that arrive within a time of the first one, or as soon
    as there are :data:`~sluice.scheduling.placement.together.MOST_TOGETHER` queries.

    Each message gets one answer, and the answers of a connection come in the order of its messages.
    No decision is made for a connection that has ended, or for a sender that no longer waits. Where
    the decisions on several messages together fail, each message is decided by itself. Actor calls
    (:meth:`route`) wait as messages do: a fresh router's first questions are such.

    Args:
        route: decides on queries, in order; ``None``: a malformed one.
        clock: monotonic seconds.
        window_s: how long the first message waits, seconds; 0: none does.
    """

    def __init__(self, route: Decide, clock: Callable[[], float], window_s: float) -> None:
        self._route = route
        self._clock = clock
        self._window_s = window_s
        self._waiting: list[_Message] = []
        self._timer: asyncio.TimerHandle | None = None

    def ask(
        self,
        sender: Frames | asyncio.Future[_Answer],
        number: int,
        queries: list[RouteQuery | None],
        due_s: float,
    ) -> None:
        """Take a message, which arrives now."""
        self._waiting.append(_Message(sender, number, queries, self._clock(), due_s))
        if self._window_s <= 0.0 or sum(len(m.queries) for m in self._waiting) >= MOST_TOGETHER:
            self.close()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._window_s, self.close)

    async def route(self, queries: list[RouteQuery | None]) -> RouteReply:
        """The decisions on the queries of an actor call, which arrives now.

        Raises:
            ValueError: they are refused.
            RuntimeError: decisions of a window failed, and it was logged.
        """
        if self._window_s <= 0.0:
            return self._route(queries)
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self.ask(answer, 0, queries, inf)
        found = await answer
        if isinstance(found, Routed):
            return found.reply
        raise RuntimeError("a decision failed") if found is None else ValueError(found.why)

    def close_for(self, connection: Frames) -> None:
        """Decide now if a message of ``connection`` waits."""
        if any(message.sender is connection for message in self._waiting):
            self.close()

    def close(self) -> None:
        """Decide on all queries that wait, and answer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        now_s = self._clock()
        messages = [message for message in waiting if not message.abandoned]
        answers = iter(self._answers([m for m in messages if now_s <= m.due_s], now_s))
        for message in messages:
            late = now_s > message.due_s
            message.answer(Refused(message.number, None) if late else next(answers))

    def _answers(self, messages: Sequence[_Message], now_s: float) -> list[_Answer]:
        """The answer to each message."""
        if self._window_s > 0.0:
            messages = [message.aged(now_s) for message in messages]
        if len(messages) < 2:
            return [self._alone(message) for message in messages]
        try:
            reply = self._route([query for message in messages for query in message.queries])
        except Exception:
            _log.exception("deciding %d messages together failed; deciding each", len(messages))
            return [self._alone(message) for message in messages]
        rest = iter(reply.decisions)
        return [
            Routed(m.number, reply._replace(decisions=tuple(islice(rest, len(m.queries)))))
            for m in messages
        ]

    def _alone(self, message: _Message) -> _Answer:
        try:
            return Routed(message.number, self._route(message.queries))
        except ValueError as error:
            return Refused(message.number, str(error))
        except Exception:
            _log.exception("a decision failed")
            return None
