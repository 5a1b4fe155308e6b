// The list of conversations: searched, renamed, exported, imported, deleted.

import { Dialog, download, html, useRef, useState } from "../ui.js";
import { exportOf, forget, importFrom, update } from "./chats.js";
import { matches } from "./tree.js";

export function Conversations({ all, current, open, shown }) {
  const [words, setWords] = useState("");
  const [said, say] = useState("");
  const [chosen, choose] = useState(null);
  const listed = [...all.values()].filter((each) => matches(each, words)).sort((one, other) => other.updated - one.updated);
  const bring = async (event) => {
    const [file] = event.target.files;
    try {
      say(`${await importFrom(await file.text())} brought in.`);
    } catch (error) {
      say(error.message);
    }
    event.target.value = "";
  };
  return html`<aside id="conversations" class=${shown ? "list shown" : "list"} aria-label="Conversations">
    <div class="list-head">
      <button type="button" class="main" onClick=${() => open("")}>New</button>
      <input type="search" aria-label="Search conversations" placeholder="Search" value=${words} onInput=${(event) => setWords(event.target.value)} />
    </div>
    <ul>
      ${listed.map((each) => html`<li key=${each.id} class=${each.id === current ? "open" : ""}>
        <a href=${`#/chat/${each.id}`} aria-current=${each.id === current ? "true" : undefined} onClick=${() => open(each.id)}>${each.title || "Empty"}</a>
        <button type="button" class="plain" aria-label=${`More for ${each.title || "the empty one"}`} onClick=${() => choose(each)}>⋯</button>
      </li>`)}
      ${listed.length === 0 && html`<li class="note">${words ? "None has these words." : "None yet."}</li>`}
    </ul>
    <div class="list-foot">
      <button type="button" class="plain" disabled=${all.size === 0} onClick=${() => offer("conversations", [...all.keys()])}>Export all</button>
      <label class="plain file">Import<input class="sr" type="file" accept="application/json,.json" onChange=${bring} /></label>
      <span class="note" role="status">${said}</span>
    </div>
    ${chosen && html`<${One} conversation=${chosen} close=${() => choose(null)} gone=${() => chosen.id === current && open("")} />`}
  </aside>`;
}

function offer(name, ids) {
  download(`${name.replace(/[^\w-]+/g, "-").slice(0, 60)}.json`, exportOf(ids), "application/json");
}

function One({ conversation, close, gone }) {
  const name = useRef();
  const rename = async (event) => {
    event.preventDefault();
    await update(conversation.id, { title: name.current.value.trim() });
    close();
  };
  const drop = async () => {
    await forget(conversation.id);
    gone();
    close();
  };
  return html`<${Dialog} title="This conversation" close=${close}>
    <form class="row" onSubmit=${rename}>
      <input ref=${name} aria-label="Its name" required defaultValue=${conversation.title} />
      <button class="main">Rename</button>
    </form>
    <div class="row">
      <button type="button" onClick=${() => offer(conversation.title, [conversation.id])}>Export</button>
      <button type="button" class="danger" onClick=${drop}>Delete for good</button>
      <button type="button" onClick=${close}>Close</button>
    </div>
  <//>`;
}
