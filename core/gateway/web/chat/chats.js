// The conversations of this browser, and the answers that are coming: they go on whatever part of the page is shown.

import { Source } from "../ui.js";
import { answer } from "./exchange.js";
import { hear, readAll, remove, save } from "./store.js";
import { append, change, choose, exported, imported, newConversation, prompt } from "./tree.js";

const DRAW_MS = 50;
const SAVE_MS = 1000;
const newId = () => crypto.randomUUID();

// `running` has the AbortController of each conversation whose answer is coming.
export const chats = new Source({ all: new Map(), running: new Map(), ready: false, trouble: "" });

function tell(changes = {}) {
  chats.set({ ...chats.value, ...changes });
}

function put(conversation) {
  chats.value.all.set(conversation.id, conversation);
  tell();
}

async function keep(conversation) {
  put(conversation);
  try {
    await save(conversation);
  } catch (error) {
    tell({ trouble: `This browser keeps nothing: ${error.message}. Export what you need.` });
  }
}

export async function load() {
  if (chats.value.ready) return;
  tell({ ready: true });
  hear({
    onSaved: (conversation) => {
      if (!chats.value.running.has(conversation.id)) put(conversation);
    },
    onRemoved: (id) => {
      chats.value.all.delete(id);
      tell();
    },
  });
  try {
    for (const each of await readAll()) chats.value.all.set(each.id, each);
    tell();
  } catch (error) {
    tell({ trouble: `This browser keeps no conversations: ${error?.message ?? "it has no database"}.` });
  }
}

export function begin(settings) {
  const conversation = newConversation(newId(), Date.now(), settings);
  put(conversation);
  return conversation.id;
}

export function say(id, content, files, parent = chats.value.all.get(id).leaf) {
  const message = { id: newId(), parent, role: "user", content, files, created: Date.now() };
  return respond(append(chats.value.all.get(id), message), message.id);
}

// A new answer to what the message `parent` says, beside those that there are.
export function askAgain(id, parent) {
  return respond({ ...chats.value.all.get(id), leaf: parent }, parent);
}

async function respond(conversation, parent) {
  const message = { id: newId(), parent, role: "assistant", content: "", created: Date.now() + 1 };
  const { id, sampling } = conversation;
  const stopping = new AbortController();
  chats.value.running.set(id, stopping);
  const messages = prompt(conversation, parent);
  await keep(append(conversation, { ...message, finish: "interrupted" }));
  let state = {};
  let timer = 0;
  const draw = () => {
    timer = 0;
    const latest = chats.value.all.get(id);
    if (latest) put(change(latest, message.id, state));
    else stopping.abort();
  };
  let saved = Date.now();
  for await (state of answer(messages, sampling, stopping.signal)) {
    timer ||= setTimeout(draw, DRAW_MS);
    if (Date.now() - saved > SAVE_MS && chats.value.all.has(id)) {
      saved = Date.now();
      await keep(change(chats.value.all.get(id), message.id, { ...state, finish: state.finish || "interrupted" }));
    }
  }
  clearTimeout(timer);
  draw();
  chats.value.running.delete(id);
  const latest = chats.value.all.get(id);
  if (latest) await keep(latest);
  tell();
}

export function stop(id) {
  chats.value.running.get(id)?.abort();
}

export function show(id, messageId) {
  return keep(choose(chats.value.all.get(id), messageId));
}

export function update(id, changes) {
  return keep({ ...chats.value.all.get(id), ...changes });
}

export async function forget(id) {
  stop(id);
  chats.value.all.delete(id);
  tell();
  await remove(id);
}

export function exportOf(ids) {
  return exported(ids.map((id) => chats.value.all.get(id)));
}

export async function importFrom(text) {
  const found = imported(text, newId);
  for (const each of found) await keep(each);
  return found.length;
}
