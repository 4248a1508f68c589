// A card for each replica.

import { sparkline } from "./chart.js";
import { ago, by, count, make, ms, NONE, pairs, share } from "./figures.js";

const POINTS = 60; // of a sparkline: two minutes
const PERIOD_MS = 2000; // between two of them, about: as often as the page asks
const SURE_MS = 5000; // for which a button that asks "sure?" waits for the answer

// Replicas keep their nodes from one answer to the next, so that a focused button stays focused.

const cards = new Map();

/** Show the replicas. `change(id, drain)` drains one or takes that back, and says so itself. */
export function showReplicas(replicas, manyModels, change) {
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
    if (!card) cards.set(replica.replica_id, (card = newCard(replica.replica_id, change)));
    card.update(replica, manyModels);
    const parent = by("replicas");
    if (parent.children[place] !== card.node) parent.insertBefore(card.node, parent.children[place] ?? null);
  });
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
    const [state, tone] = STATES[replica.condition] ?? [replica.condition, ""];
    const left = replica.waiting + replica.running + replica.reserved;
    const why = replica.condition === "quarantined" ? quarantine(replica.quarantine) : null;
    const isDraining = replica.condition === "draining";
    const rest = isDraining ? (left ? `${left} left` : "nothing left") : why?.reason;
    const shown = rest ? `${state}, ${rest}` : state;
    node.classList.toggle("off", replica.condition !== "fresh");
    top.replaceChildren(
      make("h3.mono", {}, id),
      ...(manyModels ? [make("span.hint", {}, replica.model)] : []),
      ...(replica.role === "mixed" ? [] : [make("span.hint", {}, replica.role)]),
      make(`span.state${tone ? `.${tone}` : ""}`, {}, shown),
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

function facts(replica) {
  const entries = [
    ["On the way", count(replica.reserved)],
    ["Prompts ahead", `${count(replica.prefill_tokens)} tokens, ${ms(replica.prefill_ms)}`],
    ["Prefill budget (PAB)", replica.pab_tokens === null ? "no limit" : `${count(replica.pab_tokens)} tokens`],
    ["Step, real and predicted", replica.steps ? `${ms(replica.last_step_ms)} · ${ms(replica.predicted_step_ms)}` : NONE],
  ];
  if (replica.best_effort_prefill_ms > 0) {
    entries.push(["Best-effort prompts", ms(replica.best_effort_prefill_ms)]);
  }
  return pairs(entries);
}
