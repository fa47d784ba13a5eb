"use strict";
// Formatting of numbers, and DOM elements. Names come from traces, so they are inserted as text, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const $ = (id) => document.getElementById(id);

function el(tag, attrs, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

function svg(tag, attrs, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attrs || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const UNITS = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];

// Round like the terminal: by the exact value (7.55 is slightly less and becomes 7.5), ties to the even digit.
function rounded(v, digits) {
  const away = v.toFixed(digits), exact = v.toFixed(digits + 25);
  const odd = exact.endsWith(`5${"0".repeat(24)}`) && "13579".includes(away[away.length - 1]);
  return odd ? exact.slice(0, digits ? -25 : -26) : away;
}

// 3h 25m, 2d 4h, 42s: two units at most, as in the terminal.
function duration(s) {
  if (s === null || s === undefined || !isFinite(s)) return "–";
  for (let i = 0; i < UNITS.length - 1; i++) {
    const [unit, size] = UNITS[i], [small, part] = UNITS[i + 1];
    const whole = Math.floor(s / part + 0.5) * part; // round first, so that 59.7 s become a minute
    if (whole >= size) return `${Math.floor(whole / size)}${unit} ${(whole % size) / part}${small}`;
  }
  return `${rounded(Math.max(s, 0), s < 9.95 ? 1 : 0)}s`;
}

const STEPS_S = [
  0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
  86400, 172800, 345600, 604800, 1209600, 2419200, 4838400, 8640000, 17280000, 34560000, 86400000,
];

// A mark on an axis of time.
function tick(s) {
  if (s === 0) return "0";
  for (const [unit, size] of UNITS) if (s >= size) return Math.abs(s / size - Math.round(s / size)) < 1e-6 ? `${Math.round(s / size)} ${unit}` : duration(s);
  return s < 1 ? `${+s.toFixed(2)} s` : duration(s);
}

function ticksUpTo(end, most) {
  const step = STEPS_S.find((v) => end / v <= most) || end / most;
  const out = [];
  for (let t = 0; t <= end * 1.0001; t += step) out.push(t);
  return out;
}

const count = (n) => (n === null || n === undefined ? "–" : Number(n).toLocaleString("en", { maximumFractionDigits: 0 }));
const percent = (part, digits = 0) => (part === null || part === undefined ? "–" : `${rounded(100 * part, digits)} %`);
const grouped = (text) => text.replace(/^(-?)(\d+)/, (_, sign, whole) => (sign ? "−" : "") + whole.replace(/\B(?=(\d{3})+$)/g, ","));
const fixed = (v, digits = 1) => (v === null || v === undefined ? "–" : grouped(rounded(Number(v), digits)));
const short = (v) => (v === null || v === undefined ? "–" : v >= 100 ? count(v) : `${+Number(v).toFixed(v >= 10 ? 1 : 2)}`);
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const COSTS = { none: "no cost", restart: "stop and restart", concurrent: "concurrent" };

// A colour for each policy, and a dash pattern for each variant (cost model, knowledge). The variants of a single
// policy differ in both.
const POLICIES = [...new Set(RUNS.map((r) => r.policy))];
const KINDS = [...new Set(RUNS.map((r) => r.costs))];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const COLOURS = 10;
const variant = (run) => (run.label.startsWith(run.policy) ? run.label.slice(run.policy.length) : run.label);
const VARIANTS = [...new Set(RUNS.map(variant))];
RUNS.forEach((run, i) => {
  const p = POLICIES.indexOf(run.policy), v = VARIANTS.indexOf(variant(run));
  run.i = i;
  run.colour = `--c${(POLICIES.length === 1 ? v : p) % COLOURS}`;
  run.dash = DASHES[(v + Math.floor(p / COLOURS)) % DASHES.length];
  // The simulated time of an interrupted run, shown wherever the run is named.
  run.mark = run.figures.interrupted ? ` (to ${duration(run.figures.makespan_s)})` : "";
  run.label += run.mark;
});

// Interrupted runs are shown but not ranked.
const ENDED = RUNS.filter((run) => !run.figures.interrupted);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function swatch(run) {
  return svg("svg", { class: "swatch", viewBox: "0 0 18 10", "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 18, y1: 5, y2: 5, stroke: `var(${run.colour})`, "stroke-dasharray": run.dash.join(" ") }));
}
