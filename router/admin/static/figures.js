// Building elements, and figures in words. All text goes in as text, never as markup.

export const by = (id) => document.getElementById(id);

/** An element: `make("td.good", {title: "..."}, "text", otherElement)`. */
export function make(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const node = document.createElement(tag);
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

export const rate = (value) => (value === null ? NONE : `${value < 10 ? value.toFixed(1) : Math.round(value)}/s`);
export const level = (value) => (value === null ? "" : value >= 0.99 ? ".good" : value >= 0.9 ? ".warn" : ".bad");
export const ago = (value) => (value < 1000 ? "now" : `${ms(value)} ago`);

/** A line through `values`, of which any may be null. The number itself stands beside it. */
export function line(values, least, most) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "line");
  svg.setAttribute("viewBox", "0 0 100 20");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const step = 100 / Math.max(1, values.length - 1);
  const height = (value) => 19 - (18 * (value - least)) / Math.max(1e-9, most - least);
  let run = [];
  const draw = () => {
    if (run.length === 1) run.push(`${Number(run[0].split(",")[0]) + 0.8},${run[0].split(",")[1]}`);
    if (run.length) {
      const drawn = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
      drawn.setAttribute("points", run.join(" "));
      svg.append(drawn);
    }
    run = [];
  };
  values.forEach((value, index) => {
    if (value === null) draw();
    else run.push(`${(index * step).toFixed(1)},${height(value).toFixed(1)}`);
  });
  draw();
  return svg;
}

/** A list of names and values. */
export function pairs(entries) {
  return make("dl.facts", {}, ...entries.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}
