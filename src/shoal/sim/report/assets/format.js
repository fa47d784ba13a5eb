"use strict";
// Numbers for people, and elements without markup: names come from traces and only ever become text.

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

function duration(s) {
  if (s === null || s === undefined || !isFinite(s)) return "–";
  if (s < 0.0005) return "0 s";
  if (s < 1) return `${+(s * 1000).toPrecision(2)} ms`;
  if (s < 60) return `${s < 10 ? +s.toFixed(1) : Math.round(s)} s`;
  let rest = s;
  for (let i = 0; i < UNITS.length - 1; i++) {
    const [unit, size] = UNITS[i], [small, part] = UNITS[i + 1];
    if (rest >= size) {
      // Rounded to the smaller unit first, so that 1 h 59 m 40 s is 2 h and not 1 h 60 m.
      rest = Math.round(s / part) * part;
      const big = Math.floor(rest / size), more = Math.round((rest % size) / part);
      if (big * size >= (UNITS[i - 1] || [0, Infinity])[1]) return duration(rest);
      return more ? `${big}${unit} ${more}${small}` : `${big} ${unit}`;
    }
  }
  return `${Math.round(rest)} s`;
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
const percent = (part, digits = 0) => (part === null || part === undefined ? "–" : `${(100 * part).toFixed(digits)} %`);
const fixed = (v, digits = 1) => (v === null || v === undefined ? "–" : Number(v).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−"));
const short = (v) => (v === null || v === undefined ? "–" : v >= 100 ? count(v) : `${+Number(v).toFixed(v >= 10 ? 1 : 2)}`);
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const COSTS = { none: "no cost", restart: "stop and restart", concurrent: "concurrent" };

// A colour for each policy, a dash for each variant of it (cost model, what it knows): runs differ by one even
// where the other is the same. The variants of a single policy differ by both.
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
  // How far a run came that was cut short: it stands wherever the run is named.
  run.mark = run.figures.interrupted ? ` (to ${duration(run.figures.makespan_s)})` : "";
  run.label += run.mark;
});

// What was cut short is shown and not compared.
const ENDED = RUNS.filter((run) => !run.figures.interrupted);

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function swatch(run) {
  return svg("svg", { class: "swatch", viewBox: "0 0 18 10", "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 18, y1: 5, y2: 5, stroke: `var(${run.colour})`, "stroke-dasharray": run.dash.join(" ") }));
}
