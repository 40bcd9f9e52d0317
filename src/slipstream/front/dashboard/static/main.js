// The page's life: asks for a snapshot each second, hands it to the views, and says plainly when it is not current.

import { $, h, put, set } from "./dom.js";
import { ago, clock } from "./format.js";
import * as server from "./server.js";
import { charts } from "./latency.js";
import { health } from "./health.js";
import { machine } from "./machine.js";
import { requests } from "./requests.js";
import { routes } from "./routes.js";
import { tiles } from "./tiles.js";
import { workers } from "./workers.js";

const EVERY_MS = 1000;
const PATIENT_MS = 5000; // between two tries when nobody answers
const STALE_S = 3.5;

const views = [tiles, machine, workers, charts, routes, health];
const life = { router: "", since: 0, heard: 0, failures: 0, problem: "", paused: false, locked: false, timer: 0 };

async function look() {
  clearTimeout(life.timer);
  if (!life.paused && !document.hidden && !life.locked) {
    try {
      take(await server.state(life.since));
    } catch (error) {
      missed(error);
    }
  }
  tell();
  life.timer = setTimeout(look, Math.min(EVERY_MS * 2 ** Math.min(life.failures, 3), PATIENT_MS));
}

function take(state) {
  if (state.router !== life.router) {
    life.router = state.router; // another router counts from zero
    for (const view of views) view.reset?.();
  }
  life.since = state.history.points.at(-1)?.t ?? life.since;
  life.failures = 0;
  life.problem = "";
  life.heard = performance.now();
  life.state = state;
  for (const view of views) view.update(state);
  put($("model"), state.model ? `${state.model.name} · context ${state.model.max_model_len.toLocaleString("en-US")}` : "no model yet");
  put($("foot"), `slipstream ${state.version} · snapshot ${state.id} at ${clock(state.time)}`);
  document.title = `${state.health.ready ? "" : "! "}slipstream${state.model ? ` · ${state.model.name}` : ""}`;
  document.documentElement.dataset.snapshot = state.id;
}

function missed(error) {
  life.failures += 1;
  if (error instanceof server.Refused && error.status === 401) {
    life.locked = true;
    askForKey(server.key.get() ? "The key is wrong." : "This server asks for its API key.");
  }
  life.problem = error instanceof server.Refused ? error.message : "the server does not answer";
}

/** The pill and the banner; called every second, whatever happened. */
function tell() {
  const old = (performance.now() - life.heard) / 1000;
  const [state, word] = standing(old);
  const pill = $("status");
  set(pill, "data-state", state);
  put(pill, word);
  set($("main"), "data-stale", state === "ready" || state === "unready" ? null : "yes");
  const banner = $("banner");
  const words = message(state, old);
  if (banner.dataset.words !== words) {
    banner.dataset.words = words;
    banner.replaceChildren(words);
    if (life.locked) banner.append(" ", h("button", { type: "button", on: { click: () => askForKey("") } }, "Enter the key"));
    banner.dataset.state = state;
    banner.hidden = !words;
  }
}

function standing(old) {
  if (life.locked) return ["locked", "key needed"];
  if (life.paused) return ["paused", "paused"];
  if (life.problem) return ["lost", life.heard ? `disconnected, ${ago(old)}` : "disconnected"];
  if (!life.heard) return ["waiting", "connecting"];
  if (old > STALE_S) return ["stale", `${ago(old)} old`];
  return life.state.health.ready ? ["ready", "ready"] : ["unready", "not ready"];
}

function message(state, old) {
  const shown = life.heard ? ` What is shown is from ${clock(life.state.time)}.` : "";
  if (state === "lost") return `Disconnected: ${life.problem}.${shown} Trying again by itself.`;
  if (state === "stale") return `No news for a while.${shown}`;
  if (state === "paused") return `Paused. Press p to go on.${shown}`;
  if (state === "locked") return "This server asks for its API key.";
  if (state === "unready") return `Not ready: ${life.state.health.reasons.join("; ")}.`;
  return "";
}

// ------------------------------------------------------------------------------------------ key, theme, keyboard

function askForKey(problem) {
  const dialog = $("ask-key");
  if (problem) put($("key-problem"), problem);
  if (!dialog.open) dialog.showModal();
}

$("ask-key").addEventListener("close", () => {
  const field = $("key");
  if ($("ask-key").returnValue === "ok" && field.value) {
    server.key.set(field.value);
    life.locked = false;
    life.failures = 0;
    look();
  }
  field.value = "";
  tell();
});

const THEMES = ["system", "light", "dark"];

function theme(name) {
  set(document.documentElement, "data-theme", name === "system" ? null : name);
  put($("theme"), `Theme: ${name}`);
  try {
    localStorage.setItem("slipstream-theme", name);
  } catch {
    // a browser that keeps nothing follows the system again next time
  }
}

function storedTheme() {
  try {
    const name = localStorage.getItem("slipstream-theme");
    return THEMES.includes(name) ? name : "system";
  } catch {
    return "system";
  }
}

const nextTheme = () => theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % 3]);

function jump(number) {
  const link = document.querySelectorAll("nav a")[number - 1];
  const section = link && document.querySelector(link.getAttribute("href"));
  if (!section) return false;
  section.scrollIntoView({ block: "start" });
  section.focus({ preventScroll: true });
  return true;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input") || document.querySelector("dialog[open]")) return;
  const run = {
    "?": () => $("keys").showModal(), t: nextTheme, Escape: () => requests.close(),
    p: () => { life.paused = !life.paused; look(); },
  }[event.key] ?? (/^[1-6]$/.test(event.key) ? () => jump(Number(event.key)) : null);
  if (!run) return;
  run();
  event.preventDefault();
});

$("theme").addEventListener("click", nextTheme);
$("help").addEventListener("click", () => $("keys").showModal());
document.addEventListener("visibilitychange", () => document.hidden || look());
window.addEventListener("online", look);

theme(storedTheme());
requests.start(() => life.paused || document.hidden || life.locked || life.failures > 0);
setInterval(tell, 1000);
look();
