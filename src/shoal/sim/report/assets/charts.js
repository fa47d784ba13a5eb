// Charts of all runs: lines by uPlot, strips as small multiples. One legend shows, hides and highlights runs.

const VIEW = { hidden: new Set(), focus: null };
const CHARTS = [];
const LANES = [];
const REDRAWS = [];

const shown = () => RUNS.filter((r) => !VIEW.hidden.has(r.i));

function axis(values, more) {
  return {
    stroke: () => css("--soft"), font: "12px system-ui, sans-serif", values, size: 28, gap: 6,
    grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false }, ...more,
  };
}
// As wide as the longest label, in letters of 12px.
const wide = (u, labels) => Math.max(54, 14 + 7 * Math.max(0, ...(labels || []).map((label) => label.length)));
const yAxis = (values, more) => axis((u, splits) => splits.map((v) => (v === null ? "" : values(v))), { size: wide, ...more });
const timeAxis = (more) => axis((u, splits) => splits.map(tick), { incrs: STEPS_S, space: 70, ...more });

function tooltip(title, value, list) {
  let tip;
  return {
    hooks: {
      init: (u) => { tip = el("div", { class: "tip" }); u.over.append(tip); u.over.addEventListener("mouseleave", () => { tip.style.display = "none"; }); },
      setCursor: (u) => {
        const at = u.cursor.idx, left = u.cursor.left;
        if (at === null || at === undefined || left < 0) { tip.style.display = "none"; return; }
        const rows = list(u, at).filter((r) => r.v !== null && r.v !== undefined);
        if (!rows.length) { tip.style.display = "none"; return; }
        tip.replaceChildren(el("b", {}, title(u.data[0][at])),
          ...rows.map((r) => el("div", {}, el("span", {}, r.mark, r.name), el("span", {}, value(r.v)))));
        tip.style.display = "block";
        const flip = left > u.over.clientWidth / 2;
        tip.style.left = flip ? "" : `${left + 14}px`;
        tip.style.right = flip ? `${u.over.clientWidth - left + 14}px` : "";
        tip.style.top = `${Math.max(4, Math.min(u.cursor.top - 20, u.over.clientHeight - tip.offsetHeight - 4))}px`;
      },
    },
  };
}

function plot(host, opts, data, label) {
  host.replaceChildren();
  host.setAttribute("role", "img");
  host.setAttribute("aria-label", label);
  const size = () => ({ width: Math.max(host.clientWidth, 200), height: opts.height || 250 });
  const u = new uPlot({
    ...size(), legend: { show: false }, focus: { alpha: 0.18 },
    cursor: { focus: { prox: 14 }, points: { size: 6 }, drag: { x: true, y: false, uni: 20 } },
    padding: [10, 12, 0, 0], ...opts, height: size().height,
  }, data, host);
  const watch = new ResizeObserver(() => { if (Math.abs(host.clientWidth - u.width) > 1) u.setSize(size()); });
  watch.observe(host);
  u.forget = () => { watch.disconnect(); u.destroy(); };
  REDRAWS.push(u);
  return u;
}

function forget(u) {
  if (!u) return;
  REDRAWS.splice(REDRAWS.indexOf(u), 1);
  u.forget();
}

function empty(host, words) {
  host.replaceChildren(el("div", { class: "empty" }, words));
}

// Lines of all runs over a common x, and the band (smallest to largest value) of the highlighted run.
function runChart(host, { x, ys, bands, xAxis, xScale, value, title, label, runs = RUNS, yRange, yTicks }) {
  const only = () => {
    if (VIEW.focus !== null) return VIEW.focus;
    const visible = runs.filter((r) => !VIEW.hidden.has(r.i));
    return visible.length === 1 ? visible[0].i : null;
  };
  const band = (u) => {
    const at = runs.findIndex((r) => r.i === only());
    if (!bands || at < 0 || VIEW.hidden.has(runs[at].i)) return;
    const { low, high } = bands[at];
    const path = new Path2D();
    const point = (i, v, first) => path[first ? "moveTo" : "lineTo"](u.valToPos(x[i], "x", true), u.valToPos(v, "y", true));
    for (let i = 0; i < high.length; i++) point(i, high[i], i === 0);
    for (let i = low.length - 1; i >= 0; i--) point(i, low[i], false);
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    u.ctx.clip();
    u.ctx.globalAlpha = 0.22;
    u.ctx.fillStyle = css(runs[at].colour);
    u.ctx.fill(path);
    u.ctx.restore();
  };
  // With bands the axis must include the extremes of every run that may be highlighted.
  const top = bands ? Math.max(1, ...bands.map((b) => Math.max(0, ...b.high))) : null;
  const u = plot(host, {
    scales: { x: { time: false, ...xScale }, y: { range: yRange || ((u, lo, hi) => [0, (only() !== null && top ? top : Math.max(hi, 1)) * 1.06]) } },
    axes: [xAxis || timeAxis(), yAxis(yTicks || value)],
    series: [{}, ...runs.map((run) => ({
      label: run.label, stroke: () => css(run.colour), width: 2, dash: run.dash, spanGaps: true, points: { show: false },
      show: !VIEW.hidden.has(run.i),
    }))],
    hooks: { drawAxes: [band] },
    plugins: [tooltip(title, value, (u, at) => runs.map((run, i) => ({ name: run.label, mark: swatch(run), v: u.series[i + 1].show ? u.data[i + 1][at] : null })).sort((a, b) => (b.v ?? -1) - (a.v ?? -1)))],
  }, [x, ...ys], label);
  CHARTS.push({ u, runs });
  return u;
}

// One strip per row: `points` [[x, y], ...] or `area` paths, scaled to the height.
function lanes(host, { rows, end, top, note, label }) {
  const W = 1000, H = 100;
  host.style.setProperty("--lane", rows.length > 10 ? "26px" : "38px");
  const letters = Math.max(...rows.map((r) => r.run.label.length));
  if (host.clientWidth > 800) host.style.setProperty("--label", `${Math.min(40 + 8 * letters, 260)}px`);
  const X = (t) => +((t / end) * W).toFixed(2), Y = (v) => +(H - (v / top) * (H - 4)).toFixed(2);
  const made = rows.map((row) => {
    const em = el("em", {}, row.note);
    const hair = el("i", { class: "hair" });
    const strip = el("div", { class: "strip", role: "img", "aria-label": `${row.run.label}: ${label}. ${row.note}` },
      svg("svg", { class: "area", viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", "aria-hidden": "true" },
        ...(row.band ? [svg("path", { d: closed(row.band, X, Y), fill: `var(${row.run.colour})`, opacity: 0.28 })] : []),
        svg("path", { d: stepped(row.points, X, Y, H), fill: `var(${row.run.colour})`, opacity: 0.85 })), hair);
    const lane = el("div", { class: "lane" }, el("span", { title: row.run.label }, swatch(row.run), row.run.label), strip, em);
    return { lane, strip, hair, em, row };
  });
  const ticks = el("div", { class: "ticks", "aria-hidden": "true" });
  const marks = ticksUpTo(end, host.clientWidth < 700 ? 4 : 9);
  ticks.append(...marks.map((t) => el("span", { style: { left: `${(100 * t) / end}%` } }, tick(t))));
  host.replaceChildren(...made.map((m) => m.lane), ticks);
  host.onmousemove = (event) => {
    const box = made.length && made[0].strip.getBoundingClientRect();
    if (!box) return;
    const part = (event.clientX - box.left) / box.width;
    if (part < 0 || part > 1) { host.onmouseleave(); return; }
    for (const m of made) {
      m.hair.style.display = "block";
      m.hair.style.left = `${100 * part}%`;
      m.em.textContent = note(m.row, part * end);
    }
  };
  host.onmouseleave = () => { for (const m of made) { m.hair.style.display = "none"; m.em.textContent = m.row.note; } };
  const entry = { host, made };
  const old = LANES.findIndex((l) => l.host === host);
  if (old >= 0) LANES[old] = entry; else LANES.push(entry);
  applyLanes(entry);
}

function stepped(points, X, Y, H) {
  let d = "", last = null;
  for (const [t, v] of points) {
    if (last === null) d += `M${X(t)} ${H}`;
    else d += `H${X(t)}`;
    d += `V${v > 0 ? Y(v) : H}`;
    last = t;
  }
  return last === null ? "" : `${d}V${H}Z`;
}

function closed(band, X, Y) {
  const up = band.map(([t, , high]) => `${X(t)} ${Y(high)}`), down = band.map(([t, low]) => `${X(t)} ${Y(low)}`).reverse();
  return up.length ? `M${up.join("L")}L${down.join("L")}Z` : "";
}

// The value that holds at a time, in [[x, y], ...].
function valueAt(points, t) {
  let low = 0, high = points.length;
  while (low < high) { const mid = (low + high) >> 1; if (points[mid][0] <= t) low = mid + 1; else high = mid; }
  return low ? points[low - 1][1] : 0;
}

// Linear between points given by two columns; null outside.
function interpolate(xs, ys, t, after) {
  if (!xs.length || t < xs[0]) return 0;
  if (t >= xs[xs.length - 1]) return t > xs[xs.length - 1] ? after : ys[ys.length - 1];
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] <= t) low = mid; else high = mid; }
  const span = xs[high] - xs[low];
  return span > 0 ? ys[low] + ((ys[high] - ys[low]) * (t - xs[low])) / span : ys[high];
}

function applyLanes({ made }) {
  for (const m of made) {
    m.lane.hidden = VIEW.hidden.has(m.row.run.i);
    m.lane.classList.toggle("dim", VIEW.focus !== null && VIEW.focus !== m.row.run.i);
  }
}

function applyView() {
  for (const { u, runs } of CHARTS) {
    u.batch(() => {
      runs.forEach((run, i) => {
        const show = !VIEW.hidden.has(run.i);
        if (u.series[i + 1].show !== show) u.setSeries(i + 1, { show });
      });
    });
    const at = runs.findIndex((r) => r.i === VIEW.focus);
    u.setSeries(at < 0 ? null : at + 1, { focus: at >= 0 });
    u.redraw(true, true);
  }
  LANES.forEach(applyLanes);
}

function legend() {
  const host = $("legend");
  const chips = RUNS.map((run) => {
    const focus = (on) => { VIEW.focus = on && !VIEW.hidden.has(run.i) ? run.i : null; applyView(); };
    return el("button", {
      class: "chip", type: "button", "aria-pressed": "true", title: "Click to hide or show",
      onmouseenter: () => focus(true), onmouseleave: () => focus(false),
      onclick: () => { if (!VIEW.hidden.delete(run.i)) VIEW.hidden.add(run.i); sync(); focus(true); },
    }, swatch(run), run.label);
  });
  const all = el("button", { class: "chip quiet", type: "button", onclick: () => { const none = VIEW.hidden.size === 0; VIEW.hidden = new Set(none ? RUNS.map((r) => r.i) : []); sync(); applyView(); } }, "Hide all");
  const sync = () => {
    chips.forEach((chip, i) => chip.setAttribute("aria-pressed", String(!VIEW.hidden.has(i))));
    all.textContent = VIEW.hidden.size ? "Show all" : "Hide all";
  };
  host.replaceChildren(...chips, ...(RUNS.length > 1 ? [all] : []));
}
