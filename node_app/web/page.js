"use strict";

const POLL_MS = 1000;
const $ = (id) => document.getElementById(id);
const limitsForm = $("limits-form");
let filled = false;
let paused = false;

function set(id, text) {
  const node = $(id);
  if (node.textContent !== text) node.textContent = text;
}

function show(status) {
  const kind = status.state.replace(" ", "-");
  $("picture").firstElementChild.setAttribute("href", "#" + kind);
  $("picture").style.color = `var(--${kind})`;
  document.title = `${status.headline} · core`;
  set("headline", status.headline);
  set("reason", status.reason);
  $("progress").hidden = status.fraction === null;
  $("progress").value = status.fraction ?? 0;
  set("notice", status.notice);
  $("notice").hidden = !status.notice;
  const joined = status.cluster !== "";
  $("figures").hidden = !joined;
  set("cluster", status.cluster);
  set("model", status.model || "none yet");
  set("holdings", status.holdings);
  set("served", status.served);
  set("speed", `${Number(status.tokens_per_second.toPrecision(3))} tokens/s`);
  set("join-title", joined ? "Join another cluster" : "Join a cluster");
  $("leave").hidden = !joined;
  paused = status.paused;
  $("pause").hidden = !joined;
  set("pause", paused ? "Resume" : "Pause");
  set("version", status.version);
  if (!filled && status.limits) fill(status.limits);
}

function fill(limits) {
  const field = limitsForm.elements;
  field.memory_gb.value = limits.memory_gb ?? "";
  field.threads.value = limits.threads ?? "";
  field.device.value = limits.device;
  field.pause_on_battery.checked = limits.pause_on_battery;
  field.has_hours.checked = limits.hours !== null;
  if (limits.hours) [field.start.value, field.end.value] = [limits.hours.start, limits.hours.end];
  for (const [box, name] of [["has_cpu", "cpu_percent"], ["has_gpu", "gpu_percent"], ["has_free", "free_memory_gb"]]) {
    field[box].checked = limits[name] !== null;
    if (limits[name] !== null) field[name].value = limits[name];
  }
  filled = true;
}

function limits() {
  const field = limitsForm.elements;
  const number = (name) => (field[name].value === "" ? null : Number(field[name].value));
  const ticked = (box, name) => (field[box].checked ? number(name) : null);
  return {
    memory_gb: number("memory_gb"),
    threads: number("threads"),
    device: field.device.value,
    hours: field.has_hours.checked ? { start: field.start.value, end: field.end.value } : null,
    pause_on_battery: field.pause_on_battery.checked,
    cpu_percent: ticked("has_cpu", "cpu_percent"),
    gpu_percent: ticked("has_gpu", "gpu_percent"),
    free_memory_gb: ticked("has_free", "free_memory_gb"),
  };
}

async function post(what, value) {
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(what, { method: "POST", headers, body: JSON.stringify(value) });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

async function ask(what, value = null) {
  show(await post(what, value));
}

function offer(clusters) {
  $("found").replaceChildren(...clusters.map(({ name, key, host }) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Ask to join";
    button.addEventListener("click", () => tell("join-answer", "Asking.", async () => {
      await ask("ask", key);
      offer([]);
    }));
    const item = document.createElement("li");
    item.append(`${name}, key ${key}, at ${host} `, button);
    return item;
  }));
  return clusters.length;
}

async function tell(id, done, work) {
  const line = $(id);
  try {
    const said = await work();
    line.className = "answer";
    line.textContent = said ?? done;
  } catch (error) {
    line.className = "answer bad";
    line.textContent = error.message;
  }
}

async function poll() {
  try {
    const answer = await fetch("status");
    if (answer.ok) show(await answer.json());
    if ($("log-details").open) await showLog();
  } catch {
    show(GONE);
  }
  setTimeout(poll, POLL_MS);
}

const GONE = {
  state: "not joined", headline: "core does not run", reason: "start it again, and open this page from its icon",
  cluster: "", model: "", holdings: "", served: "", tokens_per_second: 0, fraction: null, paused: false, notice: "",
  version: "", limits: null,
};

async function showLog() {
  const pre = $("log-text");
  const atEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 8;
  pre.textContent = await (await fetch("log")).text();
  if (atEnd) pre.scrollTop = pre.scrollHeight;
}

function goTo() {
  const part = location.hash && $(location.hash.slice(1));
  if (location.hash === "#log") $("log-details").open = true;
  if (location.hash === "#join") $("invite").focus();
  part && part.scrollIntoView({ block: "start" });
}

$("join-form").addEventListener("submit", (event) => {
  event.preventDefault();
  tell("join-answer", "Joining.", async () => {
    await ask("join", $("invite").value);
    $("invite").value = "";
  });
});
limitsForm.addEventListener("submit", (event) => {
  event.preventDefault();
  tell("limits-answer", "Saved.", () => ask("limits", limits()));
});
$("pause").addEventListener("click", () => tell("join-answer", "", () => ask(paused ? "resume" : "pause")));
$("find").addEventListener("click", async () => {
  $("find").disabled = true;
  set("join-answer", "Looking.");
  await tell("join-answer", "", async () => (offer(await post("find", null)) ? "" : "None was found."));
  $("find").disabled = false;
});
$("leave").addEventListener("click", () => tell("join-answer", "Left.", () => ask("leave")));
window.addEventListener("hashchange", goTo);
poll().then(goTo);
