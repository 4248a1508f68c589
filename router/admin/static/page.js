// The live page. It asks the admin API and shows the answers; all text goes in as text, never as
// markup. Durations come in milliseconds.
"use strict";

const POLL_MS = 2000;
const MOST_PAUSE_MS = 30000;
const TIMEOUT_MS = 10000;
const POINTS = 60; // of a replica's sparkline: two minutes
const SURE_MS = 5000; // for which a button that asks "sure?" waits for the answer
const KEY = "sluice-admin-key";

const by = (id) => document.getElementById(id);

/** An element: `make("td.good", {title: "..."}, "text", otherElement)`. */
function make(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const node = document.createElement(tag);
  node.classList.add(...classes);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

// Figures.

const NONE = "–";

function ms(value) {
  if (value === null || value === undefined) return NONE;
  if (Math.abs(value) >= 60000) return `${Math.floor(value / 60000)} min ${Math.round(value / 1000) % 60} s`;
  if (Math.abs(value) >= 1000) return `${(value / 1000).toFixed(value < 10000 ? 1 : 0)} s`;
  if (value === 0 || Math.abs(value) >= 10) return `${Math.round(value)} ms`;
  return `${value.toFixed(value < 0.1 ? 3 : 1)} ms`;
}

const share = (value) =>
  value === null || value === undefined ? NONE : `${(100 * value).toFixed(value >= 0.9995 || value < 0.1 ? 0 : 1)} %`;

function count(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(size < 1e5 ? 1 : 0)} k`;
  return String(Math.round(value));
}

const rate = (value) => (value === null ? NONE : `${value < 10 ? value.toFixed(1) : Math.round(value)}/s`);
const level = (value) => (value === null ? "" : value >= 0.99 ? ".good" : value >= 0.9 ? ".warn" : ".bad");
const ago = (value) => (value < 1000 ? "now" : `${ms(value)} ago`);

/** A line through `values`, of which any may be null. The number itself stands beside it. */
function line(values, least, most) {
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

// The fleet.

let manyModels = false;

function showFleet(fleet) {
  const models = Object.entries(fleet.models);
  manyModels = models.length > 1;
  const { controller } = fleet;
  by("about").textContent = manyModels
    ? `${models.length} models`
    : `${models[0][0]} · ${controller.policy}, admission ${controller.admission}`;
  showTiles(fleet, models);
  showClasses(fleet);
  showReplicas(fleet.replicas);
  const silent = fleet.unavailable;
  trouble(silent.length ? `The controller of ${silent.join(", ")} does not answer.` : null);
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
  const tiles = [
    ["Replicas ready", `${ready} of ${replicas.length}`, ready < replicas.length || !ready ? ".warn" : ""],
    ["Running", count(sum(replicas, "running")), ""],
    ["Waiting", count(sum(replicas, "waiting") + sum(replicas, "reserved")), ""],
    ["Attainment", share(overall), level(overall)],
    ["Refused", count(fleet.admission.refused), ""],
    ["KV in use, mean", kv.length ? share(kv.reduce((a, b) => a + b) / kv.length) : NONE, ""],
    ["Decision, p50 and p99", took.length ? `${ms(slowest("p50"))} · ${ms(slowest("p99"))}` : NONE, ""],
  ];
  by("tiles").replaceChildren(
    ...tiles.map(([name, value, state]) => make("div", {}, make("dt", {}, name), make(`dd${state}`, {}, value))),
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
  const name = manyModels ? `${row.class} (${row.model})` : row.class;
  const attained = make(
    "span.trend",
    {},
    line(row.trend, 0, 1),
    make(`span${level(row.attainment)}`, {}, share(row.attainment)),
  );
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, name),
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

// Replicas keep their nodes from one answer to the next, so that a focused button stays focused.

const cards = new Map();

function showReplicas(replicas) {
  by("no-replicas").hidden = replicas.length > 0;
  const seen = new Set(replicas.map((replica) => replica.replica_id));
  for (const [id, card] of cards) {
    if (!seen.has(id)) {
      card.node.remove();
      cards.delete(id);
    }
  }
  replicas.forEach((replica, place) => {
    let card = cards.get(replica.replica_id);
    if (!card) cards.set(replica.replica_id, (card = newCard(replica.replica_id)));
    card.update(replica);
    const parent = by("replicas");
    if (parent.children[place] !== card.node) parent.insertBefore(card.node, parent.children[place] ?? null);
  });
}

const STATES = {
  fresh: ["ready", "good"],
  aged: ["silent: nothing is promised", "warn"],
  stale: ["silent: left out", "bad"],
  draining: ["drained", "warn"],
  gone: ["gone", "bad"],
};

function newCard(id) {
  const top = make("div.top");
  const body = make("div");
  const button = make("button", { type: "button" });
  const said = make("p.hint");
  const node = make("article.replica", { "aria-label": `Replica ${id}`, "data-replica": id });
  node.append(top, body, make("div.foot", {}, said, button));
  body.className = "body";
  const kv = [];
  let drained = false;
  let sure = null;

  function relax() {
    clearTimeout(sure);
    sure = null;
    button.classList.remove("sure");
    button.textContent = drained ? "Take back" : "Drain";
    button.setAttribute("aria-label", `${button.textContent} ${drained ? "" : "replica "}${id}`);
  }

  button.addEventListener("click", async () => {
    if (!drained && sure === null) {
      button.classList.add("sure");
      button.textContent = "Sure? Drain";
      sure = setTimeout(relax, SURE_MS);
      return;
    }
    const method = drained ? "DELETE" : "POST";
    relax();
    button.disabled = true;
    try {
      await ask(`replicas/${encodeURIComponent(id)}/drain`, method);
    } catch (error) {
      trouble(`Replica ${id} could not be ${drained ? "taken back" : "drained"}: ${error.message}`);
    }
    button.disabled = false;
    poll();
  });

  function update(replica) {
    kv.push(replica.kv_usage);
    if (kv.length > POINTS) kv.shift();
    const [state, tone] = STATES[replica.condition] ?? [replica.condition, ""];
    const left = replica.waiting + replica.running + replica.reserved;
    const isDraining = replica.condition === "draining";
    const shown = isDraining ? `${state}, ${left ? `${left} left` : "nothing left"}` : state;
    node.classList.toggle("off", replica.condition !== "fresh");
    top.replaceChildren(
      make("h3.mono", {}, id),
      ...(manyModels ? [make("span.hint", {}, replica.model)] : []),
      make(`span.state${tone ? `.${tone}` : ""}`, {}, shown),
    );
    body.replaceChildren(meter(replica, kv), queue(replica), facts(replica));
    said.textContent = `${replica.policy} · ${ago(replica.report_age_ms)}`;
    said.title = `Node ${replica.node_id}`;
    const was = drained;
    drained = replica.drain === "operator";
    button.hidden = replica.drain === "replica" || replica.condition === "gone";
    if (was !== drained || !button.textContent) relax();
  }
  return { node, update };
}

function meter(replica, kv) {
  const used = replica.kv_usage;
  const fill = make(used > 0.95 ? "div.warn" : "div");
  fill.style.width = `${100 * (used ?? 0)}%`;
  const blocks = `${replica.kv_blocks_total - replica.kv_blocks_free} of ${replica.kv_blocks_total} blocks`;
  const track = make(
    "div.track",
    { role: "meter", "aria-label": "KV in use", "aria-valuemin": 0, "aria-valuemax": 100,
      "aria-valuenow": Math.round(100 * (used ?? 0)), "aria-valuetext": blocks, title: blocks },
    fill,
  );
  const trend = make("span.trend", {}, line(kv, 0, 1), share(used));
  return make("div.meter", {}, make("span", {}, "KV in use"), track, trend);
}

function queue(replica) {
  const rows = replica.queue.length ? replica.queue : [{ class: "idle", tier: "", waiting: 0, running: 0 }];
  const head = ["Class", "Waiting", "Running"].map((name) => make("th", { scope: "col" }, name));
  const shown = rows.map((row) => {
    const name = row.class ?? "unknown class";
    const text = row.tier === "best-effort" ? `${name}, best effort` : name;
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, text),
      make("td", {}, row.waiting),
      make("td", {}, row.running),
    );
  });
  return make("table.queue", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...shown));
}

function pairs(entries) {
  return make("dl.facts", {}, ...entries.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

function facts(replica) {
  const entries = [
    ["On the way", count(replica.reserved)],
    ["Prompts ahead", `${count(replica.prefill_tokens)} tokens, ${ms(replica.prefill_ms)}`],
    ["Prefill budget (PAB)", replica.pab_tokens === null ? "no limit" : `${count(replica.pab_tokens)} tokens`],
    ["Step, real and predicted", `${ms(replica.last_step_ms)} · ${ms(replica.predicted_step_ms)}`],
  ];
  if (replica.best_effort_prefill_ms > 0) {
    entries.push(["Best-effort prompts", ms(replica.best_effort_prefill_ms)]);
  }
  return pairs(entries);
}

// Decisions never change, but for their age; one that was asked again is a new one.

const decisions = new Map();

function showDecisions(list, wanted) {
  by("no-decisions").hidden = list.length > 0;
  by("no-decisions").textContent = wanted
    ? "No decision on this request is remembered: only the latest are."
    : "No decision yet.";
  const keys = list.map((each) => `${each.model}/${each.key}/${each.asked}`);
  const kept = new Set(keys);
  for (const [key, entry] of decisions) {
    if (!kept.has(key)) {
      entry.node.remove();
      decisions.delete(key);
    }
  }
  const parent = by("decisions");
  list.forEach((decision, place) => {
    const key = keys[place];
    let entry = decisions.get(key);
    if (!entry) decisions.set(key, (entry = newDecision(decision)));
    entry.age.textContent = ago(decision.age_ms);
    if (wanted && place === 0) entry.node.open = true;
    if (parent.children[place] !== entry.node) parent.insertBefore(entry.node, parent.children[place] ?? null);
  });
}

function outcome(decision) {
  if (decision.outcome === "unattainable") return ["refused", "bad"];
  if (decision.outcome === "no_replica") return ["no replica", "bad"];
  if (decision.tier === "guaranteed") return ["promised", "good"];
  return decision.tier === "best-effort" ? ["best effort", "warn"] : ["placed", ""];
}

function newDecision(decision) {
  const [text, tone] = outcome(decision);
  const age = make("span.age");
  const goal = decision.objective.ttft_ms;
  const expected = decision.predicted_ttft_ms;
  const times =
    expected === null
      ? decision.retry_after_ms === null ? "" : `come again in ${ms(decision.retry_after_ms)}`
      : `first token in ${ms(expected)}${goal === null ? "" : ` of ${ms(goal)}`}`;
  const summary = make(
    "summary",
    {},
    age,
    make("span", {}, manyModels ? `${decision.class} (${decision.model})` : decision.class),
    make(`span${tone ? `.${tone}` : ""}`, {}, text),
    make("span.mono", {}, decision.replica_id ?? NONE),
    make("span", {}, times),
  );
  const node = make("details", { "data-key": decision.key }, summary);
  // The words are made when somebody wants to read them.
  node.addEventListener("toggle", () => {
    if (node.open && node.children.length === 1) node.append(why(decision));
  });
  return { node, age };
}

function why(decision) {
  const { objective } = decision;
  const goals = [["TTFT", objective.ttft_ms], ["TPOT", objective.tpot_ms], ["end to end", objective.e2e_ms]]
    .filter(([, value]) => value !== null)
    .map(([name, value]) => `${name} ${ms(value)}`);
  const known = [
    ["Request", decision.request_id ?? NONE],
    ["Objective", goals.join(", ") || "none"],
    ["Priority", objective.priority],
    ["Prompt, estimated", `${count(decision.prompt_tokens)} tokens`],
    ["Waited at the edge", ms(decision.waited_ms)],
    ["Asked", decision.asked === 1 ? "once" : `${decision.asked} times`],
    ["Replicas known, choosable, able", [decision.known, decision.candidates, decision.able].map((each) => each ?? NONE).join(" · ")],
    ["Decided in", ms(decision.took_ms)],
  ];
  const list = make(
    "dl.facts",
    {},
    ...known.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd.mono", {}, value))),
  );
  const node = make("div.why", {}, make("p", {}, decision.why), list);
  const rows = [...(decision.chosen ? [[decision.chosen, "chosen"]] : []), ...decision.others.map((each) => [each, each.why_not])];
  if (rows.length) node.append(compared(rows));
  if (decision.others_left_out > 0) {
    node.append(make("p.hint", {}, `${decision.others_left_out} more are not shown.`));
  }
  return node;
}

function compared(rows) {
  const names = ["Replica", "First token", "Prompts ahead", "This prompt", "Cached", "Could promise", "Why"];
  const promise = (each) => {
    if (each.can_promise === null) return NONE;
    if (each.can_promise) return "now";
    return each.could_promise_in_ms === null ? "never" : `in ${ms(each.could_promise_in_ms)}`;
  };
  const shown = rows.map(([each, reason]) => {
    const values = [ms(each.predicted_ttft_ms), ms(each.ahead_ms), ms(each.prefill_ms), count(each.cached_tokens), promise(each), reason];
    return make(
      "tr",
      {},
      make("th.mono", { scope: "row" }, each.replica_id),
      ...values.map((value, place) => make("td", { "data-label": names[place + 1] }, make("span", {}, value))),
    );
  });
  const head = names.map((name) => make("th", { scope: "col" }, name));
  return make("table.stack", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...shown));
}

// Asking.

class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The admin API's answer. Throws a Refusal, or what `fetch` throws where there is no answer. */
async function ask(path, method = "GET") {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch(`admin/v1/${path}`, {
    method,
    headers: key ? { authorization: `Bearer ${key}` } : {},
    cache: "no-store",
    credentials: "omit",
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (answer.ok) return answer.json();
  const said = await answer.json().catch(() => null);
  throw new Refusal(answer.status, said?.error?.message ?? `The server answered ${answer.status}.`);
}

let timer = null;
let polling = false;
let again = false;
let failures = 0;
let paused = false;
let lastGood = null;
let wanted = "";

async function poll() {
  clearTimeout(timer);
  if (polling) {
    again = true;
    return;
  }
  polling = true;
  try {
    const query = wanted ? `?request_id=${wanted}` : "";
    const [fleet, told] = await Promise.all([ask("fleet"), ask(`decisions${query}`)]);
    trouble(null);
    showFleet(fleet);
    showDecisions(told.decisions, wanted);
    succeeded();
  } catch (error) {
    failed(error);
  }
  polling = false;
  if (again) {
    again = false;
    poll();
  } else {
    plan();
  }
}

function plan() {
  clearTimeout(timer);
  if (paused || document.hidden || !by("login").hidden) return;
  timer = setTimeout(poll, Math.min(MOST_PAUSE_MS, POLL_MS * 2 ** Math.min(failures, 8)));
}

function succeeded() {
  failures = 0;
  lastGood = Date.now();
  by("login").hidden = true;
  by("main").hidden = false;
  delete document.body.dataset.stale;
  status("live", "Live");
}

function failed(error) {
  failures += 1;
  if (error instanceof Refusal && error.status === 401) {
    const tried = sessionStorage.getItem(KEY) !== null;
    sessionStorage.removeItem(KEY);
    by("login-why").textContent = tried ? "That key is not accepted." : "The admin API needs a key.";
    by("login").hidden = false;
    by("main").hidden = true;
    trouble(null);
    status("waiting", "Needs a key");
    return;
  }
  const since = lastGood === null ? "" : ` What is shown is of ${new Date(lastGood).toLocaleTimeString()}.`;
  if (lastGood !== null) document.body.dataset.stale = "";
  if (error instanceof Refusal) {
    const off = error.status === 404 ? "There is no admin API here: router.admin.access is off." : error.message;
    trouble(`${off}${since}`);
    status("stale", error.status === 503 ? "Controller silent" : "Refused");
  } else {
    trouble(`The server does not answer.${since} The page goes on trying.`);
    status("stale", "Unreachable");
  }
}

function trouble(text) {
  by("trouble").hidden = text === null;
  if (by("trouble").textContent !== (text ?? "")) by("trouble").textContent = text ?? "";
}

function status(state, text) {
  const node = by("status");
  node.dataset.state = state;
  if (node.textContent !== text) node.textContent = text;
}

/** Take the key out of the address, so that it stays in no history and no bookmark. */
function takeKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key === null) return;
  sessionStorage.setItem(KEY, key);
  history.replaceState(null, "", location.pathname + location.search);
}

by("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, by("key").value.trim());
  by("key").value = "";
  by("login").hidden = true;
  poll();
});

by("find").addEventListener("submit", (event) => {
  event.preventDefault();
  wanted = by("request").value.trim().toLowerCase();
  poll();
});

by("find").addEventListener("reset", () => {
  wanted = "";
  poll();
});

by("pause").addEventListener("click", () => {
  paused = !paused;
  by("pause").setAttribute("aria-pressed", String(paused));
  by("pause").textContent = paused ? "Go on" : "Pause";
  if (paused) {
    clearTimeout(timer);
    status("waiting", "Paused");
  } else {
    poll();
  }
});

addEventListener("hashchange", () => {
  takeKey();
  poll();
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else if (!paused) poll();
});

takeKey();
poll();
