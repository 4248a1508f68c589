// A card for each replica; of many a table, the worst first, with the card behind its name.

import { sparkline } from "./chart.js";
import { ago, by, count, make, ms, NONE, pairs, ratio, share, tone } from "./figures.js";
import { byForecast } from "./promises.js";

const MOST_CARDS = 8;
const MOST_ROWS = 16; // before all of them are asked for

const POINTS = 60; // of a sparkline: two minutes
const PERIOD_MS = 2000; // between two of them, about: as often as the page asks
const SURE_MS = 5000; // for which a button that asks "sure?" waits for the answer

// Replicas keep their nodes from one answer to the next, so that a focused button stays focused.

const cards = new Map();
const rows = new Map();
let shown = []; // the last ones, with their promises
let all = false;
let sorted = { column: 1, worstFirst: true };

/** Show the replicas, with the `promises` of each. `change(id, drain)` drains one or takes that
 * back, and says so itself. */
export function showReplicas(replicas, promises, manyModels, change) {
  by("no-replicas").hidden = replicas.length > 0;
  const seen = new Set(replicas.map((replica) => replica.replica_id));
  for (const known of [cards, rows]) {
    for (const [id, { node }] of known) {
      if (seen.has(id)) continue;
      node.remove();
      known.delete(id);
    }
  }
  shown = replicas.map((replica) => ({ ...replica, promises: promises.get(replica.replica_id) }));
  for (const replica of shown) {
    let card = cards.get(replica.replica_id);
    if (!card) cards.set(replica.replica_id, (card = newCard(replica.replica_id, change)));
    card.update(replica, manyModels);
  }
  const many = shown.length > MOST_CARDS;
  by("replicas").hidden = many;
  for (const id of ["many", "choose"]) by(id).hidden = !many;
  if (many) {
    by("many").classList.toggle("no-gpu", !shown.some((replica) => replica.gpu));
    by("replicas").replaceChildren();
    showRows(true);
  } else {
    place(by("replicas"), shown.map((replica) => cards.get(replica.replica_id).node));
  }
}

/** Put nodes in this order, and move no more of them than needed: one that moves loses the focus. */
function place(parent, nodes) {
  nodes.forEach((node, index) => {
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
  while (parent.children.length > nodes.length) parent.lastChild.remove();
}

const kept = ({ promises }) => (promises ? ratio(promises.kept, promises.promised) : null);
const busy = ({ gpu }) => gpu?.utilization ?? null;
const budget = ({ pab_tokens: tokens }) => tokens ?? Infinity;
const WORST = Object.fromEntries(["gone", "quarantined", "stale", "aged", "draining", "fresh"].map((name, index) => [name, index]));

// Name, what it shows, its order with the worst first, and whether a phone has room for it.
const COLUMNS = [
  ["Replica", null, (a, b) => a.replica_id.localeCompare(b.replica_id), true],
  ["State", (replica) => state(replica), worse, true],
  ["Budget (PAB)", (replica) => (replica.pab_tokens === null ? "no limit" : count(replica.pab_tokens)), (a, b) => budget(a) - budget(b) || 0, true],
  ["Waiting", (replica) => count(replica.waiting), (a, b) => b.waiting - a.waiting, true],
  ["Running", (replica) => count(replica.running), (a, b) => b.running - a.running, false],
  ["KV in use", (replica) => share(replica.kv_usage), (a, b) => b.kv_usage - a.kv_usage, true],
  ["GPU busy", (replica) => share(busy(replica)), (a, b) => busy(b) - busy(a) || 0, false],
  ["Prompts ahead", (replica) => ms(replica.prefill_ms), (a, b) => b.prefill_ms - a.prefill_ms, false],
  ["Step", (replica) => (replica.steps ? ms(replica.last_step_ms) : NONE), (a, b) => b.last_step_ms - a.last_step_ms, false],
  ["Promises kept", (replica) => make(`span${replica.promises ? tone(kept(replica), replica.promises.level) : ""}`, {}, share(kept(replica))), (a, b) => (kept(a) ?? 2) - (kept(b) ?? 2), false],
];

const RISING = ["Replica", "Budget (PAB)", "Promises kept"]; // of which the least is the worst

const kind = (name, narrow) => (narrow ? "" : ".wide") + (name === "GPU busy" ? ".gpu" : "");

/** By state, then by the promises that it missed, its budget and its queue. */
function worse(a, b) {
  const missed = ({ promises }) => (promises ? promises.promised - promises.kept : 0);
  return (
    (WORST[a.condition] ?? 0) - (WORST[b.condition] ?? 0) ||
    missed(b) - missed(a) ||
    budget(a) - budget(b) ||
    b.waiting - a.waiting
  );
}

/** The rows; with `hold`, one that is open or has the focus stays where it is. */
function showRows(hold = false) {
  const text = by("filter").value.trim().toLowerCase();
  const words = (replica) => [replica.replica_id, replica.model, replica.role, replica.node_id, STATES[replica.condition]?.[0]].join(" ").toLowerCase();
  const found = shown.filter((replica) => words(replica).includes(text));
  const [, , order] = COLUMNS[sorted.column];
  found.sort((a, b) => (sorted.worstFirst ? order(a, b) : order(b, a)) || a.replica_id.localeCompare(b.replica_id));
  const bodies = [...by("many").tBodies];
  const listed = all ? found : found.slice(0, MOST_ROWS);
  const nodes = listed.map((replica) => {
    const row = rows.get(replica.replica_id) ?? newRow(replica.replica_id);
    row.update(replica);
    return row.node;
  });
  bodies.forEach((node, index) => {
    const at = nodes.indexOf(node);
    if (!hold || at < 0 || !node.matches(":has(:focus-visible, [aria-expanded=true])")) return;
    nodes.splice(at, 1);
    nodes.splice(index, 0, node);
  });
  place(by("many"), [by("many").tHead, ...nodes]);
  const told = `${listed.length} of ${shown.length}, ${sorted.column === 1 && sorted.worstFirst ? "worst first" : `by ${COLUMNS[sorted.column][0]}`}`;
  if (by("shown").textContent !== told) by("shown").textContent = told; // said aloud once
  by("all").hidden = found.length <= MOST_ROWS;
  by("all").textContent = all ? `Show ${MOST_ROWS}` : `Show all ${found.length}`;
}

by("many").tHead.rows[0].append(
  ...COLUMNS.map(([name, , , narrow], column) => {
    const button = make("button", { type: "button" }, name);
    const head = make(`th${kind(name, narrow)}`, { scope: "col" }, button);
    button.addEventListener("click", () => {
      sorted = { column, worstFirst: sorted.column !== column || !sorted.worstFirst };
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sorted.worstFirst === RISING.includes(name) ? "ascending" : "descending");
      showRows();
    });
    return head;
  }),
);
by("many").tHead.rows[0].cells[1].setAttribute("aria-sort", "descending");
by("filter").addEventListener("input", () => showRows());
by("all").addEventListener("click", () => {
  all = !all;
  showRows();
});

/** A row, which opens to its replica's card. */
function newRow(id) {
  const { node: card } = cards.get(id);
  const button = make("button.mono", { type: "button", "aria-expanded": "false" }, id);
  const cells = COLUMNS.slice(1).map(([name, , , narrow]) => make(`td${kind(name, narrow)}`));
  const row = make("tr", {}, make("th", { scope: "row" }, button), ...cells);
  const below = make("tr", {}, make("td.card", { colspan: COLUMNS.length }));
  const node = make("tbody", { "data-row": id }, row);
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    if (open) {
      below.cells[0].append(card);
      node.append(below);
    } else {
      below.remove();
    }
  });
  function update(replica) {
    cells.forEach((cell, index) => cell.replaceChildren(COLUMNS[index + 1][1](replica)));
  }
  const made = { node, update };
  rows.set(id, made);
  return made;
}

const STATES = {
  fresh: ["ready", "good"],
  aged: ["silent: nothing is promised", "warn"],
  stale: ["silent: left out", "bad"],
  quarantined: ["in quarantine", "bad"],
  draining: ["drained", "warn"],
  gone: ["gone", "bad"],
};

function newCard(id, change) {
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
      button.setAttribute("aria-label", `Sure? Drain replica ${id}`);
      sure = setTimeout(relax, SURE_MS);
      return;
    }
    const drain = !drained;
    relax();
    button.disabled = true;
    await change(id, drain);
    button.disabled = false;
  });

  function update(replica, manyModels) {
    kv.push(replica.kv_usage);
    if (kv.length > POINTS) kv.shift();
    const why = replica.condition === "quarantined" ? quarantine(replica.quarantine) : null;
    node.classList.toggle("off", replica.condition !== "fresh");
    top.replaceChildren(
      make("h3.mono", {}, id),
      ...(manyModels ? [make("span.hint", {}, replica.model)] : []),
      ...(replica.role === "mixed" ? [] : [make("span.hint", {}, replica.role)]),
      state(replica),
    );
    body.replaceChildren(
      ...(why ? [make("p.hint.quarantine", {}, why.next)] : []),
      meter(replica, kv),
      queue(replica),
      facts(replica),
    );
    said.textContent = `${replica.policy} · ${ago(replica.report_age_ms)}`;
    said.title = `Node ${replica.node_id}`;
    const was = drained;
    drained = replica.drain === "operator";
    button.hidden = replica.drain === "replica" || replica.condition === "gone";
    if (was !== drained || !button.textContent) relax();
  }
  return { node, update };
}

/** Whether it takes requests, in colour. */
function state(replica) {
  const [name, colour] = STATES[replica.condition] ?? [replica.condition, ""];
  const left = replica.waiting + replica.running + replica.reserved;
  const rest =
    replica.condition === "draining" ? (left ? `${left} left` : "nothing left")
    : replica.condition === "quarantined" ? quarantine(replica.quarantine).reason
    : null;
  return make(`span.state${colour ? `.${colour}` : ""}`, {}, rest ? `${name}, ${rest}` : name);
}

const TROUBLES = { hung: "it hangs", failed: "requests fail" };

/** What was seen of a replica in quarantine, and what comes next. */
function quarantine(found) {
  const { reason, state, since_ms: since, retry_in_ms: retry } = found;
  const next =
    state === "half-open" ? "one request at a time tries it"
    : retry === null ? "nothing goes there until it says that it works"
    : `tried again in ${ms(retry)}`;
  return { reason: TROUBLES[reason] ?? reason, next: `For ${ms(since)}; ${next}` };
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
  const span = ms(Math.max(1, kv.length - 1) * PERIOD_MS);
  const trend = make("span.trend", {}, sparkline("KV in use", kv, 1, share, span), share(used));
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

const gib = (bytes) => (bytes / 2 ** 30).toFixed(1);

function facts(replica) {
  const entries = [
    ["On the way", count(replica.reserved)],
    ["Prompts ahead", `${count(replica.prefill_tokens)} tokens, ${ms(replica.prefill_ms)}`],
    ["Prefill budget (PAB)", replica.pab_tokens === null ? "no limit" : `${count(replica.pab_tokens)} tokens`],
    ["Step, real and predicted", replica.steps ? `${ms(replica.last_step_ms)} · ${ms(replica.predicted_step_ms)}` : NONE],
  ];
  if (replica.gpu) {
    const { memory_used_bytes: used, memory_bytes: total } = replica.gpu;
    entries.push(["GPU: busy, memory", `${share(busy(replica))} · ${gib(used)} of ${gib(total)}\u00a0GiB`]);
  }
  if (replica.promises?.promised) {
    const { promises } = replica;
    entries.push(["Promises kept", `${share(kept(replica))} of ${count(promises.promised)}`]);
    const checked = byForecast(promises.reliability, promises.quantiles);
    if (checked) entries.push(["First tokens by p50 · p90 · p99", checked]);
  }
  if (replica.best_effort_prefill_ms > 0) {
    entries.push(["Best-effort prompts", ms(replica.best_effort_prefill_ms)]);
  }
  return pairs(entries);
}
