// The drawing of the machine, made by the server, with live states of workers and rates of the ways of KV.

import { $, h, put, set, show } from "./dom.js";
import { bandwidth } from "./format.js";
import * as server from "./server.js";

const room = $("drawing");
const ALLOWED = new Set(["svg", "title", "g", "rect", "text", "path", "circle"]);
let shown = "";
let asking = false;

async function redraw(version) {
  asking = true;
  try {
    const text = await server.machine();
    const svg = harmless(new DOMParser().parseFromString(text, "image/svg+xml").documentElement);
    if (svg) {
      room.replaceChildren(document.adoptNode(svg));
      set($("main"), "data-drawing", Number(svg.getAttribute("width")) < 620 ? "small" : "large");
      shown = version;
    }
  } catch {
    // the next snapshot asks again
  } finally {
    asking = false;
  }
}

/** The drawing if it is one, and only shapes: whatever a worker is called, nothing in it can run. */
function harmless(svg) {
  if (svg.localName !== "svg") return null;
  for (const element of [svg, ...svg.querySelectorAll("*")]) {
    if (!ALLOWED.has(element.localName)) return null;
    for (const { name } of [...element.attributes]) if (/^(on|style$|href$|xlink:)/i.test(name)) element.removeAttribute(name);
  }
  svg.style.setProperty("--natural", `${svg.getAttribute("width")}px`);
  svg.setAttribute("aria-label", "Machine with its workers and the ways of KV between them");
  return svg;
}

function update(state) {
  const { drawing } = state;
  put($("handoff"), drawing.handoff);
  if (drawing.problem) room.replaceChildren(h("p", { class: "note" }, drawing.problem));
  else if (drawing.version && drawing.version !== shown && !asking) redraw(drawing.version).then(() => live(state));
  live(state);
}

function live(state) {
  const workers = new Map(state.workers.map((worker) => [worker.name, worker]));
  for (const chip of room.querySelectorAll(".worker")) set(chip, "data-state", workers.get(chip.dataset.worker)?.state ?? "gone");
  for (const part of room.querySelectorAll("[data-lane]")) {
    const figure = workers.get(part.dataset.lane)?.figures?.transfer?.[part.dataset.transport];
    set(part, "data-active", figure?.value > 0 ? "yes" : null);
    const text = part.querySelector(".figure");
    if (text) label(text, figure);
  }
}

function label(text, figure) {
  show(text, figure, bandwidth);
  text.removeAttribute("title"); // in SVG a tooltip is an element, and the group has one
}

export const machine = { update, reset: () => { shown = ""; } };
