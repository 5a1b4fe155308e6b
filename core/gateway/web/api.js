// The cluster's API, as any client asks it: https://, cookies and all, but for this page's own server alone.

import { Source } from "./ui.js";

// Whoever listens is told that a key is needed, or needed again.
export const access = new Source({ needsKey: false, me: null });

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const SILENT = "The server does not answer. Is core serve still running?";

export async function request(path, { method = "GET", body, signal } = {}) {
  const headers = body === undefined ? {} : { "content-type": "application/json" };
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(SILENT, 0, "no_answer");
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  if (answer.status === 401) access.set({ ...access.value, needsKey: true });
  throw new ApiError(said?.error?.message ?? `The server answered with status ${answer.status}.`, answer.status, said?.error?.code);
}

export async function ask(path, options) {
  return (await request(path, options)).json();
}

export async function findOut() {
  try {
    access.set({ needsKey: false, me: await ask("v1/me") });
  } catch (error) {
    if (error.status !== 401) throw error;
  }
}

export function askForKey() {
  access.set({ ...access.value, needsKey: true });
}

export async function logIn(key) {
  const body = { key };
  access.set({ needsKey: false, me: await ask("v1/login", { method: "POST", body }) });
}

export async function logOut() {
  await ask("v1/logout", { method: "POST" });
  await findOut();
}
