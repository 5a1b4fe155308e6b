// What a status says, put in the order in which a token passes it.

const GONE = ["paused", "failed"];

// The route from the first layers to the last: the one that serves, with its times, or the one that is being made.
export function hopsOf({ state, nodes, hops }) {
  const byId = new Map(nodes.map((node) => [node.node_id, node]));
  if (state === "ready" && hops.length && hops.every(({ node_id: id }) => byId.has(id)))
    return hops.map((hop) => ({ node: byId.get(hop.node_id), layers: hop.layers, weights: hop.weight_bytes, ms: hop.compute_ms }));
  const made = nodes.filter(({ layers }) => layers).sort((one, other) => one.layers[0] - other.layers[0]);
  return made.map((node) => ({ node, layers: node.layers, weights: node.weight_bytes, ms: null }));
}

// The machines that have no part in it.
export function othersOf(status) {
  const used = new Set(hopsOf(status).map(({ node }) => node.node_id));
  return status.nodes.filter(({ node_id: id }) => !used.has(id));
}

// The layers that a machine gets on the next route, if they are others; or null.
export function nextLayers(node, [start, end]) {
  return node.layers && (node.layers[0] !== start || node.layers[1] !== end) ? node.layers : null;
}

export function reasonOf({ left_out: leftOut }, node) {
  if (node.layers) return `it gets layers ${node.layers[0]} to ${node.layers[1] - 1} on the next route`;
  return node.detail || leftOut[node.node_id] || (GONE.includes(node.state) ? "" : "it has no layers for now");
}

// The one-way time between two machines in milliseconds, "" being the coordinator; null if nobody measured it.
export function wireMs({ wires }, one, other) {
  const wire = wires.find(({ ends }) => ends.includes(one) && ends.includes(other) && one !== other);
  return wire ? 1000 * wire.seconds : null;
}

// The memory of a machine in parts that add up to 1.
export function memoryOf({ kv_bytes: kv, free_memory: free }, weights) {
  const whole = weights + kv + free || 1;
  return { weights: weights / whole, kv: kv / whole, free: free / whole };
}

// The points of an hour, the present one as the status has it: {at, rate, sessions}, oldest first.
export function extended(points, width, now, status) {
  const at = Math.floor(now / width) * width;
  const present = { at, rate: status.tokens_per_second, sessions: status.generations.length };
  const before = points.filter((point) => point.at < at && point.at > at - 3600);
  return [...before, present];
}

export function ratesOf({ seconds, points }) {
  return points.map(({ at, tokens, sessions }) => ({ at, rate: tokens / seconds, sessions }));
}
