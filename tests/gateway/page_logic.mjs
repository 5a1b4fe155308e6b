// What the page's modules work out, without a browser: run by test_page_logic.py with `node --test`.

import assert from "node:assert/strict";
import { test } from "node:test";

const web = new URL("../../core/gateway/web/", import.meta.url);
const { append, branch, change, choose, exported, imported, matches, merged, newConversation, prompt, versions } = await import(new URL("chat/tree.js", web));
const { events } = await import(new URL("sse.js", web));
const { Reading } = await import(new URL("chat/exchange.js", web));
const { textOf } = await import(new URL("chat/files.js", web));
const { extended, hopsOf, memoryOf, nextLayers, othersOf, ratesOf, reasonOf, wireMs } = await import(new URL("cluster/route.js", web));
const { path } = await import(new URL("cluster/chart.js", web));
const { outline } = await import(new URL("members/qr.js", web));

const said = (id, role, parent, content, created) => ({ id, role, parent, content, created });

function talk() {
  let made = newConversation("c", 1, { system: "Be brief." });
  made = append(made, said("q", "user", null, "What is a layer?", 2));
  return append(made, said("a", "assistant", "q", "A part of a model.", 3));
}

const ids = (messages) => messages.map(({ id }) => id);

test("a conversation is named by its first words and shown in order", () => {
  assert.equal(talk().title, "What is a layer?");
  assert.deepEqual(ids(branch(talk())), ["q", "a"]);
  assert.equal(append(newConversation("c", 1), said("q", "user", null, "x".repeat(99), 2)).title.length, 60);
});

test("what is asked again is a version beside the one before, and either can be shown", () => {
  const again = append({ ...talk(), leaf: "q" }, said("b", "assistant", "q", "A block.", 4));
  assert.deepEqual(ids(branch(again)), ["q", "b"]);
  assert.deepEqual(ids(versions(again, again.messages.a)), ["a", "b"]);
  assert.deepEqual(ids(branch(choose(again, "a"))), ["q", "a"]);
});

test("an edited question begins a branch, and its old answers stay", () => {
  const edited = append(append(talk(), said("q2", "user", null, "What is a stage?", 5)), said("a2", "assistant", "q2", "Layers.", 6));
  assert.deepEqual(ids(branch(edited)), ["q2", "a2"]);
  assert.deepEqual(ids(branch(choose(edited, "q"))), ["q", "a"]);
});

test("the prompt is the branch, behind the system prompt, with files before what is said of them", () => {
  const files = [{ name: "a.md", text: "a ``` fence ````" }];
  const withFile = append(talk(), { ...said("q2", "user", "a", "Sum it up.", 4), files });
  assert.deepEqual(prompt(withFile, "q2").map(({ role }) => role), ["system", "user", "assistant", "user"]);
  assert.equal(prompt(withFile, "q2").at(-1).content, "File a.md:\n`````\na ``` fence ````\n`````\n\nSum it up.");
});

test("two tabs that add to one conversation lose nothing", () => {
  const other = append(talk(), said("x", "user", "a", "from another tab", 7));
  const mine = change(append(talk(), said("y", "user", "a", "from this one", 8)), "a", { content: "longer" });
  assert.deepEqual(Object.keys(merged(other, mine).messages).sort(), ["a", "q", "x", "y"]);
  assert.equal(merged(other, mine).messages.a.content, "longer");
});

test("all words are looked for, in titles and messages", () => {
  assert.ok(matches(talk(), "PART layer"));
  assert.ok(!matches(talk(), "part banana"));
});

test("what is exported is brought in again, under another id", () => {
  const [back] = imported(exported([talk()]), () => "new");
  assert.deepEqual({ ...back, id: "c" }, talk());
});

test("what is no whole conversation is refused", () => {
  const broken = (change) => exported([{ ...talk(), ...change }]);
  for (const text of ["{", "[]", '{"format":"other"}', broken({ leaf: "nobody" }), broken({ title: 3 }),
    broken({ messages: { q: { ...talk().messages.q, role: "system" }, a: talk().messages.a } }),
    broken({ messages: { q: { ...talk().messages.q, parent: "a" }, a: talk().messages.a } })])
    assert.throws(() => imported(text, () => "new"), Error, text);
});

async function read(...chunks) {
  const encoder = new TextEncoder();
  const told = [];
  for await (const event of events(new ReadableStream({
    start(controller) {
      for (const chunk of chunks) controller.enqueue(typeof chunk === "string" ? encoder.encode(chunk) : chunk);
      controller.close();
    },
  }))) told.push(event);
  return told;
}

test("events are read wherever the network cuts them", async () => {
  const bytes = new TextEncoder().encode('data: {"a":"ü"}\n\n: waiting: it left\n\ndata: 1\ndata: 2\r\n\r\n');
  const expected = [{ data: '{"a":"ü"}' }, { comment: "waiting: it left" }, { data: "1\n2" }];
  for (let cut = 0; cut < bytes.length; cut += 1) assert.deepEqual(await read(bytes.slice(0, cut), bytes.slice(cut)), expected);
});

function reading() {
  const clock = { now: 0 };
  return { clock, it: new Reading(() => clock.now) };
}

const chunk = (delta, finish_reason = null) => ({ data: JSON.stringify({ choices: [{ delta, finish_reason }] }) });

test("an answer is put together, with its thoughts and calls, and measured", () => {
  const { clock, it } = reading();
  it.take(chunk({ role: "assistant", content: "" }));
  clock.now = 500;
  it.take(chunk({ reasoning_content: "hm" }));
  it.take(chunk({ content: "Hel" }));
  it.take(chunk({ content: "lo" }));
  it.take(chunk({ tool_calls: [{ index: 0, function: { name: "look", arguments: "" } }] }));
  it.take(chunk({ tool_calls: [{ index: 0, function: { arguments: '{"x":1}' } }] }));
  clock.now = 2500;
  it.take(chunk({}, "tool_calls"));
  it.take({ data: JSON.stringify({ choices: [], usage: { prompt_tokens: 7, completion_tokens: 41, prompt_tokens_details: { cached_tokens: 3 } } }) });
  assert.equal(it.take({ data: "[DONE]" }), false);
  const { content, reasoning, calls, finish, figures } = it.message;
  assert.deepEqual([content, reasoning, finish], ["Hello", "hm", "tool_calls"]);
  assert.deepEqual(calls, [{ name: "look", arguments: '{"x":1}' }]);
  assert.deepEqual(figures, { prompt: 7, completion: 41, cached: 3, ttft: 0.5, perSecond: 20 });
});

test("a suspended answer says why, goes on, and remembers that it did", () => {
  const { it } = reading();
  it.take(chunk({ content: "Hel" }));
  assert.equal(it.take({ comment: "waiting" }), false);
  assert.equal(it.take({ comment: "waiting: node 'b' was lost: it left" }), true);
  assert.equal(it.message.waits, "node 'b' was lost: it left");
  assert.equal(it.take({ comment: "waiting: node 'b' was lost: it left" }), false);
  it.take(chunk({ content: "lo" }, "stop"));
  assert.deepEqual([it.message.content, it.message.waits, it.message.stops], ["Hello", "", 1]);
});

test("an error in the stream is shown with what came before", () => {
  const { it } = reading();
  it.take(chunk({ content: "Hel" }));
  it.take({ data: JSON.stringify({ error: { message: "the route broke" } }) });
  assert.deepEqual([it.message.content, it.message.error], ["Hel", "the route broke"]);
});

test("only text is taken from files", () => {
  assert.equal(textOf("a", new TextEncoder().encode("grüße")), "grüße");
  assert.throws(() => textOf("a.png", new Uint8Array([0x89, 0x50, 0xff])), /no text in UTF-8/);
  assert.throws(() => textOf("a.bin", new Uint8Array([65, 0])), /no text/);
});

const node = (id, layers, more = {}) => ({ node_id: id, layers, detail: "", state: "ready", ...more });

test("machines stand in the order of their layers, and others apart with the reason", () => {
  const status = {
    nodes: [node("b", [4, 8]), node("spare", null), node("a", [0, 4]), node("p", null, { detail: "it is paused: a game" })],
    state: "ready",
    hops: [{ node_id: "a", compute_ms: 1, layers: [0, 4] }, { node_id: "b", compute_ms: 2, layers: [4, 8] }],
    left_out: { spare: "slower with it" },
  };
  const order = (told) => hopsOf(told).map(({ node: { node_id: id }, layers, ms }) => [id, ...layers, ms]);
  assert.deepEqual(order(status), [["a", 0, 4, 1], ["b", 4, 8, 2]]);
  assert.deepEqual(order({ ...status, hops: [] }), [["a", 0, 4, null], ["b", 4, 8, null]]);
  assert.deepEqual(order({ ...status, state: "loading" }), [["a", 0, 4, null], ["b", 4, 8, null]]);
  const twice = [...status.hops, { node_id: "a", compute_ms: 3, layers: [8, 9] }];
  assert.deepEqual(order({ ...status, hops: twice }).at(-1), ["a", 8, 9, 3]);
  assert.deepEqual(othersOf(status).map((each) => reasonOf(status, each)), ["slower with it", "it is paused: a game"]);
});

test("what serves is shown as it is while the next route is loaded beside it", () => {
  const nodes = [node("a", [0, 1]), node("b", [1, 8]), node("new", [8, 9])];
  const hops = [{ node_id: "a", compute_ms: 1, layers: [0, 8], weight_bytes: 5 }, { node_id: "b", compute_ms: 2, layers: [8, 9], weight_bytes: 6 }];
  const status = { state: "ready", nodes, hops };
  assert.deepEqual(hopsOf(status).map(({ layers, weights }) => [...layers, weights]), [[0, 8, 5], [8, 9, 6]]);
  assert.deepEqual(othersOf(status).map(({ node_id: id }) => id), ["new"]);
  assert.deepEqual(hopsOf(status).map(({ node: each, layers }) => nextLayers(each, layers)), [[0, 1], [1, 8]]);
  assert.equal(nextLayers(node("a", [0, 4]), [0, 4]), null);
});

test("a link is found from either end, and one that nobody measured is not zero", () => {
  const wires = [{ ends: ["", "a"], seconds: 0.001 }, { ends: ["b", "a"], seconds: 0.002 }];
  assert.deepEqual([wireMs({ wires }, "a", ""), wireMs({ wires }, "a", "b"), wireMs({ wires }, "", "b"), wireMs({ wires }, "", "")], [1, 2, null, null]);
});

test("memory is shown in parts of one", () => {
  assert.deepEqual(memoryOf({ kv_bytes: 1, free_memory: 1 }, 2), { weights: 0.5, kv: 0.25, free: 0.25 });
});

test("an hour grows at its end and is forgotten at its beginning", () => {
  const told = ratesOf({ seconds: 10, points: [{ at: 0, tokens: 50, sessions: 2 }, { at: 3590, tokens: 20, sessions: 1 }] });
  const status = { tokens_per_second: 7, generations: [1, 2, 3] };
  assert.deepEqual(extended(told, 10, 3599, status), [{ at: 0, rate: 5, sessions: 2 }, { at: 3590, rate: 7, sessions: 3 }]);
  assert.deepEqual(extended(told, 10, 3601, status).map(({ at }) => at), [3590, 3600]);
  assert.equal(path([{ at: 0, v: 0 }, { at: 3600, v: 5 }], ({ v }) => v, 3600, 5), "M0.0 88.0L600.0 4.0");
});

test("a QR code is drawn module by module", () => {
  assert.equal(outline(["10", "01"]), "M4 4h1v1h-1zM5 5h1v1h-1z");
});
