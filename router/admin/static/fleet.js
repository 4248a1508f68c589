// The fleet: what it is, its figures at a glance, and its service classes.

import { by, count, level, line, make, ms, rate, share } from "./figures.js";
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
  showClasses(fleet);
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
  const idle = ready < replicas.length || !ready;
  const tiles = [
    ["Replicas ready", `${ready} of ${replicas.length}`, idle ? ".warn" : "", idle ? "see below" : "all of them"],
    ["Running", count(sum(replicas, "running")), "", "requests in the engines"],
    ["Waiting", count(sum(replicas, "waiting")), "", `and ${count(sum(replicas, "reserved"))} on the way`],
    ["Attainment", share(overall), level(overall), `of ${count(stated)} with an objective`],
    ["Refused", count(fleet.admission.refused), "", `of ${count(sum(classes, "requests"))} requests`],
    ["KV in use", share(mean), "", `mean; the most is ${share(most)}`],
    ["A decision takes", ms(slowest("p50")), "", `p99 ${ms(slowest("p99"))}`],
  ];
  by("tiles").replaceChildren(
    ...tiles.map(([name, value, state, more]) =>
      make("div", {}, make("dt", {}, name), make(`dd${state}`, {}, value), make("dd.hint", {}, more)),
    ),
  );
}

function showClasses(fleet) {
  const windows = Object.values(fleet.models).filter((facts) => facts.up);
  by("window").textContent = `over the last ${ms(Math.max(...windows.map((facts) => facts.window_ms)))}`;
  const rows = fleet.classes.filter((row) => row.requests > 0);
  by("classes").hidden = !rows.length;
  by("no-classes").hidden = rows.length > 0;
  by("classes").tBodies[0].replaceChildren(...rows.map(classRow));
}

function classRow(row) {
  const cell = (label, ...content) => make("td", { "data-label": label }, make("span", {}, ...content));
  const attained = make(
    "span.trend",
    {},
    line(row.trend, 0, 1),
    make(`span${level(row.attainment)}`, {}, share(row.attainment)),
  );
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, named(row.class, row.model)),
    cell("Requests", `${count(row.requests)} · ${rate(row.requests_per_s)}`),
    cell("Attainment", attained),
    cell("Token gain", share(row.tdg)),
    cell("Promises kept", share(row.promises_kept)),
    cell("Promised", count(row.admission.guaranteed)),
    cell("Best effort", count(row.admission.best_effort)),
    cell("Refused", count(row.admission.refused)),
    cell("First token, p50 and p95", `${ms(row.ttft_ms.p50)} · ${ms(row.ttft_ms.p95)}`),
  );
}
