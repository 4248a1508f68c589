// The margins of promises, and whether forecast first tokens come as often as they should.

import { by, count, draw, make, pairs, share } from "./figures.js";

const SIZE = 100;
const NAMES = { ttft: "TTFT", tpot: "TPOT", e2e: "end to end" };

/** Show them for each model with ended promises; `manyModels`: each below its name. */
export function showPromises(up, manyModels) {
  const shown = up.filter(([, { calibration }]) => calibration.promised || calibration.reliability.count || calibration.loops.ended);
  by("no-promises").hidden = shown.length > 0;
  by("promises").replaceChildren(
    ...shown.map(([name, { calibration }]) =>
      make("div", {}, ...(manyModels ? [make("h3", {}, name)] : []), make("div.promises", {}, facts(calibration), ...plots(calibration))),
    ),
  );
}

/** The observed shares of first tokens by p50, p90 and p99 of the forecast, if any was checked. */
export function byForecast({ count: checked, observed }, quantiles) {
  return checked ? [0.5, 0.9, 0.99].map((quantile) => share(observed[quantiles.indexOf(quantile)])).join(" · ") : null;
}

function facts({ margins, moved, moved_kept: kept, loops, reliability, quantiles }) {
  const checked = byForecast(reliability, quantiles);
  return pairs([
    ...Object.entries(margins).map(([name, margin]) => [`Largest margin of ${NAMES[name] ?? name}`, share(margin)]),
    ...(moved ? [["Promises that moved, and were kept", `${count(moved)} · ${count(kept)}`]] : []),
    ...(loops.ended ? [["Tool loops · promised · kept", `${count(loops.ended)} · ${count(loops.promised)} · ${count(loops.kept)}`]] : []),
    ...(checked ? [["First tokens by forecast p50 · p90 · p99", checked]] : []),
  ]);
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
