// The last decisions, and why they fell as they did.

import { ago, by, count, make, ms, NONE } from "./figures.js";
import { named } from "./fleet.js";
import { CAUSES } from "./promises.js";

// Decisions never change, but for their age and how their request ended; one that was asked again is
// a new one.

const decisions = new Map();

/** Show them; `wanted` is the request that was asked for, or empty. */
export function showDecisions(list, wanted) {
  by("no-decisions").hidden = list.length > 0;
  by("no-decisions").textContent = wanted
    ? "No decision on this request is remembered: only the latest are."
    : "No decision yet.";
  by("decisions-head").hidden = !list.length;
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
    entry.update(decision);
    if (wanted && place === 0) entry.node.open = true;
    if (parent.children[place] !== entry.node) parent.insertBefore(entry.node, parent.children[place] ?? null);
  });
}

const REASONS = {
  no_objective: "no objective stated",
  best_effort_asked: "asked for, as by a batch",
  over_share: "client has its fair share",
  silent: "reports are too old",
  ttft: "TTFT out of reach",
  tpot: "TPOT out of reach",
  guarantees: "earlier guarantees",
  kv_memory: "too little KV memory",
  sequences: "no free sequence",
  prefill_budget: "prefill budget spent",
  worthier: "kept for requests of more worth",
};

/** What was promised, and if nothing was, why. */
function admission(decision) {
  const [text, tone] =
    decision.outcome === "unattainable" ? ["refused", ".bad"]
    : decision.outcome === "no_replica" ? ["no replica", ".bad"]
    : decision.tier === "guaranteed" ? ["promised", ".good"]
    : decision.tier === "best-effort" ? ["best effort", ".warn"]
    : ["placed", ""];
  const reason = REASONS[decision.not_guaranteed];
  return make("span", {}, make(`span${tone}`, {}, text), ...(reason ? [" ", make("span.hint", {}, reason)] : []));
}

const NAMES = { ttft: "TTFT", tpot: "TPOT", e2e: "end to end" };

/** Whether the response kept what was promised, or met what was stated. */
function verdict({ ended, tier }) {
  if (ended.attained === null) return ["", ""];
  if (!ended.attained) {
    const why = ended.cause ? `: ${CAUSES[ended.cause] ?? ended.cause}` : "";
    return [`missed ${ended.missed.map((name) => NAMES[name]).join(", ")}${why}`, ".bad"];
  }
  return [tier === "guaranteed" ? "kept" : "met", ".good"];
}

/** How the request ended. */
function ending(decision) {
  const { ended } = decision;
  if (decision.tried_again) return [make("span.hint", {}, "tried again, see above")];
  if (!ended) return [make("span.hint", {}, "not ended yet")];
  const why = ended.error ? `: ${ended.error}` : "";
  const after = ms(ended.ttft_ms ?? ended.e2e_ms);
  const [text, tone] =
    ended.outcome === "ok" ? verdict(decision)
    : ended.outcome === "cancelled" ? [`client left after ${ms(ended.e2e_ms)}`, ".warn"]
    : ended.outcome === "client_error" ? [`client error${why}`, ".warn"]
    : [`${ended.outcome}${why}`, ".bad"];
  const time = ended.ttft_ms === null && ended.outcome !== "ok" ? "" : `${after} `;
  return [time, make(`span${tone}`, {}, text)];
}

/** The replica that answers, after the one that computes the prompt where that is another. */
function where({ replica_id: answers, prefill_id: computes }) {
  return computes ? `${computes} → ${answers}` : answers ?? NONE;
}

function newDecision(decision) {
  const age = make("span.age");
  const end = make("span.end");
  const goal = decision.objective.ttft_ms;
  const expected = decision.predicted_ttft_ms;
  const times =
    expected === null
      ? decision.retry_after_ms === null ? NONE : `come again in ${ms(decision.retry_after_ms)}`
      : `${ms(expected)}${goal === null ? "" : ` of ${ms(goal)}`}`;
  const cell = (label, ...content) => make("span", { "data-label": label }, ...content);
  const summary = make(
    "summary",
    {},
    age,
    cell("Class", named(decision.class, decision.model)),
    cell("Admission", admission(decision)),
    cell("Replica", make("span.mono", {}, where(decision))),
    cell("Predicted", times),
    cell("Observed", end),
  );
  const node = make("details", { "data-key": decision.key }, summary);
  let latest = decision;
  let known = null;
  // The explanation is built when a reader opens it.
  function explain() {
    if (!node.open) return;
    node.querySelector(".why")?.remove();
    node.append(why(latest));
  }
  node.addEventListener("toggle", explain);

  function update(decision) {
    latest = decision;
    age.textContent = ago(decision.age_ms);
    const seen = JSON.stringify([decision.ended, decision.tried_again]);
    if (seen === known) return;
    known = seen;
    end.replaceChildren(...ending(decision));
    explain();
  }
  return { node, update };
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
    ...(decision.client_request_id ? [["The client's own id", decision.client_request_id]] : []),
    ["Objective", goals.join(", ") || "none"],
    ["Priority", objective.priority],
    ["Prompt, estimated", `${count(decision.prompt_tokens)} tokens`],
    ["Waited at the edge", ms(decision.waited_ms)],
    ["Asked", decision.asked === 1 ? "once" : `${decision.asked} times`],
    ["Replicas", replicas],
    ["Decided in", ms(decision.took_ms)],
    ...observed(decision),
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

/** What the router saw of the response. */
function observed({ ended }) {
  if (!ended) return [];
  return [
    ["Observed TTFT", ms(ended.ttft_ms)],
    ["Observed TPOT", ms(ended.tpot_ms)],
    ["End to end", ms(ended.e2e_ms)],
    ["Generated", `${count(ended.tokens)} tokens`],
    ...Object.entries(ended.late_ms).map(([cause, late]) => [`Late by: ${CAUSES[cause] ?? cause}`, ms(late)]),
  ];
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
