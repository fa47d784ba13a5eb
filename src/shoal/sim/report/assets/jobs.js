// Jobs: find one, click it, and see its share under each run.

const FEW = 60;
const known = (v) => (Number.isNaN(v) ? null : v);

async function jobs() {
  const caption = $("jobs-caption");
  if (typeof DecompressionStream === "undefined") {
    caption.textContent = "This browser cannot unpack the shares of the jobs: open this file in a browser of 2023 or later.";
    $("job-panel").hidden = true;
    return;
  }
  caption.textContent = `Unpacking the shares of ${plural(DATA.meta.jobs, "job")} …`;
  const [trace, ...byRun] = await Promise.all([DATA.jobs, ...RUNS.map((r) => r.jobs)].map(unpackAll));
  byRun.forEach((columns, i) => {
    Object.assign(RUNS[i].jobs, columns, { begin: begins(columns.points), guests: new Set(columns.guests) });
  });
  caption.textContent = "Click a job to see its share over time in each run.";
  jobTable(rowsOf(trace));
}

// Where the changes of each job begin.
function begins(points) {
  const begin = new Uint32Array(points.length + 1);
  for (let k = 0; k < points.length; k++) begin[k + 1] = begin[k] + points[k];
  return begin;
}

function rowsOf(j) {
  return j.name.map((name, k) => {
    let least = null, most = null, changes = 0;
    for (const run of RUNS) {
      const jct = known(run.jobs.jct_s[k]);
      if (jct !== null && (least === null || jct < least)) least = jct;
      if (jct !== null && (most === null || jct > most)) most = jct;
      changes = Math.max(changes, run.jobs.changes[k]);
    }
    const text = `${name} ${j.user[k]} ${j.model[k]}`.toLowerCase();
    return { k, name, user: j.user[k], model: j.model[k], requested: j.requested[k], submit: j.submit_s[k], work: j.work_gpu_s[k], least, most, changes, text, rank: 0 };
  });
}

// How well a job matches the search words: 0 if each is one of its words, 1 if each begins one, else 2.
function closeness(words, text) {
  const own = text.split(/\s+/);
  if (words.every((w) => own.includes(w))) return 0;
  return words.every((w) => own.some((o) => o.startsWith(w))) ? 1 : 2;
}

function jobTable(rows) {
  const table = $("job-table");
  const several = RUNS.length > 1;
  const columns = [
    { head: "Job", word: true, get: (r) => r.name, show: (r) => el("button", { class: "rowpick", type: "button", title: r.name }, r.name) },
    { head: "User", word: true, get: (r) => r.user, show: (r) => r.user, mark: () => "clip" },
    { head: "Model", word: true, get: (r) => r.model, show: (r) => r.model, mark: () => "clip" },
    { head: "Requested", get: (r) => r.requested, show: (r) => plural(r.requested, "GPU"), downFirst: true },
    { head: "Work", get: (r) => r.work, show: (r) => `${short(r.work / 3600)} GPU h`, downFirst: true, hint: "GPU-hours at the requested size" },
    { head: "Submitted at", get: (r) => r.submit, show: (r) => duration(r.submit) },
    { head: several ? "Shortest JCT" : "JCT", get: (r) => r.least, show: (r) => duration(r.least), downFirst: true },
    ...(several ? [{ head: "Longest JCT", get: (r) => r.most, show: (r) => duration(r.most), downFirst: true }] : []),
    { head: several ? "Most changes" : "Changes", get: (r) => r.changes, show: (r) => count(r.changes), downFirst: true },
  ];
  let picked = null;
  const mark = (tr, row) => { tr.setAttribute("aria-selected", String(row.k === picked)); };
  const made = sortable(table, columns, rows, {
    by: 4, down: true, limit: FEW, rank: (row) => row.rank,
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
    const found = rows.filter((r) => words.every((w) => r.text.includes(w)));
    for (const row of found) row.rank = closeness(words, row.text);
    made.set(found, FEW);
  });
  if (made.first()) pick(made.first());
  else $("job-panel").hidden = true;
}

// [[seconds since its submission, GPUs from then on], ...] of a job in a run.
function shares(run, k) {
  const { at, gpus, begin, unit_s } = run.jobs, out = [];
  for (let i = begin[k], t = 0; i < begin[k + 1]; i++) out.push([(t += at[i]) * unit_s, gpus[i]]);
  return out;
}

// [[seconds since its submission, 1 if it is co-located from then on, else 0], ...]
function stays(run, k, points) {
  const { begin, guests } = run.jobs, mine = begin[k + 1] - begin[k];
  return points.map(([t], i) => [t, i < mine && guests.has(begin[k] + i) ? 1 : 0]);
}

// The co-located time, and its outline [[x, from, to], ...].
function colocatedTime(stayed) {
  const from = stayed.map(([t, guest], i) => [t, guest, (stayed[i + 1] || [t])[0]]).filter(([, guest]) => guest);
  return {
    sum: from.reduce((sum, [t, , until]) => sum + until - t, 0),
    band: from.length ? from.flatMap(([t, , until]) => [[t, 0, 0], [t, 0, 1], [until, 0, 1], [until, 0, 0]]) : null,
  };
}

function drawJob(row) {
  const k = row.k;
  $("job-title").textContent = row.name;
  $("job-facts").textContent = `${row.user}’s ${row.model || "job"}, requested ${plural(row.requested, "GPU")}, submitted ${duration(row.submit)} after the first job.`;
  let top = 1, end = 1e-3;
  const rows = RUNS.map((run) => {
    const points = shares(run, k), jct = known(run.jobs.jct_s[k]), waited = run.jobs.wait_s[k];
    const until = jct ?? Math.max(run.over_time.end_s - row.submit, 0);
    if (jct === null && points.length) points.push([until, points[points.length - 1][1]]);
    end = Math.max(end, until);
    for (const [, gpus] of points) top = Math.max(top, gpus);
    const stayed = stays(run, k, points), { sum, band } = colocatedTime(stayed);
    const more = [waited >= 1 ? `waited ${duration(waited)}` : "", sum > 0 ? `co-located ${duration(sum)}` : ""].filter(Boolean).join(", ");
    const note = jct === null ? "did not finish" : `${duration(jct)}, ${plural(run.jobs.changes[k], "change")}${more ? `,\n${more}` : ""}`;
    return { run, points: points.map(([t, gpus], i) => [t, stayed[i][1] ? 0 : gpus]), stayed, band, jct, note };
  });
  lanes($("job-lanes"), {
    rows, end, top, label: "GPUs of the job over time",
    note: (r, t) => `${duration(t)}: ${t > (r.jct ?? Infinity) ? "done" : valueAt(r.stayed, t) ? "co-located" : plural(valueAt(r.points, t), "GPU")}`,
  });
}
