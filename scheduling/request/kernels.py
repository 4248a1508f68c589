"""Compiled loops over a queue, ``float64[requests, FIELDS]``, in which counts below 2**53 are
exact."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import gc
import logging
import operator
import re
import sys
import threading
from collections.abc import Callable
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.request import deadline

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The fields of a row. Times are seconds on the caller's clock.
ARRIVAL = 0
TTFT = 1  # objectives: infinite where none is stated
TPOT = 2
E2E = 3
PRIORITY = 4
PROMPT = 5  # tokens
COMPUTED = 6
PENDING = 7
EMITTED = 8
KV_BLOCKS = 9
RUNNING = 10  # 1 or 0
EXPECTED = 11  # predicted output tokens in all; nan where nothing is known
BEST_EFFORT = 12  # 1 or 0
DRAFTED = 13  # tokens that a decode's next step could check beside its one
ACCEPTANCE = 14  # probability that one of them is accepted; nan where nothing is known
FIRST_TOKEN = 15  # when it left; nan before
LAST_TOKEN = 16
TENANT = 17  # a number that names it; only whether two are equal counts
WEIGHT = 18  # of the tenant's share
PROMISED = 19  # 1 where the objective was guaranteed, else 0
PROGRAM = 20  # a number that names what it counts for, such as a session; 0: nothing
LEAST = 21  # tokens that its output surely has, where its TPOT is a mean over them; else 0
FIELDS = 22

LIVE = np.dtype(
    [
        (name, "<f8")
        for name in (
            "arrival_s",
            "ttft_s",
            "tpot_s",
            "e2e_s",
            "priority",
            "prompt_tokens",
            "computed_tokens",
            "pending_tokens",
            "emitted_tokens",
            "kv_blocks",
            "running",
            "expected_tokens",
            "best_effort",
            "drafted_tokens",
            "acceptance",
            "first_token_s",
            "last_token_s",
            "tenant",
            "weight",
            "promised",
            "program",
            "least_tokens",
        )
    ]
)
"""A row of a queue with its columns by name, in their order: ``table.view(LIVE)``."""

# A latency model's coefficients, see :class:`sluice.scheduling.latency.model.LatencyModel`.
FIXED = 0
PREFILL_TOKENS = 1
PREFILL_SQUARE = 2
PREFILL_CROSS = 3
PREFILL_CONTEXT = 4
PREFILL_SEQUENCE = 5
DECODE_SEQUENCE = 6
DECODE_CONTEXT = 7
COEFFICIENTS = 8

logger = logging.getLogger(__name__)

_IMPORT = re.compile(r"^from (sluice[\w.]*) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)


def digest_of(name: str) -> str:
    """Digest of the source of a module and of all that it imports at its top from Sluice, directly
    or not; its imports have run. ``O(source)``, once per module."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        own = waiting.pop()
        if own not in found:
            found.add(own)
            waiting += _read(own)[1]
    together = blake2b()
    for own in sorted(found):
        together.update(_read(own)[0])
    return together.hexdigest()


@cache
def _read(name: str) -> tuple[bytes, tuple[str, ...]]:
    """The digest of a module's source, and the modules that it imports."""
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None:
        return b"", ()
    source = Path(path).read_bytes()
    names = []
    for package, listed, line in _IMPORT.findall(source.decode()):
        names.append(package)
        # What is imported may itself be a module.
        parts = [f"{package}.{each}" for each in re.findall(r"\w+", listed or line)]
        names += [each for each in parts if each in sys.modules]
    return blake2b(name.encode() + source).digest(), tuple(names)


F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile ``function`` with numba at its first call, and keep the machine code on disk
    (``NUMBA_CACHE_DIR``, beside the source, or the user's cache) until a module changes that its
    own imports; numba alone would look at its own file only. Numbers are converted to their
    annotated types, so that an integer compiles nothing again; that costs some 50 us."""
    if _loaded.is_set():
        return cast(F, _compiler(function))
    _packages.add(function.__module__.partition(".")[0])
    return cast(F, _Deferred(function))


# Most processes read configurations and compile nothing: they need no numba, which takes 40 MiB and
# half a second. The first call of a compiled function loads it.
_loaded = threading.Event()
_loading = threading.Lock()
_packages: set[str] = set()


class _Deferred:
    """A compiled function until numba is loaded."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @cached_property
    def made(self) -> Any:
        """numba's function."""
        return _compiler(self._function)

    def __call__(self, *args: Any) -> Any:
        load_numba()
        return self.made(*args)


def load_numba() -> None:
    """Put numba's functions in the place of deferred ones, in all modules of packages that have
    some. Not needed before a call, which does it."""
    with _loading:
        if _loaded.is_set():
            return
        _loaded.set()
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in _packages:
                for key, value in list(vars(module).items()):
                    if isinstance(value, _Deferred):
                        setattr(module, key, value.made)


def _compiler(function: Callable[..., Any]) -> Any:
    """numba's form of ``function``."""
    from numba import config, njit

    wanted = config.CACHE_DIR or str(Path(function.__code__.co_filename).parent)
    try:
        made = njit(cache=True, nogil=True, no_cfunc_wrapper=True)(function)
    except RuntimeError:
        _warn_not_kept(wanted, "it and the user's cache directory are not writable")
        made = njit(nogil=True, no_cfunc_wrapper=True)(function)
    else:
        made._cache._cache_file._source_stamp = digest_of(function.__module__)
        if config.CACHE_DIR and not made._cache.cache_path.startswith(wanted):
            _warn_not_kept(wanted, f"it is not writable; {made._cache.cache_path} is used")
        save = made._cache.save_overload

        def save_or_warn(*args: Any) -> None:
            try:
                save(*args)
            except OSError as error:
                _warn_not_kept(made._cache.cache_path, str(error.strerror))

        made._cache.save_overload = save_or_warn
    compile_for = made._compile_for_args

    def compile_as_annotated(*args: Any) -> Any:
        hints = (_hints(function).get(name) for name in function.__code__.co_varnames)
        collects = gc.isenabled()
        gc.disable()  # collections take a tenth of the time, and find nothing
        try:
            return compile_for(*map(_annotated, args, hints))
        finally:
            if collects:
                gc.enable()

    # numba calls it with arguments of types that it has no machine code for, and then the machine
    # code that it returns, which converts the arguments.
    made._compile_for_args = compile_as_annotated
    return made


@cache
def _warn_not_kept(path: str, why: str) -> None:
    logger.warning(
        "compiled loops cannot be kept in %s: %s. Each process compiles what is not kept when it "
        "starts, for up to a minute of a core; set NUMBA_CACHE_DIR to a writable folder",
        path,
        why,
    )


_hints = cache(get_type_hints)
_NUMBERS: dict[Any, Callable[[Any], Any]] = {float: float, int: operator.index, bool: bool}


def _annotated(value: Any, hint: Any) -> Any:
    """``value`` with each number of its annotated type. Raises TypeError if it is not one."""
    if isinstance(value, tuple):
        hints = _hints(type(value)).values() or get_args(hint)
        made = tuple(map(_annotated, value, hints))
        return type(value)(*made) if hasattr(value, "_fields") else made
    return _NUMBERS[hint](value) if hint in (float, int, bool) else value


@compiled
def copy_row(row: Floats, source: Floats) -> None:
    """``row[:] = source``. For that numba also compiles the text of an error about other shapes,
    which takes two seconds."""
    for column in range(row.shape[0]):
        row[column] = source[column]


@compiled
def work_s(coefficients: Floats, new_tokens: float, computed_tokens: float) -> float:
    """Marginal seconds of ``new_tokens`` on ``computed_tokens`` by one piece."""
    if new_tokens == 1.0:
        return coefficients[DECODE_SEQUENCE] + coefficients[DECODE_CONTEXT] * computed_tokens
    return (
        coefficients[PREFILL_SEQUENCE]
        + coefficients[PREFILL_CONTEXT] * computed_tokens
        + new_tokens
        * (
            coefficients[PREFILL_TOKENS]
            + coefficients[PREFILL_SQUARE] * new_tokens
            + coefficients[PREFILL_CROSS] * computed_tokens
        )
    )


@compiled
def most_work_s(pieces: Floats, new_tokens: float, computed_tokens: float) -> float:
    """The same by the costliest piece of a model, ``pieces`` being ``float64[n, COEFFICIENTS]``."""
    most = work_s(pieces[0], new_tokens, computed_tokens)
    for piece in range(1, pieces.shape[0]):
        most = max(most, work_s(pieces[piece], new_tokens, computed_tokens))
    return most


@compiled
def pending_work_s(table: Floats, pieces: Floats) -> Floats:
    """Per row, the marginal time of its pending tokens. ``O(requests)``."""
    work = np.empty(table.shape[0])
    for row in range(table.shape[0]):
        work[row] = most_work_s(pieces, table[row, PENDING], table[row, COMPUTED])
    return work


next_due_s = compiled(deadline.next_due_s)
paced = compiled(deadline.paced)
needs_prefill = compiled(deadline.needs_prefill)


@compiled
def is_prefill(table: Floats) -> NDArray[np.bool_]:
    """Per row, whether its next token needs more than one decode step's work."""
    found = np.empty(table.shape[0], np.bool_)
    for row in range(table.shape[0]):
        found[row] = needs_prefill(table[row, EMITTED], table[row, PENDING])
    return found


@compiled
def deadline_s(row: Floats, anchor: int) -> float:
    """Deadline of the next token of one row."""
    return next_due_s(
        row[EMITTED],
        row[ARRIVAL],
        row[TTFT],
        row[TPOT],
        row[E2E],
        row[FIRST_TOKEN],
        row[LAST_TOKEN],
        anchor,
    )


@compiled
def deadlines_s(table: Floats, anchor: int) -> Floats:
    """Per row, the deadline of its next token; infinite where none is stated. ``O(requests)``."""
    due = np.empty(table.shape[0])
    for row in range(table.shape[0]):
        due[row] = deadline_s(table[row], anchor)
    return due


def by_deadline(rows: Ints, due_s: Floats) -> Ints:
    """``rows`` by deadline ascending, ties as they were. ``O(n log n)``."""
    ordered: Ints = rows[np.argsort(due_s[rows], kind="stable")]
    return ordered
