"""The vote by itself."""

from __future__ import annotations

from fakes import FakeGroup, FakeSession

import torch
from shoal.torch.vote import Vote, ballot


def others(*ballots: tuple[int, bool]) -> FakeGroup:
    return FakeGroup(*(torch.tensor([ballot(flag, fits)]) for flag, fits in ballots))


def session(group: FakeGroup, flag: int) -> FakeSession:
    size = len(group.others) + 1
    return FakeSession(world_size=size, contributors=tuple(range(size)), vote_group=group, raises=flag)


def test_members_agree_only_if_all_raise_the_same_flag():
    for theirs, agreed in ((7, True), (0, False), (6, False)):
        me = session(others((7, True), (theirs, True)), flag=7)
        assert Vote(me).cast(lambda flag: flag == 7)
        assert me.reported == ([("agree", 7)] if agreed else [])


def test_the_next_window_is_final_if_the_rest_fits_for_all_contributors():
    for mine, theirs, fits in ((True, True, True), (True, False, False), (False, True, False)):
        vote = Vote(session(others((0, theirs)), flag=0))
        vote.cast(lambda _: mine)  # noqa: B023
        assert vote.rest_fits is fits


def test_a_broken_vote_decides_nothing():
    me = session(others((7, True)), flag=7)
    me.works = False
    assert not Vote(me).cast(lambda _: True)
    assert me.reported == []


def test_an_early_vote_is_counted_once_and_a_discarded_one_leaves_fresh_memory():
    group = others((0, True))
    me = session(group, flag=0)
    vote = Vote(me)
    vote.cast_early(group, generation=3)
    assert vote.is_cast_early
    assert vote.early_generation == 3
    assert vote.take_early()()
    assert not vote.is_cast_early
    assert group.calls == 1
    vote.cast_early(group, generation=4)
    vote.discard()
    assert not vote.is_cast_early
    assert vote.early_generation == 0
