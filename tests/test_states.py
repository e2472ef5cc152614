"""The table of states: everything it allows happens on both sides, nothing else happens on either."""

from __future__ import annotations

import pytest

from outboard.ipc.errors import ProtocolError, UsageError
from outboard.ipc.messages import MESSAGES
from outboard.ipc.states import ANSWER, ENDED, RING, TABLE, Conversation, Phase, Role, picture
from pair import Conversations

EVENTS = sorted({event for _, event in TABLE} | set(MESSAGES) | {RING, ANSWER, "Nonsense"})
# Whatever the table does not say that `role` may do.
ILLEGAL = [
    (phase, event, role)
    for phase in Phase
    for event in EVENTS
    for role in Role
    if (phase, event) not in TABLE or TABLE[phase, event].by is not role
]


def at(phase: Phase, role: Role) -> Conversation:
    conversation = Conversation(role)
    conversation.phase = phase
    return conversation


each_phase = pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)


@each_phase
def test_a_legal_event_moves_both_sides_alike(phase: Phase) -> None:
    for (at_phase, event), move in TABLE.items():
        if at_phase is phase:
            sides = Conversations()
            sides.host.phase = sides.worker.phase = phase
            sides.push(move.by, event)
            assert sides.phases == (move.to.value, move.to.value), event


def test_the_illegal_cases_are_generated() -> None:
    assert len(ILLEGAL) == 2 * len(Phase) * len(EVENTS) - len(TABLE)


@each_phase
def test_our_own_mistake_is_a_usage_error_and_changes_nothing(phase: Phase) -> None:
    for event, role in [(event, role) for p, event, role in ILLEGAL if p is phase]:
        conversation = at(phase, role)
        with pytest.raises(UsageError, match=f"{event} is not possible in phase {phase.value}"):
            conversation.sent(event)
        assert conversation.phase is phase, event


@each_phase
def test_the_peers_mistake_is_a_protocol_error_and_changes_nothing(phase: Phase) -> None:
    for event, role in [(event, role) for p, event, role in ILLEGAL if p is phase]:
        conversation = at(phase, role.peer)
        with pytest.raises(ProtocolError, match=f"the {role.value} sent {event}"):
            conversation.received(event)
        assert conversation.phase is phase, event


def test_a_good_life_from_hello_to_bye() -> None:
    sides = Conversations()
    life = "Hello Init Progress InitReply Attach Ready Ring Answer Where WhereReply Close Bye"
    for event in life.split():
        by = Role.WORKER if event in ("Hello", "Progress", "Ready", "Answer", "Bye") else Role.HOST
        sides.push(Role.WORKER if event.endswith("Reply") else by, event)
    assert sides.phases == ("CLOSED", "CLOSED")


@each_phase
def test_a_failure_ends_every_phase_but_a_good_end(phase: Phase) -> None:
    conversation = at(phase, Role.HOST)
    conversation.fail()
    assert conversation.phase is (Phase.CLOSED if phase is Phase.CLOSED else Phase.FAILED)


def test_every_phase_can_be_reached() -> None:
    reached = {Phase.SPAWNED}
    for _ in Phase:
        reached |= {move.to for (phase, _), move in TABLE.items() if phase in reached}
    assert reached == set(Phase)


def test_nothing_happens_after_the_end() -> None:
    assert [phase for phase, _ in TABLE if phase in ENDED] == []


def test_every_message_has_a_place_in_the_table() -> None:
    assert {event for _, event in TABLE} == set(MESSAGES) | {RING, ANSWER}


def test_an_answer_under_way_is_still_good_after_close() -> None:
    """Host and worker may speak at the same time: what the worker could say in the phase before CLOSE
    must not be an error in CLOSING."""
    for (phase, event), move in TABLE.items():
        if move.by is Role.WORKER and (phase, "Close") in TABLE:
            assert (Phase.CLOSING, event) in TABLE


def test_the_picture_shows_every_move_between_phases() -> None:
    drawn = picture()
    for (phase, event), move in TABLE.items():
        if phase is not move.to:
            lines = [x for x in drawn.splitlines() if f"{phase.value} --> {move.to.value}:" in x]
            assert len(lines) == 1 and event in lines[0]
