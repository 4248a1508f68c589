// The fleet: whether it is well, and its service classes.

import { chart, sparkline } from "./chart.js";
import { by, count, make, ms, NONE, rate, ratio, share, sum, tone } from "./figures.js";
import { showCauses, showPromises } from "./promises.js";
import { showReplicas } from "./replicas.js";
import { showShadow } from "./shadow.js";

const FEW = 3; // requests of which a share says nothing

let manyModels = false;

/** A class or a decision by its name, with its model where there are several. */
export const named = (name, model) => (manyModels ? `${name} (${model})` : name);

/** Show all of it but the decisions; `change` is what a card's button does. */
export function showFleet(fleet, change) {
  const models = Object.entries(fleet.models);
  const up = models.filter(([, facts]) => facts.up);
  manyModels = models.length > 1;
  const { controller } = fleet;
  by("about").textContent = manyModels
    ? `${models.length} models`
    : `${models[0][0]} · ${controller.policy}, admission ${controller.admission}`;
  const windowMs = Math.max(...up.map(([, facts]) => facts.window_ms));
  by("window").textContent = `Shares, rates and times are of the requests that ended in the last ${ms(windowMs)}; replicas and their queues are as of now.`;
  showVerdict(up, fleet);
  showTiles(up, fleet, windowMs);
  showCharts(up);
  showClasses(fleet, windowMs);
  showCauses(fleet.classes);
  showPromises(up, manyModels);
  showShadow(up, manyModels);
  showReplicas(fleet.replicas, promisesOf(up), manyModels, change);
}

/** The promises of each replica, by its id. */
const promisesOf = (up) =>
  new Map(up.flatMap(([, { calibration }]) => calibration.replicas.map((row) => [row.replica_id, { ...row, level: calibration.level, quantiles: calibration.quantiles }])));

const kept = (classes) => sum(classes, ({ promises }) => promises.kept);
const judged = (classes) => sum(classes, ({ promises }) => promises.kept + promises.missed);
const stated = (classes) => sum(classes, (row) => row.stated);
const attained = (classes) => Math.round(sum(classes, (row) => (row.attainment ?? 0) * row.stated));

/** The pool of replicas with the highest load; `used` is the part of its time that is asked for. */
function busiest(up) {
  const pools = up.flatMap(([name, { pressure }]) => pressure.map((pool) => ({ name, ...pool })));
  const used = pools.map((pool) => ({ ...pool, used: pool.ready ? pool.demand / pool.ready : pool.demand ? Infinity : 0 }));
  return used.sort((a, b) => b.used - a.used)[0];
}

/** Whether a model is well: how bad it is, in a word, and why. */
function verdict([model, { pressure, admission, calibration, startup_ms: startup }], fleet) {
  const classes = fleet.classes.filter((row) => row.model === model);
  const replicas = fleet.replicas.filter((row) => row.model === model);
  if (replicas.length && !replicas.some((row) => row.condition === "fresh")) {
    return [5, "Down", "no replica is ready, and nothing can be promised."];
  }
  if (!replicas.length) {
    return startup === null
      ? [3, "Waiting", "no replica has reported."]
      : [0, "Idle", `no replica runs; a request starts one, in about ${ms(startup)}.`];
  }
  const asking = classes.filter((row) => row.stated);
  const asked = sum(asking, (row) => row.asked);
  const lacking = asked - sum(asking, (row) => row.admission.guaranteed);
  const { level } = calibration;
  const more = sum(pressure, (pool) => Math.max(0, pool.needed - pool.ready));
  const cure = !more
    ? "not for lack of replicas on average: the last decisions say why"
    : more === 1 ? "one more replica would be enough" : `${more} more replicas would be enough`;
  if (admission !== "none" && lacking >= FEW && lacking > (1 - level) * asked) {
    return [4, more ? "Overloaded" : "Not all promised", `${share(lacking / asked)} of requests cannot be promised; ${cure}.`];
  }
  // What is not promised may wait for long, and has not ended yet.
  if (pressure.some((pool) => pool.demand > pool.ready)) {
    return [4, "Overloaded", `requests ask for more than all of the replicas' time; ${cure}.`];
  }
  const broken = judged(classes) - kept(classes);
  if (broken >= FEW && broken > (1 - level) * judged(classes)) {
    return [3, "Promises are missed", `${count(broken)} of ${count(judged(classes))} were not kept, more than the level of ${share(level)} allows.`];
  }
  const missed = stated(classes) - attained(classes);
  if (missed >= FEW && missed > (1 - level) * stated(classes)) {
    return [2, "Objectives are missed", `by ${count(missed)} of ${count(stated(classes))} requests.`];
  }
  if (!sum(classes, (row) => row.asked)) {
    const live = sum(replicas, (row) => row.waiting + row.running + row.reserved);
    return live
      ? [1, "Well", `no request has ended yet; ${count(live)} run or wait.`]
      : [0, "Idle", "no request has ended in the last minutes."];
  }
  return [1, "Well", asked && admission !== "none" ? "nearly every request is promised, and promises are kept." : "requests are served as they come."];
}

/** Of several models, the one that is worst off. */
function showVerdict(up, fleet) {
  const all = up.map((each) => [each[0], ...verdict(each, fleet)]);
  const [model, rank, word, why] = all.sort((a, b) => b[1] - a[1])[0];
  const text = `${word}:`;
  if (by("verdict").textContent !== text) by("verdict").textContent = text; // said aloud once
  by("verdict").className = rank > 2 ? "bad" : rank > 1 ? "warn" : "good";
  by("sentence").textContent = manyModels ? `${model}: ${why}` : why;
}

function showTiles(up, { replicas, classes }, windowMs) {
  const level = Math.max(...up.map(([, { calibration }]) => calibration.level));
  const promises = ratio(kept(classes), judged(classes));
  const attainment = ratio(attained(classes), stated(classes));
  const pool = busiest(up);
  const load = pool && pool.window_ms ? pool.used : null;
  const where = !pool ? "" : [manyModels ? pool.name : "", pool.role === "mixed" ? "" : pool.role].filter(Boolean).join(" ");
  const ready = replicas.filter((replica) => replica.condition === "fresh").length;
  const now = (field) => count(sum(replicas, (replica) => replica[field]));
  const tile = (name, value, state, more) => make("div", {}, make("dt", {}, name), make(`dd${state}`, {}, value), make("dd.hint", {}, more));
  by("tiles").replaceChildren(
    tile("Promises kept", share(promises), tone(promises, level), promises === null ? "none has ended" : `level ${share(level)}; of ${count(judged(classes))} promises`),
    tile("Attainment", share(attainment), tone(attainment, level), attainment === null ? "none with an objective" : `target ${share(level)}; of ${count(stated(classes))} with an objective`),
    tile("Load", load === null ? NONE : load === Infinity ? "no replica" : `${Math.round(100 * load)}\u00a0%`, load === null ? "" : load > 1 ? ".bad" : load > 0.75 ? ".warn" : ".good",
      load === null ? "not measured yet" : `${where && `${where}: `}${pool.demand.toFixed(1)} replicas' time asked for, ${pool.ready} ready`),
    tile("Replicas ready", `${ready} of ${replicas.length}`, ready < replicas.length || !ready ? ".warn" : ".good", `${now("running")} requests run, ${now("waiting")} wait, ${now("reserved")} on the way`),
  );
  const kv = replicas.map((replica) => replica.kv_usage).filter((usage) => usage !== null);
  const tokens = (kind) => sum(classes, (row) => row.tokens[kind]);
  const perSecond = (value) => rate(windowMs ? (1000 * value) / windowMs : null);
  const took = up.map(([, facts]) => facts.decision_ms).filter((each) => each.count);
  const slowest = (field) => ms(took.length ? Math.max(...took.map((each) => each[field])) : null);
  const facts = [
    ["Requests", perSecond(sum(classes, (row) => row.asked))],
    ["Generated tokens", perSecond(tokens("generated"))],
    ["Prefix-cache hits", tokens("prompt") ? `${share(ratio(tokens("cached"), tokens("prompt")))} of prompt tokens` : NONE],
    ["KV in use", kv.length ? `${share(sum(kv, (each) => each) / kv.length)}, at most ${share(Math.max(...kv))}` : NONE],
    ["A decision takes", took.length ? `${slowest("p50")}, p99 ${slowest("p99")}` : NONE],
  ];
  by("more").replaceChildren(...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

const QUANTILES = (series, time) =>
  ["p50", "p95"].map((label) => ({ label, values: series[`${time}_${label}_ms`] }));

/** Throughput and latency over time, a row of charts for each model. */
function showCharts(up) {
  const shown = up.filter(([, { series }]) => series.requests_per_s.some((value) => value > 0));
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

function showClasses({ classes, models }, windowMs) {
  const rows = classes.filter((row) => row.asked > 0);
  const others = sum(classes, (row) => row.requests - row.asked);
  by("classes").hidden = !rows.length;
  by("no-classes").hidden = rows.length > 0;
  by("others").hidden = !others;
  by("others").textContent = `${count(others)} more ended with a client's error, before an answer began, or asked for no tokens.`;
  by("classes").tBodies[0].replaceChildren(...rows.map((row) => classRow(row, models[row.model].calibration.level, ms(windowMs))));
}

function classRow(row, level, span) {
  const cell = (label, ...content) => make("td", { "data-label": label }, make("span", {}, ...content));
  const promises = ratio(kept([row]), judged([row]));
  const attained = make(
    "span.trend",
    {},
    sparkline(`Attainment of ${row.class}`, row.trend, 1, share, span),
    make(`span${tone(row.attainment, level)}`, {}, share(row.attainment)),
  );
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, named(row.class, row.model)),
    cell("Requests", `${count(row.asked)}\u00a0·\u00a0${rate(row.asked_per_s)}`),
    cell("Promised", count(row.admission.guaranteed)),
    cell("Best effort", count(row.admission.best_effort)),
    cell("Refused", count(row.admission.refused)),
    cell("Promises kept", make(`span${tone(promises, level)}`, {}, share(promises))),
    cell("Attainment", attained),
    cell("Token gain", share(row.tdg)),
    cell("First token, p50 and p95", `${ms(row.ttft_ms.p50)} · ${ms(row.ttft_ms.p95)}`),
    cell("End to end, p50 and p95", `${ms(row.e2e_ms.p50)} · ${ms(row.e2e_ms.p95)}`),
  );
}
