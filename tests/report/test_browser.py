"""The page in a real browser: it draws, answers to clicks, and stays silent on the console and the network."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest

from shoal.cli import out as terminal
from shoal.sim.report.page import render
from shoal.sim.report.run_series import series_of

from .conftest import shares_by_job, summary_of
from .test_page import HARM

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not CHROMIUM.exists(), reason=f"NO BROWSER: {CHROMIUM} is missing, the report was not looked at"
    ),
]


@pytest.fixture(scope="module")
def context():
    sync_api = pytest.importorskip("playwright.sync_api", reason="NO BROWSER: playwright is missing")
    with sync_api.sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=str(CHROMIUM),
            args=FLAGS,
            headless=True,
            color_scheme="light",
            viewport={"width": 1280, "height": 900},
        )
        yield context
        context.close()


@pytest.fixture(scope="module")
def evil_page(series, tmp_path_factory):
    """The report of four runs, with a job, a user and a model whose names try to break out."""
    evil = copy.deepcopy(series)
    for one in evil:
        jobs = one["jobs"]
        longest = int(jobs["work_gpu_s"].argmax())
        jobs["name"][longest] = jobs["user"][longest] = jobs["model"][longest] = HARM
        one["users"]["names"][0] = HARM
    path = tmp_path_factory.mktemp("report") / "out.html"
    path.write_text(render(evil), encoding="utf-8")
    return path


@pytest.fixture
def opened(context, evil_page):
    yield from silently(context, evil_page)


def silently(context, path):
    """(page, what it complained of), and in the end it must have complained of nothing."""
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: complaints.append(str(e)))
    page.on("dialog", lambda d: (complaints.append(f"dialog {d.message}"), d.dismiss()))
    page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith("file://") else None)
    page.goto(path.as_uri())
    yield page, complaints
    page.close()
    assert complaints == []


def test_everything_is_drawn(opened):
    page, _ = opened
    assert page.locator("#ranking-table tbody tr").count() == 4
    for chart in ("cdf", "waiting", "changes", "progress", "users-stack", "users-detail"):
        box = page.locator(f"#{chart} canvas").bounding_box()
        assert box["width"] > 300, chart
        assert box["height"] > 200, chart
    assert page.locator("#used .lane").count() == 4
    assert page.locator("#ledger tbody tr").count() == 5
    assert "completes jobs soonest" in page.locator("#finding").inner_text()


def test_a_click_on_a_heading_sorts(opened):
    page, _ = opened
    column = page.locator("#ranking-table tbody tr").locator("th")
    by_jct = column.all_inner_texts()
    assert by_jct[-1] == "fifo / none"
    page.locator("#ranking-table thead button", has_text="Average JCT").click()
    assert column.all_inner_texts() == by_jct[::-1]
    assert page.locator("#ranking-table thead th[aria-sort=descending]").count() == 1


@pytest.fixture
def cut_short(context, series, tmp_path):
    """The page of a comparison of which all but fifo and one more were interrupted, or not begun."""
    runs = copy.deepcopy(series)
    for one in runs[2:]:
        one["figures"] |= {"interrupted": True, "avg_jct_s": 1.0, "makespan_s": 22_320.0, "finished": 3}
    path = tmp_path / "cut.html"
    path.write_text(render(runs, ["srtf"]), encoding="utf-8")
    yield from silently(context, path)


def test_interrupted_runs_are_last_marked_and_compared_with_none(cut_short):
    page, _ = cut_short
    rows = page.locator("#ranking-table tbody tr")
    cut = ["afs-p / restart (to 6h 12m)", "afs-p / concurrent (to 6h 12m)"]
    assert rows.locator("th").all_inner_texts() == ["afs-p / none", "fifo / none", *cut]
    ratios = rows.locator("td:nth-child(3)").all_inner_texts()
    assert ratios[0] == "1.00×"
    assert ratios[2:] == ["–", "–"]
    assert rows.nth(2).locator(".best").count() == 0
    page.locator("#ranking-table thead button", has_text="Average JCT").click()
    assert rows.locator("th").all_inner_texts()[:2] == ["fifo / none", "afs-p / none"]
    assert "afs-p / none completes jobs soonest" in page.locator("#finding").inner_text()
    note = page.locator("#ranking-note").inner_text()
    assert "interrupted come last" in note
    assert "Not begun when the comparison was interrupted: srtf." in note


def test_a_click_on_a_job_shows_its_share_under_each_run(opened):
    page, _ = opened
    page.locator("#job-search").fill("job7 ")
    row = page.locator("#job-table tbody tr").filter(has=page.get_by_role("button", name="job7", exact=True))
    row.get_by_role("button").click()
    assert page.locator("#job-title").inner_text() == "job7"
    assert row.get_attribute("aria-selected") == "true"
    lanes = page.locator("#job-lanes .lane")
    assert lanes.count() == 4
    assert all(
        d.startswith("M")
        for d in lanes.locator("path").evaluate_all("ps => ps.map(p => p.getAttribute('d'))")
    )
    strip = lanes.nth(0).locator(".strip")
    strip.hover()
    assert (
        "GPU" in lanes.nth(0).locator("em").inner_text() or "done" in lanes.nth(0).locator("em").inner_text()
    )


@pytest.fixture
def renamed(context, series, tmp_path):
    """The page with a few jobs of names that hold one another."""
    one = copy.deepcopy(series[0])
    jobs = one["jobs"]
    by_work = jobs["work_gpu_s"].argsort()[::-1]
    names = ["my-run7", "run70", "RUN7", "run7-b", "again-run71"]
    for k, name in zip(by_work, names):
        jobs["name"][k] = name
    jobs["user"][by_work[0]] = "zoe"
    path = tmp_path / "names.html"
    path.write_text(render([one]), encoding="utf-8")
    yield from silently(context, path)


@pytest.mark.parametrize(
    ("sought", "found"),
    [
        ("run7", ["RUN7", "run70", "run7-b", "my-run7", "again-run71"]),
        ("un7", ["my-run7", "run70", "RUN7", "run7-b", "again-run71"]),
        ("zoe", ["my-run7"]),
        ("run7 zoe", ["my-run7"]),
    ],
    ids=["exact, then prefixes, then others by work", "all others by work", "a user", "a job and a user"],
)
def test_a_search_lists_what_is_meant_first(renamed, sought, found):
    page, _ = renamed
    page.locator("#job-search").fill(sought)
    assert page.locator("#job-table tbody th").all_inner_texts() == found
    page.locator("#job-search").fill("")
    assert page.locator("#job-table tbody th").first.inner_text() == "my-run7"


def test_a_job_is_found_before_those_whose_names_begin_with_its_own(opened):
    page, _ = opened
    page.locator("#job-search").fill("job27")
    names = page.locator("#job-table tbody th").all_inner_texts()
    assert names[0] == "job27"
    assert sorted(names[1:]) == [f"job27{i}" for i in range(10)]


@pytest.fixture
def with_guests(context, shared, tmp_path):
    path = tmp_path / "shared.html"
    path.write_text(render([series_of(shared, summary_of(shared))]), encoding="utf-8")
    yield from silently(context, path)


def test_the_lane_of_a_guest_is_pale_while_it_is_one(with_guests, shared):
    page, _ = with_guests
    record = shared.record
    log = shares_by_job(record)
    only_guest = next(j for j in record.change_job if len(log[j]) == 2 and record.changes[j] == 0)
    never = next(j for j in record.change_job if len(log[j]) == record.changes[j] + 1)
    for j, opacities in ((only_guest, ["0.28", "0.85"]), (never, ["0.85"])):
        page.locator("#job-search").fill(record.jobs[j].name)
        page.locator("#job-table tbody .rowpick").first.click()
        assert page.locator("#job-title").inner_text() == record.jobs[j].name
        paths = page.locator("#job-lanes .lane path").all()
        assert [path.get_attribute("opacity") for path in paths] == opacities
        assert ("co-located" in page.locator("#job-lanes em").inner_text()) == (j == only_guest)
        band = page.evaluate("LANES.find((l) => l.host.id === 'job-lanes').made[0].row.band")
        if j == only_guest:
            assert (band[0][0], band[-1][0]) == pytest.approx([at_s for at_s, _ in log[j]], abs=0.06)
        else:
            assert band is None


def test_the_share_of_any_job_is_unpacked_as_it_was(opened, results):
    page, _ = opened
    page.locator("#job-table tbody tr").first.wait_for()
    for i, result in enumerate(results.values()):
        seen = page.evaluate("i => Array.from({length: 300}, (_, k) => shares(RUNS[i], k))", i)
        for mine, theirs in zip(shares_by_job(result.record), seen):
            assert [gpus for _, gpus in theirs] == [gpus for _, gpus in mine]
            assert [at for at, _ in theirs] == pytest.approx([at for at, _ in mine], abs=0.0501)


def test_a_browser_that_cannot_unpack_says_so(context, evil_page):
    page = context.new_page()
    page.add_init_script("delete window.DecompressionStream")
    page.goto(evil_page.as_uri())
    assert "cannot unpack" in page.locator("#jobs-caption").inner_text()
    assert page.locator("#ranking-table tbody tr").count() == 4
    assert not page.locator("#job-panel").is_visible()
    page.close()


def test_the_job_of_time_zero_can_be_watched_too(opened):
    page, _ = opened
    caption = page.locator("#thrashing-caption")
    assert "after the first job" in caption.inner_text()
    page.locator("#thrashing-job select").select_option(index=1)
    assert "submitted at time zero" in caption.inner_text()
    assert page.locator("#progress canvas").count() == 1


def test_what_was_run_is_told(opened):
    page, _ = opened
    rows = page.locator("#input-table tbody tr")
    assert rows.count() == 4
    assert "kind=restart, restart_s=120" in rows.nth(2).inner_text()
    caption = page.locator("#input-caption").inner_text()
    assert "gpus: 64; seed: 0" in caption
    assert "jobs: jobs.csv; profiles: profiles.csv;" in caption


LENGTHS = {
    0: "0.0s", 0.25: "0.2s", 0.35: "0.3s", 9.94: "9.9s", 9.96: "10s", 10.5: "10s", 11.5: "12s", 59.4: "59s",
    59.6: "1m 0s", 3599.6: "1h 0m", 7199: "2h 0m", 7589.9: "2h 6m", 7590.1: "2h 7m", 86_399.0: "1d 0h",
    1e6: "11d 14h", -1: "0.0s",
}  # fmt: skip


def test_lengths_of_time_read_as_in_the_terminal(opened):
    page, _ = opened
    texts = list(LENGTHS.values())
    assert page.evaluate("all => all.map(s => duration(s))", list(LENGTHS)) == texts
    assert [terminal.duration(seconds) for seconds in LENGTHS] == texts


NUMBERS = [
    (7.55, 1, "7.5"), (7.45, 1, "7.5"), (0.25, 1, "0.2"), (0.75, 1, "0.8"), (2.5, 0, "2"), (3.5, 0, "4"),
    (1140.46, 1, "1,140.5"), (999_999.96, 1, "1,000,000.0"), (-1234.25, 1, "−1,234.2"), (1.005, 2, "1.00"),
    (0.0, 1, "0.0"),
]  # fmt: skip


def test_numbers_are_rounded_as_in_the_terminal(opened):
    page, _ = opened
    texts = [text for *_, text in NUMBERS]
    asked = [[number, places] for number, places, _ in NUMBERS]
    assert page.evaluate("all => all.map(([v, digits]) => fixed(v, digits))", asked) == texts
    in_terminal = [terminal.decimal(number, places) for number, places, _ in NUMBERS]
    assert in_terminal == [text.replace(",", "").replace("−", "-") for text in texts]


@pytest.fixture
def odd_figures(context, series, tmp_path):
    """The page of a run whose figures lie between two roundings."""
    one = copy.deepcopy(series[0])
    one["figures"] |= {
        "share_changes_per_job": 7.55,
        "rho_max": 1140.5,
        "avg_queue_s": 0.0,
        "utilization": 0.705,
    }
    path = tmp_path / "odd.html"
    path.write_text(render([one]), encoding="utf-8")
    yield from silently(context, path)


def test_the_ranking_shows_figures_as_the_terminal_does(odd_figures):
    page, _ = odd_figures
    heads = page.locator("#ranking-table thead th").all_inner_texts()
    row = dict(zip(heads, page.locator("#ranking-table tbody tr > *").all_inner_texts()))
    assert (row["Changes"], row["Worst ρ"], row["Wait"]) == ("7.5", "1,140.5", "0.0s")
    assert row["GPUs used"] == f"{100 * 0.705:.0f} %"


def test_but_for_the_ranking_runs_stand_in_the_order_they_were_given_in(opened, series):
    page, _ = opened
    given = [one["label"] for one in series]
    assert page.locator("#ranking-table tbody th").all_inner_texts() != given
    assert page.locator("#legend .chip:not(.quiet)").all_inner_texts() == given
    for place in (
        "#used .lane > span",
        "#job-lanes .lane > span",
        "#users-run option",
        "#input-table tbody th",
    ):
        assert page.locator(place).all_inner_texts() == given, place
    assert page.locator("#fairness-table thead th").all_inner_texts()[1:] == given


def test_the_ledger_adds_up_for_its_reader(opened):
    page, _ = opened
    page.locator("#users-run").select_option("fifo / none")
    heads = page.locator("#ledger thead th").all_inner_texts()
    idle_hours = 0.0
    for row in page.locator("#ledger tbody tr").all():
        hours = dict(
            zip(heads[1:-1], [float(t.replace(",", "")) for t in row.locator("td").all_inner_texts()[:-1]])
        )
        left = hours["Entitled"] + hours["Borrowed"] - hours["Lent"] - hours["Idle"]
        assert left == pytest.approx(hours["Received"], abs=0.26)
        idle_hours += hours["Idle"]
    assert idle_hours > 1  # fifo leaves GPUs idle for which the first in line is too large


def test_a_harmful_name_is_shown_as_it_is(opened):
    page, _ = opened
    page.locator("#job-search").fill("onerror")
    page.locator("#job-table tbody .rowpick").first.click()
    assert page.locator("#job-title").inner_text() == HARM
    assert page.locator("img").count() == 0


def test_a_run_can_be_switched_off_and_on(opened):
    page, _ = opened
    chip = page.locator("#legend .chip", has_text="fifo")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    assert page.locator("#used .lane:visible").count() == 3
    page.locator("#legend .chip", has_text="Show all").click()
    assert page.locator("#used .lane:visible").count() == 4


@pytest.mark.parametrize("label", ["0", "64", "2,000,000", "12,345,678,901"])
def test_there_is_room_for_the_labels_of_an_axis(opened, label):
    page, _ = opened
    needed = """label => {
      const paint = document.createElement('canvas').getContext('2d');
      paint.font = axis().font;
      return paint.measureText(label).width + axis().gap;
    }"""
    assert page.evaluate(needed, label) <= page.evaluate("label => wide(null, [label])", label)


def test_colours_follow_the_system_and_the_button(opened):
    page, _ = opened
    ground = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    light = ground()
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert ground() != light
    page.locator("#theme").click()
    assert ground() == light
    page.evaluate("localStorage.clear()")
    page.emulate_media(color_scheme="dark")
    page.reload()
    assert ground() != light


def test_words_stand_out_from_their_ground_in_both_themes(opened):
    page, _ = opened
    for _ in range(2):
        ratios = page.evaluate(CONTRAST)
        assert ratios
        assert min(ratios.values()) >= 4.5, ratios
        page.locator("#theme").click()


def test_a_narrow_window_does_not_scroll_sideways(opened):
    page, _ = opened
    page.set_viewport_size({"width": 390, "height": 800})
    # The charts follow a resize a frame later; if they never do, this times out and fails.
    page.wait_for_function("document.documentElement.scrollWidth <= 390", timeout=10_000)


#: The contrast (WCAG 2) of the two colours of text against the grounds they stand on.
CONTRAST = """() => {
  const paint = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const light = (name) => {
    paint.fillStyle = css(name);
    paint.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data].map((v) => {
      const c = v / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const out = {};
  for (const text of ['--ink', '--soft', '--accent', '--good']) for (const ground of ['--bg', '--card', '--faint']) {
    const [a, b] = [light(text), light(ground)].sort((x, y) => y - x);
    out[`${text} on ${ground}`] = (a + 0.05) / (b + 0.05);
  }
  return out;
}"""
