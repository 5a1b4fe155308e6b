// The system prompt of a conversation, and how its answers are sampled. What is empty is as the model has it.

import { Dialog, html } from "../ui.js";
import { chats, update } from "./chats.js";

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, hint: "0 is always the likeliest" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01 },
  { name: "top_k", label: "Top k", min: 0, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 10, step: 0.01 },
  { name: "max_tokens", label: "Tokens at most", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
];

export function Settings({ id, close }) {
  const { system, sampling } = chats.value.all.get(id);
  const keep = async (event) => {
    event.preventDefault();
    const { elements } = event.target;
    const given = FIELDS.filter(({ name }) => elements[name].value !== "").map(({ name }) => [name, Number(elements[name].value)]);
    await update(id, { system: elements.system.value.trim(), sampling: Object.fromEntries(given) });
    close();
  };
  return html`<${Dialog} title="Settings of this conversation" close=${close}>
    <form class="settings" onSubmit=${keep}>
      <label class="wide">System prompt<textarea name="system" rows="4" defaultValue=${system}></textarea></label>
      ${FIELDS.map(({ name, label, hint, ...bounds }) => html`<label key=${name}>${label}
        <input type="number" name=${name} ...${bounds} placeholder=${hint ?? "as the model has it"} defaultValue=${sampling[name] ?? ""} /></label>`)}
      <div class="row"><button class="main">Save</button><button type="button" onClick=${close}>Cancel</button></div>
    </form>
  <//>`;
}
