"""The GPU type of a cluster that nobody described: one on which the profiles' models run at most sizes."""

from __future__ import annotations

import pytest

from shoal.sim.inputs import read_profiles
from shoal.sim.inputs.model_pool import common_type

HEADER = "model,gpus,seconds_per_iteration,gpu_type\n"
CASES = {
    "no type is told": ("a,1,1,\n", "gpu"),
    "every model has a speed on any type": ("a,1,1,\na,8,1,v100\nb,1,1,\n", "gpu"),
    "one type for all": ("a,1,1,v100\nb,1,1,v100\n", "v100"),
    "the first of equals": ("a,1,1,p100\na,1,1,v100\nb,1,1,v100\nb,1,1,p100\n", "p100"),
    "the one with the larger shares": (
        "a,1,1,k80\na,1,1,v100\na,4,0.5,v100\nb,1,1,k80\nb,1,1,v100\n",
        "v100",
    ),
    "a type that one model lacks is none": ("a,1,1,k80\na,1,1,v100\na,8,0.5,v100\nb,1,1,k80\n", "k80"),
    "a type that only a later model names": ("a,1,1,\nb,1,1,v100\n", "v100"),
    "no type that all know": ("a,1,1,k80\nb,1,1,v100\n", "gpu"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_type_is_one_that_all_models_run_on_at_most_sizes(tmp_path, name):
    rows, expected = CASES[name]
    path = tmp_path / "profiles.csv"
    path.write_text(HEADER + rows)
    assert common_type(read_profiles(path)) == expected
