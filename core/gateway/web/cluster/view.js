// The cluster: its pipeline, who else is there and why, what is planned, what happened, and an hour of speed and load.

import { access, ask } from "../api.js";
import { cluster, connected } from "../live.js";
import { clock, counted, html, milliseconds, rate, useEffect, useSource, useState } from "../ui.js";
import { Chart } from "./chart.js";
import { Pipeline, Progress } from "./pipeline.js";
import { extended, othersOf, ratesOf, reasonOf } from "./route.js";
import { WhatIf } from "./what_if.js";

export function ClusterView() {
  const status = useSource(cluster);
  const { me } = useSource(access);
  const history = useHistory(status);
  if (!status) return html`<p class="alone" role="status">Waiting for the cluster to say how it is.</p>`;
  return html`<div class="page">
    <${Head} status=${status} />
    <section aria-labelledby="pipeline"><h2 id="pipeline">The way of a token</h2><${Pipeline} status=${status} /></section>
    <${Others} status=${status} />
    <div class="pair">
      <${Plan} status=${status} />
      ${me?.host && status.planning && html`<${WhatIf} nodes=${status.nodes} />`}
    </div>
    <div class="pair">
      <section aria-label="The last hour">
        <${Chart} title="Speed" points=${history} value=${(point) => point.rate} say=${rate} />
        <${Chart} title="Generations at once" points=${history} value=${(point) => point.sessions} say=${String} />
      </section>
      <${Events} events=${status.events} />
    </div>
  </div>`;
}

function Head({ status }) {
  const { kv, measured_token_seconds: taken, predicted_token_seconds: predicted } = status;
  const token = taken || predicted;
  const figures = [
    ["Model", status.model],
    ["Speed now", rate(status.tokens_per_second)],
    ["Generations", String(status.generations.length)],
    ["A token takes", token ? `${milliseconds(1000 * token)}${taken ? "" : ", predicted"}` : "not known yet"],
    ["KV cache", `${counted(kv.reserved + kv.kept, "token")} of ${kv.tokens.toLocaleString("en")}`],
    ["Weights", `${status.quant}, computed in ${status.dtype}`],
  ];
  return html`<div>
    <h1>${status.state === "ready" ? "The cluster serves" : `The cluster is ${status.state}`}</h1>
    ${status.detail && html`<p role="status">${status.detail}</p>`}
    ${status.progress && html`<${Progress} node=${{ node_id: "The coordinator", detail: status.detail, progress: status.progress }} />`}
    <dl class="figures">${figures.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  </div>`;
}

function Others({ status }) {
  const others = othersOf(status);
  if (others.length === 0) return null;
  return html`<section aria-labelledby="others">
    <h2 id="others">Without layers</h2>
    <ul class="others">${others.map((node) => html`<li key=${node.node_id}>
      <strong>${node.node_id}</strong> <span class="note">${node.device} · ${node.state}</span>
      ${node.progress ? html`<${Progress} node=${node} />` : html`<p>${reasonOf(status, node)}</p>`}
    </li>`)}</ul>
  </section>`;
}

function Plan({ status }) {
  return html`<section aria-labelledby="plan">
    <h2 id="plan">Why it is planned so</h2>
    ${status.notes.length === 0 && html`<p>The planner has nothing to say yet.</p>`}
    ${status.notes.map((note) => html`<p key=${note} class="plan-note">${note}</p>`)}
  </section>`;
}

function Events({ events }) {
  return html`<section aria-labelledby="events">
    <h2 id="events">What happened last</h2>
    <ol class="events">${[...events].reverse().map(({ at, text }) => html`<li key=${`${at} ${text}`}><time>${clock(at)}</time> ${text}</li>`)}</ol>
  </section>`;
}

// An hour as the server kept it, and from then on what it tells.
function useHistory(status) {
  const there = useSource(connected);
  const [{ points, seconds }, set] = useState({ points: [], seconds: 10 });
  useEffect(() => {
    if (there) ask("v1/cluster/history").then((told) => set({ points: ratesOf(told), seconds: told.seconds }), () => {});
  }, [there]);
  useEffect(() => {
    if (status) set((before) => ({ ...before, points: extended(before.points, before.seconds, Date.now() / 1000, status) }));
  }, [status]);
  return points;
}
