// Percentiles over time: three small charts, readable with pointer and arrow keys.

import { $, h, put, s, set, show } from "./dom.js";
import { clock, count, known, seconds } from "./format.js";

const HEIGHT = 132;
const EDGE = { left: 50, right: 8, top: 8, bottom: 20 };
const SHORTEST_S = 120;
const KEPT_S = 900;
let points = [];

const kinds = [["ttft", "Time to first token"], ["itl", "Between tokens"], ["e2e", "Whole request"]];
const parts = Object.fromEntries(kinds.map(([key, title]) => [key, make(key, title)]));
$("charts").append(...kinds.map(([key]) => parts[key].root));

function make(key, title) {
  const part = { key, title, at: null };
  part.svg = s("svg", { class: "chart", height: HEIGHT, "aria-hidden": "true" });
  part.figures = Object.fromEntries(["p50", "p90", "p99", "count"].map((name) => [name, h("dd", { class: "value" })]));
  part.read = h("output", { class: "muted small" });
  part.frame = h("div", { class: "plot", tabindex: 0, role: "img" }, part.svg);
  part.root = h("figure", {}, h("figcaption", {}, h("h3", {}, title), part.read), part.frame,
    h("dl", {}, ...["p50", "p90", "p99", "count"].flatMap((name) => [h("dt", { class: name }, name === "count" ? "seen" : name), part.figures[name]])));
  part.frame.addEventListener("pointermove", (event) => point(part, event.offsetX));
  part.frame.addEventListener("pointerleave", () => point(part, null));
  part.frame.addEventListener("blur", () => point(part, null));
  part.frame.addEventListener("keydown", (event) => {
    const from = part.at ?? points.length;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: points.length - 1 }[event.key];
    if (to === undefined || !points.length) return;
    part.at = Math.min(Math.max(to, 0), points.length - 1);
    draw(part);
    event.preventDefault();
  });
  new ResizeObserver(() => draw(part)).observe(part.frame);
  return part;
}

function point(part, x) {
  part.at = x === null || !part.scale ? null : nearest(part.scale.time(x));
  draw(part);
}

function nearest(time) {
  let best = null;
  points.forEach((item, at) => {
    if (best === null || Math.abs(item.t - time) < Math.abs(points[best].t - time)) best = at;
  });
  return best;
}

/** The next round number. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value) * power;
}

function scaleOf(part) {
  const width = part.frame.clientWidth;
  const end = points.at(-1)?.t ?? 0;
  const start = Math.min(points[0]?.t ?? 0, end - SHORTEST_S);
  const seen = points.flatMap((item) => [item[`${part.key}_p50`], item[`${part.key}_p99`]]).filter(known);
  const top = seen.length ? nice(Math.max(...seen, 1e-4)) : 1;
  const wide = Math.max(width - EDGE.left - EDGE.right, 10);
  const high = HEIGHT - EDGE.top - EDGE.bottom;
  return {
    width, start, end, top, empty: !seen.length,
    x: (time) => EDGE.left + (wide * (time - start)) / (end - start || 1),
    y: (value) => EDGE.top + high * (1 - value / top),
    time: (x) => start + ((x - EDGE.left) / wide) * (end - start),
  };
}

/** A path that is broken where there is no number. */
function path(scale, name) {
  let pen = "M";
  return points.map((item) => {
    const value = item[name];
    if (!known(value)) {
      pen = "M";
      return "";
    }
    const step = `${pen}${scale.x(item.t).toFixed(1)} ${scale.y(value).toFixed(1)}`;
    pen = "L";
    return step;
  }).join("");
}

function draw(part) {
  const scale = scaleOf(part);
  part.scale = scale;
  if (scale.width < 20) return;
  set(part.svg, "width", scale.width);
  const marks = [];
  for (const share of [0, 0.5, 1]) {
    const y = scale.y(scale.top * share);
    marks.push(s("path", { class: "rule", d: `M${EDGE.left} ${y}H${scale.width - EDGE.right}` }));
    if (!scale.empty) marks.push(s("text", { class: "axis", x: EDGE.left - 6, y: y + 4, "text-anchor": "end" }, seconds(scale.top * share)));
  }
  const span = scale.end - scale.start;
  const words = span > 180 ? `${Math.round(span / 60)} min ago` : `${Math.round(span)} s ago`;
  marks.push(s("text", { class: "axis", x: EDGE.left, y: HEIGHT - 5 }, words));
  marks.push(s("text", { class: "axis", x: scale.width - EDGE.right, y: HEIGHT - 5, "text-anchor": "end" }, "now"));
  marks.push(s("path", { class: "p99", d: path(scale, `${part.key}_p99`) }), s("path", { class: "p50", d: path(scale, `${part.key}_p50`) }));
  if (scale.empty) marks.push(s("text", { class: "axis", x: scale.width / 2, y: HEIGHT / 2 - 4, "text-anchor": "middle" }, "no request in the last minutes"));
  marks.push(...cursor(part, scale));
  part.svg.replaceChildren(...marks);
  read(part);
}

function cursor(part, scale) {
  const item = part.at === null ? null : points[part.at];
  if (!item) return [];
  const x = scale.x(item.t);
  const dots = ["p50", "p99"].filter((name) => known(item[`${part.key}_${name}`]))
    .map((name) => s("circle", { class: name, cx: x, cy: scale.y(item[`${part.key}_${name}`]), r: 3.5 }));
  return [s("path", { class: "cursor", d: `M${x} ${EDGE.top}V${HEIGHT - EDGE.bottom}` }), ...dots];
}

function read(part) {
  const item = points[part.at ?? points.length - 1];
  const pair = item ? `p50 ${seconds(item[`${part.key}_p50`])}, p99 ${seconds(item[`${part.key}_p99`])}` : "";
  put(part.read, item ? (part.at === null ? `now ${pair}` : `${clock(item.t)} ${pair}`) : "");
  set(part.frame, "aria-label", `${part.title}: ${pair || "nothing yet"}. Arrow keys go along the time.`);
}

function update(state) {
  const last = points.at(-1)?.t ?? 0;
  const fresh = state.history.points.filter((item) => item.t > last);
  if (fresh.length) {
    points.push(...fresh);
    const oldest = points.at(-1).t - KEPT_S;
    points = points.filter((item) => item.t >= oldest);
  }
  for (const [key] of kinds) {
    const part = parts[key];
    for (const name of ["p50", "p90", "p99"]) show(part.figures[name], state.latency[key][name], seconds);
    show(part.figures.count, state.latency[key].count, count);
    if (fresh.length) draw(part);
  }
}

export const charts = { update, reset: () => { points = []; } };
