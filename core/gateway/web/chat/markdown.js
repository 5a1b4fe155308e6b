// A model's Markdown as elements. What it writes is a stranger's: all of it passes DOMPurify, pictures become links.

import DOMPurify from "../vendor/purify.js";
import hljs from "../vendor/highlight.js";
import { Marked } from "../vendor/marked.js";
import { html, useLayoutEffect, useRef } from "../ui.js";

const MOST_HIGHLIGHTED = 50_000;
const CLEAN = {
  USE_PROFILES: { html: true },
  FORBID_TAGS: ["style", "form", "input", "button", "textarea", "select", "img", "picture", "video", "audio", "dialog"],
  FORBID_ATTR: ["style", "id", "name", "role", "tabindex"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  renderer: {
    code({ text, lang }) {
      const [language = ""] = (lang ?? "").split(/\s/);
      const known = hljs.getLanguage(language) && text.length < MOST_HIGHLIGHTED;
      const code = known ? hljs.highlight(text, { language }).value : escaped(text);
      return `<pre title="${escaped(language)}"><code>${code}</code></pre>`;
    },
    image({ href, text }) {
      return `<a href="${escaped(href)}">${escaped(text || href)}</a>`;
    },
    checkbox({ checked }) {
      return checked ? "☑ " : "☐ ";
    },
  },
});

DOMPurify.addHook("uponSanitizeAttribute", (_, attribute) => {
  if (attribute.attrName === "class") {
    const classes = attribute.attrValue.split(/\s+/).filter((name) => /^(hljs-[\w-]+|function_|class_)$/.test(name));
    attribute.attrValue = classes.join(" ");
  }
});
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

export function clean(markup) {
  return DOMPurify.sanitize(markup, CLEAN);
}

// Blocks that have not changed stay as they are, so that a growing answer is drawn at its end alone.
export function draw(frame, text, drawn) {
  const tokens = marked.lexer(text);
  const blocks = tokens.filter(({ type }) => type !== "space");
  const sources = blocks.map(({ raw }) => raw.trimEnd());
  let same = 0;
  while (same < sources.length && sources[same] === drawn[same]) same += 1;
  while (frame.children.length > same) frame.lastElementChild.remove();
  for (const token of blocks.slice(same)) {
    const block = document.createElement("div");
    block.append(clean(marked.parser([token])));
    block.querySelectorAll("pre").forEach(furnish);
    block.querySelectorAll("table").forEach(scrollable);
    frame.append(block);
  }
  return sources;
}

function furnish(pre) {
  const language = pre.title;
  pre.removeAttribute("title");
  const box = document.createElement("div");
  box.className = "code";
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "copy plain";
  copy.textContent = "Copy";
  copy.setAttribute("aria-label", `Copy the code${language ? ` (${language})` : ""}`);
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(pre.textContent);
    copy.textContent = "Copied";
  });
  const head = document.createElement("div");
  head.className = "code-head";
  head.append(language, copy);
  pre.replaceWith(box);
  pre.tabIndex = 0;
  box.append(head, pre);
}

function scrollable(table) {
  const box = document.createElement("div");
  box.className = "table";
  box.tabIndex = 0;
  table.replaceWith(box);
  box.append(table);
}

export function Markdown({ text }) {
  const frame = useRef();
  const drawn = useRef([]);
  useLayoutEffect(() => {
    drawn.current = draw(frame.current, text, drawn.current);
  }, [text]);
  return html`<div class="markdown" ref=${frame}></div>`;
}
