"""What ranks agree to do in a pass, from what one pass did."""

import pytest

from zero_core.sharding.program import Event, Kind, buckets, compile_program, digest


def need(*units: int) -> list[Event]:
    return [Event(Kind.NEED, unit) for unit in units]


def done(*units: int) -> list[Event]:
    return [Event(Kind.DONE, unit) for unit in units]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(0, [[0], [1], [2], [3]]), (5, [[0, 1], [2, 3]]), (4, [[0], [1, 2], [3]]), (99, [[0, 1, 2, 3]])],
)
def test_neighbours_are_bucketed_up_to_a_limit(limit: int, expected: list[list[int]]) -> None:
    assert buckets([0, 1, 2, 3], [3, 2, 2, 3], limit) == expected


def gathers(recorded: list[Event], bucket: int, prefetch: int) -> dict[int, tuple[int, ...]]:
    program = compile_program(
        recorded, [10] * 5, [], gather_bucket=bucket, prefetch=prefetch, reduce_bucket=0
    )
    return {step.event.index: step.gathers for step in program.steps if step.event.kind is Kind.NEED}


def test_without_prefetch_a_unit_is_gathered_when_it_is_needed() -> None:
    assert gathers(need(0, 1, 2), 0, 0) == {0: (0,), 1: (1,), 2: (2,)}


def test_the_next_unit_at_least_is_prefetched_however_large_it_is() -> None:
    assert gathers(need(0, 1, 2, 3), 0, 1) == {0: (0, 1), 1: (2,), 2: (3,), 3: ()}


def test_prefetch_reaches_as_many_elements_ahead_as_it_says() -> None:
    assert gathers(need(0, 1, 2, 3, 4), 0, 20) == {0: (0, 1, 2), 1: (3,), 2: (4,), 3: (), 4: ()}


def test_a_bucket_is_gathered_at_its_first_need() -> None:
    assert gathers(need(0, 1, 2, 3), 20, 0) == {0: (0, 1), 1: (), 2: (2, 3), 3: ()}


def test_every_unit_is_gathered_once_and_no_later_than_its_need() -> None:
    order = [3, 0, 4, 1, 2]
    for bucket in (0, 10, 25, 99):
        for prefetch in (0, 5, 15, 40):
            seen: list[int] = []
            for step in compile_program(
                need(*order), [10] * 5, [], gather_bucket=bucket, prefetch=prefetch, reduce_bucket=0
            ).steps:
                seen += step.gathers
                assert step.event.index in seen
            assert sorted(seen) == [0, 1, 2, 3, 4]


def test_a_unit_that_is_needed_again_is_counted_and_gathered_once() -> None:
    program = compile_program(need(0, 1, 0), [10] * 2, [], gather_bucket=0, prefetch=0, reduce_bucket=0)
    assert program.needs == [2, 1]
    assert [step.event.index for step in program.steps] == [0, 1]


def test_reductions_start_when_the_last_unit_of_their_bucket_is_done() -> None:
    recorded = [*need(2), *done(2), *need(1), *done(1), *need(0), *done(0)]
    program = compile_program(recorded, [10] * 3, [10] * 3, gather_bucket=0, prefetch=0, reduce_bucket=20)
    assert [step.reductions for step in program.steps] == [(), (), (), (2, 1), (), (0,)]


def test_the_digest_tells_sequences_apart() -> None:
    sequences = [need(0, 1), need(1, 0), done(0, 1), need(0), [], [*need(0), *done(1)]]
    assert len({digest(events) for events in sequences}) == len(sequences)
    assert digest(need(0, 1)) == digest(need(0, 1))
