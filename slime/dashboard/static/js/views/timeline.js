// What happened when, lane by lane: the loop, engines, rewards, trainer ranks. Zoom with the wheel, drag or keys.
import * as api from "../api.js";
import { h, fill, empty } from "../dom.js";
import { duration, num } from "../format.js";
import { note, link } from "../route.js";
import { color, seriesColor } from "../colors.js";
import { csv, png } from "../export.js";
import { tip } from "../tip.js";

export const title = "Timeline";
const ROW = 16, GAP = 8, LEFT = 92, HEAD = 22, MAX_ROWS = 120;
const LANES = {
  loop: "What the driver does: generate, train, push weights, save, evaluate, pause.",
  engines: "One bar for each answer while an engine writes it. Bars that lie below each other were written together.",
  reward: "One bar for each answer while its reward is computed.",
};
const NAMES = ["generating", "training", "pushing weights", "evaluating", "saving", "paused"];

function colorOf(span) {
  const at = NAMES.indexOf(span.name);
  if (span.lane === "loop" && at >= 0) return seriesColor(at);
  if (span.lane === "engines") return seriesColor(0);
  if (span.lane === "reward") return seriesColor(4);
  return seriesColor(1 + (([...span.name].reduce((sum, c) => sum + c.charCodeAt(0), 0)) % 6));
}

function bright(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 120;
}

class Lanes {
  constructor(found, onPick) {
    this.found = found; this.onPick = onPick;
    this.canvas = h("canvas", {});
    this.element = h("div", { class: "lanes", tabIndex: 0, role: "img", "aria-label": "Timeline. Plus and minus zoom, arrow keys move, 0 shows all; the table below holds the same.", onkeydown: (e) => this.key(e) }, this.canvas);
    this.start = found.start; this.end = found.end;
    let top = HEAD;
    this.lanes = found.lanes.map((lane) => { const rows = Math.min(lane.rows, MAX_ROWS), high = rows <= 12 ? ROW : Math.max(2, Math.min(8, Math.floor(200 / rows))), place = { lane, top, rows, high }; top += Math.max(ROW, rows * high) + GAP; return place; });
    this.height = top + 4;
    this.canvas.addEventListener("wheel", (e) => { if (e.ctrlKey || e.shiftKey) return; e.preventDefault(); this.zoom(e.deltaY > 0 ? 1.25 : 0.8, this.timeAt(e.offsetX)); }, { passive: false });
    this.canvas.addEventListener("pointerdown", (e) => { this.drag = { x: e.offsetX, start: this.start, end: this.end }; this.canvas.setPointerCapture(e.pointerId); });
    this.canvas.addEventListener("pointerup", () => { this.drag = null; });
    this.canvas.addEventListener("pointermove", (e) => this.move(e));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  get width() { return this.element.clientWidth || 800; }
  timeAt(x) { return this.start + ((x - LEFT) / (this.width - LEFT)) * (this.end - this.start); }
  xAt(time) { return LEFT + ((time - this.start) / (this.end - this.start)) * (this.width - LEFT); }

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
      const shift = ((this.drag.x - event.offsetX) / (this.width - LEFT)) * (this.drag.end - this.drag.start), width = this.drag.end - this.drag.start;
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
    const ratio = window.devicePixelRatio || 1, width = this.width, pen = this.canvas.getContext("2d");
    this.canvas.width = width * ratio; this.canvas.height = this.height * ratio;
    this.canvas.style.height = `${this.height}px`;
    pen.scale(ratio, ratio);
    const text = color("text"), dim = color("dim"), grid = color("grid");
    pen.font = "11px sans-serif"; pen.textBaseline = "middle";
    const ticks = Math.max(2, Math.floor((width - LEFT) / 110));
    for (let i = 0; i <= ticks; i += 1) {
      const time = this.start + ((this.end - this.start) * i) / ticks, x = this.xAt(time);
      pen.fillStyle = grid; pen.fillRect(x, HEAD - 4, 1, this.height);
      pen.fillStyle = dim; pen.textAlign = i === ticks ? "right" : "left"; pen.fillText(duration(time - this.found.start), i === ticks ? x - 2 : x + 3, 9);
    }
    pen.textAlign = "left";
    for (const { lane, top, rows, high } of this.lanes) {
      pen.fillStyle = text; pen.fillText(lane.name, 6, top + 8, LEFT - 10);
      for (const span of lane.spans) {
        if (span.row >= rows || span.end < this.start || span.start > this.end) continue;
        const x = Math.max(LEFT, this.xAt(span.start)), end = Math.min(width, this.xAt(span.end));
        const fillColor = colorOf(span), wide = Math.max(1.5, end - x - 0.5);
        pen.fillStyle = fillColor; pen.fillRect(x, top + span.row * high + 1, wide, high > 4 ? high - 2 : high - 0.5);
        if (wide > 46 && high === ROW) { pen.fillStyle = bright(fillColor) ? "#111" : "#fff"; pen.fillText(span.name, x + 4, top + span.row * high + high / 2, wide - 8); }
      }
    }
  }
}

export async function render(main, context) {
  const key = context.keys[0];
  const params = context.params.step !== undefined ? { step: context.params.step, from: context.params.from } : {};
  const found = await api.get(api.run(key, "/timeline"), params).catch((error) => ({ last: null, error: error.message }));
  if (found.last === null || found.last === undefined) {
    fill(main, empty(found.error || "No span is recorded.", " The timeline is part of the record of a run (record.db); runs of older versions, and those with --record-max-mib 0, have none."));
    return {};
  }
  const to = found.to, from = found.from;
  const go = (first, last) => { const a = Math.max(found.first, Math.min(first, found.last)), b = Math.max(a, Math.min(last, found.last)); location.hash = link("timeline", { runs: context.keys.join(","), step: b, from: a === b ? undefined : a }); };
  const info = h("p", { role: "status", class: "dim" }, "Point at a bar to see what it is.");
  const pick = (span) => fill(info, h("b", {}, span.name), ` in ${span.lane}, step ${span.step}: ${duration(span.end - span.start)}, from ${duration(span.start - found.start)} on`, Object.entries(span.about).map(([name, value]) => ` · ${name} ${typeof value === "number" ? num(value) : value}`));
  const number = h("input", { type: "number", min: found.first, max: found.last, value: to, "aria-label": "Step", onchange: () => go(Number(number.value), Number(number.value)) });
  const many = h("select", { "aria-label": "Number of steps", onchange: () => go(to - Number(many.value) + 1, to) }, [1, 2, 5, 10, 25].map((n) => h("option", { value: n }, n === 1 ? "1 step" : `${n} steps`)));
  many.value = String([1, 2, 5, 10, 25].find((n) => n >= to - from + 1) ?? 25);
  const lanes = found.lanes.length ? new Lanes(found, pick) : null;
  const all = found.lanes.flatMap((lane) => lane.spans);
  const sums = new Map();
  for (const span of all) { const name = span.lane === "engines" || span.lane === "reward" ? `${span.lane}: all answers` : `${span.lane}: ${span.name}`; const entry = sums.get(name) || { name, count: 0, total: 0, longest: 0 }; entry.count += 1; entry.total += span.end - span.start; entry.longest = Math.max(entry.longest, span.end - span.start); sums.set(name, entry); }
  const button = (text, label, act, disabled) => h("button", { type: "button", class: "small", title: label, "aria-label": label, onclick: act, disabled }, text);
  fill(main,
    h("div", { class: "bar" }, button("◀", "Step before", () => go(from - 1, from - 1), from <= found.first), h("label", {}, "Step", number), button("▶", "Next step", () => go(to + 1, to + 1), to >= found.last), many,
      button("+", "Zoom in", () => lanes?.zoom(0.6)), button("−", "Zoom out", () => lanes?.zoom(1.7)), button("all", "Show all", () => lanes?.key({ key: "0", preventDefault() {}, stopPropagation() {} })),
      button("CSV", "Download as CSV", () => csv(`${key}-spans`, ["step", "lane", "name", "start", "end", "seconds"], all.map((s) => [s.step, s.lane, s.name, s.start, s.end, s.end - s.start]))), button("PNG", "Download as picture", () => lanes && png(`${key}-timeline`, lanes.canvas, `${key}, steps ${from} to ${to}`)),
      h("span", { class: "dim" }, found.lanes.map((lane) => [lane.name, tip(LANES[lane.name] || "A rank of the trainer: which part of the step it computes."), " "]))),
    lanes ? lanes.element : empty(`Step ${to} has no span in the record.`), info,
    found.left_out > 0 && h("p", { class: "dim" }, `${num(found.left_out)} shorter bars are left out; look at fewer steps to see them.`),
    h("section", { class: "panel scroll" }, h("h2", {}, "Where the time went"), h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "What"), ["Times", "In all", "Longest"].map((name) => h("th", { class: "num" }, name)))),
      h("tbody", {}, [...sums.values()].sort((a, b) => b.total - a.total).map((row) => h("tr", {}, h("td", {}, row.name), h("td", { class: "num" }, num(row.count)), h("td", { class: "num" }, duration(row.total)), h("td", { class: "num" }, duration(row.longest))))))));
  lanes?.draw();
  note({ step: context.params.step });
  return { themed: () => lanes?.draw() };
}
