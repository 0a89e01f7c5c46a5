// Requests to the server this page came from, and the token they carry.

const TOKEN_KEY = "headway-token";
const PATIENCE_MS = 20000;

/** The server answered, and said no. */
export class Refused extends Error {
  constructor(status, answer) {
    super(String(answer?.error ?? `the server answered ${status}`));
    this.status = status;
    this.answer = answer ?? {};
  }
}

/** No answer, or none that is of use now; the same request may work later. */
export class Unreachable extends Error {
  constructor(message, answered = false) {
    super(message);
    this.answered = answered;
  }
}

let token = null;

/** The token from the address, which is then cleared of it, or the one of this browser tab. */
export function takeToken() {
  const said = new URLSearchParams(location.hash.slice(1));
  const given = said.get("token");
  if (given !== null) {
    said.delete("token");
    const rest = said.toString();
    history.replaceState(null, "", location.pathname + (rest ? `#${rest}` : ""));
    setToken(given);
  } else {
    token = sessionStorage.getItem(TOKEN_KEY);
  }
  return token;
}

export function setToken(value) {
  token = value ? value.trim() : null;
  if (token) sessionStorage.setItem(TOKEN_KEY, token);
  else sessionStorage.removeItem(TOKEN_KEY);
}

export function tokenInUse() {
  return token;
}

async function ask(method, path, body) {
  const headers = { Accept: "application/json" };
  // A header holds Latin-1 only; anything else is no token of ours and gets the same answer.
  if (token) headers.Authorization = `Bearer ${token.replace(/[^\x21-\x7e]/g, "?")}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  let value;
  try {
    answer = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
    value = await answer.json();
  } catch (error) {
    if (answer === undefined || answer.ok) throw new Unreachable(String(error.message ?? error));
    value = {};
  }
  if (answer.ok) return value;
  if (answer.status >= 500 || answer.status === 429) {
    throw new Unreachable(String(value?.error ?? `the server answered ${answer.status}`), true);
  }
  throw new Refused(answer.status, value);
}

export function get(path) {
  return ask("GET", path);
}

export function post(path, body) {
  return ask("POST", path, body);
}

export function runPath(run, rest) {
  return `/api/runs/${encodeURIComponent(run)}/${rest}`;
}

/** A fresh id: a command sent twice with one id is the same command. */
export function newCommandId() {
  const random = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
