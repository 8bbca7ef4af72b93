// Charts over time and the histogram of lengths, as SVG that is drawn anew for each state.

import { draw, make, tokens } from "./words.js";

const HEIGHT = 190;
const EDGE = { top: 12, right: 12, bottom: 24, left: 52 };

/** Something drawable: the figure's own width decides, so that text keeps its size on a phone. */
function canvas(figure, label, height = HEIGHT) {
  const width = Math.max(figure.clientWidth, 260);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  return { svg, width, height, right: width - EDGE.right, bottom: height - EDGE.bottom };
}

function show(figure, svg, legend) {
  const parts = legend ? [svg, legend] : [svg];
  figure.replaceChildren(...parts);
}

/** Values of an axis from 0: few, round, the last one at or above the largest value. */
function linearTicks(most, whole) {
  const top = most > 0 ? (whole ? Math.max(most, 4) : most) : whole ? 4 : 1;
  const raw = top / 4;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((k) => k * size).find((k) => k >= raw * 0.999);
  const ticks = [];
  for (let k = 0; ; k += 1) {
    ticks.push(k * step);
    if (k * step >= top * 0.999) return ticks;
  }
}

/** Powers of ten around all values; at least two. */
function logTicks(least, most) {
  let low = Math.floor(Math.log10(least) + 1e-9);
  const high = Math.max(Math.ceil(Math.log10(most) - 1e-9), low + 1);
  low = Math.max(low, high - 6);
  const ticks = [];
  for (let k = low; k <= high; k += 1) ticks.push(10 ** k);
  return ticks;
}

function axis(values, log, most, whole) {
  const kept = values.filter((v) => v !== null && v !== undefined && (!log || v > 0));
  const ticks = log
    ? logTicks(Math.min(...kept, Infinity) === Infinity ? 0.1 : Math.min(...kept), kept.length ? Math.max(...kept) : 1)
    : linearTicks(most ?? Math.max(...kept, 0), whole);
  const place = log ? Math.log10 : (v) => v;
  const low = place(ticks[0]);
  const span = place(ticks[ticks.length - 1]) - low;
  return { ticks, at: (v) => Math.min(Math.max((place(v) - low) / span, 0), 1) };
}

/** Points of a line, broken where a value or a step is missing. */
function path(series, times, x, y, log, gap_s, stepped) {
  let d = "";
  let last = null;
  series.values.forEach((v, k) => {
    if (v === null || v === undefined || (log && v <= 0)) {
      last = null;
      return;
    }
    const joined = last !== null && times[k] - times[last] <= gap_s;
    const px = x(times[k]).toFixed(1);
    const py = y(v).toFixed(1);
    if (!joined) d += `M${px} ${py}h0.01`;
    else d += stepped ? `H${px}V${py}` : `L${px} ${py}`;
    last = k;
  });
  return d;
}

/**
 * A chart over the last 15 minutes.
 *
 * spec: series [{name, kind, values}], format, log, most (fixed top), whole (counts), lines [{value, name}], marks [unix_s], stepped,
 * empty (what to say without a value), label (what it shows, for those who do not see it).
 * when: times (unix seconds), now_s, window_s, step_s, cursor (index or -1 for the end).
 */
export function timeChart(figure, spec, when) {
  const every = spec.series.flatMap((s) => s.values).filter((v) => v !== null && v !== undefined);
  const { svg, right, bottom, width, height } = canvas(figure, spec.label);
  if (!every.length) {
    svg.append(draw("text", { x: width / 2, y: height / 2, class: "none" }, spec.empty));
    show(figure, svg);
    return;
  }
  const lines = spec.lines ?? [];
  const scale = axis([...every, ...lines.map((l) => l.value)], spec.log, spec.most, spec.whole);
  const x = (t) => right - ((when.now_s - t) / when.window_s) * (right - EDGE.left);
  const y = (v) => bottom - scale.at(v) * (bottom - EDGE.top);
  for (const tick of scale.ticks) {
    svg.append(
      draw("line", { x1: EDGE.left, x2: right, y1: y(tick), y2: y(tick), class: "grid" }),
      draw("text", { x: EDGE.left - 6, y: y(tick) + 4, class: "tick end" }, spec.format(tick)),
    );
  }
  for (const minutes of [15, 10, 5, 0]) {
    const px = x(when.now_s - minutes * 60);
    svg.append(draw("text", { x: px, y: height - 7, class: minutes ? "tick" : "tick end" }, minutes ? `−${minutes} min` : "now"));
  }
  for (const mark of spec.marks ?? []) {
    if (when.now_s - mark < when.window_s) svg.append(draw("line", { x1: x(mark), x2: x(mark), y1: EDGE.top, y2: bottom, class: "mark" }));
  }
  for (const line of lines) {
    svg.append(
      draw("line", { x1: EDGE.left, x2: right, y1: y(line.value), y2: y(line.value), class: "limit" }),
      draw("text", { x: right, y: y(line.value) - 4, class: "tick end" }, line.name),
    );
  }
  for (const s of spec.series) {
    const d = path(s, when.times, x, y, spec.log, when.step_s * 2.5, spec.stepped);
    svg.append(draw("path", { d, class: `line ${s.kind}` }));
  }
  const at = when.cursor < 0 ? when.times.length - 1 : when.cursor;
  if (when.cursor >= 0) {
    svg.append(draw("line", { x1: x(when.times[at]), x2: x(when.times[at]), y1: EDGE.top, y2: bottom, class: "cursor" }));
  }
  const rows = spec.series.map((s) => {
    const v = s.values[at];
    const text = v === null || v === undefined ? (s.missing?.(at) ?? "–") : spec.format(v);
    return make("li", {}, swatch(s.kind), make("span", {}, s.name), make("b", {}, text));
  });
  svg.dataset.left = EDGE.left;
  svg.dataset.right = right;
  show(figure, svg, make("ul", { class: "legend" }, ...rows));
}

function swatch(kind) {
  const svg = draw("svg", { width: 26, height: 10, "aria-hidden": "true", class: "swatch" });
  svg.append(draw("path", { d: "M1 5H25", class: `line ${kind}` }));
  return svg;
}

/** Which step lies under a pointer: an index into the times, or -1 right of the last one. */
export function stepAt(svg, clientX, when) {
  const box = svg.getBoundingClientRect();
  const left = Number(svg.dataset.left);
  const right = Number(svg.dataset.right);
  const t = when.now_s - ((right - (clientX - box.left) * (svg.viewBox.baseVal.width / box.width)) / (right - left)) * when.window_s;
  let best = -1;
  when.times.forEach((time, k) => {
    if (best < 0 || Math.abs(time - t) < Math.abs(when.times[best] - t)) best = k;
  });
  return best === when.times.length - 1 ? -1 : best;
}

/** The histogram of lengths by route, with the threshold in force (null = none to draw). */
export function lengthChart(figure, lengths, threshold, label, empty) {
  const { svg, width, right, bottom, height } = canvas(figure, label, HEIGHT + 20);
  const both = lengths.local.map((n, k) => n + lengths.remote[k]);
  const total = both.reduce((a, b) => a + b, 0);
  const edges = lengths.edges_tokens;
  const [low, high] = [Math.log(edges[0]), Math.log(edges[edges.length - 1])];
  const x = (t) => EDGE.left + ((Math.log(Math.min(Math.max(t, edges[0]), edges[edges.length - 1])) - low) / (high - low)) * (right - EDGE.left);
  const top = EDGE.top + 18;
  const scale = axis([Math.max(...both, 1)], false, undefined, true);
  const y = (v) => bottom - scale.at(v) * (bottom - top);
  for (const tick of scale.ticks) {
    svg.append(
      draw("line", { x1: EDGE.left, x2: right, y1: y(tick), y2: y(tick), class: "grid" }),
      draw("text", { x: EDGE.left - 6, y: y(tick) + 4, class: "tick end" }, tokens(tick)),
    );
  }
  both.forEach((n, k) => {
    const [x1, x2] = [x(edges[k]) + 0.8, x(edges[k + 1]) - 0.8];
    const bar = (from, to, kind) => draw("rect", { x: x1, width: x2 - x1, y: y(to), height: y(from) - y(to), class: `bar ${kind}` });
    if (lengths.local[k]) svg.append(bar(0, lengths.local[k], "local"));
    if (lengths.remote[k]) svg.append(bar(lengths.local[k], n, "remote"));
  });
  for (const [t, name] of [[128, "128"], [1024, "1K"], [8192, "8K"], [32768, "32K"], [131072, "128K"]]) {
    svg.append(draw("text", { x: x(t), y: height - 7, class: name === "128K" ? "tick end" : "tick" }, name));
  }
  if (threshold !== null) {
    const px = x(threshold);
    const side = px > (EDGE.left + right) / 2 ? "end" : "start";
    svg.append(
      draw("line", { x1: px, x2: px, y1: EDGE.top, y2: bottom, class: "threshold" }),
      draw("text", { x: px + (side === "end" ? -6 : 6), y: EDGE.top + 9, class: `tick strong ${side}` }, `threshold ${tokens(threshold)}`),
    );
  }
  if (!total) svg.append(draw("text", { x: width / 2, y: height / 2, class: "none" }, empty));
  const rows = [["local", "prefilled locally"], ["remote", "prefilled remotely"]].map(([kind, name]) => {
    const n = lengths[kind].reduce((a, b) => a + b, 0);
    const square = draw("svg", { width: 14, height: 14, "aria-hidden": "true", class: "swatch" });
    square.append(draw("rect", { width: 14, height: 14, class: `bar ${kind}` }));
    return make("li", {}, square, make("span", {}, name), make("b", {}, n.toLocaleString("en")));
  });
  show(figure, svg, make("ul", { class: "legend" }, ...rows));
}
