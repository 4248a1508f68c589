// The last decisions, and why they fell as they did.

import { ago, by, count, make, ms, NONE } from "./figures.js";
import { named } from "./fleet.js";

// Decisions never change, but for their age; one that was asked again is a new one.

const decisions = new Map();

/** Show them; `wanted` is the request that was asked for, or empty. */
export function showDecisions(list, wanted) {
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

/** The replica that answers, after the one that computes the prompt where that is another. */
function where({ replica_id: answers, prefill_id: computes }) {
  return computes ? `${computes} → ${answers}` : answers ?? NONE;
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
    make("span", {}, named(decision.class, decision.model)),
    make(`span${tone ? `.${tone}` : ""}`, {}, text),
    make("span.mono", {}, where(decision)),
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
  const replicas = [[decision.known, "known"], [decision.candidates, "choosable"], [decision.able, "able"]]
    .filter(([number]) => number !== null)
    .map(([number, what]) => `${number} ${what}`)
    .join(", ");
  const known = [
    ["Request", decision.request_id ?? NONE],
    ["Objective", goals.join(", ") || "none"],
    ["Priority", objective.priority],
    ["Prompt, estimated", `${count(decision.prompt_tokens)} tokens`],
    ["Waited at the edge", ms(decision.waited_ms)],
    ["Asked", decision.asked === 1 ? "once" : `${decision.asked} times`],
    ["Replicas", replicas],
    ["Decided in", ms(decision.took_ms)],
  ];
  const list = make(
    "dl.facts",
    {},
    ...known.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd.mono", {}, value))),
  );
  const node = make("div.why", {}, make("p", {}, decision.why), list);
  showWeighed(node, decision);
  if (decision.prefill_id && decision.second) {
    node.append(make("p", {}, `The answer comes from another one, ${ms(decision.handover_ms)} later:`));
    showWeighed(node, decision.second);
  }
  return node;
}

/** The chosen replica beside the best of the others. */
function showWeighed(node, { chosen, others, others_left_out: leftOut }) {
  const rows = [...(chosen ? [[chosen, "chosen"]] : []), ...others.map((each) => [each, each.why_not])];
  if (rows.length) node.append(compared(rows));
  if (leftOut > 0) node.append(make("p.hint", {}, `${leftOut} more are not shown.`));
}

function compared(rows) {
  const promise = (each) => {
    if (each.can_promise === null) return NONE;
    if (each.can_promise) return "now";
    return each.could_promise_in_ms === null ? "never" : `in ${ms(each.could_promise_in_ms)}`;
  };
  const columns = [
    ["First token", (each) => ms(each.predicted_ttft_ms)],
    ["Prompts ahead", (each) => ms(each.ahead_ms)],
    ["This prompt", (each) => ms(each.prefill_ms)],
    ["Cached", (each) => count(each.cached_tokens)],
    ["Could promise", promise],
    ["Why", (_, reason) => reason],
  ].filter(([, show]) => rows.some(([each, reason]) => show(each, reason) !== NONE));
  const shown = rows.map(([each, reason]) =>
    make(
      "tr",
      {},
      make("th.mono", { scope: "row" }, each.replica_id),
      ...columns.map(([name, show]) => make("td", { "data-label": name }, make("span", {}, show(each, reason)))),
    ),
  );
  const head = ["Replica", ...columns.map(([name]) => name)].map((name) => make("th", { scope: "col" }, name));
  return make("table.stack", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...shown));
}
