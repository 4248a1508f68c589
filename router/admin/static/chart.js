// Values over time, with their range and unit, so that they can be read without anything beside.

import { draw, make } from "./figures.js";

const HEIGHT = 100;
const WIDTH = 100;

const known = (values) => values.filter((value) => value !== null && value !== undefined);
const last = (values) => known(values).at(-1) ?? null;

/** The least of 1, 2 and 5 times a power of ten that is no less than `value`. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((bound) => bound >= value * (1 - 1e-9));
}

/** The parts of a line between its gaps. */
function runs(values, most) {
  const step = WIDTH / Math.max(1, values.length - 1);
  const found = [];
  let run = null;
  values.forEach((value, index) => {
    if (value === null || value === undefined) {
      run = null;
      return;
    }
    if (run === null) found.push((run = []));
    const height = HEIGHT - (HEIGHT * Math.min(value, most)) / most;
    run.push(`${(index * step).toFixed(2)},${height.toFixed(2)}`);
  });
  // A single point is a short line, for else nothing would be drawn.
  return found.map((run) => (run.length > 1 ? run : [run[0], `${Number(run[0].split(",")[0]) + 1},${run[0].split(",")[1]}`]));
}

function plot(lines, most, said) {
  const svg = draw(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": said },
    draw("title", {}, said),
    ...[0, 0.5, 1].map((part) => draw("line", { x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part })),
  );
  lines.forEach(({ values }, place) => {
    for (const run of runs(values, most)) svg.append(draw(`polyline.line-${place}`, { points: run.join(" ") }));
  });
  return svg;
}

/** In words: the last value, the range, and of which time. */
function inWords(name, lines, format, span) {
  const each = lines.map(({ label, values }) => {
    const found = known(values);
    const what = label ? `${label}: ` : "";
    if (!found.length) return `${what}no value`;
    const [low, high] = [Math.min(...found), Math.max(...found)].map(format);
    return `${what}last ${format(last(values))}, from ${low} to ${high}`;
  });
  return `${name} over the last ${span}. ${each.join("; ")}.`;
}

/** A chart with its name, last values and both axes. `lines` are `{label, values}`, of which any
 * value may be null; `span` says how much time they cover. */
export function chart(name, lines, format, span) {
  const all = lines.flatMap(({ values }) => known(values));
  const most = roundUp(Math.max(0, ...all));
  const lasts = lines.map(({ label, values }, place) =>
    make(`span.last.line-${place}`, {}, label ? `${label} ` : "", make("b", {}, format(last(values)))),
  );
  const body = all.length
    ? [
        make("span.axis.y", { "aria-hidden": "true" }, make("span", {}, format(most)), make("span", {}, format(0))),
        plot(lines, most, inWords(name, lines, format, span)),
        make("span.axis.x", { "aria-hidden": "true" }, make("span", {}, `${span} ago`), make("span", {}, "now")),
      ]
    : [make("p.hint", {}, "No value yet.")];
  return make("figure.chart", {}, make("figcaption", {}, make("span", {}, name), ...lasts), ...body);
}

/** A small line beside its number, from 0 to `most`. */
export function sparkline(name, values, most, format, span) {
  if (!known(values).length) return make("span.spark");
  return make(
    "span.spark",
    {},
    plot([{ values }], most, inWords(name, [{ values }], format, span)),
    make("span.axis.y", { "aria-hidden": "true" }, make("span", {}, format(most)), make("span", {}, format(0))),
  );
}
