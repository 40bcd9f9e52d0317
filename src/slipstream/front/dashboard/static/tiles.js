// The row of figures on top.

import { $, h, put, s, show } from "./dom.js";
import { count, known, rate, seconds } from "./format.js";

const KEPT = 90;
let line = [];

function tile(label, ...figures) {
  const values = figures.map(([unit, kind]) => {
    const value = h("span", { class: `value ${kind ?? ""}` });
    return { value, part: h("span", { class: "part" }, value, unit ? h("span", { class: "unit" }, unit) : null) };
  });
  return { root: h("div", { class: "tile" }, h("h3", {}, label), h("p", {}, ...values.map((v) => v.part))), values: values.map((v) => v.value) };
}

const tokens = tile("Generating", ["tok/s", "big"]);
const spark = s("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, s("path", { class: "area" }), s("path", { class: "line" }));
tokens.root.append(spark);
const flow = tile("Requests", ["/s", "big"], ["in flight"], ["waiting"]);
const ttft = tile("First token, since start", ["p50", "big"], ["p99"]);
const itl = tile("Between tokens, since start", ["p50", "big"], ["p99"]);
const answered = tile("Answers, since start", ["ok", "big"], ["otherwise"]);
const total = tile("Tokens of answers", ["made", "big"], ["prompt"], ["cached"]);
$("tiles").append(...[tokens, flow, ttft, itl, answered, total].map((t) => t.root));
const otherwise = answered.values[1];

function update(state) {
  const { totals, latency } = state;
  show(tokens.values[0], totals.tokens_per_s, rate);
  show(flow.values[0], totals.requests_per_s, rate);
  show(flow.values[1], totals.in_flight, count);
  show(flow.values[2], totals.waiting, count);
  show(ttft.values[0], latency.ttft.p50, seconds);
  show(ttft.values[1], latency.ttft.p99, seconds);
  show(itl.values[0], latency.itl.p50, seconds);
  show(itl.values[1], latency.itl.p99, seconds);
  show(answered.values[0], totals.outcomes.ok ?? { value: 0, metric: "" }, count);
  const others = Object.entries(totals.outcomes).filter(([outcome]) => outcome !== "ok");
  const sum = others.reduce((all, [, figure]) => all + (figure.value ?? 0), 0);
  put(otherwise, count(sum));
  otherwise.title = others.map(([outcome, figure]) => `${outcome}: ${count(figure.value)}`).join(", ") || "no request ended otherwise";
  otherwise.dataset.sumOf = JSON.stringify(others.map(([outcome]) => outcome));
  show(total.values[0], totals.generated_tokens, count);
  show(total.values[1], totals.prompt_tokens, count);
  show(total.values[2], totals.cached_tokens, count);
  line = [...line, ...state.history.points.map((point) => point.tokens)].slice(-KEPT);
  draw();
}

function draw() {
  const most = Math.max(1, ...line.filter(known));
  const path = line.map((value, at) => `${at ? "L" : "M"}${((at + KEPT - line.length) / (KEPT - 1)) * 100} ${23 - (known(value) ? value / most : 0) * 20}`).join(" ");
  spark.children[1].setAttribute("d", path);
  spark.children[0].setAttribute("d", line.length > 1 ? `${path} L100 24 L${((KEPT - line.length) / (KEPT - 1)) * 100} 24 Z` : "");
}

export const tiles = { update, reset: () => { line = []; } };
