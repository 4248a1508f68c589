"""An engine in a child process, on which this process calls functions.

Two vLLM engines in one process would share the global state of vLLM and torch: groups of workers,
threads, the cores that these are pinned to.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_END_LIMIT_S = 30.0
_ENDED = "the engine's process ended"


class EngineProcess:
    """The engine that ``make`` returns, in a child process.

    Args:
        make: makes the engine, in the child. Like everything that is sent, it must be picklable.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make))
        self._process.start()
        other.close()
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(engine, *args)``, in the child process.

        Raises:
            RuntimeError: the function raised, or the process ended.
        """
        try:
            self._pipe.send((function, args))
        except OSError:
            raise RuntimeError(_ENDED) from None
        return self._answer()

    def close(self) -> None:
        """Close the engine, and end the process."""
        self._pipe.close()
        self._process.join(_END_LIMIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _answer(self) -> Any:
        try:
            result, error = self._pipe.recv()
        except EOFError:
            raise RuntimeError(_ENDED) from None
        if error:
            raise RuntimeError(f"in the engine's process:\n{error}")
        return result


def _serve(pipe: Connection, make: Callable[[], Any]) -> None:
    engine: Any = None
    try:
        engine = make()
        pipe.send((None, ""))
        while True:
            function, args = pipe.recv()
            try:
                pipe.send((function(engine, *args), ""))
            except Exception:
                pipe.send((None, traceback.format_exc()))
    except EOFError:  # the parent has closed the pipe
        pass
    except Exception:
        pipe.send((None, traceback.format_exc()))
    finally:
        if engine is not None:
            engine.close()
