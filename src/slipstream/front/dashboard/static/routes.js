// The measured ways of KV, each with the reasons against the others.

import { $, cell, empty, filledAgain, h, navigable, put, rows, set, show } from "./dom.js";
import { bandwidth, seconds } from "./format.js";

const body = $("routes-rows");
const MOST = 400;
navigable(body);

function make() {
  const parts = { source: h("strong"), peer: h("strong"), by: h("span", { class: "transport" }), rate: h("span", { class: "value" }), latency: h("span", { class: "value" }), why: h("span", { class: "why" }) };
  const row = h("tr", { role: "row", tabindex: -1 }, h("th", { scope: "row", role: "rowheader" }, parts.source), cell("To", "", parts.peer), cell("By", "", parts.by),
    cell("Measured", "n", parts.rate), cell("Latency", "n", parts.latency), cell("Why not another way", "wide", parts.why));
  row.parts = parts;
  return row;
}

function fill(row, route) {
  const { parts } = row;
  put(parts.source, route.source);
  put(parts.peer, `${route.peer}${route.ranks ? ` (${route.ranks})` : ""}`);
  put(parts.by, route.error ? "no way" : route.transport);
  set(parts.by, "data-state", route.error ? "bad" : null);
  show(parts.rate, route.rate, bandwidth);
  show(parts.latency, route.latency, seconds);
  const reasons = Object.entries(route.rejected ?? {});
  const words = route.error || reasons.map(([name, why]) => `${name}: ${why}`).join("\n");
  if (parts.why.dataset.words === words) return;
  parts.why.dataset.words = words;
  parts.why.replaceChildren(...(route.error ? [route.error] : reasons.map(([name, why]) => h("span", {}, h("b", {}, name), ` ${why.replace(/^here: /, "")}`))));
}

function update(state) {
  const found = state.routes.slice(0, MOST);
  put($("routes-note"), found.length < state.routes.length ? `the first ${MOST} of ${state.routes.length}` : found.length ? `${found.length} measured` : "");
  if (!found.length) return empty(body, 6, "No way has been measured yet: that takes a prefill and a decode worker.");
  filledAgain(body);
  rows(body, found, (route) => `${route.source}\u0000${route.peer}\u0000${route.ranks}\u0000${route.transport}`, make, fill);
}

export const routes = { update };
