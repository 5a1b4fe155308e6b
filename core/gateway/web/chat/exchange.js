// One answer: asked of the API, read as it comes, and measured.

import { ask, request } from "../api.js";
import { events } from "../sse.js";

let model = null;

async function served() {
  model ??= (await ask("v1/models")).data[0].id;
  return model;
}

// The parts of an answer so far, which `take` adds to.
export class Reading {
  constructor(now) {
    this.now = now;
    this.began = now();
    this.first = null;
    this.message = { content: "", reasoning: "", calls: [], waits: "", error: "", finish: "", figures: null };
  }

  // Whether the message has changed by this event.
  take({ data, comment }) {
    if (comment !== undefined) return this.hear(comment);
    if (data === "[DONE]") return false;
    const chunk = JSON.parse(data);
    if (chunk.error) {
      this.change({ error: chunk.error.message, waits: "" });
      return true;
    }
    for (const { delta, finish_reason: finish } of chunk.choices ?? []) this.add(delta, finish);
    if (chunk.usage) this.count(chunk.usage);
    return true;
  }

  change(changes) {
    this.message = { ...this.message, ...changes };
  }

  hear(comment) {
    const [, waits = ""] = comment.match(/^waiting: (.*)$/) ?? [];
    if (waits === this.message.waits) return false;
    this.change({ waits, stops: (this.message.stops ?? 0) + (waits && !this.message.waits ? 1 : 0), last: waits || this.message.last });
    return true;
  }

  add({ content = "", reasoning_content: thought = "", tool_calls: calls = [] }, finish) {
    if (this.first === null && (content || thought || calls.length)) this.first = this.now();
    const { message } = this;
    const changes = { content: message.content + (content ?? ""), reasoning: message.reasoning + thought, waits: "" };
    if (calls.length) changes.calls = calls.reduce(withCall, message.calls);
    if (finish) changes.finish = finish;
    this.change(changes);
  }

  count({ prompt_tokens: prompt, completion_tokens: completion, prompt_tokens_details: { cached_tokens: cached } = {} }) {
    const end = this.now();
    const first = this.first ?? end;
    const decoding = (end - first) / 1000;
    const perSecond = completion > 1 && decoding > 0 ? (completion - 1) / decoding : null;
    this.change({ figures: { prompt, completion, cached, ttft: (first - this.began) / 1000, perSecond } });
  }
}

function withCall(calls, { index, function: { name, arguments: text = "" } = {} }) {
  const call = calls[index] ?? { name: "", arguments: "" };
  const next = [...calls];
  next[index] = { name: name || call.name, arguments: call.arguments + text };
  return next;
}

// Yields the message as it grows. A stop by `signal` ends it with what has come.
export async function* answer(messages, sampling, signal) {
  const reading = new Reading(() => performance.now());
  try {
    const body = { model: await served(), messages, stream: true, stream_options: { include_usage: true }, ...sampling };
    const { body: stream } = await request("v1/chat/completions", { method: "POST", body, signal });
    for await (const event of events(stream)) if (reading.take(event)) yield reading.message;
    const { finish, error } = reading.message;
    if (!finish && !error) reading.change({ error: "The answer broke off: the server went away." });
  } catch (error) {
    if (signal.aborted) reading.change({ finish: "stopped", waits: "" });
    else reading.change({ error: error.message, waits: "" });
    if (error.code === "model_not_found") model = null;
  }
  yield reading.message;
}
