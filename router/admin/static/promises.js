// The margins of promises, and whether forecast first tokens come as often as they should.

import { by, count, draw, make, pairs, share } from "./figures.js";

const SIZE = 100;
const NAMES = { ttft: "TTFT", tpot: "TPOT", e2e: "end to end" };

export const CAUSES = {
  edge: "router and replica, before the engine",
  decision: "the controller's answer",
  admission_queue: "admission queue",
  prefills: "others' prefills",
  own_prefill: "own prefill, longer than predicted",
  decodes: "decodes",
  kv_memory: "KV memory",
  kv_transfer: "KV transfer",
  engine_stall: "engine stalled",
  failure: "failure",
  replica_start: "start of a replica",
  way_back: "way to the client",
  unknown: "unknown: the client left",
};

/** What most of the lateness of missed promises went to, the most frequent first. */
export function showCauses(classes) {
  const found = new Map();
  for (const [cause, missed] of classes.flatMap((row) => Object.entries(row.causes))) {
    found.set(cause, (found.get(cause) ?? 0) + missed);
  }
  const rows = [...found].sort((a, b) => b[1] - a[1]);
  by("causes").hidden = !rows.length;
  const bar = (missed) => make("meter", { min: 0, max: rows[0][1], value: missed, "aria-hidden": "true" });
  by("causes").replaceChildren(
    make("figcaption", {}, "Missed objectives of promises, by cause"),
    pairs(rows.map(([cause, missed]) => [CAUSES[cause] ?? cause, make("span", {}, bar(missed), ` ${count(missed)}`)])),
  );
}

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
