// The fleet: what it is, its figures at a glance, and its service classes.

import { chart, sparkline } from "./chart.js";
import { by, count, level, make, ms, rate, share } from "./figures.js";
import { showPromises } from "./promises.js";
import { showReplicas } from "./replicas.js";

let manyModels = false;

/** A class or a decision by its name, with its model where there are several. */
export const named = (name, model) => (manyModels ? `${name} (${model})` : name);

/** Show all of it but the decisions; `change` is what a card's button does. */
export function showFleet(fleet, change) {
  const models = Object.entries(fleet.models);
  manyModels = models.length > 1;
  const { controller } = fleet;
  by("about").textContent = manyModels
    ? `${models.length} models`
    : `${models[0][0]} · ${controller.policy}, admission ${controller.admission}`;
  showTiles(fleet, models);
  showCharts(models);
  showClasses(fleet);
  showPromises(models, manyModels);
  showReplicas(fleet.replicas, manyModels, change);
}

function showTiles(fleet, models) {
  const { replicas, classes } = fleet;
  const ready = replicas.filter((replica) => replica.condition === "fresh").length;
  const sum = (rows, field) => rows.reduce((total, row) => total + row[field], 0);
  const stated = sum(classes, "stated");
  const attained = classes.reduce((total, row) => total + (row.attainment ?? 0) * row.stated, 0);
  const overall = stated ? attained / stated : null;
  const took = models.map(([, facts]) => facts.decision_ms).filter((each) => each && each.count);
  const slowest = (field) => (took.length ? Math.max(...took.map((each) => each[field])) : null);
  const kv = replicas.map((replica) => replica.kv_usage).filter((usage) => usage !== null);
  const mean = kv.length ? kv.reduce((a, b) => a + b) / kv.length : null;
  const most = kv.length ? Math.max(...kv) : null;
  const now = (field) =>
    sum(models.filter(([, facts]) => facts.up).map(([, facts]) => ({ now: facts.series?.[field]?.at(-1) ?? 0 })), "now");
  const idle = ready < replicas.length || !ready;
  const tiles = [
    ["Replicas ready", `${ready} of ${replicas.length}`, idle ? ".warn" : "", !replicas.length ? "none has reported" : idle ? "see below" : "all of them"],
    ["Running", count(sum(replicas, "running")), "", "requests in the engines"],
    ["Waiting", count(sum(replicas, "waiting")), "", `and ${count(sum(replicas, "reserved"))} on the way`],
    ["Throughput", rate(now("requests_per_s")), "", `${count(now("generated_tokens_per_s"))}\u00a0tokens/s generated`],
    ["Attainment", share(overall), level(overall), stated ? `of ${count(stated)} with an objective` : "none with an objective yet"],
    ["Refused", count(fleet.admission.refused), "", `of ${count(sum(classes, "requests"))} requests`],
    ["KV in use", share(mean), "", kv.length ? `mean; the most is ${share(most)}` : "no replica yet"],
    ["A decision takes", ms(slowest("p50")), "", took.length ? `p99 ${ms(slowest("p99"))}` : "none yet"],
  ];
  by("tiles").replaceChildren(
    ...tiles.map(([name, value, state, more]) =>
      make("div", {}, make("dt", {}, name), make(`dd${state}`, {}, value), make("dd.hint", {}, more)),
    ),
  );
}

const QUANTILES = (series, time) =>
  ["p50", "p95"].map((label) => ({ label, values: series[`${time}_${label}_ms`] }));

/** Throughput and latency over time, a row of charts for each model. */
function showCharts(models) {
  const shown = models.filter(([, facts]) => facts.series?.requests_per_s.some((value) => value > 0));
  by("no-charts").hidden = shown.length > 0;
  by("charts").replaceChildren(
    ...shown.map(([name, { series, window_ms: window }]) => {
      const one = (title, field) => chart(title, [{ label: "", values: series[field] }], rate, ms(window));
      const two = (title, time) => chart(title, QUANTILES(series, time), ms, ms(window));
      return make(
        "div",
        {},
        ...(manyModels ? [make("h3", {}, name)] : []),
        make(
          "div.charts",
          {},
          one("Requests", "requests_per_s"),
          one("Prompt tokens", "prompt_tokens_per_s"),
          one("Generated tokens", "generated_tokens_per_s"),
          two("First token (TTFT)", "ttft"),
          two("Per token after it (TPOT)", "tpot"),
          two("End to end", "e2e"),
        ),
      );
    }),
  );
}

function showClasses(fleet) {
  const windows = Object.values(fleet.models).filter((facts) => facts.up);
  const span = ms(Math.max(...windows.map((facts) => facts.window_ms)));
  for (const id of ["window", "charts-window"]) by(id).textContent = `over the last ${span}`;
  const rows = fleet.classes.filter((row) => row.requests > 0);
  by("classes").hidden = !rows.length;
  by("no-classes").hidden = rows.length > 0;
  by("classes").tBodies[0].replaceChildren(...rows.map((row) => classRow(row, span)));
}

function classRow(row, span) {
  const cell = (label, ...content) => make("td", { "data-label": label }, make("span", {}, ...content));
  const attained = make(
    "span.trend",
    {},
    sparkline(`Attainment of ${row.class}`, row.trend, 1, share, span),
    make(`span${level(row.attainment)}`, {}, share(row.attainment)),
  );
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, named(row.class, row.model)),
    cell("Requests", `${count(row.requests)}\u00a0·\u00a0${rate(row.requests_per_s)}`),
    cell("Attainment", attained),
    cell("Token gain", share(row.tdg)),
    cell("Promises kept", share(row.promises_kept)),
    cell("Promised", count(row.admission.guaranteed)),
    cell("Best effort", count(row.admission.best_effort)),
    cell("Refused", count(row.admission.refused)),
    cell("First token, p50 and p95", `${ms(row.ttft_ms.p50)} · ${ms(row.ttft_ms.p95)}`),
    cell("End to end, p50 and p95", `${ms(row.e2e_ms.p50)} · ${ms(row.e2e_ms.p95)}`),
  );
}
