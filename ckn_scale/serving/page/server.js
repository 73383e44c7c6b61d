// Requests to this server: the visitor's key, errors as the API gives them, patience when it is busy.

const ROOT = new URL("..", import.meta.url); // the server may live below a path of its host
const MAX_RETRIES = 2;
const LONGEST_WAIT_S = 10;

export class ServerError extends Error {
  constructor(answer, body) {
    super(body?.error?.message ?? `status ${answer.status}`);
    this.status = answer.status;
    this.details = body?.error ?? {};
    this.retryAfter_s = Number(answer.headers.get("retry-after")) || null;
    this.reference = this.details.reference ?? answer.headers.get("x-request-id");
  }
}

export const hasKey = () => Boolean(sessionStorage.getItem("key"));

export function rememberKey(key) {
  if (key) sessionStorage.setItem("key", key);
  else sessionStorage.removeItem("key");
}

export const formUrl = (path) => new URL(path, ROOT).href;

// The answer, or a ServerError. A link or an <img> cannot carry the key, so everything is fetched.
export async function ask(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = key ? { ...options.headers, Authorization: `Bearer ${key}` } : options.headers;
  const answer = await fetch(formUrl(path), { ...options, headers });
  if (!answer.ok) throw new ServerError(answer, await answer.json().catch(() => null));
  return answer;
}

export const askJson = async (path, options) => (await ask(path, options)).json();

export const askBlob = async (path, options) => (await ask(path, options)).blob();

export function post(body, signal) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
}

// As askJson; when the server is busy or a part of it restarts, again after the time it asks for.
export async function askPatiently(path, options, onWait) {
  for (let tries = 0; ; tries++) {
    try {
      return await askJson(path, options);
    } catch (error) {
      const wait_s = error.retryAfter_s ?? 2;
      const passes = error.status === 429 || error.status === 503;
      if (!passes || tries === MAX_RETRIES || wait_s > LONGEST_WAIT_S) throw error;
      onWait(error, wait_s);
      await pause(wait_s, options?.signal);
    }
  }
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
