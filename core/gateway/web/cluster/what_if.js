// What other machines would bring: the cluster's own planner is asked.

import { ask } from "../api.js";
import { bytes, html, useState } from "../ui.js";

const GB = 1e9;

export function WhatIf({ nodes }) {
  const [answer, setAnswer] = useState(null);
  const [said, say] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    const { elements } = event.target;
    const without = nodes.map(({ node_id: id }) => id).filter((id) => elements[`without ${id}`]?.checked);
    const memory = Number(elements.memory.value);
    const body = { without, memory_of_others: memory ? [Math.round(memory * GB)] : [] };
    say("Planning…");
    try {
      setAnswer(await ask("v1/cluster/what-if", { method: "POST", body }));
      say("");
    } catch (error) {
      setAnswer(null);
      say(error.message);
    }
  };
  return html`<section aria-labelledby="what-if">
    <h2 id="what-if">What if…</h2>
    <form onSubmit=${submit} class="what-if">
      <fieldset>
        <legend>these machines were away</legend>
        ${nodes.map(({ node_id: id }) => html`<label key=${id} class="tick"><input type="checkbox" name=${`without ${id}`} /> ${id}</label>`)}
      </fieldset>
      <label>one more came, with <span><input type="number" name="memory" min="0.1" step="any" placeholder="none" /> GB free</span></label>
      <button>Ask the planner</button>
    </form>
    <p class="answer" role="status">${said}</p>
    ${answer && html`<${Answer} answer=${answer} />`}
  </section>`;
}

function Answer({ answer: { message, stages, left_out: leftOut, notes } }) {
  return html`<div role="status" class="planned">
    <p><strong>${message}</strong></p>
    <ul>
      ${stages.map(({ node_id: id, start, end, nbytes }) => html`<li key=${`${id} ${start}`}>${id}: layers ${start} to ${end - 1}, ${bytes(nbytes)}</li>`)}
      ${Object.entries(leftOut).map(([id, reason]) => html`<li key=${id}>${id}: no layers, ${reason}</li>`)}
    </ul>
    ${notes.map((note) => html`<p key=${note}>${note}</p>`)}
  </div>`;
}
