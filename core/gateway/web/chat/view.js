// The chat: conversations on the left, the one that is open on the right.

import { html, useEffect, useRef, useSource, useState } from "../ui.js";
import { chats, begin, load, say, stop } from "./chats.js";
import { Composer } from "./composer.js";
import { Conversations } from "./conversations.js";
import { Message } from "./message.js";
import { Settings } from "./settings.js";
import { branch } from "./tree.js";

const NEAR_END = 80;

export function Chat({ place }) {
  const { all, running, trouble } = useSource(chats);
  const [listed, setListed] = useState(false);
  const [settings, setSettings] = useState(null);
  useEffect(() => {
    load();
  }, []);
  const conversation = all.get(place);
  const open = (id) => {
    setListed(false);
    location.hash = `#/chat/${id}`;
  };
  const send = (content, files) => {
    const id = conversation?.id ?? begin();
    if (!conversation) open(id);
    return say(id, content, files);
  };
  return html`
    <${Conversations} all=${all} current=${place} open=${open} shown=${listed} />
    <div class="talk">
      <div class="talk-head">
        <button type="button" class="plain list-button" aria-expanded=${listed} aria-controls="conversations"
          onClick=${() => setListed(!listed)}>Conversations</button>
        <h1>${conversation?.title || "A new conversation"}</h1>
        <button type="button" class="plain" onClick=${() => setSettings(conversation?.id ?? begin())}>Settings</button>
      </div>
      ${trouble && html`<p class="notice" role="alert">${trouble}</p>`}
      <${Messages} conversation=${conversation} busy=${running.has(place)} />
      <${Composer} key=${place} send=${send} busy=${running.has(place)} stop=${() => stop(place)} />
    </div>
    ${settings && html`<${Settings} id=${settings} close=${() => {
      open(settings);
      setSettings(null);
    }} />`}
  `;
}

// Follows the end while it is in sight; whoever scrolls up stays there.
function Messages({ conversation, busy }) {
  const frame = useRef();
  const follows = useRef(true);
  const watch = () => {
    const { scrollTop, clientHeight, scrollHeight } = frame.current;
    follows.current = scrollTop + clientHeight > scrollHeight - NEAR_END;
  };
  useEffect(() => {
    if (follows.current) frame.current.scrollTop = frame.current.scrollHeight;
  });
  useEffect(() => {
    follows.current = true;
  }, [conversation?.id]);
  const shown = conversation ? branch(conversation) : [];
  return html`<div class="messages" ref=${frame} onScroll=${watch} tabindex="0" role="log" aria-label="Messages" aria-busy=${busy}>
    ${shown.length === 0 && html`<p class="hint">Whatever you ask is computed by the machines of this cluster. Its host and
      its members can read it; conversations are kept in this browser alone.</p>`}
    ${shown.map((message, at) => html`<${Message} key=${message.id} conversation=${conversation} message=${message}
      comes=${busy && at === shown.length - 1} busy=${busy} />`)}
  </div>`;
}
