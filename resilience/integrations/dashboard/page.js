"use strict";

// All text is set through `textContent`, so names and messages are never parsed as markup.

const TROUBLES = ["failures", "timeouts", "rejections"];

const WATCHED = ["executions", "failures"]; // counted only while there is a viewer

const FEW = 3; // as many cards of a kind fit below one another

const STATES = { closed: "closed", open: "open", half_open: "half-open", isolated: "isolated" };

// The word and the level of each kind of row; a change of a circuit has the level of its new state.
const KINDS = {
  retry_scheduled: ["retry", "calm"],
  retry_gave_up: ["gave up", "warning"],
  hedge_started: ["hedge", "calm"],
  budget_spent: ["budget", "calm"],
  timed_out: ["timeout", "warning"],
  call_rejected: ["refused", "warning"],
  circuit_changed: ["circuit", "calm"],
  fallback_used: ["fallback", "calm"],
  chaos_injected: ["chaos", "calm"],
  execution_finished: ["failed", "warning"],
};

const LEVELS = { closed: "good", open: "error", isolated: "warning" };

// --- making elements ---

const byId = (id) => document.getElementById(id);

function element(tag, className, text) {
  const it = document.createElement(tag);
  if (className) it.className = className;
  if (text !== undefined) it.textContent = text;
  return it;
}

function drawing(tag, attributes, ...children) {
  const it = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) it.setAttribute(name, value);
  it.append(...children);
  return it;
}

function write(it, text) {
  if (it.textContent !== text) it.textContent = text;
}

// Make the children of `list` match `items`; elements of items that were there before are kept.
function arrange(list, items, keyOf, make, update) {
  const old = new Map([...list.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, place) => {
    const key = String(keyOf(item));
    const it = old.get(key) ?? make(item);
    it.dataset.key = key;
    old.delete(key);
    if (list.children[place] !== it) list.insertBefore(it, list.children[place] ?? null);
    update(it, item);
  });
  while (list.children.length > items.length) list.lastChild.remove(); // two items may have the same key
}

function parts(it, names) {
  return Object.fromEntries(names.map((name) => [name, it.querySelector(`.${name}`)]));
}

const digits = (count) => count.toLocaleString("en");

const plural = (count, word) => `${digits(count)} ${word}${count === 1 ? "" : "s"}`;

function perSecond(value) {
  if (value === 0) return "0";
  return value < 10 ? value.toFixed(1) : digits(Math.round(value));
}

// --- rates ---

function makeRate([name]) {
  const it = element("li", "rate");
  const curve = drawing("path", { class: "curve" });
  const area = drawing("path", { class: "area" });
  const base = drawing("path", { class: "base", d: "M0 19H58" });
  const chart = drawing("svg", { viewBox: "0 0 58 20", preserveAspectRatio: "none", role: "img" }, area, base, curve);
  it.append(element("p", "name", name), element("p", "value"), element("p", "total"), chart);
  return it;
}

function updateRate(it, [name, rate]) {
  const known = rate.seconds.filter((count) => count !== null);
  const most = Math.max(0, ...known);
  const { value, total, curve, area } = parts(it, ["value", "total", "curve", "area"]);
  write(value, known.length ? perSecond(rate.present) : "–");
  write(total, `${digits(rate.total)} ${WATCHED.includes(name) ? "while watched" : "in all"}`);
  it.classList.toggle("trouble", TROUBLES.includes(name) && rate.present > 0);
  it.classList.toggle("quiet", rate.present === 0);
  const line = known.length > 1 && most > 0 ? curveOf(rate.seconds, most) : null;
  curve.setAttribute("d", line ? line.curve : "");
  area.setAttribute("d", line ? line.area : "");
  it.querySelector("svg").setAttribute("aria-label", `${name} in the last minute: at most ${most} in a second`);
}

function curveOf(seconds, most) {
  const points = seconds
    .map((count, x) => (count === null ? null : [x, 19 - (17 * count) / most]))
    .filter((point) => point !== null);
  const curve = `M${points.map(([x, y]) => `${x} ${y.toFixed(2)}`).join("L")}`;
  return { curve, area: `${curve}L${points.at(-1)[0]} 20L${points[0][0]} 20Z` };
}

// --- pipelines ---

function makePipeline() {
  const it = element("li", "card");
  it.append(element("p", "name"), element("p", "facts"));
  return it;
}

function updatePipeline(it, pipeline) {
  write(it.querySelector(".name"), pipeline.name);
  const seen = Object.entries(pipeline.rates).filter(([, rate]) => rate.total > 0);
  fill(it.querySelector(".facts"), seen.map(([name, rate]) => [name, perSecond(rate.present)]));
}

// --- circuits ---

function makeCard(...more) {
  const it = element("li", "card");
  const top = element("div", "top");
  it.append(top, element("p", "where"), ...more, element("p", "facts"), element("p", "about"));
  return [it, top];
}

function updateCard(it, policy, counts) {
  const { name, where, facts, about } = parts(it, ["name", "where", "facts", "about"]);
  write(name, policy.name);
  write(where, `in ${policy.pipelines.join(", ")}`);
  fill(facts, counts);
  write(about, policy.about);
}

function lever() {
  return drawing(
    "svg",
    { class: "switch", viewBox: "0 0 44 22", "aria-hidden": "true" },
    drawing("path", { d: "M1 13H9M35 13H43" }),
    drawing("path", { class: "lever", d: "M12 13H31" }),
    drawing("path", { class: "bar", d: "M22 2V20" }),
    drawing("circle", { class: "pole", cx: 11, cy: 13, r: 2.5 }),
    drawing("circle", { class: "pole", cx: 33, cy: 13, r: 2.5 }),
  );
}

function makeCircuit() {
  const wait = element("div", "meter thin");
  wait.append(element("i"));
  wait.setAttribute("aria-hidden", "true"); // the text below it says the same
  const [it, top] = makeCard(wait, element("p", "why"));
  top.append(lever(), element("span", "name"), element("span", "state"));
  return it;
}

function updateCircuit(it, circuit) {
  const counted = circuit.counted.map(([what, bad, of]) => [what, `${digits(bad)} of ${digits(of)}`]);
  const counts = [["opened", `${digits(circuit.opened)}×`], ["refused", digits(circuit.rejected)]];
  updateCard(it, circuit, [...counted, ...counts]);
  const { state, why, meter } = parts(it, ["state", "why", "meter"]);
  it.dataset.state = circuit.state;
  write(state, STATES[circuit.state]);
  const waits = circuit.state === "open" && circuit.open_for !== null;
  meter.hidden = !waits;
  if (waits) meter.firstChild.style.width = `${Math.min(100, (100 * circuit.retry_after) / circuit.open_for)}%`;
  why.hidden = circuit.state === "closed";
  write(why, reasonOf(circuit));
}

function reasonOf(circuit) {
  const after = circuit.last_failure ? ` After ${circuit.last_failure}.` : "";
  if (circuit.state === "isolated") return "Opened manually, until it is closed manually.";
  if (circuit.state === "half_open") return `${plural(circuit.probes, "probe")} under way.${after}`;
  if (circuit.state !== "open") return "";
  const seconds = Math.ceil(circuit.retry_after);
  return (seconds > 0 ? `A probe may go in ${seconds} s.` : "The next call is a probe.") + after;
}

function fill(it, facts) {
  const text = facts.map(([name, value]) => `${name} ${value}`).join(";");
  if (it.dataset.facts === text) return;
  it.dataset.facts = text;
  it.replaceChildren(
    ...facts.map(([name, value]) => {
      const fact = element("span", "", `${name} `);
      fact.append(element("b", "", value));
      return fact;
    }),
  );
}

// --- cards with a meter ---

function makeMeterCard() {
  const meter = element("div", "meter");
  meter.append(element("i"));
  meter.setAttribute("role", "meter");
  meter.setAttribute("aria-valuemin", "0");
  const [it, top] = makeCard(meter);
  top.append(element("span", "name"), element("span", "full-word"));
  return it;
}

function updateMeterCard(it, policy, { word, label, value, max, counts }) {
  updateCard(it, policy, counts);
  const meter = it.querySelector(".meter");
  write(it.querySelector(".full-word"), word);
  meter.classList.toggle("full", word !== "");
  meter.firstChild.style.width = `${Math.min(100, (100 * value) / max)}%`;
  meter.setAttribute("aria-label", label);
  meter.setAttribute("aria-valuemax", max);
  meter.setAttribute("aria-valuenow", value);
}

function aboutBulkhead({ name, in_flight, limit, queue, queued, rejected }) {
  const waiting = queue ? [["waiting", `${queued} of ${queue}`]] : [];
  return {
    word: in_flight >= limit ? "full" : "",
    label: `calls running in ${name}`,
    value: in_flight,
    max: limit,
    counts: [["running", `${in_flight} of ${limit}`], ...waiting, ["refused", digits(rejected)]],
  };
}

function aboutThrottle({ name, rejection_rate, accepts, requests, rejected }) {
  const share = Math.round(100 * rejection_rate);
  const accepted = `${digits(accepts)} of ${digits(requests)}`;
  return {
    word: share > 0 ? "holds back" : "",
    label: `share of calls that ${name} holds back`,
    value: share,
    max: 100,
    counts: [["held back", `${share} %`], ["accepted", accepted], ["refused", digits(rejected)]],
  };
}

const FULL_METER = 10; // seconds to wait

function aboutLimiter({ name, next_turn, queued, rejected }) {
  const next = next_turn === null ? "never" : `${next_turn.toFixed(1)} s`;
  return {
    word: queued > 0 ? "waits" : "",
    label: `seconds until the next turn of ${name}`,
    value: Math.min(FULL_METER, next_turn ?? FULL_METER),
    max: FULL_METER,
    counts: [["waiting", digits(queued)], ["next turn", next], ["refused", digits(rejected)]],
  };
}

function aboutCache(cache) {
  const answered = cache.hits + cache.stale + cache.shared;
  const all = answered + cache.misses;
  const share = all ? Math.round((100 * answered) / all) : 0;
  const seen = ["hits", "stale", "shared", "misses", "size"].map((it) => [it, digits(cache[it])]);
  return {
    word: "",
    label: `share of calls that ${cache.name} has answered`,
    value: share,
    max: 100,
    counts: [["answered", `${share} %`], ...seen],
  };
}

const METERS = { bulkheads: aboutBulkhead, throttles: aboutThrottle, limiters: aboutLimiter, caches: aboutCache };

// --- the log ---

const rows = new Map(); // number -> row, oldest first

function makeRow() {
  const it = element("li", "row");
  it.append(element("time"), element("span", "kind"), element("span", "text"), element("span", "count"));
  return it;
}

function updateRow(it, row) {
  const { kind, text, count } = parts(it, ["kind", "text", "count"]);
  const at = new Date(row.at * 1000);
  const time = it.querySelector("time");
  write(time, at.toLocaleTimeString("en-GB"));
  time.dateTime = at.toISOString();
  const [word, level] = KINDS[row.kind] ?? [row.kind, "calm"];
  it.dataset.level = LEVELS[row.state] ?? level;
  write(kind, word);
  write(text, row.text);
  write(count, row.count > 1 ? `×${digits(row.count)}` : "");
}

function keep(changed, most) {
  for (const row of changed) rows.set(row.number, row);
  for (const number of [...rows.keys()].slice(0, Math.max(0, rows.size - most))) rows.delete(number);
}

// --- the whole ---

function show(now) {
  arrange(byId("rates"), Object.entries(now.rates), ([name]) => name, makeRate, updateRate);
  arrange(byId("pipelines"), now.pipelines, (it) => it.name, makePipeline, updatePipeline);
  arrange(byId("circuits"), now.circuits, (it) => it.key, makeCircuit, updateCircuit);
  for (const [list, about] of Object.entries(METERS)) {
    const update = (it, policy) => updateMeterCard(it, policy, about(policy));
    arrange(byId(list), now[list], (it) => it.key, makeMeterCard, update);
  }
  for (const list of ["pipelines", "throttles", "limiters", "caches"]) {
    byId(list).parentElement.hidden = now[list].length === 0;
  }
  const policies = ["circuits", ...Object.keys(METERS)];
  const cards = ["pipelines", ...policies].map((list) => now[list].length);
  byId("board").classList.toggle("few", Math.max(...cards) <= FEW);
  arrange(byId("log"), [...rows.values()].sort((a, b) => b.change - a.change), (it) => it.number, makeRow, updateRow);
  for (const it of document.querySelectorAll("section > .empty")) {
    it.hidden = it.previousElementSibling.children.length > 0;
  }
  for (const list of policies) write(byId(`n-${list}`), numberOf(now[list], now.left_out[list]));
  summarize(now);
  write(byId("process"), `Process ${now.pid}. ${plural(now.abandoned, "abandoned call")} still running.`);
}

function numberOf(shown, leftOut) {
  if (leftOut) return `${shown.length} of ${shown.length + leftOut}`;
  return shown.length > 1 ? `${shown.length}` : "";
}

function summarize(now) {
  const counts = Object.keys(STATES)
    .map((state) => [state, now.circuits.filter((it) => it.state === state).length])
    .filter(([state, count]) => count && state !== "closed");
  const trouble = counts.map(([state, count]) => `${plural(count, "circuit")} ${STATES[state]}`).join(", ");
  const all = now.circuits.length === 1 ? "The circuit is closed" : "All circuits are closed";
  write(byId("summary"), trouble || (now.circuits.length ? all : ""));
  byId("summary").classList.toggle("trouble", counts.length > 0);
  const title = byId("title").textContent;
  document.title = trouble ? `${trouble} · ${title}` : title;
}

let latest = null;
let paused = false;

function link(state, text) {
  byId("link").dataset.link = state;
  write(byId("link-text"), text);
}

function connect() {
  const source = new EventSource("events");
  let lost = 0; // the timer that shows a lost connection
  source.addEventListener("open", () => {
    clearTimeout(lost);
    lost = 0;
    link("live", "live");
    rows.clear(); // each stream begins with all of them
  });
  source.addEventListener("update", (event) => {
    const update = JSON.parse(event.data);
    keep(update.rows, update.now.keep);
    latest = update.now;
    if (!paused) show(latest);
  });
  source.addEventListener("error", () => {
    // Streams end regularly, and the browser reconnects at once: only a longer interruption is shown.
    lost ||= setTimeout(() => link("lost", "no connection"), 2500);
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 5000); // it does not reconnect by itself
  });
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  write(byId("pause"), paused ? "Paused" : "Pause");
  if (!paused && latest !== null) show(latest);
});

connect();
