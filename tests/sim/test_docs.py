"""The commands of docs/simulator.md run, and the figures it names are there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from shoal.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
COMMANDS = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.S) for line in block.splitlines()]


def shoal(words):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert not end.value.code


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(command)
    assert program == "shoal"
    shoal(words)
    for word in words:
        assert not word.endswith(".html") or (tmp_path / word).exists()


def test_the_figures_of_the_page_are_those_of_a_run(capsys):
    shoal(["sim", "run", "--sample", "--policy", "fifo", "-o", "json"])
    table = PAGE.partition("| name in JSON")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    figures = json.loads(capsys.readouterr().out)
    assert len(named) > 12
    assert named <= figures.keys()
