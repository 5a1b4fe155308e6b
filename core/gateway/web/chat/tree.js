// A conversation is a tree: what was edited or asked again is a branch beside the one before, and nothing is lost.
//
// conversation: {id, title, created, updated, system, sampling, messages: {id: message}, leaf}
// message: {id, parent, role, content, created, files, ...}; `leaf` is the last message of the branch that is shown.

export function newConversation(id, now, settings = {}) {
  const { system = "", sampling = {} } = settings;
  return { id, title: "", created: now, updated: now, system, sampling, messages: {}, leaf: null };
}

// The messages that are shown, from the first to the leaf.
export function branch(conversation, leaf = conversation.leaf) {
  const shown = [];
  for (let message = conversation.messages[leaf]; message; message = conversation.messages[message.parent]) shown.unshift(message);
  return shown;
}

function inOrder(messages) {
  return messages.sort((one, other) => one.created - other.created || (one.id < other.id ? -1 : 1));
}

function children(conversation, id) {
  return inOrder(Object.values(conversation.messages).filter(({ parent }) => parent === id));
}

// The versions of a message, itself among them.
export function versions(conversation, message) {
  return children(conversation, message.parent).filter(({ role }) => role === message.role);
}

export function append(conversation, message) {
  const title = conversation.title || titleOf(message);
  const messages = { ...conversation.messages, [message.id]: message };
  return { ...conversation, title, messages, leaf: message.id, updated: message.created };
}

export function change(conversation, id, changes) {
  const message = { ...conversation.messages[id], ...changes };
  return { ...conversation, messages: { ...conversation.messages, [id]: message } };
}

// Shows the branch that `id` is on, with what was said last there.
export function choose(conversation, id) {
  let leaf = id;
  for (let next = children(conversation, leaf); next.length; next = children(conversation, leaf)) leaf = next.at(-1).id;
  return { ...conversation, leaf };
}

// Two tabs may have added to one conversation: all messages of both, and the newer one's word on the rest.
export function merged(stored, newer) {
  if (!stored) return newer;
  return { ...newer, messages: { ...stored.messages, ...newer.messages } };
}

// What the API is asked for: the branch up to `leaf`, with the files in front of what was said of them.
export function prompt(conversation, leaf) {
  const said = branch(conversation, leaf).map((message) => ({ role: message.role, content: withFiles(message) }));
  return conversation.system ? [{ role: "system", content: conversation.system }, ...said] : said;
}

function withFiles({ content, files = [] }) {
  const parts = files.map(({ name, text }) => `File ${name}:\n${fenced(text)}`);
  return [...parts, content].filter(Boolean).join("\n\n");
}

function fenced(text) {
  const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((fence) => fence.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}

function titleOf({ content, files = [] }) {
  const text = content.trim() || files[0]?.name || "";
  const [line] = text.split("\n");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

export function matches(conversation, words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const texts = [conversation.title, conversation.system, ...Object.values(conversation.messages).map(({ content }) => content)];
  const text = texts.join("\n").toLowerCase();
  return wanted.every((word) => text.includes(word));
}

const FORMAT = "core conversations";

export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

// The conversations of an exported file, with ids of their own. Throws an Error that says what is wrong with it.
export function imported(text, newId) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("That file is no JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw new Error("That file has no conversations of core.");
  return file.conversations.map((each) => ({ ...checked(each), id: newId() }));
}

function checked(conversation) {
  const { title, created, updated, system, sampling, messages, leaf } = Object(conversation);
  const wrong = Object.entries(Object(messages)).some(
    ([id, { role, content, parent, created: at }]) =>
      !["user", "assistant"].includes(role) || typeof content !== "string" || typeof at !== "number" ||
      !(parent === null || Object.hasOwn(messages, parent)) || messages[id].id !== id,
  );
  const count = Object.keys(Object(messages)).length;
  const endless = (id) => {
    let steps = 0;
    for (let at = id; at !== null; at = messages[at].parent) if (++steps > count) return true;
    return false;
  };
  if (!wrong && Object.keys(Object(messages)).some(endless)) throw new Error("A conversation in that file has no beginning.");
  if (typeof title !== "string" || typeof updated !== "number" || wrong || !(leaf === null || Object.hasOwn(messages, leaf)))
    throw new Error("A conversation in that file is not whole.");
  return { title, created, updated, system: String(system ?? ""), sampling: Object(sampling), messages, leaf };
}
