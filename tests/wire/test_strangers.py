"""Connections that have not proved who they are."""

from __future__ import annotations

from shoal.wire.strangers import Strangers


def test_a_newcomer_takes_the_place_of_the_oldest_stranger_of_the_busiest_address():
    closed: list[str] = []
    strangers = Strangers(most=3)
    strangers.enter("10.0.0.1", lambda: closed.append("lone"))
    strangers.enter("10.0.0.2", lambda: closed.append("first of many"))
    strangers.enter("10.0.0.2", lambda: closed.append("second of many"))
    strangers.enter("10.0.0.3", lambda: closed.append("newcomer"))
    assert closed == ["first of many"]
    assert len(strangers) == 3


def test_a_connection_that_has_proved_its_identity_is_not_closed_for_others():
    closed: list[str] = []
    strangers = Strangers(most=1)
    place = strangers.enter("10.0.0.1", lambda: closed.append("worker"))
    strangers.leave(place)
    for _ in range(5):
        strangers.enter("10.0.0.1", lambda: closed.append("stranger"))
    assert closed == ["stranger"] * 4
