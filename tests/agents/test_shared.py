"""A directory counts as shared only when each side has read what the other wrote."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path

from shoal.agents.shared import PROBE, SharedProof, Sharing, answer_probe
from shoal.wire import agent_messages as am


def test_a_shared_directory_is_proved_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    proof = SharedProof(tmp_path)
    assert proof.of("a") is None, "nothing is known before it answers"
    assert proof.answered("a", answer_probe(proof.probe())) == Sharing(True)
    assert proof.of("a") == Sharing(True)
    assert [p.name for p in tmp_path.iterdir()] == [PROBE]
    proof.forget("a")
    assert proof.of("a") is None


def test_a_directory_that_is_absent_there(tmp_path: Path) -> None:
    proof = SharedProof(tmp_path)
    answer = answer_probe(am.Probe(str(tmp_path / "elsewhere")))
    found = proof.answered("a", answer)
    assert not found.shares
    assert found.why == f"it cannot read {tmp_path / 'elsewhere'}: no such file or directory"


def test_another_directory_of_the_same_name_is_not_shared(tmp_path: Path) -> None:
    """As on a machine whose disk has a copy of the home: the path exists, and so does an old probe."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    SharedProof(here)
    shutil.copytree(here, there)
    proof = SharedProof(here)
    answer = answer_probe(am.Probe(str(there)))
    assert proof.answered("a", answer) == Sharing(False, f"another directory is at {here}")


def test_a_directory_that_is_read_there_but_written_elsewhere_is_not_shared(tmp_path: Path) -> None:
    """As with an overlay or a snapshot: what the machine reads is ours, and what it writes stays there."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    proof = SharedProof(here)
    shutil.copytree(here, there)
    found = proof.answered("a", answer_probe(am.Probe(str(there))))
    assert found == Sharing(False, f"what it writes to {here} does not appear here")


def test_a_directory_that_is_read_only_there(tmp_path: Path) -> None:
    proof = SharedProof(tmp_path)
    answer = am.Probed(str(tmp_path), why=f"it cannot write to {tmp_path}: read-only file system")
    assert "read-only" in proof.answered("a", answer).why


def test_an_answer_that_invents_the_text_is_not_believed(tmp_path: Path) -> None:
    proof = SharedProof(tmp_path)
    assert not proof.answered("a", am.Probed(str(tmp_path), "0" * 32, "ab")).shares


def test_files_of_agents_that_were_killed_are_removed_at_the_next_start(tmp_path: Path) -> None:
    SharedProof(tmp_path)
    old, new = tmp_path / f"{PROBE}.aa", tmp_path / f"{PROBE}.bb"
    for path in (old, new):
        path.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    SharedProof(tmp_path)
    assert not old.exists()
    assert new.exists(), "its agent may be answering just now"


def test_addresses_that_workers_need_are_tried(tmp_path: Path) -> None:
    proof = SharedProof(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as open_:
        here = f"127.0.0.1:{open_.getsockname()[1]}"
        with socket.create_server(("127.0.0.1", 0)) as gone:
            closed = f"127.0.0.1:{gone.getsockname()[1]}"
        answer = answer_probe(proof.probe((here, closed, "nonsense")))
    assert answer.unreachable.keys() == {closed, "nonsense"}
    assert answer.unreachable[closed] == "connection refused"
    assert proof.answered("a", answer).shares
