// The few words in which the page is written. Text is always text: nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/** An element: h("td", { class: "n", dataset: {...} }, "text", child). Absent attributes are null or undefined. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "on") for (const [event, run] of Object.entries(value)) element.addEventListener(event, run);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Writes only what changed, so that nothing flickers and a selection stays. */
export function put(element, text) {
  const words = String(text ?? "");
  if (element.textContent !== words) element.textContent = words;
}

export function set(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

function described(figure) {
  const labels = Object.entries(figure.labels ?? {}).map(([key, value]) => `${key}="${[value].flat().join("|")}"`);
  const name = figure.metric + (labels.length ? `{${labels.join(", ")}}` : "");
  const what = figure.quantile ? `${figure.quantile} quantile of ${name}` : name;
  const grown = figure.per ? `growth of ${what} for each ${figure.per}` : figure.since ? `growth of ${what} each second` : what;
  return figure.worker ? `${grown}, ${figure.worker}` : grown;
}

/** A number and where it comes from: the metric as a tooltip, and all of it for whoever checks. */
export function show(element, figure, format) {
  const value = figure?.value;
  put(element, format(value));
  element.classList.toggle("zero", value === 0);
  if (!figure?.metric) return element;
  set(element, "title", described(figure));
  const data = {
    metric: figure.metric, labels: JSON.stringify(figure.labels ?? {}), worker: figure.worker ?? "",
    quantile: figure.quantile ?? "", since: figure.since ?? "", per: figure.per ?? "", value: value ?? "",
  };
  for (const [key, text] of Object.entries(data)) if (element.dataset[key] !== String(text)) element.dataset[key] = text;
  return element;
}

/**
 * Rows of a table by key: `make(item)` once for each key, `update(row, item)` at every look, gone ones are removed.
 * The order is that of the items; a row that stays in place is not touched, so focus and scrolling stay.
 */
export function rows(body, items, key, make, update) {
  const before = new Map([...body.children].map((row) => [row.dataset.key, row]));
  let place = body.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let row = before.get(name);
    before.delete(name);
    if (!row) {
      row = make(item);
      row.dataset.key = name;
    }
    update(row, item);
    if (row === place) place = place.nextElementSibling;
    else body.insertBefore(row, place);
  }
  for (const row of before.values()) row.remove();
  if (body.children.length && ![...body.children].some((row) => row.tabIndex === 0)) body.children[0].tabIndex = 0;
}

/** One row of a table is in the tab order; arrows, Home and End go from row to row, Enter and a click open one. */
export function navigable(body, open) {
  const go = (row) => {
    if (!row) return;
    for (const other of body.children) other.tabIndex = other === row ? 0 : -1;
    row.focus();
  };
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    if (!row || event.target.closest("button, summary, a") || event.altKey || event.ctrlKey || event.metaKey) return;
    const next = {
      ArrowDown: () => row.nextElementSibling, ArrowUp: () => row.previousElementSibling,
      Home: () => body.firstElementChild, End: () => body.lastElementChild,
    }[event.key];
    if (next) go(next());
    else if (open && (event.key === "Enter" || event.key === " ")) open(row);
    else return;
    event.preventDefault();
  });
  body.addEventListener("focusin", (event) => {
    const row = event.target.closest("tr");
    for (const other of body.children) other.tabIndex = other === row ? 0 : -1;
  });
  if (open) body.addEventListener("click", (event) => open(event.target.closest("tr")));
}

export function cell(label, kind = "", ...children) {
  return h("td", { class: kind || null, role: "cell", "data-label": label }, ...children);
}

export function empty(body, columns, words) {
  if (body.dataset.empty === words && body.children.length === 1) return;
  body.replaceChildren(h("tr", { role: "row", class: "none" }, h("td", { role: "cell", colspan: columns }, words)));
  body.dataset.empty = words;
}

export function filledAgain(body) {
  if (body.dataset.empty !== undefined) {
    body.replaceChildren();
    delete body.dataset.empty;
  }
}
