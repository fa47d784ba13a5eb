"""Texts about policies: names in errors, and equal tables in the docs and in `shoal policy ls`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.core.errors import ShoalError
from shoal.policies.registry import BUILT_IN, make_policy, policy_class

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()


@pytest.mark.parametrize("policy", ["tiresias-l", "tiresias-g"])
@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("thresholds_gpu_s", "5,3", "option thresholds_gpu_s=5,3 of policy '{}' must be ascending numbers"),
        ("thresholds_gpu_s", "-1,3", "option thresholds_gpu_s=-1,3 of policy '{}' must be above 0"),
        ("service", "none", "option service='none' of policy '{}' must be since-start or attained"),
        ("promote", "-2", "option promote=-2 of policy '{}' must be 0 or more"),
    ],
    ids=["falling thresholds", "a threshold below 0", "an unknown service", "a promotion below 0"],
)
def test_a_wrong_option_of_tiresias_names_the_policy_as_it_was_typed(policy, option, value, told):
    with pytest.raises(ShoalError, match=f"^{re.escape(told.format(policy))}$"):
        make_policy(policy, {option: value})


def test_the_table_of_the_docs_says_what_the_command_says():
    rows = [
        [cell.strip() for cell in line.split("|")[1:4]]
        for line in PAGE.splitlines()
        if line.startswith("| `")
    ]
    words = {True: "yes", False: "no"}
    classes = {name: policy_class(name) for name in BUILT_IN}
    assert rows == [
        [f"`{name}`", words[cls.elastic], words[cls.needs_lengths]] for name, cls in classes.items()
    ]
