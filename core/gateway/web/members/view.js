// Members: machines are invited, let in by the code that they show, and removed; and how much each has served.

import { access, ask } from "../api.js";
import { cluster } from "../live.js";
import { Act, Dialog, day, html, useEffect, useSource, useState } from "../ui.js";
import { Invite } from "./invite.js";

const PATH = "v1/cluster/members";

export function MembersView() {
  const { me } = useSource(access);
  const version = useSource(cluster)?.register_changes;
  const [told, setTold] = useState({ members: [], asking: [], invites: [], closed: "" });
  const [trouble, setTrouble] = useState("");
  const refresh = async () => {
    try {
      setTold(await ask(PATH));
      setTrouble("");
    } catch (error) {
      setTrouble(error.message);
    }
  };
  useEffect(() => {
    refresh();
  }, [version]);
  const { members, asking, invites, closed } = told;
  if (me && !me.host) return html`<div class="page"><h1>Members</h1><p class="notice">Only the host sees and decides who is a member: with a key of core keys add NAME --host.</p></div>`;
  return html`<div class="page">
    <h1>Members</h1>
    ${trouble && html`<p class="notice" role="alert">${trouble}</p>`}
    ${closed && html`<p class="notice">Nobody can join from elsewhere: ${closed}.</p>`}
    <${Asking} asking=${asking} refresh=${refresh} />
    ${!closed && html`<${Invite} invites=${invites} refresh=${refresh} />`}
    <${Known} members=${members} refresh=${refresh} />
  </div>`;
}

function Asking({ asking, refresh }) {
  const decide = (code, decision) => async () => {
    const { message } = await ask(`${PATH}/decide`, { method: "POST", body: { code, decision } });
    await refresh();
    return message;
  };
  return html`<div role="region" aria-live="polite" aria-label="Machines that ask to join">
    ${asking.map(({ code, name, host, expires }) => html`<section key=${code} class="asker">
      <h2>${name} asks to join</h2>
      <p>From ${host}, until ${day(expires)}. Let it in only if its owner reads you this code, by voice or by a message that you know is theirs:</p>
      <p class="code-large" aria-label=${`Code ${[...code].join(" ")}`}>${code.slice(0, 3)} ${code.slice(3)}</p>
      <p>Whoever is in the cluster can read what is asked and answered here.</p>
      <div class="row">
        <${Act} kind="main" label="It shows the same: let it in" work=${decide(code, "approve")} />
        <${Act} label="Send it away" work=${decide(code, "deny")} />
      </div>
    </section>`)}
  </div>`;
}

function Known({ members, refresh }) {
  const [leaving, setLeaving] = useState(null);
  const remove = async () => {
    await ask(`${PATH}/remove`, { method: "POST", body: { name: leaving } });
    setLeaving(null);
    await refresh();
  };
  return html`<section aria-labelledby="known">
    <h2 id="known">Who is in</h2>
    ${members.length === 0
      ? html`<p>No machine from elsewhere has joined yet.</p>`
      : html`<div class="table" tabindex="0" role="region" aria-label="Members"><table>
          <thead><tr><th>Machine</th><th>State</th><th>Tokens served</th><th>Since</th><th>Last seen</th><td></td></tr></thead>
          <tbody>${members.map((each) => html`<tr key=${each.node_id}>
            <th scope="row">${each.node_id}</th><td>${each.connected ? "connected" : "away"}</td>
            <td class="number">${each.tokens.toLocaleString("en")}</td><td>${day(each.first_seen)}</td><td>${each.connected ? "now" : day(each.last_seen)}</td>
            <td><button type="button" class="danger" aria-label=${`Remove ${each.node_id}`} onClick=${() => setLeaving(each.node_id)}>Remove</button></td>
          </tr>`)}</tbody>
        </table></div>
        <p class="note">Tokens are those that passed its layers since this coordinator started.</p>`}
    ${leaving && html`<${Dialog} title=${`Remove ${leaving}?`} close=${() => setLeaving(null)}>
      <p>It is turned out at once, and comes back only with a new invite. Answers go on with the machines that stay.</p>
      <div class="row"><${Act} kind="danger" label="Remove it" work=${remove} /><button type="button" onClick=${() => setLeaving(null)}>Cancel</button></div>
    <//>`}
  </section>`;
}
