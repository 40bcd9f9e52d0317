// The table of workers. A row belongs to a URL: a worker that was killed keeps its row until it is back.

import { $, cell, empty, filledAgain, h, navigable, put, rows, set, show } from "./dom.js";
import { bandwidth, count, known, rate } from "./format.js";

const body = $("workers-rows");
navigable(body);

/** What the router calls "connecting" is, of a worker that was there before, a loss. */
const stateOf = (worker) => (worker.state === "connecting" && worker.id ? "lost" : worker.state ?? "not known");

function make() {
  const value = () => h("span", { class: "value" });
  const row = h("tr", { role: "row", tabindex: -1 });
  const part = {
    name: h("strong"), role: h("span", { class: "role" }), device: h("span", { class: "muted small" }),
    state: h("span", { class: "state" }), problem: h("span", { class: "problem" }),
    waiting: value(), prefill: value(), batch: value(), leaving: value(), arriving: value(),
    bar: ["used", "cached", "free"].map((kind) => h("i", { class: kind })),
    pages: ["used", "cached", "free"].map((kind) => h("span", { class: `value ${kind}` })),
    prefillRate: value(), decodeRate: value(), perStep: value(), transfer: h("span"),
  };
  row.parts = part;
  row.append(
    h("th", { scope: "row", role: "rowheader" }, part.name, " ", part.role, part.device),
    cell("State", "", part.state, part.problem),
    cell("Waiting", "n", part.waiting), cell("Prefill", "n", part.prefill), cell("Batch", "n", part.batch),
    cell("Leaving", "n", part.leaving), cell("Arriving", "n", part.arriving),
    cell("KV pages", "pages", h("span", { class: "bar", "aria-hidden": "true" }, ...part.bar), h("span", { class: "counts" }, ...part.pages)),
    cell("Prefill tok/s", "n", part.prefillRate), cell("Decode tok/s", "n", part.decodeRate),
    cell("Tok/step", "n", part.perStep), cell("KV out", "n", part.transfer),
  );
  return row;
}

function fill(row, worker) {
  const { parts } = row;
  const figures = worker.figures ?? {};
  const state = stateOf(worker);
  put(parts.name, worker.name);
  put(parts.role, worker.role);
  set(parts.role, "data-role", worker.role);
  put(parts.device, [(worker.devices ?? []).join(", "), worker.host, worker.pid ? `pid ${worker.pid}` : ""].filter(Boolean).join(" · "));
  put(parts.state, state);
  set(parts.state, "data-state", state);
  const problems = [worker.problem, ...(worker.problems ?? []), worker.figures || state === "lost" ? "" : worker.figures_problem];
  put(parts.problem, problems.filter(Boolean).join("; "));
  set(row, "data-state", state);
  set(row, "aria-label", `${worker.name}, ${worker.role}, ${state}`);
  show(parts.waiting, figures.waiting, count);
  show(parts.prefill, figures.prefilling, count);
  show(parts.batch, figures.decoding, count);
  show(parts.leaving, figures.leaving, count);
  show(parts.arriving, figures.arriving, count);
  const kinds = ["used", "cached", "free"];
  const all = kinds.reduce((sum, kind) => sum + (figures.pages?.[kind]?.value ?? 0), 0);
  kinds.forEach((kind, at) => {
    const figure = figures.pages?.[kind];
    show(parts.pages[at], figure, count);
    parts.bar[at].style.width = all && known(figure?.value) ? `${(100 * figure.value) / all}%` : "0";
  });
  show(parts.prefillRate, figures.prefill_per_s, rate);
  show(parts.decodeRate, figures.decode_per_s, rate);
  show(parts.perStep, figures.tokens_per_step, rate);
  const ways = Object.entries(figures.transfer ?? {});
  if (parts.transfer.children.length !== Math.max(ways.length, 1)) parts.transfer.replaceChildren(...(ways.length ? ways : [null]).map(() => h("span", { class: "value way" }, "–")));
  ways.forEach(([transport, figure], at) => {
    show(parts.transfer.children[at], figure, bandwidth);
    set(parts.transfer.children[at], "data-transport", transport);
  });
  if (!worker.figures) clear(row);
}

/** Old figures of a worker that is away would be lies. */
function clear(row) {
  for (const item of row.querySelectorAll(".value")) {
    put(item, "–");
    for (const key of ["metric", "labels", "worker", "value", "quantile", "since", "per"]) delete item.dataset[key];
  }
}

function update(state) {
  const found = state.workers;
  const live = found.filter((worker) => worker.state === "live").length;
  put($("workers-note"), found.length ? `${live} of ${found.length} live` : "");
  if (!found.length) return empty(body, 12, "No worker has joined yet. Start one with: slipstream worker MODEL --join URL");
  filledAgain(body);
  rows(body, found, (worker) => worker.url, make, fill);
}

export const workers = { update };
