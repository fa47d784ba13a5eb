"""A machine without an engine: its tests are skipped, and in CI they fail."""

from __future__ import annotations

import pytest

from . import absent, slurm_cluster


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail), ("", pytest.skip), (None, pytest.skip)])
@pytest.mark.parametrize("engine", ["ray", "slurm"])
def test_an_engine_that_is_absent_fails_in_ci_only(
    monkeypatch: pytest.MonkeyPatch, engine: str, ci: str | None, outcome: type[pytest.skip]
) -> None:
    monkeypatch.delenv("CI", raising=False)
    if ci is not None:
        monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(absent, "find_spec", lambda _: None)
    monkeypatch.setattr(slurm_cluster, "_find", lambda _: None)
    need = {"ray": absent.need_ray, "slurm": slurm_cluster.need_slurm}[engine]
    with pytest.raises(outcome.Exception, match=f"NO {engine.upper()} TESTS: .*install"):
        need()
