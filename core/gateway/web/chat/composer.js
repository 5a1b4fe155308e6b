// Where messages are written: Enter sends, Shift+Enter is a new line; files of text are dropped in.

import { html, useRef, useState } from "../ui.js";
import { readFiles } from "./files.js";

const MOST_HEIGHT = 240;

export function Composer({ send, busy, stop }) {
  const [files, setFiles] = useState([]);
  const [trouble, setTrouble] = useState("");
  const [over, setOver] = useState(false);
  const text = useRef();
  const take = async (list) => {
    try {
      const read = await readFiles(list);
      setFiles((before) => [...before.filter(({ name }) => !read.some((file) => file.name === name)), ...read]);
      setTrouble("");
    } catch (error) {
      setTrouble(error.message);
    }
  };
  const grow = () => {
    text.current.style.height = "auto";
    text.current.style.height = `${Math.min(text.current.scrollHeight + 2, MOST_HEIGHT)}px`;
  };
  const submit = (event) => {
    event?.preventDefault();
    const said = text.current.value.trim();
    if (busy || !(said || files.length)) return;
    text.current.value = "";
    grow();
    setFiles([]);
    send(said, files);
  };
  const drop = (event) => {
    event.preventDefault();
    setOver(false);
    take([...event.dataTransfer.files]);
  };
  const key = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    if (event.key === "Escape" && busy) stop();
  };
  return html`<form class=${`composer ${over ? "over" : ""}`} onSubmit=${submit} onDrop=${drop}
    onDragOver=${(event) => {
      event.preventDefault();
      setOver(true);
    }} onDragLeave=${() => setOver(false)}>
    ${files.length > 0 && html`<ul class="files">${files.map(({ name }) => html`<li key=${name}>${name}
      <button type="button" class="plain" aria-label=${`Leave out ${name}`} onClick=${() => setFiles(files.filter((file) => file.name !== name))}>×</button></li>`)}</ul>`}
    <p class="answer bad" role="alert">${trouble}</p>
    <div class="composer-row">
      <label class="attach" title="Add files of text"><span class="sr">Add files of text</span><span aria-hidden="true">+</span>
        <input class="sr" type="file" multiple onChange=${(event) => {
          take([...event.target.files]);
          event.target.value = "";
        }} /></label>
      <textarea ref=${text} rows="1" aria-label="Message" placeholder="Ask something" onInput=${grow} onKeyDown=${key}></textarea>
      ${busy
        ? html`<button type="button" class="stop" onClick=${stop}>Stop</button>`
        : html`<button class="main">Send</button>`}
    </div>
  </form>`;
}
