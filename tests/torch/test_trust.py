"""A checkpoint is read only if nobody else could have written it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

import torch
from shoal.torch import trust
from shoal.torch.state import ModelState, StateBox
from shoal.torch.state_files import StateFiles


def _read(path: Path) -> bytes:
    with StateFiles().open(str(path)) as file:
        return file.read()


@pytest.mark.parametrize(
    ("mode", "directory_mode", "why"),
    [
        (0o600, 0o700, None),
        (0o644, 0o755, None),
        (0o666, 0o700, "others may write to it"),
        (0o644, 0o777, "others may write to its directory"),
        (0o644, 0o1777, None),
    ],
    ids=["private", "readable", "a file for all", "a directory for all", "sticky, like /tmp"],
)
def test_modes(tmp_path: Path, mode: int, directory_mode: int, why: str | None) -> None:
    place = tmp_path / "place"
    place.mkdir()
    path = place / "checkpoint.pt"
    path.write_bytes(b"state")
    path.chmod(mode)
    place.chmod(directory_mode)
    if why is None:
        assert _read(path) == b"state"
    else:
        with pytest.raises(PermissionError, match=why):
            _read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to others")
def test_files_and_directories_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "place"
    place.mkdir()
    path = place / "checkpoint.pt"
    path.write_bytes(b"state")
    os.chown(path, 12345, 12345)
    with pytest.raises(PermissionError, match="it belongs to user 12345"):
        _read(path)
    os.chown(path, 0, 0)
    os.chown(place, 12345, 12345)
    with pytest.raises(PermissionError, match="its directory belongs to user 12345"):
        _read(path)
    os.chown(place, 0, 12345)
    place.chmod(0o775)
    with pytest.raises(PermissionError, match="others may write to its directory"):
        _read(path)
    monkeypatch.setattr(trust, "_is_private", lambda gid: gid == 12345)
    assert _read(path) == b"state", "a group of one's own"


def test_tensors_are_read_without_running_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "ran"),))

    path = tmp_path / "checkpoint.pt"
    torch.save({"shoal": 3, "signature": Evil()}, path)
    model = torch.nn.Linear(2, 2)
    state = ModelState([model], [torch.optim.SGD(model.parameters(), 0.1)], StateBox())
    with path.open("rb") as file, pytest.raises((ValueError, pickle.UnpicklingError)):
        state.read(file)
    assert not (tmp_path / "ran").exists()
