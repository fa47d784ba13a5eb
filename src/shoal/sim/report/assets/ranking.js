// Tables that sort when a heading is clicked, and the ranking of the runs.

const ALPHABET = new Intl.Collator("en", { numeric: true });

// columns: {head, get: value to sort by, show: text or node, word: align left, hint}; rows with a lower `rank` always
// come first
function sortable(table, columns, rows, { by = 0, down = false, onrow, limit = Infinity, rank = () => 0 } = {}) {
  const state = { by, down, rows, limit };
  const heads = columns.map((c, i) => el("th", { scope: "col", class: c.word ? "word" : null, title: c.hint },
    el("button", { type: "button", onclick: () => { state.down = state.by === i ? !state.down : !!c.downFirst; state.by = i; draw(); } }, c.head)));
  const body = el("tbody");
  table.replaceChildren(el("thead", {}, el("tr", {}, ...heads)), body);
  const draw = () => {
    heads.forEach((h, i) => h.setAttribute("aria-sort", i === state.by ? (state.down ? "descending" : "ascending") : "none"));
    const get = columns[state.by].get, sign = state.down ? -1 : 1;
    const sorted = [...state.rows].sort((a, b) => {
      if (rank(a) !== rank(b)) return rank(a) - rank(b);
      const x = get(a), y = get(b);
      if (x === null || x === undefined) return 1; // unknown values stay at the end
      if (y === null || y === undefined) return -1;
      return sign * (typeof x === "string" ? ALPHABET.compare(x, y) : x - y);
    });
    const visible = sorted.slice(0, state.limit);
    body.replaceChildren(...visible.map((row) => {
      const tr = el("tr", {}, ...columns.map((c, i) => el(i === 0 ? "th" : "td", { class: [c.word ? "word" : "", c.mark ? c.mark(row) : ""].join(" ").trim() || null, scope: i === 0 ? "row" : null }, c.show(row))));
      if (onrow) onrow(tr, row);
      return tr;
    }));
    if (sorted.length > state.limit) {
      body.append(el("tr", { class: "more" }, el("td", { colspan: columns.length },
        el("button", { class: "button", type: "button", onclick: () => { state.limit *= 4; draw(); } }, `Show more of ${count(sorted.length)}`))));
    } else if (!sorted.length) body.append(el("tr", { class: "more" }, el("td", { colspan: columns.length }, "No match.")));
    state.first = visible[0];
  };
  draw();
  return { set: (next, most) => { state.rows = next; if (most) state.limit = most; draw(); }, first: () => state.first };
}

const best = (get) => Math.min(...ENDED.map(get).filter((v) => v !== null && v !== undefined));

function meter(run, value, most, text) {
  return el("span", {}, text, el("i", { style: { width: `${most > 0 ? Math.max(1, (100 * value) / most) : 0}%`, background: `var(${run.colour})` } }));
}

const GLOSSARY = [
  ["JCT", "job completion time: from submission to the end, including waiting"],
  ["vs best", "average JCT relative to that of the best run"],
  ["wait", "average time without a GPU"],
  ["paused", "average time that reconfigurations stopped training"],
  ["makespan", "from the first submission to the last end"],
  ["GPUs used", "fraction of all GPU time that jobs held, until the last end"],
  ["changes", "share changes per job, including its start"],
  ["worst ρ", "finish-time fairness: the largest ratio of a job's completion time to that in a cluster of its own with 1/n of the GPUs; 1 or less is fair"],
  ["deviation", "the largest relative difference between what a user received and what it was due (entitled and traded)"],
];

function ranking() {
  const f = (name) => (run) => run.figures[name];
  // Omit what most runs have in common.
  const least = (name) => {
    const low = best(f(name)), shared = ENDED.filter((r) => r.figures[name] === low).length;
    return (run) => (!run.figures.interrupted && run.figures[name] === low && shared <= ENDED.length / 2 ? "best" : "");
  };
  const time = (head, name, hint) => ({ head, get: f(name), show: (r) => duration(r.figures[name]), mark: least(name), hint });
  const top = Math.max(...RUNS.map((r) => r.figures.avg_jct_s || 0)), low = best(f("avg_jct_s"));
  const bestMark = least("avg_jct_s");
  const columns = [
    { head: "Run", get: (r) => r.label, show: (r) => el("span", {}, swatch(r), r.label) },
    { head: "Average JCT", get: f("avg_jct_s"), show: (r) => meter(r, r.figures.avg_jct_s, top, duration(r.figures.avg_jct_s)), mark: (r) => `meter ${bestMark(r)}` },
    { head: "vs best", get: f("avg_jct_s"), show: (r) => (r.figures.avg_jct_s && !r.figures.interrupted ? `${fixed(r.figures.avg_jct_s / low, 2)}×` : "–") },
    time("Median", "p50_jct_s"), time("p95", "p95_jct_s"), time("p99", "p99_jct_s"), time("Wait", "avg_queue_s"),
    ...(KINDS.some((k) => k !== "none") ? [time("Paused", "avg_paused_s")] : []),
    { ...time("Makespan", "makespan_s"), show: (r) => (r.figures.interrupted ? "–" : duration(r.figures.makespan_s)) },
    { head: "GPUs used", get: f("utilization"), show: (r) => percent(r.figures.utilization), downFirst: true },
    { head: "Changes", get: f("share_changes_per_job"), show: (r) => fixed(r.figures.share_changes_per_job, 1), mark: least("share_changes_per_job") },
    { head: "Worst ρ", get: f("rho_max"), show: (r) => fixed(r.figures.rho_max, 1), mark: least("rho_max") },
    ...(RUNS.some((r) => r.figures.deviation !== null) ? [{ head: "Deviation", get: f("deviation"), show: (r) => percent(r.figures.deviation, r.figures.deviation < 0.1 ? 1 : 0), mark: least("deviation") }] : []),
    ...(RUNS.some((r) => r.figures.finished < r.figures.jobs) ? [{ head: "Unfinished", get: (r) => r.figures.jobs - r.figures.finished, show: (r) => count(r.figures.jobs - r.figures.finished) }] : []),
  ];
  sortable($("ranking-table"), columns, RUNS, {
    by: 1, rank: (run) => (run.figures.interrupted ? 1 : 0),
    onrow: (tr, run) => {
      tr.addEventListener("mouseenter", () => { VIEW.focus = VIEW.hidden.has(run.i) ? null : run.i; applyView(); });
      tr.addEventListener("mouseleave", () => { VIEW.focus = null; applyView(); });
    },
  });
  const cut = RUNS.length > ENDED.length, missing = DATA.meta.not_begun;
  if (cut) $("ranking-note").append(" Runs that were interrupted come last, with the simulated time they had reached: their figures are of the jobs that had ended by then, and compare with no other's.");
  if (missing.length) $("ranking-note").append(` Not begun when the comparison was interrupted: ${missing.join(", ")}.`);
  $("glossary").append(...GLOSSARY.flatMap(([word, text]) => [el("dt", {}, word), el("dd", {}, text)]));
}

function lead() {
  const ranked = ENDED.filter((r) => r.figures.avg_jct_s !== null).sort((a, b) => a.figures.avg_jct_s - b.figures.avg_jct_s);
  const m = DATA.meta, first = ranked[0], last = ranked[ranked.length - 1];
  $("title").textContent = m.policies > 1 ? `${m.policies} policies compared` : m.runs > 1 ? `${m.runs} runs of ${RUNS[0].policy} compared` : `One run of ${RUNS[0].policy}`;
  if (first && ranked.length > 1) {
    const ratio = last.figures.avg_jct_s / first.figures.avg_jct_s;
    $("finding").append(el("strong", {}, first.label), ` completes jobs soonest, in ${duration(first.figures.avg_jct_s)} on average; `,
      el("strong", {}, last.label), ` takes ${duration(last.figures.avg_jct_s)}, ${fixed(ratio, 2)} times as long.`);
  } else if (first) $("finding").append(el("strong", {}, first.label), ` completes a job in ${duration(first.figures.avg_jct_s)} on average.`);
  else if (!ENDED.length) $("finding").append("No run had ended when this comparison was interrupted: there is nothing to rank.");
  const types = Object.entries(m.types);
  const end = Math.max(...RUNS.map((r) => r.over_time.end_s));
  const facts = [
    ["Jobs", count(m.jobs), RUNS.some((r) => r.figures.interrupted) ? "interrupted: results so far" : null],
    ["GPUs", count(m.gpus), types.length > 1 ? types.map(([t, n]) => `${n} ${t}`).join(", ") : m.pooled ? "one pool" : types[0][0]],
    ["Users", count(Math.max(m.users, 1)), null],
    ["Simulated time", duration(end), "the longest run"],
    ["Shortest average JCT", first ? duration(first.figures.avg_jct_s) : "–", first ? first.label : null],
  ];
  $("facts").append(...facts.map(([name, value, small]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, small ? el("small", {}, small) : null))));
}
