"""The page is one file that needs nothing else, and no name in a trace can do harm."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from shoal.sim.report.packed_columns import pack_numbers, pack_words
from shoal.sim.report.page import assemble, render, script_hash

from .conftest import SETUP, shares_by_job, unpacked

HARM = "</script><img src=x onerror=alert(1)><!--"


class Elements(HTMLParser):
    """All start tags with their attributes, and the text of each script."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self.inside = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def page(series):
    return render(series)


def data_of(page):
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.S)[1])


def test_the_page_asks_nothing_of_the_network(page):
    found = Elements(page)
    for tag, attrs in found.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img"), tag
        assert "src" not in attrs, (tag, attrs)
        assert attrs.get("href", "#").startswith("#")
    assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", page)
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts)\b", page)
    policy = next(a["content"] for _, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


def test_the_security_policy_admits_the_pages_own_script_and_no_other(page):
    found = Elements(page)
    policy = next(a["content"] for _, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert len(found.scripts) == 2  # the data, which is not run, and the script
    assert f"script-src '{script_hash(found.scripts[1])}'" in policy
    assert not any(name.startswith("on") for _, attrs in found.tags for name in attrs)


def test_the_licence_of_the_chart_library_travels_with_the_page(page):
    assert "Copyright (c) 2022 Leon Sorokin" in page
    assert "Permission is hereby granted" in page


def test_harmful_names_stay_text(series):
    evil = copy.deepcopy(series)
    for one in evil:
        one["label"] = one["policy"] = HARM
        one["jobs"]["name"][0] = one["jobs"]["user"][0] = one["jobs"]["model"][0] = HARM
        for job in one["watched"]:
            job["job"] = "\u2028" + HARM
        one["users"]["names"][0] = HARM
        one["cluster"]["types"] = {HARM: 64}
    page = render(evil)
    found = Elements(page)
    assert "img" not in {tag for tag, _ in found.tags}
    assert len(found.scripts) == 2
    assert HARM not in page
    assert "\u2028" not in page
    data = data_of(page)
    assert unpacked(data["jobs"]["name"])[0] == HARM  # and is still there to be read
    assert data["runs"][0]["label"] == HARM


def test_scripts_never_make_markup_of_data():
    from shoal.sim.report.page import ASSETS, SCRIPTS

    for name in SCRIPTS[1:]:
        text = (ASSETS / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), name


def test_all_runs_are_on_one_grid_of_time(series):
    runs = copy.deepcopy(series)
    one = runs[0]["over_time"]  # as if this run had been longer and its buckets wider by four
    from shoal.sim.report.page import on_grid

    width = one["width_s"] * 4
    runs[0]["over_time"] = {"width_s": width, **on_grid(one, width)}
    data = assemble(runs)
    assert data["width_s"] == width
    for run, before in zip(data["runs"][1:], series[1:]):
        assert len(run["over_time"]["used"]["mean"]) == -(-len(before["over_time"]["used"]["mean"]) // 4)
        assert max(run["over_time"]["used"]["high"]) == max(before["over_time"]["used"]["high"])
        assert sum(run["over_time"]["changes"]) == sum(before["over_time"]["changes"])


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("f4", [0.5, -1.25, float("inf"), 2.0**120]),
        ("u4", [0, 1, 255, 256, 65_536, 2**32 - 1]),
        ("u4", []),
    ],
)
def test_numbers_come_back_as_they_were(kind, values):
    assert unpacked(pack_numbers(np.array(values), kind)) == values


def test_what_is_not_known_stays_so():
    assert np.isnan(unpacked(pack_numbers(np.array([np.nan]), "f4"))).all()


def test_words_come_back_as_they_were_whatever_is_in_them():
    words = ["a", "", "b", "a", HARM, "\u2028 é 日本", "a\nb"]
    assert unpacked(pack_words(words)) == words
    assert unpacked(pack_words([])) == []


def test_the_page_has_every_change_of_every_job_in_every_run(page, series, results):
    data = data_of(page)
    names = unpacked(data["jobs"]["name"])
    for run, result in zip(data["runs"], results.values()):
        record = result.record
        assert names == [job.name for job in record.jobs]
        columns = {name: unpacked(c) for name, c in run["jobs"].items() if name != "unit_s"}
        log = shares_by_job(record)
        begin = 0
        for j, points in enumerate(columns["points"]):
            mine = slice(begin, begin := begin + points)
            at_s = np.cumsum(columns["at"][mine]) * run["jobs"]["unit_s"]
            np.testing.assert_allclose(at_s, [at for at, _ in log[j]], atol=0.0501)
            assert columns["gpus"][mine] == [gpus for _, gpus in log[j]]
        assert begin == len(record.change_s)
        np.testing.assert_allclose(
            columns["jct_s"], record.finish_s - [j.submit_s for j in record.jobs], rtol=1e-6
        )


def test_a_change_of_a_job_takes_a_few_bytes(series):
    """So that all changes of a hundred thousand jobs are a few megabytes."""
    jobs = series[1]["jobs"]
    packed = sum(len(pack_numbers(jobs[name], "u4")["data"]) for name in ("at", "gpus"))
    assert packed < 4 * len(jobs["at"])


def test_unfinished_figures_are_null_not_nan(series):
    odd = copy.deepcopy(series)
    odd[0]["figures"]["avg_jct_s"] = float("nan")
    odd[0]["figures"]["rho_max"] = np.float64("inf")
    data = data_of(render(odd))
    assert data["runs"][0]["figures"]["avg_jct_s"] is None
    assert data["runs"][0]["figures"]["rho_max"] is None


def test_the_page_names_files_without_their_folders(page):
    assert str(SETUP.jobs.parent) not in page
    assert data_of(page)["runs"][0]["setup"]["jobs"] == "jobs.csv"


def test_runs_that_did_not_begin_are_named(series):
    assert data_of(render(series, [HARM]))["meta"]["not_begun"] == [HARM]
    assert data_of(render(series))["meta"]["not_begun"] == []


def test_a_report_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one run"):
        render([])
