// Invites: a link that lets one machine in, once, as text and as a code to scan.

import { ask } from "../api.js";
import { Act, day, html, useState } from "../ui.js";
import { QrCode } from "./qr.js";

const PATH = "v1/cluster/invites";
const EXPIRIES = [["An hour", 3600], ["A day", 86_400], ["A week", 604_800]];

export function Invite({ invites, refresh }) {
  const [made, setMade] = useState(null);
  const [said, say] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    const { expiry, name } = event.target.elements;
    try {
      const body = { seconds: Number(expiry.value), name: name.value.trim() };
      setMade(await ask(PATH, { method: "POST", body }));
      say("");
      await refresh();
    } catch (error) {
      say(error.message);
    }
  };
  return html`<section aria-labelledby="invite">
    <h2 id="invite">Invite a machine</h2>
    <form class="invite" onSubmit=${submit}>
      <label>Good for <select name="expiry">${EXPIRIES.map(([label, value]) => html`<option key=${value} value=${value} selected=${value === 86_400}>${label}</option>`)}</select></label>
      <label>Called <input name="name" maxlength="40" placeholder="its own name" /></label>
      <button class="main">Make an invite</button>
    </form>
    <p class="answer bad" role="alert">${said}</p>
    ${made && html`<${Made} made=${made} />`}
    <${Open} invites=${invites.filter(({ state }) => state === "open")} refresh=${refresh} />
  </section>`;
}

function Made({ made: { link, expires, hosts, port, qr } }) {
  const copy = async () => {
    await navigator.clipboard.writeText(link);
    return "Copied.";
  };
  return html`<div class="made" role="status">
    <${QrCode} rows=${qr} label="The invite as a QR code" />
    <div>
      <p><strong>Send it like a password: whoever has it first can join, and can read what is asked and answered.</strong></p>
      <code class="link">${link}</code>
      <${Act} label="Copy the link" work=${copy} />
      <p class="note">It lets one machine in, until ${day(expires)}, and leads to ${hosts.join(", ")}, port ${port}.
        Your friend opens it in the tray app (core-node), or runs core node --join - and pastes it.</p>
    </div>
  </div>`;
}

function Open({ invites, refresh }) {
  const revoke = (id) => async () => {
    await ask(`${PATH}/revoke`, { method: "POST", body: { id } });
    await refresh();
  };
  if (invites.length === 0) return null;
  return html`<h3>Open invites</h3>
    <ul class="others">${invites.map(({ id, name, expires }) => html`<li key=${id}>
      <strong>${name || "for any machine"}</strong> <span class="note">${id}, until ${day(expires)}</span>
      <${Act} kind="danger" label="Revoke" name=${`Revoke invite ${id}`} work=${revoke(id)} />
    </li>`)}</ul>`;
}
