// Whether a request would be answered now, and what doctor found.

import { $, h, put, set } from "./dom.js";
import { clock } from "./format.js";
import * as server from "./server.js";

const button = $("doctor-again");
// while doctor runs the button stays where the focus is, and does nothing
const rest = (running) => set(button, "aria-disabled", running ? "true" : null);
button.addEventListener("click", async () => {
  if (button.hasAttribute("aria-disabled")) return;
  rest(true);
  try {
    await server.doctor();
  } catch (error) {
    put($("doctor-note"), `doctor could not be started: ${error.message}`);
    rest(false);
  }
});

function finding(kind, title, lines) {
  return h("li", { "data-kind": kind }, h("div", {}, h("strong", {}, title), ...lines.filter(([, words]) => words).map(([label, words]) =>
    h("p", {}, label ? h("span", { class: "muted" }, `${label} `) : null, words))));
}

function again(list, items) {
  const key = JSON.stringify(items);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...items.map((item) => finding(...item)));
}

function note(doctor) {
  if (doctor.running) return "doctor is looking ...";
  if (doctor.state === "failed") return doctor.problem;
  if (doctor.state !== "done") return "doctor has not looked yet";
  const counts = Object.entries(doctor.counts).map(([status, count]) => `${count} ${status}`);
  return `doctor at ${clock(doctor.time)}: ${counts.join(", ")}`;
}

function update(state) {
  const { health, doctor } = state;
  again($("reasons"), health.ready ? [["ok", "A request sent now would be answered.", []]] : health.reasons.map((reason) => ["fail", reason, []]));
  put($("doctor-note"), note(doctor));
  rest(doctor.running);
  const results = doctor.results ?? [];
  const good = doctor.state === "done" && !results.length ? [["ok", "Doctor has nothing to report.", []]] : [];
  again($("findings"), [...good, ...results.map((r) => [r.status, r.title, [["seen", r.seen], ["wanted", r.wanted], ["why", r.why], ["do", r.remedy], ["because of", (r.because ?? []).join(", ")]]])]);
}

export const health = { update };
