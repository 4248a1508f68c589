// Asking the admin API. The key stays in this tab.

const TIMEOUT_MS = 10000;
const KEY = "sluice-admin-key";

export class Refusal extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The admin API's answer. Throws a Refusal, or what `fetch` throws where there is no answer. */
export async function ask(path, method = "GET") {
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
  throw new Refusal(answer.status, said?.error?.message ?? `The server answered ${answer.status}.`, said?.error?.code);
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const keepKey = (key) => sessionStorage.setItem(KEY, key);
export const dropKey = () => sessionStorage.removeItem(KEY);

/** Take the key out of the address, so that it stays in no history and no bookmark. */
export function takeKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key === null) return;
  keepKey(key);
  history.replaceState(null, "", location.pathname + location.search);
}
