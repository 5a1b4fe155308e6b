// What the views are written with: elements, hooks, and how figures are said.

import htm from "./vendor/htm.js";
import { h, render } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";

export { render, useEffect, useLayoutEffect, useRef, useState };
export const html = htm.bind(h);

const DECIMALS = 3;

export function bytes(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(value < 1e10 ? 2 : 1)} GB`;
  return value >= 1e6 ? `${(value / 1e6).toFixed(1)} MB` : `${Math.round(value / 1e3)} kB`;
}

export function milliseconds(value) {
  return `${Number(value.toPrecision(DECIMALS))} ms`;
}

export function seconds(value) {
  return value < 1 ? milliseconds(1000 * value) : `${Number(value.toPrecision(DECIMALS))} s`;
}

export function rate(value) {
  return `${Number(value.toPrecision(DECIMALS))} tokens/s`;
}

export function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

export function clock(unixSeconds) {
  return new Date(1000 * unixSeconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

export function day(unixSeconds) {
  return new Date(1000 * unixSeconds).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

// The value that `source` has now, and whenever it tells its listeners.
export function useSource(source) {
  const [, again] = useState(0);
  useEffect(() => source.listen(() => again((count) => count + 1)), [source]);
  return source.value;
}

export class Source {
  constructor(value) {
    this.value = value;
    this.listeners = new Set();
  }

  listen(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  set(value) {
    this.value = value;
    for (const listener of [...this.listeners]) listener();
  }
}

// A button that says what comes of it; pressed again meanwhile, it does nothing.
export function Act({ work, done = "", label, kind = "", name, disabled }) {
  const [said, say] = useState({ text: "", bad: false, busy: false });
  const press = async () => {
    if (said.busy) return;
    say({ text: "", bad: false, busy: true });
    try {
      say({ text: (await work()) ?? done, bad: false, busy: false });
    } catch (error) {
      say({ text: error.message, bad: true, busy: false });
    }
  };
  return html`<span class="act">
    <button type="button" class=${kind} aria-label=${name} aria-busy=${said.busy} disabled=${disabled} onClick=${press}>${label}</button>
    <span class=${`answer ${said.bad ? "bad" : ""}`} role="status">${said.text}</span>
  </span>`;
}

export function Dialog({ title, close, children }) {
  const frame = useRef();
  useEffect(() => {
    frame.current.showModal();
  }, []);
  return html`<dialog ref=${frame} aria-label=${title} onClose=${close}>
    <h2>${title}</h2>
    ${children}
  </dialog>`;
}

export function download(name, text, kind) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
