// Building elements, and figures in words. All text goes in as text, never as markup.

export const by = (id) => document.getElementById(id);

/** An element: `make("td.good", {title: "..."}, "text", otherElement)`. */
export function make(what, attributes = {}, ...children) {
  return fill(what, (tag) => document.createElement(tag), attributes, children);
}

/** The same of a drawing. */
export function draw(what, attributes = {}, ...children) {
  return fill(what, (tag) => document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(what, create, attributes, children) {
  const [tag, ...classes] = what.split(".");
  const node = create(tag);
  node.classList.add(...classes);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

export const NONE = "–";

export function ms(value) {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) >= 60000) return `${Math.floor(value / 60000)}\u00a0min\u00a0${Math.round(value / 1000) % 60}\u00a0s`;
  if (Math.abs(value) >= 1000) return `${(value / 1000).toFixed(value < 10000 ? 1 : 0)}\u00a0s`;
  if (value === 0 || Math.abs(value) >= 10) return `${Math.round(value)}\u00a0ms`;
  return `${value.toFixed(value < 0.1 ? 3 : 1)}\u00a0ms`;
}

export function share(value) {
  if (value === null || value === undefined) return NONE;
  if (value === 0 || value === 1) return `${100 * value}\u00a0%`;
  return `${Math.min(99.9, 100 * value).toFixed(1)}\u00a0%`; // what is not all must not look so
}

export function count(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}\u00a0M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(size < 1e5 ? 1 : 0)}\u00a0k`;
  return String(Math.round(value));
}

export function rate(value) {
  if (value === null) return NONE;
  if (value > 0 && value < 0.1) return `${(60 * value).toFixed(1)}/min`;
  return `${value > 0 && value < 10 ? value.toFixed(1) : count(value)}/s`;
}

/** The colour of a share of which as much as `target` is wanted. */
export const tone = (value, target) => (value === null ? "" : value >= target ? ".good" : value >= 0.9 ? ".warn" : ".bad");
export const ratio = (part, whole) => (whole ? part / whole : null);
export const sum = (rows, read) => rows.reduce((total, row) => total + read(row), 0);
export const ago = (value) => (value < 1000 ? "now" : `${ms(value)} ago`);

/** A list of names and values. */
export function pairs(entries) {
  return make("dl.facts", {}, ...entries.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}
