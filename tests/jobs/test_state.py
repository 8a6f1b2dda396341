"""The state table, exhaustively."""

from itertools import product

import pytest

from jobs.state import (
    LIVE,
    PUBLIC,
    RETRYABLE,
    TERMINAL,
    TRANSITIONS,
    UNCLAIMED,
    IllegalTransition,
    Reason,
    State,
    check_transition,
)

DESIGN = """
validating -> queued failed cancelled
queued     -> starting paused cancelled
starting   -> running retry_wait failed cancelling
running    -> succeeded failed pausing cancelling retry_wait
pausing    -> paused succeeded cancelling retry_wait
cancelling -> cancelled
paused     -> queued cancelled
retry_wait -> queued paused failed cancelled
succeeded  ->
failed     ->
cancelled  ->
"""


def designed() -> dict[str, set[str]]:
    lines = [line.split("->") for line in DESIGN.strip().splitlines()]
    return {state.strip(): set(following.split()) for state, following in lines}


@pytest.mark.parametrize(("current", "following"), list(product(State, State)))
def test_a_transition_is_allowed_exactly_where_the_design_has_it(current: State, following: State) -> None:
    if following.value in designed()[current.value]:
        check_transition(current, following)
    else:
        with pytest.raises(IllegalTransition, match=f"{current} -> {following}"):
            check_transition(current, following)


def test_every_state_is_of_one_kind_and_has_a_public_name() -> None:
    assert set(TRANSITIONS) == set(PUBLIC) == set(State)
    assert set(State) == TERMINAL | LIVE | UNCLAIMED
    assert not TERMINAL & LIVE
    assert not UNCLAIMED & (TERMINAL | LIVE)
    assert {State.SUCCEEDED, State.FAILED, State.CANCELLED} == TERMINAL


def test_every_state_can_end() -> None:
    ends = set(TERMINAL)
    while reached := {s for s in State if s not in ends and TRANSITIONS[s] & ends}:
        ends |= reached
    assert ends == set(State)


def test_what_would_fail_again_is_not_retried() -> None:
    assert {Reason.LOST, Reason.HUNG, Reason.CRASHED} == RETRYABLE
