// The page at /: the state from GET /router/state, once a second, and one message to a model. No library, no build.

const PAUSE = 1000;
const KEY = "router-key";
const $ = (selector) => document.querySelector(selector);

function made(tag, text = "", classes = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (classes) element.className = classes;
  return element;
}

// Replace only the elements that have changed: a button that is replaced while it is pressed gets no click event.
function renew(parent, children) {
  children.forEach((child, index) => {
    const before = parent.children[index];
    if (!before) parent.append(child);
    else if (!before.isEqualNode(child)) before.replaceWith(child);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}

function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  return fetch(path, { ...options, headers });
}

function post(path, body, options = {}) {
  const headers = { "Content-Type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), ...options });
}

async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `HTTP ${response.status}`;
  }
}

function gib(bytes) {
  return `${(bytes / 2 ** 30).toFixed(bytes < 10 * 2 ** 30 ? 2 : 1)} GiB`;
}

// Memory

function showDevices(state) {
  const shown = state.devices.map((device) => {
    const block = made("div");
    const most = Math.min(device.total - device.foreign, (device.limit ?? device.total) - device.shared);
    const room = Math.max(0, most - device.margin);
    const bar = made("div", "", "bar");
    bar.setAttribute("aria-hidden", "true");
    const add = (bytes, text, classes) => {
      const share = (100 * bytes) / device.total;
      const part = made("span", share < 8 ? "" : text, classes);
      part.style.width = `${share}%`;
      bar.append(part);
    };
    const ours = state.workers.filter((worker) => worker.reserved[device.id]);
    for (const worker of ours) add(worker.reserved[device.id], worker.model, "ours");
    if (device.foreign > 0) add(device.foreign, "", "others");
    const line = made("span", "", "limit");
    line.style.left = `${(100 * room) / device.total}%`;
    bar.append(line);
    const words = [
      `${device.name || device.id}: ${gib(device.total)}`,
      ...ours.map((worker) => `${worker.model} ${gib(worker.reserved[device.id])}`),
      `others ${gib(device.foreign)}`,
      `models may use ${gib(room)} (dashed)`,
    ];
    block.append(bar, made("p", words.join(" · "), "quiet"));
    return block;
  });
  renew($("#devices"), shown);
}

// Models

const LOADED = new Set(["loaded", "loading", "downloading", "sleeping"]);

function memoryOf(status) {
  return Object.entries(status.memory ?? {}).map(([device, row]) => `${row.measured_mib ?? row.reserved_mib} MiB on ${device}`).join(", ");
}

// A line for the granted KV cache, and one each for the least and the most if it has a range.
function cacheOf(status) {
  const cell = made("td", "", "quiet");
  if (!status.kv_cache) return cell;
  const { least, granted, most } = status.kv_cache;
  const add = (name, { tokens, mib }) => cell.append(made("div", `${name} ${tokens.toLocaleString("en")} tokens, ${mib.toLocaleString("en")} MiB`));
  if (granted) add("granted", granted);
  if (least.tokens !== most.tokens) {
    add("least", least);
    add("most", most);
  }
  return cell;
}

function whyOf(status) {
  if (status.error) {
    const again = new Date(1000 * status.retry_at);
    return again > Date.now() ? `${status.error} (next attempt at ${again.toLocaleTimeString()})` : status.error;
  }
  if (status.waiting_for) return `waits for ${status.waiting_for}`;
  return [status.pinned ? "pinned" : "", status.draining ? "leaving" : "", status.reason ?? ""].filter(Boolean).join(", ");
}

function showModels(models) {
  const focused = document.activeElement?.dataset?.model;
  const rows = Object.entries(models).map(([id, status]) => {
    const row = made("tr");
    const share = status.progress?.value;
    const percent = share === undefined ? "" : ` ${Math.round(100 * share)} %`;
    const name = made("th", id);
    name.scope = "row";
    const button = made("button", LOADED.has(status.value) ? "Unload" : "Load");
    button.dataset.model = id;
    button.setAttribute("aria-label", `${button.textContent} ${id}`);
    button.onclick = () => act(LOADED.has(status.value) ? "models/unload" : "models/load", id);
    const queued = status.queued ? `, ${status.queued} waiting` : "";
    const action = made("td");
    action.append(button);
    row.append(
      name,
      made("td", (status.failed ? "failed" : status.value) + percent, status.failed ? "bad" : ""),
      made("td", memoryOf(status) || (status.shares ? `with ${status.shares[0]}` : "")),
      cacheOf(status),
      made("td", `${status.in_flight}${queued}`),
      made("td", whyOf(status), status.failed ? "bad" : "quiet"),
      action,
    );
    return row;
  });
  renew($("#models"), rows.length ? rows : [emptyRow()]);
  if (focused) [...document.querySelectorAll("#models button")].find((each) => each.dataset.model === focused)?.focus();
  const choice = $("#ask select");
  const ids = Object.keys(models);
  $("#ask").parentElement.hidden = !ids.length;
  if (ids.join("\n") !== [...choice.options].map((option) => option.value).join("\n")) {
    const before = choice.value;
    choice.replaceChildren(...ids.map((id) => new Option(id)));
    if (ids.includes(before)) choice.value = before;
  }
}

function emptyRow() {
  const row = made("tr");
  const cell = made("td", "This router has no models: give it a --models-preset, or a --models-dir.");
  cell.colSpan = 7;
  row.append(cell);
  return row;
}

async function act(path, model) {
  try {
    const response = await post(path, { model });
    showProblem(response.ok ? "" : await problemOf(response));
  } catch {
    showProblem(NO_ANSWER);
  }
  await look();
}

// The router's state

const NO_ANSWER = "The router does not answer.";
let shownProblem = "";

function showProblem(problem) {
  if (problem !== shownProblem) $("#trouble").textContent = shownProblem = problem;
}

async function look() {
  let response, state;
  try {
    response = await call("router/state");
    if (response.ok) state = await response.json();
  } catch {
    showProblem(NO_ANSWER);
    return;
  }
  if (response.status === 401 || response.status === 403) {
    $("#key").hidden = false;
    $("main").hidden = true;
    showProblem(response.status === 401 ? "This router needs a key." : "This page needs an admin key.");
    return;
  }
  if (!response.ok) return showProblem(await problemOf(response));
  $("#key").hidden = true;
  $("main").hidden = false;
  if (shownProblem === NO_ANSWER || shownProblem.includes("key")) showProblem("");
  $("#version").textContent = state.version;
  showDevices(state);
  showModels(state.models);
}

async function watch() {
  if (!document.hidden) await look();
  setTimeout(watch, PAUSE);
}

$("#key").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("#key input").value);
  $("#key input").value = "";
  look();
};

// A message to a model

async function ask(model, message, signal) {
  const answer = $("#answer");
  answer.textContent = "";
  const body = { model, messages: [{ role: "user", content: message }], stream: true };
  const response = await post("v1/chat/completions", body, { signal });
  if (!response.ok) throw new Error(await problemOf(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      answer.textContent += chunk.choices[0]?.delta.content ?? "";
    }
  }
}

$("#ask").onsubmit = async (event) => {
  event.preventDefault();
  const [send, stop] = $("#ask").querySelectorAll("button");
  const controller = new AbortController();
  stop.onclick = () => controller.abort();
  send.disabled = true;
  stop.hidden = false;
  try {
    await ask($("#ask select").value, $("#ask textarea").value, controller.signal);
  } catch (failed) {
    if (failed.name !== "AbortError") $("#answer").append(made("span", ` ${failed.message}`, "bad"));
  } finally {
    send.disabled = false;
    stop.hidden = true;
  }
};

$("#address").textContent = new URL("v1", document.baseURI).href;
watch();
