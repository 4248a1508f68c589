// The live page: asks the admin API every two seconds and shows what it says.

import { ask, dropKey, hasKey, keepKey, Refusal, takeKey } from "./api.js";
import { showDecisions } from "./decisions.js";
import { by } from "./figures.js";
import { showFleet } from "./fleet.js";

const POLL_MS = 2000;
const MOST_PAUSE_MS = 30000;
const DECISIONS = 30;
const NOTICE_MS = 15000; // for which it stays in sight that something could not be done

let timer = null;
let polling = false;
let again = false;
let failures = 0;
let paused = false;
let lastGood = null;
let wanted = "";
let notice = { text: null, until: 0 };

async function poll() {
  clearTimeout(timer);
  if (polling) {
    again = true;
    return;
  }
  polling = true;
  try {
    const query = wanted ? `request_id=${encodeURIComponent(wanted)}` : `limit=${DECISIONS}`;
    const open = by("last").open;
    const [fleet, told] = await Promise.all([ask("fleet"), open && ask(`decisions?${query}`)]);
    const silent = fleet.unavailable;
    if (silent.length) trouble(`The controller or observer of ${silent.join(", ")} does not answer.`);
    else trouble(Date.now() < notice.until ? notice.text : null);
    showFleet(fleet, change);
    if (told) showDecisions(told.decisions, wanted);
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

const last = (id) =>
  `${id} is the last replica of its model that takes requests. Once it is drained, each of them gets a 503. Drain it?`;

/** Drain a replica, or take that back. */
async function change(id, drain) {
  try {
    const path = `replicas/${encodeURIComponent(id)}/drain`;
    await ask(path, drain ? "POST" : "DELETE").catch((error) => {
      if (error.code !== "last_replica" || !confirm(last(id))) throw error;
      return ask(`${path}?force=true`, "POST");
    });
  } catch (error) {
    const text = `Replica ${id} could not be ${drain ? "drained" : "taken back"}: ${error.message}`;
    notice = { text, until: Date.now() + NOTICE_MS };
  }
  await poll();
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
  // An answer may come after the pause: asked for before it, or by a search.
  if (paused) status("waiting", "Paused");
  else status("live", "Live");
}

function failed(error) {
  failures += 1;
  if (error instanceof Refusal && error.status === 401) {
    const tried = hasKey();
    dropKey();
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
    const off = error.status === 404 ? "The admin API is disabled: router.admin.access is off." : error.message;
    trouble(`${off}${since}`);
    status("stale", error.status === 503 ? "Controller silent" : "Refused");
  } else {
    trouble(`The server does not answer.${since} Retrying.`);
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

by("login").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(by("key").value.trim());
  by("key").value = "";
  by("login").hidden = true;
  poll();
});

by("find").addEventListener("submit", (event) => {
  event.preventDefault();
  wanted = by("request").value.trim();
  poll();
});

by("find").addEventListener("reset", () => {
  wanted = "";
  poll();
});

by("pause").addEventListener("click", () => {
  paused = !paused;
  by("pause").setAttribute("aria-pressed", String(paused));
  by("pause").textContent = paused ? "Resume" : "Pause";
  if (paused) {
    clearTimeout(timer);
    status("waiting", "Paused");
  } else {
    poll();
  }
});

// On a phone the decisions are behind a tap, and are not asked for before it.
by("last").open = !matchMedia("(max-width: 46rem)").matches;
by("last").addEventListener("toggle", () => {
  if (by("last").open && !paused) poll();
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
