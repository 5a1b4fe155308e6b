// An hour of one figure as a line.

import { html } from "../ui.js";

const WIDTH = 600;
const HEIGHT = 90;
const SPAN = 3600;

export function path(points, value, now, most) {
  const x = (at) => (WIDTH * (at - now + SPAN)) / SPAN;
  const y = (figure) => HEIGHT - 2 - ((HEIGHT - 6) * figure) / (most || 1);
  return points.map((point, at) => `${at ? "L" : "M"}${x(point.at).toFixed(1)} ${y(value(point)).toFixed(1)}`).join("");
}

export function Chart({ title, points, value, say }) {
  const now = points.at(-1)?.at ?? 0;
  const most = Math.max(0, ...points.map(value));
  const present = points.length ? value(points.at(-1)) : 0;
  const told = `now ${say(present)}, at most ${say(most)}`;
  return html`<figure class="chart">
    <figcaption><strong>${title}</strong> <span>${told}, in the last hour</span></figcaption>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`${title}, the last hour: ${told}`}>
      <path class="ground" d=${`M0 ${HEIGHT - 2}H${WIDTH}`} /><path d=${path(points, value, now, most)} />
    </svg>
  </figure>`;
}
