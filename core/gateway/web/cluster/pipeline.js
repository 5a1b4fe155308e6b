// One picture of the pipeline: a token goes from the coordinator through each machine's layers, and back.

import { bytes, counted, html, milliseconds } from "../ui.js";
import { hopsOf, memoryOf, nextLayers, wireMs } from "./route.js";

export function Pipeline({ status }) {
  const hops = hopsOf(status);
  if (hops.length === 0) return html`<p>No machine has layers yet. ${status.detail}</p>`;
  const moves = status.tokens_per_second > 0 ? "moves" : "";
  const ids = ["", ...hops.map(({ node }) => node.node_id), ""];
  return html`<ol class=${`pipeline ${moves}`} tabindex="0" aria-label="The way of a token">
    <li class="end"><strong>Coordinator</strong><span>text, tokens, sampling</span></li>
    ${hops.map((hop, at) => [
      html`<${Link} key=${`to ${at}`} ms=${wireMs(status, ids[at], ids[at + 1])} link=${hop.node.link} />`,
      html`<${Machine} key=${`${hop.node.node_id} ${at}`} hop=${hop} whole=${status.layers} />`,
    ])}
    <${Link} ms=${wireMs(status, ids.at(-2), "")} link="" />
    <li class="end"><strong>Coordinator</strong><span>the next token</span></li>
  </ol>`;
}

function Link({ ms, link }) {
  const relayed = link && !link.startsWith("direct") ? link : "";
  return html`<li class="wire"><span class="line" aria-hidden="true"></span>
    <span>${ms === null ? "not measured" : milliseconds(ms)}${relayed && html`<br /><em title=${relayed}>relayed</em>`}</span></li>`;
}

function Machine({ hop: { node, layers, weights, ms }, whole }) {
  const [start, end] = layers;
  const memory = memoryOf(node, weights);
  const next = nextLayers(node, layers);
  return html`<li class="machine">
    <h3>${node.node_id}</h3>
    <p class="note">${node.device} · ${node.state}${node.sessions ? ` · ${counted(node.sessions, "session")}` : ""}</p>
    <svg class="share" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">
      <rect class="ground" width="100" height="6" /><rect class="own" x=${(100 * start) / whole} width=${(100 * (end - start)) / whole} height="6" />
    </svg>
    <p>Layers ${start} to ${end - 1} of ${whole}</p>
    ${next && html`<p class="note">Next: ${next[0]} to ${next[1] - 1}</p>`}
    <svg class="share" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">
      <rect class="ground" width="100" height="6" /><rect class="own" width=${100 * memory.weights} height="6" />
      <rect class="kv" x=${100 * memory.weights} width=${100 * memory.kv} height="6" />
    </svg>
    <dl>
      <div><dt>Weights</dt><dd>${bytes(weights)}</dd></div>
      <div><dt>KV cache</dt><dd>${bytes(node.kv_bytes)}</dd></div>
      <div><dt>Free</dt><dd>${bytes(node.free_memory)}</dd></div>
      <div><dt>A step takes</dt><dd>${ms ? milliseconds(ms) : "not known"}</dd></div>
      <div><dt>Tokens served</dt><dd>${node.tokens.toLocaleString("en")}</dd></div>
    </dl>
    <${Progress} node=${node} />
    ${!node.progress && node.detail && html`<p class="note">${node.detail}</p>`}
  </li>`;
}

export function Progress({ node: { progress, detail, node_id: id } }) {
  if (!progress) return null;
  const [done, total] = progress;
  return html`<div class="loading"><progress max=${total} value=${done} aria-label=${`${id}: ${detail}`}></progress>
    <p class="note">${detail}: ${bytes(done)} of ${bytes(total)}</p></div>`;
}
