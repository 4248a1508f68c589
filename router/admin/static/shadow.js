// What other policies would have changed in recorded traffic.

import { by, count, make, rate, share } from "./figures.js";

const NAMES = { attained: ["Attainment", share], kept: ["Promised and kept", share], tokens_per_s: ["Tokens in time", rate] };

/** Show them for each model that has some; `manyModels`: each below its name. */
export function showShadow(up, manyModels) {
  const shown = up.filter(([, { shadow }]) => shadow);
  by("shadow").hidden = !shown.length;
  by("shadow-models").replaceChildren(
    ...shown.flatMap(([name, { shadow }]) => [
      make("p.hint", {}, `${manyModels ? `${name}: ` : ""}${said(shadow.policies)}, replayed with ${count(shadow.windows)} windows of traffic.`),
      ...(shadow.windows ? [table(shadow.figures)] : []),
    ]),
  );
}

const said = (policies) => ["batching", "routing", "admission"].filter((kind) => policies[kind]).map((kind) => `${kind} ${policies[kind]}`).join(", ");

const signed = (value, shown) => `${value < 0 ? "\u2212" : "+"}${shown(Math.abs(value))}`;

function table(figures) {
  const head = ["Figure", "Measured", "Replayed", "Would change by", "95\u00a0% interval"];
  const rows = Object.entries(NAMES).filter(([name]) => figures[name]).map(([name, [title, shown]]) => {
    const { live, replayed, expected, low, high } = figures[name];
    const cells = [shown(live), shown(replayed), signed(expected, shown), `${signed(low, shown)} to ${signed(high, shown)}`];
    return make("tr", {}, make("th", { scope: "row" }, title), ...cells.map((text, place) => make("td", { "data-label": head[place + 1] }, make("span", {}, text))));
  });
  return make("table.stack", {}, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, ...rows));
}
