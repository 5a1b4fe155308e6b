// One message: what was thought, called and said, what it cost, and what can be done with it.

import { counted, html, rate, seconds, useState } from "../ui.js";
import { askAgain, say, show } from "./chats.js";
import { Markdown } from "./markdown.js";
import { versions } from "./tree.js";

const ENDS = {
  length: "It was cut: the limit of tokens was reached.",
  stopped: "You stopped it.",
  interrupted: "The page went away while this came.",
};

export function Message({ conversation, message, comes, busy }) {
  const [edited, setEdited] = useState(false);
  const mine = message.role === "user";
  return html`<article class=${`message ${message.role}`} aria-label=${mine ? "You" : "The model"} aria-busy=${comes}>
    ${message.files?.length > 0 && html`<ul class="files">${message.files.map(({ name, text }) => html`<li key=${name}>${name}, ${counted(text.length, "character")}</li>`)}</ul>`}
    ${edited
      ? html`<${Edit} message=${message} close=${() => setEdited(false)} send=${(text) => say(conversation.id, text, message.files, message.parent)} />`
      : html`<${Body} message=${message} mine=${mine} comes=${comes} />`}
    ${!comes && !edited && html`<footer class="message-foot">
      <${Figures} message=${message} />
      <${Versions} conversation=${conversation} message=${message} busy=${busy} />
      <${Copy} text=${message.content} />
      ${mine
        ? html`<button type="button" class="plain" disabled=${busy} onClick=${() => setEdited(true)}>Edit</button>`
        : html`<button type="button" class="plain" disabled=${busy} onClick=${() => askAgain(conversation.id, message.parent)}>Ask again</button>`}
    </footer>`}
  </article>`;
}

function Body({ message, mine, comes }) {
  if (mine) return html`<p class="said">${message.content}</p>`;
  const { content, reasoning, calls, error, finish, stops = 0, last = "" } = message;
  return html`
    ${reasoning && html`<details class="thoughts" open=${comes && !content}>
      <summary>Thoughts</summary><div class="thought">${reasoning}</div>
    </details>`}
    <${Markdown} text=${content} />
    ${calls?.map((call, at) => html`<${Call} key=${at} call=${call} />`)}
    ${comes && html`<${Waiting} message=${message} />`}
    ${!comes && stops > 0 && html`<p class="note">It went on by itself after a machine went away: ${last}</p>`}
    ${error && html`<p class="trouble" role="alert">${error}</p>`}
    ${!comes && !error && ENDS[finish] && html`<p class="note">${ENDS[finish]}</p>`}
  `;
}

function Waiting({ message }) {
  const { waits, content, reasoning } = message;
  if (waits) return html`<p class="notice suspended" role="status"><strong>The answer waits, and goes on by itself.</strong> ${waits}</p>`;
  return content || reasoning ? null : html`<p class="note" role="status">The prompt is being read…</p>`;
}

function Call({ call }) {
  return html`<div class="call"><strong>Calls ${call.name}</strong><pre tabindex="0">${call.arguments}</pre></div>`;
}

function Figures({ message: { figures } }) {
  if (!figures) return null;
  const { prompt, completion, cached, ttft, perSecond } = figures;
  const parts = [
    counted(completion, "token"),
    perSecond && rate(perSecond),
    `first after ${seconds(ttft)}`,
    `prompt ${counted(prompt, "token")}${cached ? `, ${cached} cached` : ""}`,
  ];
  return html`<p class="figures-line">${parts.filter(Boolean).join(" · ")}</p>`;
}

function Versions({ conversation, message, busy }) {
  const all = versions(conversation, message);
  const at = all.findIndex(({ id }) => id === message.id);
  if (all.length < 2) return null;
  const go = (step) => show(conversation.id, all[at + step].id);
  return html`<span class="versions">
    <button type="button" class="plain" aria-label="The version before" disabled=${busy || at === 0} onClick=${() => go(-1)}>‹</button>
    <span>${at + 1} of ${all.length}</span>
    <button type="button" class="plain" aria-label="The next version" disabled=${busy || at === all.length - 1} onClick=${() => go(1)}>›</button>
  </span>`;
}

function Copy({ text }) {
  const [label, setLabel] = useState("Copy");
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setLabel("Copied");
  };
  return html`<button type="button" class="plain" onClick=${copy} onBlur=${() => setLabel("Copy")}>${label}</button>`;
}

function Edit({ message, close, send }) {
  const submit = (event) => {
    event.preventDefault();
    close();
    send(event.target.elements.text.value);
  };
  return html`<form class="edit" onSubmit=${submit}>
    <textarea name="text" aria-label="The message" required rows="4" defaultValue=${message.content}></textarea>
    <div class="row"><button class="main">Send</button><button type="button" onClick=${close}>Cancel</button></div>
  </form>`;
}
