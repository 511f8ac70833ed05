// What happened when, lane by lane: the loop, engines, rewards, trainer ranks. Zoom with the wheel, drag or keys.
import * as api from "../api.js";
import { h, fill, empty } from "../dom.js";
import { duration, num } from "../format.js";
import { note, link } from "../route.js";
import { color, seriesColor } from "../colors.js";
import { csv, png } from "../export.js";
import { tip } from "../tip.js";

export const title = "Timeline";
const ROW = 16, GAP = 8, HEAD = 22, LOWEST = 0.5; // pixels of a row where a lane has hundreds
// Kinds of lanes, by how their names begin: what they show, and the colour of a bar (none: by its name).
const KINDS = [
  ["loop", "What the driver does: generate, train, sync weights, save, evaluate, pause."],
  ["episodes", "One bar per sample while your generate function works on it: turns, tools, waits.", 5],
  ["engines", "One bar per response while an engine generates it; the router does not report which engine.", 0],
  ["engine", "One bar per response while this engine generates it. Stacked bars were generated at the same time; a gap means that the engine was idle.", 0],
  ["reward", "One bar per response while its reward is computed.", 4],
  ["trainer", "A trainer rank: which part of the step it computes. In a gap it waits for samples or weights."],
  ["push", "The parts of a weight sync: engines pause, ranks send or write, engines load the weights and resume."],
  ["waits", "Who waited for what; point at a bar for details. A wait inside another lane's bar is part of it.", 7],
];
const NAMES = ["generating", "training", "pushing weights", "evaluating", "saving", "paused"];

const kindOf = (lane) => KINDS.find(([name]) => lane.startsWith(name) || lane.includes(`-${name}`)) || [];
const perAnswer = (lane) => ["engine", "engines", "reward", "episodes"].includes(kindOf(lane)[0]);

function colorOf(span) {
  const at = NAMES.indexOf(span.name), own = kindOf(span.lane)[2];
  if (span.lane === "loop" && at >= 0) return seriesColor(at);
  if (own !== undefined) return seriesColor(own);
  return seriesColor(1 + (([...span.name].reduce((sum, c) => sum + c.charCodeAt(0), 0)) % 6));
}

function bright(hex) {
  const full = hex.length === 4 ? `#${[...hex.slice(1)].map((c) => c + c).join("")}` : hex;
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(full.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 120;
}

function fitting(pen, text, width) {
  const each = pen.measureText(text).width / text.length, room = Math.floor(width / each);
  return room >= text.length ? text : room > 3 ? `${text.slice(0, room - 1)}…` : "";
}

class Lanes {
  constructor(found, onPick) {
    this.found = found; this.onPick = onPick;
    this.canvas = h("canvas", {});
    this.element = h("div", { class: "lanes", tabIndex: 0, role: "img", "aria-label": "Timeline. Plus and minus zoom, arrow keys move, 0 shows all; the table below holds the same.", onkeydown: (e) => this.key(e) }, this.canvas);
    this.start = found.start; this.end = found.end;
    let top = HEAD;
    this.lanes = found.lanes.map((lane) => { const rows = lane.rows, high = rows <= 12 ? ROW : Math.max(LOWEST, Math.min(8, 200 / rows)), place = { lane, top, rows, high }; top += Math.max(ROW, rows * high) + GAP; return place; });
    this.height = top + 4;
    this.canvas.addEventListener("wheel", (e) => { if (e.ctrlKey || e.shiftKey) return; e.preventDefault(); this.zoom(e.deltaY > 0 ? 1.25 : 0.8, this.timeAt(e.offsetX)); }, { passive: false });
    this.canvas.addEventListener("pointerdown", (e) => { this.drag = { x: e.offsetX, start: this.start, end: this.end }; this.canvas.setPointerCapture(e.pointerId); });
    this.canvas.addEventListener("pointerup", () => { this.drag = null; });
    this.canvas.addEventListener("pointermove", (e) => this.move(e));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  get width() { return this.element.clientWidth || 800; }
  get left() { return this.width < 560 ? 84 : 150; }
  get isWhole() { return this.start === this.found.start && this.end === this.found.end; }
  timeAt(x) { return this.start + ((x - this.left) / (this.width - this.left)) * (this.end - this.start); }
  xAt(time) { return this.left + ((time - this.start) / (this.end - this.start)) * (this.width - this.left); }

  zoom(factor, at = (this.start + this.end) / 2) {
    this.start = Math.max(this.found.start, at - (at - this.start) * factor);
    this.end = Math.min(this.found.end, Math.max(this.start + 1e-4, at + (this.end - at) * factor));
    this.draw();
  }

  pan(share) {
    const width = this.end - this.start, start = Math.max(this.found.start, Math.min(this.found.end - width, this.start + share * width));
    this.start = start; this.end = start + width;
    this.draw();
  }

  key(event) {
    const acts = { "+": () => this.zoom(0.6), "-": () => this.zoom(1.7), ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), 0: () => { this.start = this.found.start; this.end = this.found.end; this.draw(); } };
    if (acts[event.key]) { acts[event.key](); event.preventDefault(); event.stopPropagation(); }
  }

  move(event) {
    if (this.drag) {
      const shift = ((this.drag.x - event.offsetX) / (this.width - this.left)) * (this.drag.end - this.drag.start), width = this.drag.end - this.drag.start;
      this.start = Math.max(this.found.start, Math.min(this.found.end - width, this.drag.start + shift));
      this.end = this.start + width;
      this.draw();
      return;
    }
    const time = this.timeAt(event.offsetX);
    for (const { lane, top, rows, high } of this.lanes) {
      const row = Math.floor((event.offsetY - top) / high);
      if (row < 0 || row >= rows) continue;
      const near = ((this.end - this.start) / this.width) * 2;
      const span = lane.spans.find((s) => s.row === row && s.start - near <= time && s.end + near >= time);
      if (span) { this.onPick(span); return; }
    }
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, width = this.width, left = this.left, whole = this.found.end - this.found.start, pen = this.canvas.getContext("2d");
    this.canvas.width = width * ratio; this.canvas.height = this.height * ratio;
    this.canvas.style.height = `${this.height}px`;
    pen.scale(ratio, ratio);
    const text = color("text"), dim = color("dim"), grid = color("grid");
    pen.font = "11px sans-serif"; pen.textBaseline = "middle";
    const ticks = Math.max(2, Math.floor((width - left) / 110));
    for (let i = 0; i <= ticks; i += 1) {
      const time = this.start + ((this.end - this.start) * i) / ticks, x = this.xAt(time);
      pen.fillStyle = grid; pen.fillRect(x, HEAD - 4, 1, this.height);
      pen.fillStyle = dim; pen.textAlign = i === ticks ? "right" : "left"; pen.fillText(duration(time - this.found.start), i === ticks ? x - 2 : x + 3, 9);
    }
    pen.textAlign = "left";
    for (const { lane, top, rows, high } of this.lanes) {
      const share = whole > 0 && left > 100 && kindOf(lane.name)[0] !== "waits" ? `${Math.round((100 * lane.busy) / whole)}%` : "";
      pen.fillStyle = text; pen.fillText(lane.name, 6, top + 8, left - (share ? 46 : 10));
      pen.fillStyle = dim; pen.textAlign = "right"; pen.fillText(share, left - 8, top + 8); pen.textAlign = "left";
      for (const span of lane.spans) {
        if (span.row >= rows || span.end < this.start || span.start > this.end) continue;
        const x = Math.max(left, this.xAt(span.start)), end = Math.min(width, this.xAt(span.end));
        const fillColor = colorOf(span), wide = Math.max(1.5, end - x - 0.5);
        pen.fillStyle = fillColor; pen.fillRect(x, top + span.row * high + (high > 4 ? 1 : 0), wide, high > 4 ? high - 2 : Math.max(0.5, high - 0.5));
        if (wide > 30 && high === ROW) { pen.fillStyle = bright(fillColor) ? "#111" : "#fff"; pen.fillText(fitting(pen, span.name, wide - 8), x + 4, top + span.row * high + high / 2); }
      }
    }
  }
}

export async function render(main, context) {
  const key = context.keys[0], params = { step: context.params.step, from: context.params.from };
  const read = () => api.get(api.run(key, "/timeline"), params).catch((error) => ({ last: null, error: error.message }));
  let found = await read(), lanes = show(main, context, key, found);
  note({ step: context.params.step });
  async function refresh() {
    if (params.step !== undefined || (lanes && !lanes.isWhole)) return; // the user has chosen a step or zoomed in
    const newer = await read();
    if (newer.last !== found.last) { found = newer; lanes = show(main, context, key, found); }
  }
  return { refresh, themed: () => lanes?.draw() };
}

function show(main, context, key, found) {
  if (found.last === null || found.last === undefined) {
    fill(main, empty(found.error || "No span is recorded.", " The timeline is part of the record of a run (record.db); runs of older versions, and those with --record-max-mib 0, have none."));
    return null;
  }
  const to = found.to, from = found.from;
  const go = (first, last) => { const a = Math.max(found.first, Math.min(first, found.last)), b = Math.max(a, Math.min(last, found.last)); location.hash = link("timeline", { runs: context.keys.join(","), step: b, from: a === b ? undefined : a }); };
  const info = h("p", { role: "status", class: "dim" }, "Point at a bar for its details.");
  const pick = (span) => fill(info, h("b", {}, span.name), ` in ${span.lane}, step ${span.step}: ${duration(span.end - span.start)}, from ${duration(span.start - found.start)} on`, Object.entries(span.about).map(([name, value]) => ` · ${name} ${typeof value === "number" ? num(value) : value}`));
  const number = h("input", { type: "number", min: found.first, max: found.last, value: to, "aria-label": "Step", onchange: () => go(Number(number.value), Number(number.value)) });
  const many = h("select", { "aria-label": "Number of steps", onchange: () => go(to - Number(many.value) + 1, to) }, [1, 2, 5, 10, 25].map((n) => h("option", { value: n }, n === 1 ? "1 step" : `${n} steps`)));
  many.value = String([1, 2, 5, 10, 25].find((n) => n >= to - from + 1) ?? 25);
  const lanes = found.lanes.length ? new Lanes(found, pick) : null;
  const all = found.lanes.flatMap((lane) => lane.spans);
  const kinds = [...new Map(found.lanes.map((lane) => [kindOf(lane.name)[0] ?? lane.name, lane.name])).keys()];
  const button = (text, label, act, disabled) => h("button", { type: "button", class: "small", title: label, "aria-label": label, onclick: act, disabled }, text);
  fill(main,
    h("div", { class: "bar" }, button("◀", "Previous step", () => go(from - 1, from - 1), from <= found.first), h("label", {}, "Step", number), button("▶", "Next step", () => go(to + 1, to + 1), to >= found.last), many,
      button("+", "Zoom in", () => lanes?.zoom(0.6)), button("−", "Zoom out", () => lanes?.zoom(1.7)), button("all", "Show all", () => lanes?.key({ key: "0", preventDefault() {}, stopPropagation() {} })),
      button("CSV", "Download as CSV", () => csv(`${key}-spans`, ["step", "lane", "name", "start", "end", "seconds"], all.map((s) => [s.step, s.lane, s.name, s.start, s.end, s.end - s.start]))), button("PNG", "Download as PNG", () => lanes && png(`${key}-timeline`, lanes.canvas, `${key}, steps ${from} to ${to}`)),
      h("span", { class: "chips dim" }, kinds.map((name) => h("span", { class: "chips" }, name, tip(kindOf(name)[1]))))),
    lanes ? lanes.element : empty(`Step ${to} has no span in the record.`), info,
    found.left_out > 0 && h("p", { class: "dim" }, `${num(found.left_out)} shorter bars are hidden; select fewer steps to see them.`),
    table(found, all));
  lanes?.draw();
  return lanes;
}

// The same in words: who was busy for how long, and what it did.
function table(found, all) {
  const whole = found.end - found.start, sums = new Map();
  for (const span of all) {
    const name = perAnswer(span.lane) ? `${span.lane}: all responses` : `${span.lane}: ${span.name.replace(/\d+/g, "…")}`;
    const entry = sums.get(name) || { name, count: 0, total: 0, longest: 0 };
    entry.count += 1; entry.total += span.end - span.start; entry.longest = Math.max(entry.longest, span.end - span.start);
    sums.set(name, entry);
  }
  const cells = (row) => [h("td", {}, row.name), [num(row.count), duration(row.total), duration(row.longest)].map((text) => h("td", { class: "num" }, text))];
  const busy = found.lanes.filter((lane) => /^(engine|trainer)/.test(lane.name));
  return h("div", { class: "grid" },
    busy.length > 0 && h("section", { class: "panel scroll" }, h("h2", {}, "Busy and idle ", tip("The share of the shown time in which an engine generated at least one response, or a rank computed.")), h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Lane"), ["Busy", "Idle", "Share"].map((name) => h("th", { class: "num" }, name)))),
      h("tbody", {}, busy.map((lane) => h("tr", {}, h("td", {}, lane.name), [duration(lane.busy), duration(Math.max(0, whole - lane.busy)), whole > 0 ? `${Math.round((100 * lane.busy) / whole)}%` : "–"].map((text) => h("td", { class: "num" }, text))))))),
    h("section", { class: "panel scroll" }, h("h2", {}, "Where the time went"), h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Span"), ["Count", "Total", "Longest"].map((name) => h("th", { class: "num" }, name)))),
      h("tbody", {}, [...sums.values()].sort((a, b) => b.total - a.total).slice(0, 60).map((row) => h("tr", {}, cells(row)))))));
}
