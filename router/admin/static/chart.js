// Values over time, with their range and unit, so that they can be read without anything beside.

import { draw, make } from "./figures.js";

const HEIGHT = 100;
const WIDTH = 100;
const WIDE = 20; // times the least value: from there on an axis is logarithmic

const known = (values) => values.filter((value) => value !== null && value !== undefined);
const last = (values) => known(values).at(-1) ?? null;

/** The least of 1, 2 and 5 times a power of ten that is no less than `value`. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((bound) => bound >= value * (1 - 1e-9));
}

/** An axis from 0, or a logarithmic one from a power of ten: `at(value)` is a share of its height. */
function linear(most) {
  return { low: 0, most, lines: [0, 0.5, 1], log: false, at: (value) => Math.min(value, most) / most };
}

function logarithmic(least, most) {
  const low = 10 ** Math.floor(Math.log10(least) + 1e-9);
  const at = (value) => Math.min(1, Math.max(0, Math.log(value / low) / Math.log(most / low)));
  const lines = [1];
  for (let power = low; power < most; power *= 10) lines.push(at(power));
  return { low, most, lines, log: true, at };
}

function axisOf(values) {
  const [least, most] = [Math.min(...values), Math.max(0, ...values)];
  return least > 0 && most >= WIDE * least ? logarithmic(least, roundUp(most)) : linear(roundUp(most));
}

/** The parts of a line between its gaps. */
function runs(values, axis) {
  const step = WIDTH / Math.max(1, values.length - 1);
  const found = [];
  let run = null;
  values.forEach((value, index) => {
    if (value === null || value === undefined) {
      run = null;
      return;
    }
    if (run === null) found.push((run = []));
    const height = HEIGHT * (1 - axis.at(value));
    run.push(`${(index * step).toFixed(2)},${height.toFixed(2)}`);
  });
  // A single point is a short line, for else nothing would be drawn.
  return found.map((run) => (run.length > 1 ? run : [run[0], `${Number(run[0].split(",")[0]) + 1},${run[0].split(",")[1]}`]));
}

function plot(lines, axis, said) {
  const svg = draw(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": said },
    draw("title", {}, said),
    ...axis.lines.map((part) => HEIGHT * (1 - part)).map((y) => draw("line", { x1: 0, x2: WIDTH, y1: y, y2: y })),
  );
  lines.forEach(({ values }, place) => {
    for (const run of runs(values, axis)) svg.append(draw(`polyline.line-${place}`, { points: run.join(" ") }));
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
  const axis = axisOf(all);
  const lasts = lines.map(({ label, values }, place) =>
    make(`span.last.line-${place}`, {}, label ? `${label} ` : "", make("b", {}, format(last(values)))),
  );
  const body = all.length
    ? [
        make("span.axis.y", { "aria-hidden": "true" }, ...[format(axis.most), ...(axis.log ? ["log"] : []), format(axis.low)].map((text) => make("span", {}, text))),
        plot(lines, axis, inWords(name, lines, format, span)),
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
    plot([{ values }], linear(most), inWords(name, [{ values }], format, span)),
    make("span.axis.y", { "aria-hidden": "true" }, make("span", {}, format(most)), make("span", {}, format(0))),
  );
}
