"""Which files of a working directory are uploaded, and what is too much."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from shoal.client import workdir
from shoal.client.workdir import WorkdirError, find_entries, packed

MB = 1000**2


def fill(top: Path, **files: str) -> None:
    for name, text in files.items():
        path = top / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(top: Path) -> list[str]:
    return [e.name for e in find_entries(top, MB) if e.kind != "directory"]


IGNORED = {
    "a pattern excludes files everywhere": ({".gitignore": "*.pyc\n"}, ["a.py", "sub/a.pyc"], ["a.py"]),
    "a directory is not entered": ({".gitignore": "data/\n!data/keep\n"}, ["data/keep", "x"], ["x"]),
    "a leading slash means the top": ({".gitignore": "/out\n"}, ["out", "sub/out"], ["sub/out"]),
    ".shoalignore brings back what .gitignore excludes": (
        {".gitignore": "*.bin\n", ".shoalignore": "!small.bin\n"},
        ["big.bin", "small.bin"],
        ["small.bin"],
    ),
    "a file nearer to the entry decides": (
        {".gitignore": "*.txt\n", "sub/.gitignore": "!*.txt\n"},
        ["a.txt", "sub/b.txt"],
        ["sub/b.txt"],
    ),
    ".git stays behind": ({}, [".git/config", "sub/.git", "a"], ["a"]),
    "two stars cross directories": (
        {".shoalignore": "logs/**/*.csv\n"},
        ["logs/a/b/c.csv", "c.csv"],
        ["c.csv"],
    ),
    "comments and empty lines exclude nothing": ({".gitignore": "# a\n\n"}, ["a", "b"], ["a", "b"]),
}


@pytest.mark.parametrize("case", IGNORED)
def test_what_is_excluded(tmp_path: Path, case: str) -> None:
    rules, files, expected = IGNORED[case]
    for name, text in rules.items():
        fill(tmp_path, **{name.replace("/", "__"): text})
    for name in files:
        fill(tmp_path, **{name.replace("/", "__"): "x"})
    found = [n for n in names(tmp_path) if not n.endswith("ignore")]
    assert found == expected


def test_equal_content_has_one_digest_whatever_its_times_and_place(tmp_path: Path) -> None:
    found = set()
    for name in ("one", "other"):
        top = tmp_path / name
        fill(top, train__py="print(1)", sub__data="x" * 1000)
        os.utime(top / "train/py", (1, len(found)))
        with packed(top, MB) as archive:
            found.add(archive.digest)
            assert archive.files == 2
            with tarfile.open(fileobj=archive.archive) as tar:
                assert tar.getnames() == ["sub", "sub/data", "train", "train/py"]
    assert len(found) == 1
    fill(top, sub__data="x" * 999 + "y")
    with packed(top, MB) as archive:
        assert archive.digest not in found


def test_links_modes_and_what_is_no_file(tmp_path: Path) -> None:
    fill(tmp_path, run="#!/bin/sh")
    (tmp_path / "run").chmod(0o700)
    (tmp_path / "data").symlink_to("/datasets/imagenet")
    os.mkfifo(tmp_path / "pipe")
    found = {e.name: e for e in find_entries(tmp_path, MB)}
    assert found["run"].mode == 0o755
    assert found["data"].target == "/datasets/imagenet"
    assert "pipe" not in found


def test_a_directory_of_100_gb_is_refused_at_once_and_the_largest_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workdir, "LOOK_ON_ENTRIES", 50)
    fill(tmp_path, a="x", data__small="x")
    for name, gb in {"data/train.bin": 98, "data/test.bin": 2}.items():
        with open(tmp_path / name, "wb") as file:
            file.truncate(gb * 1000**3)
    for i in range(200):
        fill(tmp_path, **{f"many__{i}": "x"})
    seen: list[str] = []
    walk = workdir._walk
    monkeypatch.setattr(workdir, "_walk", lambda top: (seen.append(e.name) or e for e in walk(top)))
    with pytest.raises(WorkdirError) as refused, packed(tmp_path, 500 * MB):
        pass
    words = str(refused.value)
    assert "has at least 100 GB, and 500 MB is the limit of an upload" in words
    assert "data/train.bin (98 GB), data/test.bin (2.0 GB)" in words
    assert ".shoalignore" in words
    assert "share" in words
    assert len(seen) < 300, "counting ends soon after the limit"


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workdir, "MOST_ENTRIES", 5)
    for i in range(10):
        fill(tmp_path, **{f"f{i}": "x"})
    with pytest.raises(WorkdirError, match="more than 5 files and directories: exclude"):
        find_entries(tmp_path, MB)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WorkdirError, match="is not a directory"):
        find_entries(tmp_path / "none", MB)


def test_a_file_that_grows_while_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, log="x")
    found = find_entries(tmp_path, MB)
    fill(tmp_path, log="xx")
    monkeypatch.setattr(workdir, "find_entries", lambda top, limit: found)
    with pytest.raises(WorkdirError, match="changed while it was packed"), packed(tmp_path, MB):
        pass
