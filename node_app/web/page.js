"use strict";

const POLL_MS = 1000;
const PATIENCE_MS = 12000;
const SILENT = "core does not answer: start it again, and open this page from its icon";
const $ = (id) => document.getElementById(id);
const field = $("limits-form").elements;
const GATED = {
  has_hours: ["start", "end"], has_cpu: ["cpu_percent"], has_gpu: ["gpu_percent"], has_free: ["free_memory_gb"],
};
let filledWith = "";
let edited = false;
let duty = "pause";
let offered = "";
let ended = false;

function set(id, text) {
  const node = $(id);
  if (node.textContent !== text) node.textContent = text;
}

function show(status) {
  showHead(status);
  for (const section of document.querySelectorAll("section")) section.hidden = false;
  const joined = status.cluster !== "";
  $("figures").hidden = !joined;
  set("cluster", status.cluster);
  set("model", status.model || "none yet");
  set("holdings", status.holdings);
  set("served", status.served);
  set("speed", `${Number(status.tokens_per_second.toPrecision(3))} tokens/s`);
  set("join-title", joined ? "Join another cluster" : "Join a cluster");
  $("leaves").hidden = $("leave").hidden = $("duty").hidden = !joined;
  duty = status.resumable || status.state === "error" ? "resume" : "pause";
  set("duty", status.state === "error" ? "Try again" : status.resumable ? "Resume" : "Pause");
  set("version", status.version);
  set("code", status.code);
  $("code").hidden = !status.code;
  showOffer(status.offer, status.cluster);
  set("memory", status.memory);
  field.threads.max = status.cores;
  if (!$("login-answer").dataset.busy) $("login").checked = status.starts_at_login;
  offerDevices(status.devices, status.limits.device);
  const said = status.state === "busy" ? "ready" : status.state;
  set("announcement", status.reason ? `${said}: ${status.reason}` : said);
  if (!edited && JSON.stringify(status.limits) !== filledWith) fill(status.limits);
}

// The link is put into the field once: what its user makes of it there is theirs.
function showOffer(offer, cluster) {
  $("offer").hidden = !offer;
  if (!offer) return (offered = "");
  set("offer-host", offer.host);
  set("offer-key", offer.key);
  set("offer-leaves", cluster ? `This machine then leaves ${cluster}.` : "");
  if (offer.link === offered) return;
  offered = $("invite").value = offer.link;
  $("join").scrollIntoView({ block: "start" });
}

function offerDevices(devices, chosen) {
  const known = devices.some(([value]) => value === chosen) ? devices : [...devices, [chosen, chosen]];
  if (field.device.length === known.length) return;
  field.device.replaceChildren(...known.map(([value, label]) => new Option(label, value)));
  field.device.value = chosen;
}

function showHead({ state, headline, reason, fraction, notice }) {
  const kind = state.replace(" ", "-");
  $("picture").firstElementChild.setAttribute("href", "#" + kind);
  $("picture").style.color = `var(--${kind})`;
  document.title = `${headline} · core`;
  set("headline", headline);
  set("reason", reason);
  $("progress").hidden = fraction === null;
  $("progress").value = fraction ?? 0;
  set("notice", notice);
  $("notice").hidden = !notice;
}

function showGone() {
  set("code", "");
  $("code").hidden = true;
  showHead({ state: "not joined", headline: ended ? "core has ended" : "core does not answer", fraction: null, notice: "",
    reason: "Start it again, and open this page from its icon." });
  set("announcement", ended ? "core has ended" : SILENT);
  say($("duty-answer"), "");
  for (const part of [$("figures"), $("duty"), ...document.querySelectorAll("section")]) part.hidden = true;
}

function fill(limits) {
  filledWith = JSON.stringify(limits);
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
  gate();
}

function gate() {
  for (const [box, names] of Object.entries(GATED))
    for (const name of names) field[name].disabled = !field[box].checked;
}

function limits() {
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

async function reach(what, options = {}) {
  let answer;
  try {
    answer = await fetch(what, { signal: AbortSignal.timeout(PATIENCE_MS), ...options });
  } catch {
    throw new Error(SILENT);
  }
  if (!answer.ok) throw new Error(answer.status === 404 ? SILENT : await answer.text());
  return answer;
}

async function post(what, value = null) {
  const headers = { "Content-Type": "application/json" };
  return (await reach(what, { method: "POST", headers, body: JSON.stringify(value) })).json();
}

async function ask(what, value) {
  show(await post(what, value));
}

// What comes of it is said in the line `id`; pressed again meanwhile, it is not done twice.
async function act(id, doing, done, work) {
  const line = $(id);
  if (line.dataset.busy) return;
  line.dataset.busy = "busy";
  say(line, doing);
  try {
    say(line, (await work()) ?? done);
  } catch (error) {
    say(line, error.message, "bad");
  }
  delete line.dataset.busy;
}

function say(line, text, kind = "") {
  line.className = `answer ${kind}`;
  line.textContent = text;
}

function offer(clusters) {
  $("found").replaceChildren(...clusters.map(({ name, key, host }) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Ask to join";
    button.ariaLabel = `Ask to join ${name}, key ${key}`;
    button.addEventListener("click", () => act("find-answer", "Asking.", "Asked: the top of this page says what comes of it.", async () => {
      await ask("ask", key);
      offer([]);
    }));
    const item = document.createElement("li");
    item.append(`${name}, key ${key}, at ${host} `, button);
    return item;
  }));
  return clusters.length;
}

async function poll() {
  try {
    show(await (await reach("status")).json());
    if ($("log-details").open) await showLog();
  } catch {
    showGone();
  }
  setTimeout(poll, POLL_MS);
}

async function showLog() {
  const pre = $("log-text");
  const atEnd = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 8;
  set("log-text", await (await reach("log")).text());
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
  act("join-answer", "", "Joining: the top of this page says what comes of it.", async () => {
    await ask("join", $("invite").value);
    $("invite").value = "";
  });
});
$("invite").addEventListener("input", () => say($("join-answer"), ""));
$("limits-form").addEventListener("input", () => {
  edited = true;
  gate();
  say($("limits-answer"), "");
});
$("limits-form").addEventListener("submit", (event) => {
  event.preventDefault();
  act("limits-answer", "Saving.", "Saved.", async () => {
    await ask("limits", limits());
    edited = false;
  });
});
$("duty").addEventListener("click", () => act("duty-answer", "", "", () => ask(duty)));
$("find").addEventListener("click", () => act("find-answer", "Looking.", "None was found.", async () => {
  if (offer(await post("find"))) return "";
}));
$("leave").addEventListener("click", () => {
  if (confirm("Leave this cluster? To come back you have to join it anew."))
    act("leave-answer", "Leaving.", "Left.", () => ask("leave"));
});
$("dismiss").addEventListener("click", () => act("join-answer", "", "", async () => {
  await ask("dismiss");
  $("invite").value = "";
}));
$("login").addEventListener("change", () => act("login-answer", "", "", () => ask("login", $("login").checked)));
$("quit").addEventListener("click", () => {
  if (confirm("Quit core? What runs here is finished first, for a few seconds; this machine then serves nobody."))
    act("quit-answer", "Quitting.", "Quitting.", async () => {
      ended = true;
      await reach("quit", { method: "POST", headers: { "Content-Type": "application/json" }, body: "null" }).catch(() => {});
    });
});
window.addEventListener("hashchange", goTo);
poll().then(goTo);
