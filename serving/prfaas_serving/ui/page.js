// The page: asks for the token, reads the state every two seconds, shows it, and orders what an operator confirms.

import { lengthChart, stepAt, timeChart } from "./charts.js";
import * as words from "./words.js";
import { make, say } from "./words.js";

const KEY = "prfaas_token";
const EVERY_MS = 2000;
const MOST_TILES = 48;
const WINDOW_S = 900;

const $ = (id) => document.getElementById(id);
const show = (element, visible) => element.toggleAttribute("hidden", !visible);

let token = sessionStorage.getItem(KEY) ?? "";
let state = null;
let seen_ms = 0;
let failures = 0;
let timer = 0;
let reading = false;
let picked = null; // unix time of the moment beside the charts; null = the end

class Refused extends Error {}

/** Call the admin port. The token goes in a header and nowhere else. */
async function call(method, path, body) {
  const answer = await fetch(path, {
    method,
    headers: { Authorization: `Bearer ${token}`, ...(body ? { "Content-Type": "application/json" } : {}) },
    body: body ? JSON.stringify(body) : undefined,
    cache: "no-store",
    credentials: "omit",
    referrerPolicy: "no-referrer",
    redirect: "error",
    signal: AbortSignal.timeout(8000),
  });
  if (answer.status === 401) throw new Refused("The router does not take this token.");
  let found = null;
  try {
    found = await answer.json();
  } catch {
    found = null;
  }
  if (!answer.ok) throw new Error(found?.error?.message ?? `the router answered ${answer.status}`);
  return found;
}

// ------------------------------------------------------------------ token

function askToken(message) {
  clearTimeout(timer);
  token = "";
  state = null;
  sessionStorage.removeItem(KEY);
  show($("board"), false);
  show($("forget"), false);
  show($("login"), true);
  say($("where"), "");
  say($("updated"), "");
  say($("status"), "");
  if ($("ask").open) $("ask").close();
  say($("login-error"), message);
  if (message) $("token").setAttribute("aria-invalid", "true");
  else $("token").removeAttribute("aria-invalid");
  $("token").focus();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  $("token").value = "";
  if (!/^[\x21-\x7e]+$/.test(token)) {
    askToken("A token has no spaces and only plain characters.");
    return;
  }
  read();
});

$("forget").addEventListener("click", () => askToken(""));

// ------------------------------------------------------------------ reading

async function read() {
  clearTimeout(timer);
  if (reading || !token) return;
  reading = true;
  const mine = token;
  try {
    const found = await call("GET", "ui/state");
    if (token !== mine) return;
    state = found;
    seen_ms = Date.now();
    if (failures) say($("status"), "Connected again.");
    failures = 0;
    sessionStorage.setItem(KEY, token);
    const first = $("board").hidden;
    show($("login"), false);
    show($("board"), true);
    show($("forget"), true);
    render();
    if (first && document.activeElement === document.body) $("main").focus({ preventScroll: true });
  } catch (error) {
    if (token !== mine) return;
    if (error instanceof Refused) {
      askToken(error.message);
      return;
    }
    failures += 1;
    if (state === null) say($("login-error"), "The router cannot be reached; trying again.");
    lost();
  } finally {
    reading = false;
    if (token && !document.hidden) timer = setTimeout(read, Math.min(EVERY_MS * 2 ** Math.min(failures, 3), 15000));
  }
}

function lost() {
  document.body.classList.toggle("lost", failures > 0);
  if (failures && state !== null) {
    say($("status"), `No connection to the router. What is shown is of ${words.clock(seen_ms / 1000)}.`);
  }
}

document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : read()));

// ------------------------------------------------------------------ showing

/** Replace children only if what they show has changed: focus, selection and announcements stay. */
const shown = new WeakMap();
function keep(element, content, build) {
  const key = JSON.stringify(content);
  if (shown.get(element) === key) return;
  shown.set(element, key);
  element.replaceChildren(...build());
}

function render() {
  document.body.classList.remove("lost");
  const s = state;
  say($("where"), `scenario ${s.scenario}, PD cluster ${s.pd}, up ${words.seconds(s.uptime_s)}`);
  say($("updated"), `Updated ${words.clock(s.unix_s)}`);
  const worst = s.alarms.filter((a) => a.level !== "notice").length;
  document.title = worst ? `(${worst}) prfaas router` : "prfaas router";
  alarms(s.alarms);
  figures(s);
  sites(s);
  decision(s);
  lengths(s);
  charts(s);
  lists(s);
}

const LEVELS = { critical: "Critical", warning: "Warning", notice: "Notice" };

/** Keyed by text, so that a new alarm is announced and an old one is not announced again. */
function alarms(found) {
  const list = $("alarms");
  const wanted = found.length ? found : [{ name: "none", level: "fine", text: "None." }];
  const keyOf = (a) => `${a.level}/${a.name}/${a.text}`;
  const keys = new Set(wanted.map(keyOf));
  for (const item of [...list.children]) if (!keys.has(item.dataset.key)) item.remove();
  const there = new Set([...list.children].map((item) => item.dataset.key));
  wanted.forEach((a, k) => {
    if (there.has(keyOf(a))) return;
    const item = make("li", { class: a.level }, LEVELS[a.level] ? make("strong", {}, `${LEVELS[a.level]}: `) : null, a.text);
    item.dataset.key = keyOf(a);
    list.insertBefore(item, list.children[k] ?? null);
  });
}

function figures(s) {
  const t = s.totals;
  const span = Math.max(s.span_s, 1e-3);
  const rows = [
    ["First token, median", words.seconds(s.ttft.p50_s)],
    ["First token, P90", words.seconds(s.ttft.p90_s)],
    ["First token, P99", words.seconds(s.ttft.p99_s)],
    ["Goodput", words.rate(t.good / span)],
    ["Finished within objectives", t.finished ? words.share(t.good / t.finished) : "–"],
    ["Arrivals", words.rate(t.arrivals / span)],
    ["Sent remote", t.arrivals ? words.share(t.remote / t.arrivals) : "–"],
    ["Refused or broken off", words.count(t.refused)],
    ["Open requests", words.count(s.router.open_requests)],
  ];
  keep($("figures"), rows, () => rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

// ------------------------------------------------------------------ picture of the sites

function sites(s) {
  const of = (cluster, role) => s.router.workers.filter((w) => w.cluster === cluster && (w.role === role || role === null));
  const queue = (cluster, role) => s.waiting.find((q) => q.cluster === cluster && q.role === role)?.requests ?? 0;
  const remotes = s.router.links.map((link) => ({ link, workers: of(link.cluster, null), queue: queue(link.cluster, "prefill") }));
  const use = (name) => s.steps.link_use[name]?.at(-1) ?? 0;
  const uses = remotes.map((r) => use(r.link.cluster));
  keep($("sites"), [s.pd, s.router.workers, s.waiting, s.router.links, s.changing, uses], () => [
    make("div", { class: "remotes" }, ...(remotes.length ? remotes.map((r, k) => remote(s, r, uses[k])) : [make("p", { class: "note" }, "No remote cluster: everything is prefilled here.")])),
    local(s, of, queue),
  ]);
}

function remote(s, r, use) {
  const { link } = r;
  const wait = link.observed_bps > 0 ? link.backlog_bits / link.observed_bps : null;
  const pipe = make("div", { class: "pipe", "aria-hidden": "true" }, make("div", { class: use > 0 || link.open_flows ? "flow moving" : "flow" }));
  pipe.firstChild.style.setProperty("--use", `${Math.max(use * 100, link.open_flows ? 2 : 0)}%`);
  return make("div", { class: "pair" },
    make("section", { class: "site", "aria-label": `Remote cluster ${link.cluster}` },
      make("h3", {}, link.cluster, make("small", {}, " remote prefill")),
      tiles(s, r.workers),
      queueLine(r.queue, "prefill")),
    make("section", { class: "link", "aria-label": `Link from ${link.cluster}` },
      make("p", { class: "big" }, words.share(use), make("small", {}, ` of ${words.bps(link.nominal_bps)}`)),
      pipe,
      make("p", {}, `carries up to ${words.bps(link.observed_bps)}`),
      make("p", {}, link.backlog_bits > 0.5 ? `backlog ${words.bytes(link.backlog_bits)}, ${words.seconds(wait)}` : "no backlog"),
      make("p", {}, `${link.open_flows} ${link.open_flows === 1 ? "transfer" : "transfers"}`)));
}

function local(s, of, queue) {
  const parts = [make("h3", {}, s.pd, make("small", {}, " prefill and decode"))];
  const rows = [["prefill", "Prefill"], ["decode", "Decode"], ["both", "Prefill and decode"]];
  for (const [role, name] of rows) {
    const workers = of(s.pd, role);
    if (role === "both" && !workers.length) continue;
    parts.push(make("h4", {}, `${name} (${workers.length})`), tiles(s, workers));
    if (role !== "both") parts.push(queueLine(queue(s.pd, role), role));
  }
  return make("section", { class: "site pd", "aria-label": `PD cluster ${s.pd}` }, ...parts);
}

function queueLine(n, role) {
  return make("p", { class: n > 0 ? "queue some" : "queue" }, n > 0 ? `${words.count(n)} waiting for ${role}` : `none waiting for ${role}`);
}

function condition(s, w) {
  if (s.changing.includes(w.name)) return ["changing", "changing role"];
  if (w.state === "down") return ["down", "down"];
  if (w.state === "out") return ["broken", "taken out"];
  if (w.state === "draining") return ["draining", "draining"];
  if (w.breaker !== "closed") return ["broken", w.breaker === "open" ? "kept out" : "on trial"];
  if (w.state !== "up") return ["draining", "starting"];
  return ["up", w.share < 1 ? "warming up" : ""];
}

function tiles(s, workers) {
  if (!workers.length) return make("p", { class: "queue some" }, "no workers");
  const items = workers.slice(0, MOST_TILES).map((w) => {
    const [kind, text] = condition(s, w);
    const fill = make("span", { class: "fill", "aria-hidden": "true" });
    fill.style.setProperty("--use", `${Math.min(w.in_flight / Math.max(w.limit, 1), 1) * 100}%`);
    const kv = w.kv_use === null || w.kv_use === undefined ? null : make("span", { class: "kv" }, `KV ${words.share(w.kv_use)}`);
    return make("li", { class: `worker ${kind}` },
      make("span", { class: "name" }, w.name),
      text ? make("span", { class: "condition" }, text) : null,
      make("span", { class: "load" }, `${w.in_flight} of ${w.limit}`), kv, fill);
  });
  if (workers.length > MOST_TILES) items.push(make("li", { class: "worker more" }, `and ${workers.length - MOST_TILES} more`));
  return make("ul", { class: "workers" }, ...items);
}

// ------------------------------------------------------------------ decision and mode

const MODES = {
  active: "The policy decides.",
  shadow: "The policy decides and is logged; a rule acts.",
  off: "The policy is not asked; a rule acts.",
};

function decision(s) {
  const d = s.router.decision;
  say($("rule"), words.rule(d));
  say($("rule-note"), `${d.overridden ? "Override" : `By ${BY[d.origin] ?? d.origin}`} since ${words.clock(d.unix_s)}: ${d.reason}. Cache rule ${d.cache_rule}.`);
  $("rule").classList.toggle("overridden", d.overridden);
  show($("clear"), d.overridden);
  const c = s.control;
  show($("modes"), c !== null);
  say($("mode-note"), c === null
    ? "This router has no control loop: its decision comes from the configuration or an operator."
    : `${MODES[c.mode] ?? ""} Policy ${c.policy_spec}${c.policy_hash ? ` (${c.policy_hash.slice(0, 12)})` : ""}. Guard: ${c.guard}.`);
  for (const button of $("modes").children) {
    button.setAttribute("aria-pressed", String(c !== null && c.mode === button.dataset.mode));
  }
}

let order = null; // what is confirmed: {path, method, body(), done}
let asker = null;

function ask(title, text, yes, withRule, what) {
  order = what;
  asker = document.activeElement;
  say($("ask-title"), title);
  say($("ask-text"), text);
  say($("ask-yes"), yes);
  say($("ask-error"), "");
  $("ask-reason").value = "";
  show($("ask-rule"), withRule);
  $("ask-yes").disabled = false;
  $("ask").showModal();
  (withRule ? ($("rule-never").checked ? $("rule-never") : $("rule-tokens")) : $("ask-reason")).focus();
}

$("ask").addEventListener("close", () => {
  if ($("ask").open) return; // the event comes late, and somebody has asked again meanwhile
  order = null;
  if (asker?.isConnected) asker.focus();
});
$("ask-cancel").addEventListener("click", () => $("ask").close());
$("rule-tokens").addEventListener("input", () => {
  $("rule-threshold").checked = true;
});

$("ask-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (order === null) return;
  const mine = order;
  const reason = $("ask-reason").value.trim() || "operator";
  let body = null;
  try {
    body = mine.body(reason);
  } catch (error) {
    say($("ask-error"), error.message);
    $("rule-tokens").focus();
    return;
  }
  $("ask-yes").disabled = true;
  try {
    await call(mine.method, mine.path, body);
    $("ask").close();
    say($("status"), mine.done);
    await read();
  } catch (error) {
    if (error instanceof Refused) askToken(error.message);
    else say($("ask-error"), `Not done: ${error.message}.`);
  } finally {
    $("ask-yes").disabled = false;
  }
});

for (const button of $("modes").children) {
  button.addEventListener("click", () => {
    const mode = button.dataset.mode;
    if (state.control?.mode === mode) {
      say($("status"), `The mode is ${mode} already.`);
      return;
    }
    ask(`Switch to ${mode}?`, `${MODES[mode]} Now: ${state.control?.mode}.`, `Switch to ${mode}`, false, {
      method: "PUT",
      path: "mode",
      body: (reason) => ({ mode, reason }),
      done: `The mode is ${mode} now.`,
    });
  });
}

$("override").addEventListener("click", () => {
  ask("Override the decision?", "It holds for every new prompt until it is cleared, whatever the policy or the configuration says.", "Override", true, {
    method: "PUT",
    path: "override",
    body: (reason) => {
      if ($("rule-never").checked) return { never_remote: true, reason };
      const n = $("rule-tokens").valueAsNumber;
      if (!Number.isInteger(n) || n < 0) throw new Error("The threshold must be a whole number of tokens from 0 up.");
      return { threshold_tokens: n, reason };
    },
    done: "The override is in force.",
  });
});

$("clear").addEventListener("click", () => {
  ask("Clear the override?", "What the policy or the configuration says holds again.", "Clear override", false, {
    method: "DELETE",
    path: "override",
    body: () => null,
    done: "The override is cleared.",
  });
});

// ------------------------------------------------------------------ charts

function lengths(s) {
  const d = s.router.decision;
  const t = d.rule === "threshold" && !d.never_remote ? d.threshold_tokens : null;
  const sum = (list) => list.reduce((a, b) => a + b, 0);
  const label = `Histogram of prompt lengths: ${sum(s.lengths.local)} prefilled locally, ${sum(s.lengths.remote)} remotely. ${words.rule(d)}.`;
  lengthChart($("lengths"), s.lengths, t, label, "No prompts in the last 15 minutes");
}

function whenOf(s) {
  const times = s.steps.unix_s;
  let cursor = -1;
  if (picked !== null) {
    times.forEach((t, k) => {
      if (cursor < 0 || Math.abs(t - picked) < Math.abs(times[cursor] - picked)) cursor = k;
    });
    if (cursor === times.length - 1) cursor = -1;
  }
  return { times, now_s: s.unix_s, window_s: WINDOW_S, step_s: s.step_s, cursor };
}

const summary = (name, series, format) => {
  const ends = series.map((l) => `${l.name} ${format(l.values.at(-1))}`);
  return `${name} over 15 minutes. Last: ${ends.join(", ")}.`;
};

function specs(s) {
  const c = s.steps;
  const links = Object.keys(c.link_use);
  const one = links.length === 1;
  const queueKinds = Object.fromEntries(Object.keys(c.queues).map((name) => [name, kindOf(s, name)]));
  const split = [
    { name: "prefill", kind: "k1", values: c.prefill_workers },
    { name: "decode", kind: "k2 dash", values: c.decode_workers },
    ...(c.both_workers.some((n) => n) ? [{ name: "both", kind: "k4 dot", values: c.both_workers }] : []),
    ...(c.converting_workers.some((n) => n) ? [{ name: "changing", kind: "k4 dot", values: c.converting_workers }] : []),
  ];
  const margin = c.margin_s.some((m) => m !== null);
  const all = {
    ttft: {
      series: [
        { name: "median", kind: "k1", values: c.ttft_p50_s },
        { name: "P90", kind: "k2 dash", values: c.ttft_p90_s },
        { name: "P99", kind: "k3 dot", values: c.ttft_p99_s },
      ],
      format: words.seconds, log: true, name: "First token time",
      lines: s.slo.ttft_s === null ? [] : [{ value: s.slo.ttft_s, name: "objective" }],
      empty: "No first tokens in the last 15 minutes",
    },
    goodput: {
      series: [
        { name: "within objectives", kind: "k2", values: c.good_rps },
        { name: "arrivals", kind: "k1 dash", values: c.arrivals_rps },
        { name: "refused or broken", kind: "k3 dot", values: c.refused_rps },
      ],
      format: words.rate, name: "Goodput", empty: "Nothing yet",
    },
    link: {
      series: [
        ...links.map((n, k) => ({ name: one ? "used" : `${n} used`, kind: `k${(k % 4) + 1}`, values: c.link_use[n] })),
        ...links.map((n, k) => ({ name: one ? "observed capacity" : `${n} capacity`, kind: `k${one ? 4 : (k % 4) + 1} dash`, values: c.link_observed[n] })),
      ],
      format: words.share, most: 1, name: "Link use", empty: s.router.links.length ? "Nothing yet" : "No link",
    },
    queues: {
      series: Object.keys(c.queues).map((n) => ({ name: n, kind: queueKinds[n], values: c.queues[n] })),
      format: words.count, whole: true, name: "Requests waiting", empty: "Nothing yet",
    },
    split: { series: split, format: words.count, whole: true, stepped: true, name: "Workers by role", marks: s.conversions.map((v) => v.unix_s), empty: "Nothing yet" },
    rules: margin
      ? { series: [{ name: "margin", kind: "k1", values: c.margin_s }], format: words.seconds, stepped: true, name: "Margin", empty: "Nothing yet" }
      : {
          series: [{ name: "threshold", kind: "k1", values: c.threshold_tokens, missing: () => "never remote" }],
          format: words.tokens, log: true, stepped: true, name: "Threshold", empty: c.unix_s.length ? "Never remote" : "Nothing yet",
        },
  };
  for (const spec of Object.values(all)) spec.label = summary(spec.name, spec.series, spec.format);
  return all;
}

function kindOf(s, name) {
  if (name === `${s.pd} prefill`) return "k1";
  if (name === `${s.pd} decode`) return "k2 dash";
  return "k3 dot";
}

function charts(s) {
  const when = whenOf(s);
  for (const [id, spec] of Object.entries(specs(s))) timeChart($(id), spec, when);
  const last = Math.max(when.times.length - 1, 0);
  const range = $("moment");
  range.max = String(last);
  range.value = String(when.cursor < 0 ? last : when.cursor);
  const text = when.cursor < 0 ? "now" : words.ago(when.now_s - when.times[when.cursor]);
  range.setAttribute("aria-valuetext", text);
  range.disabled = last === 0;
  say($("moment-text"), text);
  say($("goodput-hint"), objectives(s.slo));
}

function objectives(slo) {
  const parts = [];
  if (slo.ttft_s !== null) parts.push(`first token within ${words.seconds(slo.ttft_s)}`);
  if (slo.tpot_s !== null) parts.push(`${words.seconds(slo.tpot_s)} per further token`);
  return parts.length ? `Objectives: ${parts.join(", ")}.` : "The scenario sets no objectives: every whole answer counts.";
}

function pick(index) {
  picked = index < 0 || index >= state.steps.unix_s.length - 1 ? null : state.steps.unix_s[index];
  charts(state);
}

$("moment").addEventListener("input", () => state && pick(Number($("moment").value)));
for (const id of ["ttft", "goodput", "link", "queues", "split", "rules"]) {
  const figure = $(id);
  figure.addEventListener("pointermove", (event) => {
    const svg = event.target.closest("svg[data-left]");
    if (state && svg && state.steps.unix_s.length > 1) pick(stepAt(svg, event.clientX, whenOf(state)));
  });
  figure.addEventListener("pointerleave", (event) => {
    if (state && event.pointerType === "mouse") pick(-1);
  });
}

let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (state === null || window.innerWidth === width) return;
  width = window.innerWidth;
  lengths(state);
  charts(state);
});

// ------------------------------------------------------------------ lists

const BY = { policy: "policy", rule: "rule", hold: "held", fallback: "fall-back", operator: "operator", off: "off", config: "configuration", admin: "operator" };

function lists(s) {
  const rows = s.control?.decisions.length
    ? s.control.decisions.map((d) => ({
        unix_s: d.unix_s,
        acted: words.logged(d.acted),
        proposed: words.logged(d.proposed),
        by: BY[d.by] ?? d.by,
        note: d.guard === "ok" ? d.mode : `${d.mode}, guard: ${d.guard}`,
        reason: d.reason,
      }))
    : s.changes.map((d) => ({ unix_s: d.unix_s, acted: words.rule(d), proposed: null, by: BY[d.origin] ?? d.origin, note: "", reason: d.reason }));
  keep($("decisions"), rows, () => rows.map((r) => {
    const differs = r.proposed !== null && r.proposed !== "–" && r.proposed !== r.acted;
    // the roles stay when a small screen shows rows as blocks
    const cell = (...parts) => make("td", { role: "cell" }, ...parts);
    return make("tr", { role: "row" },
      cell(words.moment(r.unix_s)),
      cell(r.acted, differs ? make("small", {}, `proposed: ${r.proposed}`) : null),
      cell(r.by, r.note ? make("small", {}, r.note) : null),
      cell(r.reason));
  }));
  const conversions = s.conversions.slice(0, 5);
  keep($("conversions"), [conversions, s.changing], () => {
    const items = s.changing.map((name) => make("li", {}, `${name} is changing its role`));
    items.push(...conversions.map((c) => make("li", {}, words.moment(c.unix_s), ` ${c.worker}: ${c.from_role} to ${c.to_role}`)));
    return items.length ? items : [make("li", {}, "No conversions.")];
  });
}

if (token) read();
else askToken("");
