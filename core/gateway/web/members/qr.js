// A QR code as a picture, from its rows of ones and zeros.

import { html } from "../ui.js";

const QUIET = 4;

export function outline(rows) {
  return rows.map((row, y) => [...row].map((dark, x) => (dark === "1" ? `M${x + QUIET} ${y + QUIET}h1v1h-1z` : "")).join("")).join("");
}

export function QrCode({ rows, label }) {
  const size = rows.length + 2 * QUIET;
  return html`<svg class="qr" viewBox=${`0 0 ${size} ${size}`} role="img" aria-label=${label} shape-rendering="crispEdges">
    <rect width=${size} height=${size} fill="#fff" /><path d=${outline(rows)} fill="#000" />
  </svg>`;
}
