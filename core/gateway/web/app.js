// The page: its parts, which of them is shown, and the door where a key is needed.

import { access, askForKey, findOut, logIn, logOut } from "./api.js";
import { Chat } from "./chat/view.js";
import { ClusterView } from "./cluster/view.js";
import { cluster, connected, follow } from "./live.js";
import { MembersView } from "./members/view.js";
import { html, rate, render, useEffect, useSource, useState } from "./ui.js";

const PARTS = [
  { name: "chat", title: "Chat", view: Chat },
  { name: "cluster", title: "Cluster", view: ClusterView },
  { name: "members", title: "Members", view: MembersView },
];

function usePlace() {
  const [place, setPlace] = useState(location.hash);
  useEffect(() => {
    const go = () => setPlace(location.hash);
    addEventListener("hashchange", go);
    return () => removeEventListener("hashchange", go);
  }, []);
  const [, part, ...rest] = place.split("/");
  return [PARTS.find(({ name }) => name === part) ?? PARTS[0], rest.join("/")];
}

function State() {
  const status = useSource(cluster);
  const there = useSource(connected);
  if (!there) return html`<p class="state error" role="status">The server does not answer</p>`;
  if (!status) return html`<p class="state" role="status">Connecting</p>`;
  const said = status.state === "ready" ? rate(status.tokens_per_second) : status.detail;
  return html`<p class=${`state ${status.state}`} title=${said}>
    <strong role="status">${status.state}</strong> <span class="said">${said}</span>
  </p>`;
}

function Door() {
  const [said, say] = useState("");
  const enter = async (event) => {
    event.preventDefault();
    try {
      await logIn(event.target.elements.key.value.trim());
    } catch (error) {
      say(error.message);
    }
  };
  return html`<main class="door">
    <section aria-labelledby="door-title">
      <h1 id="door-title">This cluster needs a key</h1>
      <p>Its host has one for you. The page keeps it in a cookie that no script can read.</p>
      <form class="row" onSubmit=${enter}>
        <label class="sr" for="key">API key</label>
        <input id="key" name="key" type="password" required autocomplete="current-password" />
        <button class="main">Enter</button>
      </form>
      <p class="answer bad" role="alert">${said}</p>
    </section>
  </main>`;
}

function skip(event) {
  event.preventDefault();
  document.querySelector("main").focus();
}

function App() {
  const { needsKey, me } = useSource(access);
  const [part, rest] = usePlace();
  useEffect(() => {
    document.title = `${part.title} · core`;
  }, [part]);
  if (needsKey) return html`<${Door} />`;
  return html`
    <header class="bar">
      <a class="skip" href=${`#/${part.name}`} onClick=${skip}>To the content</a>
      <span class="brand">core</span>
      <nav aria-label="Parts of the page">
        ${PARTS.map(({ name, title }) => html`<a key=${name} href=${`#/${name}`} aria-current=${name === part.name ? "page" : undefined}>${title}</a>`)}
      </nav>
      <${State} />
      ${me?.logged_in && html`<button type="button" class="plain" onClick=${logOut}>Log out</button>`}
      ${me && !me.host && !me.logged_in && html`<button type="button" class="plain" onClick=${askForKey}>Log in</button>`}
    </header>
    <main tabindex="-1" class=${part.name} aria-label=${part.title}><${part.view} place=${rest} /></main>
  `;
}

const frame = document.getElementById("app");
frame.replaceChildren();
render(html`<${App} />`, frame);
findOut().catch(() => connected.set(false)).finally(follow);
