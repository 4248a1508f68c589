"""llm-d's rule, which the simulator runs beside ours."""

from sluice.simulation.program_queue import HALF_LIFE_S, ProgramQueue


def test_the_program_that_has_attained_least_sends_next_and_no_more_than_the_limit() -> None:
    queue = ProgramQueue(limit=1)
    for key, program in enumerate((1, 1, 2, 3)):
        queue.join(key, program, 0.0)
    assert queue.next(0.0) == 0
    assert queue.next(0.0) is None, "one is in flight"
    queue.ended(0, 100, 50, 1.0)
    # Programs 2 and 3 have attained nothing and waited for as long.
    assert queue.next(1.0) == 2
    queue.ended(2, 90, 5, 2.0)
    assert queue.next(2.0) == 3
    queue.ended(3, 10, 5, 3.0)
    queue.join(4, 2, 3.0)
    queue.join(5, 3, 3.0)
    # 200, 100 and 20 tokens: the longest wait of the first is worth less than that.
    assert [queue.next(3.0)] == [5]
    queue.ended(99, 1, 1, 3.0)
    assert queue.next(3.0) is None, "one that was not sent has ended"


def test_service_is_forgotten_and_a_request_without_a_program_is_one_of_its_own() -> None:
    queue = ProgramQueue(limit=1)
    queue.join(0, 1, 0.0)
    assert queue.next(0.0) == 0
    queue.ended(0, 1_000, 0, 0.0)
    queue.join(1, 2, 0.0)
    assert queue.next(0.0) == 1
    now_s = 4 * HALF_LIFE_S
    queue.ended(1, 100, 0, now_s)
    for key, program in ((2, 2), (3, 1), (4, 0)):
        queue.join(key, program, now_s)
    assert queue.next(now_s) == 4
    queue.ended(4, 1, 1, now_s)
    assert queue.next(now_s) == 3, "62.5 of its tokens are left"
