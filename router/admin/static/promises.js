// How promises are kept, and whether forecast first tokens come as often as they should.

import { by, count, draw, make, ms, share } from "./figures.js";

const SIZE = 100;
const MARKED = [0.5, 0.9, 0.99];

const tone = (kept, level) => (kept === null ? "" : kept >= level ? ".good" : kept >= 0.9 ? ".warn" : ".bad");

/** Show them for each model that has promised anything; `manyModels`: each below its name. */
export function showPromises(models, manyModels) {
  // A controller of an earlier version tells nothing of it.
  const shown = models.filter(([, facts]) => facts.calibration?.promised);
  by("no-promises").hidden = shown.length > 0;
  by("promises").replaceChildren(
    ...shown.map(([name, { calibration }]) =>
      make("div", {}, ...(manyModels ? [make("h3", {}, name)] : []), summary(calibration), make("div.promises", {}, table(name, calibration), ...plots(calibration))),
    ),
  );
}

function summary(found) {
  const names = { ttft: "TTFT", tpot: "TPOT", e2e: "end to end" };
  const margins = Object.entries(found.margins).map(([name, margin]) => `${names[name] ?? name} ${share(margin)}`);
  return make("p.hint", {}, `Level ${share(found.level)}. The latest ${count(found.promised)} promises, over ${ms(found.window_ms)}. Planned earlier by at most: ${margins.join(", ")}.`);
}

function table(model, found) {
  const head = ["Promises", "Promised", "Kept", ...MARKED.map((quantile) => `By p${Math.round(100 * quantile)}`)];
  const places = MARKED.map((quantile) => found.quantiles.indexOf(quantile));
  const row = (name, { promised, kept, reliability }) => {
    const ratio = promised ? kept / promised : null;
    const cell = (label, state, value) => make("td", { "data-label": label }, make(`span${state}`, {}, value));
    const seen = places.map((place) => reliability?.observed[place] ?? null);
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, name),
      cell(head[1], "", count(promised)),
      cell(head[2], tone(ratio, found.level), share(ratio)),
      ...seen.map((value, index) => cell(head[3 + index], "", share(value))),
    );
  };
  return make(
    "table.stack",
    { "aria-label": `Promises of ${model} by class and replica` },
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))),
    make(
      "tbody",
      {},
      row("All", found),
      ...(found.moved ? [row("Moved", { promised: found.moved, kept: found.moved_kept })] : []),
      ...found.classes.map((each) => row(`Class ${each.class}`, each)),
      ...found.replicas.map((each) => row(`Replica ${each.replica_id}`, each)),
    ),
  );
}

function plots({ quantiles, reliability }) {
  if (!reliability.count) return [];
  const [x, y] = [(value) => SIZE * value, (value) => SIZE * (1 - value)];
  const points = quantiles.map((quantile, place) => [quantile, reliability.observed[place]]);
  const said = `Reliability of ${count(reliability.count)} forecasts of the first token. Predicted quantile and observed share: ${points.map((pair) => pair.map(share).join(" and ")).join("; ")}.`;
  const svg = draw(
    "svg",
    { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-label": said },
    draw("title", {}, said),
    draw("line", { x1: 0, y1: SIZE, x2: SIZE, y2: SIZE }),
    draw("line", { x1: 0, y1: 0, x2: 0, y2: SIZE }),
    draw("line.diagonal", { x1: 0, y1: SIZE, x2: SIZE, y2: 0 }),
    draw("polyline", { points: points.map(([quantile, seen]) => `${x(quantile)},${y(seen)}`).join(" ") }),
    ...points.map(([quantile, seen]) => draw("circle", { cx: x(quantile), cy: y(seen), r: 1.8 })),
  );
  const axis = (which, ...ends) => make(`span.axis.${which}`, { "aria-hidden": "true" }, ...ends.map((end) => make("span", {}, end)));
  return [
    make(
      "figure.chart.reliability",
      {},
      make("figcaption", {}, make("span", {}, "First tokens: observed share by predicted quantile")),
      axis("y", share(1), share(0)),
      svg,
      axis("x", share(0), "predicted", share(1)),
    ),
  ];
}
