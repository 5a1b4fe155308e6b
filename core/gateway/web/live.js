// The cluster as it is now, pushed by the server. A page that nobody sees lets go of its connection: browsers have few.

import { access, findOut } from "./api.js";
import { Source } from "./ui.js";

const EVENTS = "v1/cluster/events?of=cluster";
const RETRY_MS = 2000;

export const cluster = new Source(null);
export const connected = new Source(true);

let source = null;
let retry = 0;

function open() {
  clearTimeout(retry);
  if (source || document.hidden || access.value.needsKey) return;
  source = new EventSource(EVENTS);
  source.onmessage = (event) => {
    connected.set(true);
    cluster.set(JSON.parse(event.data));
  };
  source.onerror = () => {
    close();
    connected.set(false);
    findOut().catch(() => {});
    retry = setTimeout(open, RETRY_MS);
  };
}

function close() {
  source?.close();
  source = null;
}

export function follow() {
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  access.listen(open);
  open();
}
