// The last requests, and the timeline of the one that is open.

import { $, cell, empty, filledAgain, h, navigable, put, rows, set } from "./dom.js";
import { clock, count, seconds } from "./format.js";
import * as server from "./server.js";
import { timelineOf } from "./timeline.js";

const EVERY_MS = 2000;
const PATIENT_MS = 15000; // when the server keeps no timelines
const body = $("requests-rows");
const room = $("timeline");
let open = "";
let opener = null;

navigable(body, (row) => row?.dataset.key && row.parts && choose(row));

function make() {
  const names = ["began", "id", "state", "workers", "prompt", "cached", "output", "ttft", "total"];
  const parts = Object.fromEntries(names.map((name) => [name, h("span", { class: name === "state" ? "state" : null })]));
  const row = h("tr", { role: "row", tabindex: -1, class: "opens" }, cell("Began", "", parts.began), h("th", { scope: "row", role: "rowheader", "data-label": "Request" }, parts.id),
    cell("State", "", parts.state), cell("Workers", "", parts.workers), cell("Prompt", "n", parts.prompt), cell("Cached", "n", parts.cached),
    cell("Output", "n", parts.output), cell("TTFT", "n", parts.ttft), cell("Total", "n", parts.total));
  row.parts = parts;
  return row;
}

function fill(row, request) {
  const { parts } = row;
  const state = request.state ?? "not known";
  put(parts.began, clock(request.created));
  put(parts.id, shortened(request.id));
  parts.id.title = request.id ?? "";
  put(parts.state, state === "finished" && request.finish_reason ? request.finish_reason : request.error?.code ?? state);
  set(parts.state, "data-state", { finished: "ok", running: "live", failed: "bad", cancelled: "gone" }[state] ?? state);
  put(parts.workers, [request.prefill_worker, request.decode_worker].filter(Boolean).filter((name, at, all) => all.indexOf(name) === at).join(" → ") || "–");
  put(parts.prompt, count(request.prompt_tokens));
  put(parts.cached, count(request.cached_tokens));
  put(parts.output, count(request.output_tokens));
  put(parts.ttft, seconds(request.ttft_s));
  put(parts.total, seconds(request.e2e_s));
  set(row, "aria-label", `Request ${request.id}, ${state}. Enter shows its timeline.`);
  set(row, "aria-current", request.id === open ? "true" : null);
}

const shortened = (id) => (String(id ?? "").length > 18 ? `${String(id).slice(0, 16)}…` : String(id ?? "–"));

function choose(row) {
  opener = row;
  open = open === row.dataset.key ? "" : row.dataset.key;
  for (const other of body.children) set(other, "aria-current", other.dataset.key === open ? "true" : null);
  room.hidden = !open;
  if (open) follow(open);
}

/** Asks for the open timeline until it is complete. */
async function follow(id) {
  let wait = 1000;
  try {
    const found = await server.timeline(id);
    if (id !== open) return;
    timelineOf(room, found, close);
    if (found.state !== "running") return;
  } catch (error) {
    if (id !== open) return;
    const words = error.status === 404 ? "The server keeps no timeline of this request." : `The timeline cannot be shown: ${error.message}`;
    room.replaceChildren(h("p", { class: "note" }, words));
    wait = 4000;
  }
  setTimeout(() => id === open && follow(id), wait);
}

function close() {
  if (!open) return;
  open = "";
  room.hidden = true;
  for (const row of body.children) set(row, "aria-current", null);
  if (opener?.isConnected) opener.focus();
}

async function look(idle) {
  let wait = EVERY_MS;
  if (!idle()) {
    try {
      const found = await server.requests();
      put($("requests-note"), found.length ? `the last ${found.length}; Enter or a click shows a timeline` : "");
      if (found.length) {
        filledAgain(body);
        rows(body, found, (request) => request.id, make, fill);
      } else empty(body, 9, "No request yet.");
    } catch (error) {
      if (error.status === 404) {
        put($("requests-note"), "");
        empty(body, 9, "This server keeps no record of single requests.");
        wait = PATIENT_MS;
      }
    }
  }
  setTimeout(() => look(idle), wait);
}

export const requests = { start: look, close };
