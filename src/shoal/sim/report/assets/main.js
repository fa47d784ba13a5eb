// The sections of the page, from top to bottom.

function times() {
  const width = DATA.width_s, n = Math.max(...RUNS.map((r) => r.over_time.used.mean.length));
  return Array.from({ length: n }, (_, i) => (i + 0.5) * width);
}
// Show 2048 s as 34 minutes.
const coarse = (s) => (s < 600 ? s : s < 36000 ? Math.round(s / 60) * 60 : Math.round(s / 3600) * 3600);
// Values belong to the middle of a bucket; the line still begins at the start of the first one.
const fromZero = (values) => [values[0], ...values];
const padded = (values, n) => [...values, ...Array(n - values.length).fill(null)];

function cdfChart() {
  const known = RUNS.flatMap((r) => r.cdf.jct_s).filter((v) => v > 0);
  if (!known.length) return empty($("cdf"), "No job finished.");
  // Axis: the logarithm of seconds. A run's fraction at x is that of its last point at or below x.
  const low = Math.floor(Math.log10(known.reduce((a, b) => Math.min(a, b))) * 4) / 4, high = Math.max(Math.log10(known.reduce((a, b) => Math.max(a, b))), low + 0.1);
  const x = Array.from({ length: 401 }, (_, i) => low + ((high - low) * i) / 400);
  const ys = RUNS.map((run) => {
    const points = run.cdf.jct_s.map((t, i) => [t > 0 ? Math.log10(t) : low, run.cdf.part[i]]);
    return x.map((v) => valueAt(points, v + 1e-9));
  });
  const marks = [0.001, 0.01, 0.1, 1, 10, 60, 600, 3600, 28800, 259200, 2592000, 25920000];
  runChart($("cdf"), {
    x, ys, label: "Distribution of job completion times by run",
    xAxis: axis((u, splits) => splits.map((v) => tick(+(10 ** v).toPrecision(9))), {
      splits: (u, i, lo, hi) => marks.map(Math.log10).filter((v) => v >= lo - 1e-9 && v <= hi + 1e-9),
    }),
    yRange: [0, 1], value: (v) => percent(v, 1), yTicks: (v) => percent(v), title: (v) => `within ${duration(10 ** v)}`,
  });
  const unfinished = RUNS.filter((r) => r.figures.finished < r.figures.jobs);
  if (unfinished.length) $("cdf-note").textContent = ` Finished jobs only: ${unfinished.map((r) => `${count(r.figures.jobs - r.figures.finished)} did not finish under ${r.label}`).join("; ")}.`;
}

function overTime() {
  const x = times(), n = x.length;
  const end = Math.max(...RUNS.map((r) => r.over_time.end_s), 1e-3), width = DATA.width_s;
  runChart($("waiting"), {
    x: [0, ...x], ys: RUNS.map((r) => padded(fromZero(r.over_time.waiting.mean), n + 1)),
    bands: RUNS.map((r) => ({ low: fromZero(r.over_time.waiting.low), high: fromZero(r.over_time.waiting.high) })),
    value: short, title: (t) => `around ${duration(t)}`, label: "Jobs waiting over time by run",
  });
  const edges = [0, ...x.map((t) => t + DATA.width_s / 2)];
  runChart($("changes"), {
    x: edges, value: count, title: (t) => `until ${duration(t)}`, label: "Share changes so far by run",
    ys: RUNS.map((r) => { let sum = 0; return padded([0, ...r.over_time.changes.map((c) => (sum += c))], n + 1); }),
  });
  lanes($("used"), {
    end, top: DATA.meta.gpus, label: "GPUs in use over time",
    rows: RUNS.map((run) => {
      const { mean, low, high } = run.over_time.used, stop = run.over_time.end_s;
      const part = (i) => Math.min((i + 1) * width, stop) - i * width;
      const average = mean.reduce((s, v, i) => s + v * part(i), 0) / Math.max(stop, 1e-9);
      return {
        run, points: [...mean.map((v, i) => [i * width, v]), [stop, 0]],
        band: mean.flatMap((_, i) => [[i * width, low[i], high[i]], [Math.min((i + 1) * width, stop), low[i], high[i]]]),
        note: `${short(average)} on average`,
      };
    }),
    note: (row, t) => (t > row.run.over_time.end_s ? "ended" : `${duration(t)}: ${plural(Math.round(valueAt(row.points, t)), "GPU")}`),
  });
  $("used-top").textContent = `all ${plural(DATA.meta.gpus, "GPU")}`;
  for (const span of document.querySelectorAll(".bucket")) span.textContent = tick(coarse(DATA.width_s));
}

function thrashing() {
  const groups = POLICIES.filter((p) => new Set(RUNS.filter((r) => r.policy === p && r.watched.length).map((r) => r.costs)).size > 1);
  if (!groups.length) return;
  $("thrashing").hidden = false;
  const select = $("thrashing-pick").querySelector("select"), pick = $("thrashing-job").querySelector("select");
  $("thrashing-pick").hidden = groups.length < 2;
  let chart = null;
  const jobs = (i) => {
    const watched = RUNS.find((r) => r.policy === groups[i]).watched;
    $("thrashing-job").hidden = watched.length < 2;
    fill(pick, watched.map((w) => `${w.job}${w.submit_s > 0 ? "" : " (from time zero)"}`), (k) => draw(i, k));
    draw(i, 0);
  };
  const draw = (i, k) => {
    const all = RUNS.filter((r) => r.policy === groups[i]);
    const runs = KINDS.map((kind) => all.find((r) => r.costs === kind)).filter(Boolean).map((r) => ({ ...r, watched: r.watched[k], label: (COSTS[r.costs] || r.costs) + r.mark, colour: `--c${KINDS.indexOf(r.costs) % COLOURS}`, dash: DASHES[KINDS.indexOf(r.costs) % DASHES.length] }));
    const end = Math.max(...runs.map((r) => r.watched.time_s[r.watched.time_s.length - 1] || 0), 1e-3);
    const x = Array.from({ length: 501 }, (_, k) => (end * k) / 500);
    if (chart) { CHARTS.splice(CHARTS.findIndex((c) => c.u === chart), 1); forget(chart); }
    chart = runChart($("progress"), {
      x, runs, ys: runs.map((r) => x.map((t) => interpolate(r.watched.time_s, r.watched.done, t, r.watched.jct_s === null ? null : 1))),
      yRange: [0, 1.02], value: (v) => percent(v, 1), yTicks: (v) => percent(v), title: duration, label: `Progress of job ${runs[0].watched.job} by cost model`,
    });
    const top = Math.max(...runs.map((r) => r.figures.avg_jct_s || 0));
    $("cost-bars").replaceChildren(...runs.map((r) => el("div", { class: "row" },
      el("div", {}, el("span", {}, swatch(r), r.label), el("b", {}, duration(r.figures.avg_jct_s))),
      el("div", { class: "track" }, el("i", { style: { width: `${(100 * (r.figures.avg_jct_s || 0)) / (top || 1)}%`, background: `var(${r.colour})` } })),
      el("small", {}, `${fixed(r.figures.share_changes_per_job)} changes per job, paused ${duration(r.figures.avg_paused_s)}; this job: ${r.watched.jct_s === null ? "unfinished" : duration(r.watched.jct_s)}`))));
    const f = runs[0].watched, changes = runs.map((r) => r.watched.changes), [few, many] = [Math.min(...changes), Math.max(...changes)];
    $("thrashing-caption").textContent = `${groups[i]}: the progress of ${f.job}${f.model ? ` (${f.model})` : ""}, submitted ${f.submit_s > 0 ? `${duration(f.submit_s)} after the first job` : "at time zero"}, if each new share stops and restarts the job, and if new workers prepare while training continues. Its share changes ${few === many ? "" : `${count(few)} to `}${plural(many, "time")}. Flat sections are time without GPUs or paused.${DATA.meta.pooled ? "" : " On nodes, progress between changes is estimated from the number of GPUs alone."}`;
  };
  fill(select, groups, jobs);
  const start = Math.max(groups.indexOf("afs-p"), 0);
  select.selectedIndex = start;
  jobs(start);
}

// Common options in one sentence, and the differences by run.
function inputs() {
  const words = (value) => (value && typeof value === "object" ? Object.entries(value).map(([k, v]) => `${k}=${v}`).join(", ") : String(value ?? ""));
  const names = [...new Set(RUNS.flatMap((r) => Object.keys(r.setup)))];
  const all = (name) => RUNS.map((r) => words(r.setup[name]));
  const same = names.filter((name) => new Set(all(name)).size === 1), own = names.filter((name) => !same.includes(name));
  const row = (tag, cells) => el("tr", {}, ...cells.map((c, i) => el(i ? tag : "th", { class: "word", scope: tag === "th" ? "col" : i ? null : "row" }, c)));
  $("input-table").replaceChildren(el("thead", {}, row("th", ["Run", ...own])), el("tbody", {}, ...RUNS.map((r) => row("td", [r.label, ...own.map((name) => words(r.setup[name]) || "–")]))));
  $("input-table").hidden = !own.length;
  $("input-caption").textContent = `${own.length ? "All runs: " : ""}${same.filter((name) => words(RUNS[0].setup[name])).map((name) => `${name.replaceAll("_", " ")}: ${words(RUNS[0].setup[name])}`).join("; ")}.`;
}

function theme() {
  const button = $("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("shoal-theme"); } catch { /* files may have no storage */ }
  const apply = () => {
    const dark = chosen ? chosen === "dark" : system.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    button.setAttribute("aria-pressed", String(dark));
    button.textContent = dark ? "Light" : "Dark";
    button.setAttribute("aria-label", dark ? "Switch to light colours" : "Switch to dark colours");
    for (const u of REDRAWS) u.redraw(false, true);
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("shoal-theme", chosen); } catch { /* as above */ }
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

theme();
lead();
ranking();
legend();
cdfChart();
overTime();
thrashing();
users();
inputs();
jobs();
