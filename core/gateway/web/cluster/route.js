// What a status says, put in the order in which a token passes it.

const GONE = ["paused", "failed"];

// The machines of the route, each with its hop's times if they are known, from the first layers to the last.
export function hopsOf({ nodes, hops }) {
  const byId = new Map(nodes.map((node) => [node.node_id, node]));
  const serving = nodes.filter(({ layers }) => layers).sort((one, other) => one.layers[0] - other.layers[0]);
  const timed = hops.filter(({ node_id: id }) => byId.get(id)?.layers);
  const isWhole = serving.every(({ node_id: id }) => timed.some((hop) => hop.node_id === id));
  if (timed.length && isWhole) return timed.map((hop) => ({ node: byId.get(hop.node_id), hop }));
  return serving.map((node) => ({ node, hop: hops.find(({ node_id: id }) => id === node.node_id) ?? null }));
}

export function othersOf({ nodes }) {
  return nodes.filter(({ layers }) => !layers);
}

export function reasonOf({ left_out: leftOut }, node) {
  return node.detail || leftOut[node.node_id] || (GONE.includes(node.state) ? "" : "it has no layers for now");
}

// The one-way time between two machines in milliseconds, "" being the coordinator; null if nobody measured it.
export function wireMs({ wires }, one, other) {
  const wire = wires.find(({ ends }) => ends.includes(one) && ends.includes(other) && one !== other);
  return wire ? 1000 * wire.seconds : null;
}

// The memory of a machine in parts that add up to 1.
export function memoryOf({ weight_bytes: weights, kv_bytes: kv, free_memory: free }) {
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
