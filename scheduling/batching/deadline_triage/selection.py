"""Weighted Moore-Hodgson: which jobs to keep so that the total weight of late jobs is small."""

# numpy's scalars are "Any" to the type checker.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sluice.scheduling.request.kernels import PRIORITY, PROMISED, Floats, Ints, compiled


@compiled
def push(heap: Ints, size: int, worth: Floats, job: int) -> None:
    """Add ``job`` to the first ``size`` entries of ``heap``, least worth on top."""
    place = size
    while place > 0:
        parent = (place - 1) // 2
        if worth[heap[parent]] <= worth[job]:
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = job


@compiled
def pop(heap: Ints, size: int, worth: Floats) -> int:
    """Remove the job of least worth from the first ``size`` entries of ``heap``."""
    top = heap[0]
    last = heap[size - 1]
    place = 0
    child = 1
    while child < size - 1:
        if child + 1 < size - 1 and worth[heap[child + 1]] < worth[heap[child]]:
            child += 1
        if worth[last] <= worth[heap[child]]:
            break
        heap[place] = heap[child]
        place = child
        child = 2 * place + 1
    heap[place] = last
    return top


@compiled
def keep(size: Floats, weight: Floats, capacity: Floats) -> NDArray[np.bool_]:
    """Per job, whether it is kept. For every job, the kept jobs up to it fit its capacity.

    Walks the jobs in order and sums their sizes; while the sum exceeds the capacity at a job, the
    kept job of least weight per size is dropped. A job that does not fit alone is dropped first, so
    that it displaces no other job. With equal weights and capacities that are deadlines this is the
    algorithm of Moore (Management Science 1968), which keeps the most jobs; with weights it is a
    heuristic, as that problem is NP-hard. ``O(n log n)``.

    Args:
        size: ``float64[n]``, size of each job, >= 0.
        weight: ``float64[n]``, weight of each job, > 0.
        capacity: ``float64[n]``, maximum total size of the kept jobs up to each job.
    """
    count = size.shape[0]
    kept = np.zeros(count, np.bool_)
    worth = weight / np.maximum(size, 1e-12)
    heap = np.empty(count, np.int64)
    held = 0
    total = 0.0
    for job in range(count):
        if size[job] > capacity[job]:
            continue
        push(heap, held, worth, job)
        held += 1
        total += size[job]
        while held > 0 and total > capacity[job]:
            total -= size[pop(heap, held, worth)]
            held -= 1
    for place in range(held):
        kept[heap[place]] = True
    return kept


@compiled
def fitting(size: Floats, room: float) -> NDArray[np.bool_]:
    """Per job, whether it is taken if each in turn is taken where it still fits ``room``."""
    taken = np.zeros(size.shape[0], np.bool_)
    for job in range(size.shape[0]):
        if size[job] <= room:
            room -= size[job]
            taken[job] = True
    return taken


@compiled
def before(size: Floats, room: Floats, late: Floats) -> Ints:
    """The earliest position of each late job at which it makes no other job late.

    A job that is inserted before others uses up its size of the spare capacity of each of them.
    Each late job, in turn, is inserted as early as the spare capacity of all jobs behind it allows.
    ``O(late * jobs)``.

    Args:
        size: ``float64[n]``, size of each job, in their order.
        room: ``float64[n]``, maximum total size of the jobs up to each job.
        late: ``float64[m]``, size of each late job.

    Returns:
        ``int64[m]``, the job before which each late job goes; ``n`` where any earlier position
        would make a job late.
    """
    count = size.shape[0]
    places = np.full(late.shape[0], count, np.int64)
    spare = room - np.cumsum(size)
    for job in range(late.shape[0]):
        place = count
        while place > 0 and spare[place - 1] >= late[job]:
            place -= 1
        places[job] = place
        spare[place:] -= late[job]
    return places


@compiled
def sort_out(
    table: Floats, prefills: Ints, work_s: Floats, until_s: Floats, usable: float
) -> tuple[Ints, Ints, Ints]:
    """The prefills to keep, by deadline; the same with the late guaranteed ones, each as far to the
    front as makes no kept one late; and the shed ones: the other late ones, then the ones without a
    deadline. ``O(n log n + late * n)``.

    Args:
        table: the queue.
        prefills: rows, by deadline.
        work_s: per row, the work of its pending tokens.
        until_s: time for prefill until the deadline of each one that has one.
        usable: share of that time to count on, for those that move to the front.
    """
    dated = until_s.shape[0]
    due, undated = prefills[:dated], prefills[dated:]
    weight, owed = np.empty(dated), np.empty(dated, np.bool_)
    for place, row in enumerate(due):
        weight[place], owed[place] = table[row, PRIORITY], table[row, PROMISED] > 0.0
    kept = keep(work_s[due], weight, until_s)
    on_time, late, promised = due[kept], due[~kept], owed[~kept]
    shed = np.concatenate((late[~promised], undated))
    late = late[promised]
    if not late.shape[0]:
        return on_time, on_time, shed
    places = before(work_s[on_time], usable * until_s[kept], work_s[late])
    ordered = np.empty(on_time.shape[0] + late.shape[0], np.int64)
    count = 0
    for place in range(on_time.shape[0] + 1):
        for job in range(late.shape[0]):
            if places[job] == place:
                ordered[count] = late[job]
                count += 1
        if place < on_time.shape[0]:
            ordered[count] = on_time[place]
            count += 1
    return on_time, ordered, shed
