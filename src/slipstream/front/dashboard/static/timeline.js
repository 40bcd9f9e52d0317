// One request from arrival to end: a lane for each place, a bar for each stage, and the same as a table.

import { h, s } from "./dom.js";
import { count, known, seconds } from "./format.js";

const ROW = 20;
const LEFT = 96;
const KINDS = {
  received: "wait", placed: "wait", queued: "wait", prefill_chunk: "prefill", copy_chunk: "copy", offer: "hand", grant: "hand",
  commit: "hand", first_token: "decode", decode_step: "decode", finished: "end", failed: "bad", cancelled: "bad", resubmitted: "bad",
  "nothing heard": "silent",
};

const kind = (event) => KINDS[event.name] ?? "wait";
const endOf = (event) => (event.start_s ?? 0) + (known(event.duration_s) ? event.duration_s : 0);

export function timelineOf(room, request, close) {
  const told = [request.events, request.silences].flatMap((some) => (Array.isArray(some) ? some : []));
  const events = told.filter((event) => known(event.start_s)).sort((one, other) => one.start_s - other.start_s);
  const facts = [["state", request.state], ["prompt", `${count(request.prompt_tokens)} tokens, ${count(request.cached_tokens)} cached`],
    ["output", `${count(request.output_tokens)} tokens`], ["first token", seconds(request.ttft_s)], ["total", seconds(request.e2e_s)],
    ["attempts", count(request.attempts)], ["ended by", request.finish_reason ?? request.error?.message ?? request.error ?? "–"]];
  const scrolled = room.querySelector(".events")?.scrollTop ?? 0;
  const focused = room.contains(document.activeElement);
  const shut = h("button", { type: "button", "aria-label": "Close the timeline", on: { click: close } }, "Close");
  room.replaceChildren(
    h("div", { class: "head" }, h("h3", {}, "Timeline"), h("code", {}, String(request.id ?? "")), shut),
    h("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, typeof value === "string" ? value : JSON.stringify(value))])),
    events.length ? lanes(room, events) : h("p", { class: "note" }, "Nothing is recorded of it."),
    h("div", { class: "events scroll", tabindex: 0, role: "region", "aria-label": "Events" }, table(events)),
  );
  room.querySelector(".events").scrollTop = scrolled;
  if (focused) shut.focus({ preventScroll: true });
}

function lanes(room, events) {
  const places = [...new Set(events.map((event) => event.where ?? "–"))];
  const end = Math.max(...events.map(endOf), 1e-6);
  const width = Math.max(room.clientWidth - 24, 240);
  const x = (time) => LEFT + ((width - LEFT - 8) * time) / end;
  const height = places.length * ROW + 26;
  const svg = s("svg", { class: "gantt", width, height, role: "img", "aria-label": `Stages of the request over ${seconds(end)}` });
  places.forEach((place, at) => {
    const label = place.length > 14 ? `${place.slice(0, 13)}…` : place;
    svg.append(s("path", { class: "rule", d: `M${LEFT} ${at * ROW + ROW / 2}H${width - 8}` }), s("text", { class: "axis", x: 0, y: at * ROW + ROW / 2 + 4 }, label));
  });
  for (const event of events) {
    const at = places.indexOf(event.where ?? "–");
    const from = x(event.start_s);
    const wide = Math.max(x(endOf(event)) - from, 2);
    svg.append(s("rect", { class: `bar ${kind(event)}`, x: from, y: at * ROW + 4, width: wide, height: ROW - 8, rx: 2 },
      s("title", {}, `${event.name} at ${seconds(event.start_s)} for ${seconds(event.duration_s)}`)));
  }
  for (const share of [0, 0.5, 1]) {
    svg.append(s("text", { class: "axis", x: x(end * share), y: height - 6, "text-anchor": share ? (share === 1 ? "end" : "middle") : "start" }, share ? seconds(end * share) : "0"));
  }
  return svg;
}

function table(events) {
  const cells = (event) => [seconds(event.start_s), seconds(event.duration_s), event.where];
  return h("table", {}, h("thead", {}, h("tr", {}, ...["At", "For", "Where", "Event"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...events.map((event) => h("tr", {}, ...cells(event).map((words, at) => h("td", { class: at < 2 ? "n" : null }, String(words ?? ""))),
      h("td", {}, String(event.name), " ", h("span", { class: "muted small" }, details(event)))))));
}

const details = (event) => Object.entries(event.attributes ?? {}).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
