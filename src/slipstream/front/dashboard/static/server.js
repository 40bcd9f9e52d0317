// Asks the server. Everything goes to the origin of the page; the API key lives in this tab's session storage alone.

const BASE = new URL("./", import.meta.url); // .../dashboard/
const KEY = "slipstream-api-key";
const PATIENCE_MS = 5000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** The answer to a path relative to /dashboard/. Raises Refused for a status, other errors when nobody answers. */
async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const answer = await fetch(new URL(path, BASE), {
    ...options, headers, cache: "no-store", credentials: "omit", redirect: "error",
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    throw new Refused(answer.status, body?.error?.message ?? `the server answered ${answer.status}`);
  }
  return answer;
}

export const state = async (since) => (await ask(`state?since=${since}`)).json();
export const machine = async () => (await ask("machine")).text();
export const requests = async () => listed(await (await ask("../v1/requests?limit=50")).json());
export const timeline = async (id) => (await ask(`../v1/requests/${encodeURIComponent(id)}/timeline`)).json();
export const doctor = () =>
  ask("doctor", { method: "POST", body: "{}", headers: { "content-type": "application/json" } });

function listed(body) {
  const found = Array.isArray(body) ? body : body?.data ?? body?.requests;
  return Array.isArray(found) ? found : [];
}
