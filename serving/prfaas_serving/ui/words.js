// Numbers and decisions in words, and the making of elements. Text only ever enters the page as text.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes, a class and children (strings become text). */
export function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(key, String(value));
  }
  element.append(...children.filter((c) => c !== null && c !== undefined));
  return element;
}

/** Set a text only if it changes, so that nothing is announced twice. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const known = (x) => typeof x === "number" && Number.isFinite(x);

/** 19400 -> "19.4K". */
export function tokens(x) {
  if (!known(x)) return "–";
  if (x >= 1e6) return `${trim(x / 1e6)}M`;
  return x >= 1000 ? `${trim(x / 1000)}K` : trim(x);
}

function trim(x) {
  return x >= 100 ? x.toFixed(0) : String(Number(x.toPrecision(3)));
}

/** Seconds: "340 ms", "2.1 s", "3.5 min". */
export function seconds(x) {
  if (!known(x)) return "–";
  const size = Math.abs(x);
  if (size < 0.9995) return `${trim(x * 1000)} ms`;
  if (size < 120) return `${trim(x)} s`;
  return size < 7200 ? `${trim(x / 60)} min` : `${trim(x / 3600)} h`;
}

export const rate = (x) => (known(x) ? `${trim(x)}/s` : "–");
export const count = (x) => (known(x) ? trim(x) : "–");
export const share = (x) => (known(x) ? `${(x * 100).toFixed(x > 0 && x < 0.0995 ? 1 : 0)}%` : "–");

/** Bits per second: "12.5 Gbit/s". */
export const bps = (x) => (known(x) ? `${prefixed(x)}bit/s` : "–");
/** Bits as bytes: "1.2 GB". */
export const bytes = (bits) => (known(bits) ? `${prefixed(bits / 8)}B` : "–");

function prefixed(x) {
  for (const [size, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (x >= size) return `${trim(x / size)} ${prefix}`;
  }
  return `${trim(x)} `;
}

/** Time of day. */
export function clock(unix_s) {
  return new Date(unix_s * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

/** A moment as an element. */
export function moment(unix_s) {
  return make("time", { datetime: new Date(unix_s * 1000).toISOString() }, clock(unix_s));
}

/** How long ago, for a moment on the charts. */
export function ago(s) {
  if (s < 8) return "now";
  const minutes = Math.floor(s / 60);
  const rest = Math.round(s % 60);
  return minutes ? `${minutes} min ${rest} s ago` : `${rest} s ago`;
}

/** A decision of the router (`/decision`) in words. */
export function rule(d) {
  if (d.never_remote) return "Never remote";
  if (d.rule === "margin") return marginText(d.margin_s === null ? "-inf" : d.margin_s);
  return thresholdText(d.threshold_tokens);
}

function thresholdText(t) {
  if (t === null || t === undefined) return "No rule";
  if (t === "inf") return "Never remote";
  return t === 0 ? "Always remote" : `Remote above ${Number(t).toLocaleString("en")} tokens`;
}

function marginText(m) {
  if (m === "inf") return "Never remote";
  if (m === "-inf") return "Always remote";
  return `Remote when sooner by more than ${seconds(m)}`;
}

/** A decision of the control loop's log in words, with its node moves. Several PD clusters have lists. */
export function logged(d) {
  if (d === null || d === undefined) return "–";
  const at = (value, k) => (Array.isArray(value) ? value[k] : value);
  return (d.moves ?? [1])
    .map((move, k) => {
      const margin = at(d.margin_s, k);
      const text = margin !== null && margin !== undefined ? marginText(margin) : thresholdText(at(d.threshold_tokens, k));
      return MOVES[move] ? `${text}; ${MOVES[move]}` : text;
    })
    .join(" | ");
}

/** Words of `prfaas_env.decision.Move` by its value. */
const MOVES = { 0: "a worker from prefill to decode", 2: "a worker from decode to prefill" };
