// Jobs: find one, click it, and see its share under each run.

const FEW = 60;

function jobs() {
  const j = DATA.jobs, n = j.name.length;
  const rows = Array.from({ length: n }, (_, k) => {
    const jct = RUNS.map((r) => r.jobs.jct_s[k]).filter((v) => v !== null);
    return {
      k, name: String(j.name[k]), user: j.user[k], model: j.model[k], requested: j.requested[k], submit: j.submit_s[k], work: j.work_gpu_s[k],
      least: jct.length ? Math.min(...jct) : null, most: jct.length ? Math.max(...jct) : null,
      changes: Math.max(...RUNS.map((r) => r.jobs.changes[k])),
      text: `${j.name[k]} ${j.user[k]} ${j.model[k]}`.toLowerCase(),
    };
  });
  const all = DATA.meta.shown_jobs === DATA.meta.jobs;
  $("jobs-caption").textContent = all
    ? "Click a job to see how its share went under each run."
    : `Click a job to see how its share went under each run. To keep this file small it has the timelines of ${count(n)} of the ${count(DATA.meta.jobs)} jobs: the longest, those whose share changed most often, and a sample of the others.`;
  const table = $("job-table");
  const several = RUNS.length > 1;
  const columns = [
    { head: "Job", word: true, get: (r) => r.name, show: (r) => el("button", { class: "rowpick", type: "button", title: r.name }, r.name) },
    { head: "User", word: true, get: (r) => r.user, show: (r) => r.user, mark: () => "clip" },
    { head: "Model", word: true, get: (r) => r.model, show: (r) => r.model, mark: () => "clip" },
    { head: "Asked for", get: (r) => r.requested, show: (r) => plural(r.requested, "GPU"), downFirst: true },
    { head: "Work", get: (r) => r.work, show: (r) => `${short(r.work / 3600)} GPU h`, downFirst: true, hint: "GPU-hours at the size it asked for" },
    { head: "Submitted at", get: (r) => r.submit, show: (r) => duration(r.submit) },
    { head: several ? "Shortest JCT" : "JCT", get: (r) => r.least, show: (r) => duration(r.least), downFirst: true },
    ...(several ? [{ head: "Longest JCT", get: (r) => r.most, show: (r) => duration(r.most), downFirst: true }] : []),
    { head: several ? "Most changes" : "Changes", get: (r) => r.changes, show: (r) => count(r.changes), downFirst: true },
  ];
  let picked = null;
  const mark = (tr, row) => { tr.setAttribute("aria-selected", String(row.k === picked)); };
  const made = sortable(table, columns, rows, {
    by: 4, down: true, limit: FEW,
    onrow: (tr, row) => {
      tr.dataset.k = row.k;
      mark(tr, row);
      tr.addEventListener("click", () => pick(row));
    },
  });
  const pick = (row) => {
    picked = row.k;
    for (const tr of table.tBodies[0].rows) tr.setAttribute("aria-selected", String(tr.dataset.k === String(picked)));
    drawJob(row);
  };
  $("job-search").addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    made.set(rows.filter((r) => words.every((w) => r.text.includes(w))), FEW);
  });
  if (made.first()) pick(made.first());
  else $("job-panel").hidden = true;
}

function drawJob(row) {
  const k = row.k;
  $("job-title").textContent = row.name;
  $("job-facts").textContent = `${row.user}’s ${row.model || "job"}, asked for ${plural(row.requested, "GPU")}, submitted ${duration(row.submit)} after the first job.`;
  const steps = RUNS.map((run) => {
    let t = 0;
    return run.jobs.at[k].map((dt, i) => [(t += dt), run.jobs.gpus[k][i]]);
  });
  const ends = RUNS.map((run, i) => run.jobs.jct_s[k] ?? Math.max(run.over_time.end_s - row.submit, 0));
  const end = Math.max(...ends, 1e-3), top = Math.max(1, ...steps.flat().map(([, v]) => v));
  const rows = RUNS.map((run, i) => ({
    run, points: [...steps[i], ...(run.jobs.jct_s[k] === null && steps[i].length ? [[ends[i], steps[i][steps[i].length - 1][1]]] : [])],
    note: run.jobs.jct_s[k] === null ? "did not finish" : `${duration(run.jobs.jct_s[k])}, ${plural(run.jobs.changes[k], "change")}${run.jobs.wait_s[k] >= 1 ? `,\nwaited ${duration(run.jobs.wait_s[k])}` : ""}`,
  }));
  lanes($("job-lanes"), {
    rows, end, top, label: "GPUs of the job over time",
    note: (r, t) => `${duration(t)}: ${t > (r.run.jobs.jct_s[k] ?? Infinity) ? "done" : plural(valueAt(r.points, t), "GPU")}`,
  });
}
