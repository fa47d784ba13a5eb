// Users: the GPUs each received over time, and the ledger of what it was due, lent and borrowed.

// In the order of the sum: what was due, what was added, what was not used, and the result.
const LEDGER = ["entitled", "traded", "borrowed", "lent", "idle", "received"];
// The part of a user's due that neither it nor others used.
const idle = ({ entitled, traded, borrowed, lent, received }) => Math.max(entitled + traded + borrowed - lent - received, 0);
const USERS = { run: null, user: 0, charts: [] };

function users() {
  const runs = RUNS.filter((r) => r.users);
  if (!runs.length) return;
  $("users").hidden = false;
  fill($("users-run"), runs.map((r) => r.label), (i) => { USERS.run = runs[i]; drawUsers(); });
  const start = runs.reduce((a, b) => ((b.figures.avg_jct_s || Infinity) < (a.figures.avg_jct_s || Infinity) ? b : a));
  $("users-run").selectedIndex = runs.indexOf(start);
  USERS.run = start;
  const types = Object.keys(DATA.meta.types);
  fill($("users-type"), ["all", ...types], () => drawLedger());
  $("users-type-label").hidden = types.length < 2;
  drawFairness(runs);
  drawUsers();
}

// Users by runs: the deviation of each user from its due.
function drawFairness(runs) {
  if (runs.length < 2) return;
  $("fairness").hidden = false;
  const of = runs.map((run) => new Map(run.users.totals.map((row) => [row.user, row.deviation])));
  const columns = [
    { head: "User", word: true, get: (name) => name, show: (name) => el("span", { class: "clip", title: name }, name) },
    ...runs.map((run, i) => ({ head: run.label, get: (name) => of[i].get(name), show: (name) => heat(of[i].get(name)), downFirst: true })),
  ];
  const rank = new Map(runs[0].users.totals.map((row, i) => [row.user, i]));
  columns[0].get = (name) => rank.get(name); // the busiest first
  sortable($("fairness-table"), columns, [...rank.keys()], { by: 0 });
}

function heat(deviation) {
  const strength = Math.min(Math.abs(deviation || 0) / 0.5, 1) * 60;
  const colour = `color-mix(in srgb, var(${deviation >= 0 ? "--c0" : "--c1"}) ${strength.toFixed(0)}%, transparent)`;
  return el("span", { class: "cell", style: { background: colour } }, signed(deviation));
}

const signed = (part) => {
  if (part === null || part === undefined) return "–";
  const size = percent(Math.abs(part), 1);
  return `${size === "0.0 %" ? "" : part > 0 ? "+" : "−"}${size}`;
};

function fill(select, names, onpick) {
  select.replaceChildren(...names.map((name, i) => el("option", { value: i }, name)));
  select.onchange = () => onpick(select.selectedIndex);
}

function drawUsers() {
  const { names } = USERS.run.users;
  fill($("users-one"), names, (i) => { USERS.user = i; drawDetail(); });
  $("users-one").selectedIndex = USERS.user = Math.min(USERS.user, names.length - 1);
  USERS.charts.forEach(forget);
  USERS.charts = [];
  drawStack();
  drawDetail();
  drawLedger();
  drawTrades();
}

const userColour = (i) => `--c${i % COLOURS}`;

// The samples are means of intervals that end at `time_s`: each step begins where the previous one ended.
function sampled(run) {
  const ends = run.users.time_s;
  return { x: [0, ...ends], step: (values) => [...values, values.length ? values[values.length - 1] : null] };
}

const SHORT_RUN = "The run was too short for samples of the ledger (one per hour).";

function drawStack() {
  const { names, gpus, time_s } = USERS.run.users, host = $("users-stack");
  $("users-key").replaceChildren(...names.map((name, i) => el("span", { title: name }, el("i", { style: { background: `var(${userColour(i)})` } }), name)));
  if (!time_s.length) return empty(host, SHORT_RUN);
  const { x, step } = sampled(USERS.run);
  const received = gpus.map((g) => step(g.received));
  let below = x.map(() => 0);
  const sums = received.map((values) => (below = below.map((b, k) => b + values[k])));
  // From the top down, so that each area covers those above it.
  const order = names.map((_, i) => i).reverse();
  const u = plot(host, {
    scales: { x: { time: false }, y: { range: [0, DATA.meta.gpus] } },
    axes: [timeAxis(), yAxis(short)],
    series: [{}, ...order.map((i) => ({ label: names[i], stroke: () => css("--card"), width: 1, fill: () => css(userColour(i)), paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } }))],
    focus: { alpha: 1 },
    plugins: [tooltip((t) => tick(t) === "0" ? "start" : duration(t), short, (u, at) => names.map((name, i) => ({ name, mark: dot(i), v: received[i][at] })))],
  }, [x, ...order.map((i) => sums[i])], "GPUs received by each user over time, stacked");
  USERS.charts.push(u);
}

const dot = (i) => svg("svg", { class: "swatch", viewBox: "0 0 18 10" }, svg("rect", { x: 4, y: 0, width: 10, height: 10, rx: 3, fill: `var(${userColour(i)})` }));

function drawDetail() {
  const { names, gpus, time_s } = USERS.run.users, host = $("users-detail");
  const old = USERS.charts[1];
  if (old) { forget(old); USERS.charts.length = 1; }
  const parts = [["received", "--c0", []], ["entitled", "--c1", [7, 4]], ["borrowed", "--c2", [2, 3]], ["lent", "--c3", [2, 3]]];
  $("detail-key").replaceChildren(...parts.map(([name, colour, dash]) => el("span", {}, swatch({ colour, dash }), name)));
  if (!time_s.length) return empty(host, SHORT_RUN);
  const { x, step } = sampled(USERS.run);
  const one = gpus[USERS.user], columns = parts.map(([name]) => step(one[name]));
  const u = plot(host, {
    scales: { x: { time: false }, y: { range: (u, lo, hi) => [0, Math.max(hi, 1) * 1.06] } },
    axes: [timeAxis(), yAxis(short)],
    series: [{}, ...parts.map(([label, colour, dash], i) => ({
      label, stroke: () => css(colour), width: i < 2 ? 2 : 1.5, dash, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
      fill: i === 0 ? () => `${css(colour)}22` : undefined,
    }))],
    plugins: [tooltip((t) => (t ? duration(t) : "start"), short, (u, at) => parts.map(([name, colour, dash], i) => ({ name, mark: swatch({ colour, dash }), v: columns[i][at] })))],
  }, [x, ...columns], `GPUs that ${names[USERS.user]} was entitled to and received over time`);
  USERS.charts.push(u);
}

function drawLedger() {
  const { totals, names } = USERS.run.users;
  $("ledger-run").textContent = RUNS.length > 1 ? ` of ${USERS.run.label}` : "";
  const types = Object.keys(DATA.meta.types), pick = $("users-type").selectedIndex;
  const of = pick > 0 ? [types[pick - 1]] : types;
  const value = (account, column) => (account ? (column === "idle" ? idle(account) : account[column]) : 0);
  const sum = (row, column) => of.reduce((s, t) => s + value(row[t], column), 0) / 3600;
  const traded = RUNS.some((r) => r.users && r.users.totals.some((row) => types.some((t) => (row[t] || {}).traded)));
  const columns = [
    { head: "User", word: true, get: (r) => r.user, show: (r) => (names.includes(r.user) ? el("button", { class: "rowpick", type: "button", title: r.user }, r.user) : el("span", { class: "clip" }, r.user)) },
    ...LEDGER.filter((c) => c !== "traded" || traded).map((c) => ({ head: c[0].toUpperCase() + c.slice(1), get: (r) => sum(r, c), show: (r) => fixed(sum(r, c), 1), downFirst: true })),
    { head: "Deviation", get: (r) => r.deviation, show: (r) => signed(r.deviation), downFirst: true },
  ];
  sortable($("ledger"), columns, totals, {
    by: 1, down: true,
    onrow: (tr, row) => {
      const i = names.indexOf(row.user);
      if (i < 0) return;
      tr.addEventListener("click", () => { USERS.user = i; $("users-one").selectedIndex = i; drawDetail(); });
    },
  });
}

function drawTrades() {
  const trades = USERS.run.trades;
  $("trades").hidden = !trades;
  if (!trades) return;
  const columns = [
    { head: "Time", get: (t) => t.time_s, show: (t) => duration(t.time_s) },
    { head: "Buyer", word: true, get: (t) => t.buyer, show: (t) => t.buyer },
    { head: "Seller", word: true, get: (t) => t.seller, show: (t) => t.seller },
    { head: "Gets", get: (t) => t.fast_gpus, show: (t) => `${short(t.fast_gpus)} ${t.fast}` },
    { head: "For", get: (t) => t.slow_gpus, show: (t) => `${short(t.slow_gpus)} ${t.slow}` },
    { head: "Price", get: (t) => t.price, show: (t) => fixed(t.price, 2) },
    { head: "Buyer's gain", get: (t) => t.buyer_gain, show: (t) => short(t.buyer_gain) },
    { head: "Seller's gain", get: (t) => t.seller_gain, show: (t) => short(t.seller_gain) },
  ];
  sortable($("trade-table"), columns, trades.items, { by: 0, down: true });
  const some = trades.items.length < trades.count ? `The last ${count(trades.items.length)} of ${count(trades.count)} trades. ` : "";
  $("trade-caption").textContent = `${some}The price of a fast GPU is in slow GPUs, set by the second-highest speed-up. Gains are in GPUs of the slow type.`;
}
