// One chart of one metric over one or several runs: thinned by the server, refined when one zooms in.
import * as api from "./api.js";
import { h, fill, empty, debounce } from "./dom.js";
import { seriesColor, dash, faded, color } from "./colors.js";
import { num } from "./format.js";
import { csv, png } from "./export.js";
import { meanAndBand } from "./seeds.js";
import { tip, explained } from "./tip.js";
import { nearest } from "./hover.js";

const HEIGHT = 210;
const sync = () => window.uPlot.sync("steps");

export class Chart {
  // options: metric, runs, groups (of seeds, each drawn as one), smooth, byTime, log, title, onClose
  constructor(options) {
    this.options = options;
    this.holder = h("div", { class: "plot", tabIndex: 0, role: "img", onkeydown: (e) => this.key(e) });
    this.element = h("section", { class: "panel chart" }, this.head(), this.holder);
    this.range = null;
    this.refine = debounce(() => this.load(), 50);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.holder);
  }

  head() {
    const { metric, title, row, onClose } = this.options;
    const small = (text, label, act) => h("button", { class: "small", type: "button", "aria-label": `${label}: ${metric}`, title: label, onclick: act }, text);
    return h("h2", {},
      h("span", { class: "t" }, title || metric), tip(row && explained(row)),
      small("CSV", "Download as CSV", () => this.csv()), small("PNG", "Download as PNG", () => this.png()),
      onClose && small("×", "Remove", onClose));
  }

  async load() {
    const { metric, runs, smooth } = this.options;
    const width = Math.max(200, Math.round(this.holder.clientWidth || 400));
    const ask = { name: metric, width, smooth: smooth || undefined, x: this.options.byTime ? "time" : undefined };
    if (this.range) [ask.from, ask.to] = this.range;
    const found = await Promise.all(runs.map((key) => api.get(api.run(key, "/curves"), ask).catch(() => [])));
    this.series = runs.map((key, index) => ({ key, index, data: found[index][0] })).filter((s) => s.data && s.data.x.length);
    if (this.options.groups) this.series = this.options.groups.map(({ label, keys, index }) => {
      const members = this.series.filter((s) => keys.includes(s.key));
      return members.length > 1 ? { key: label, index, data: { ...meanAndBand(members.map((s) => s.data)), isBand: true } } : members[0] && { ...members[0], index };
    }).filter(Boolean);
    this.draw();
  }

  draw() {
    if (!this.series.length) { this.plot?.destroy(); this.plot = null; fill(this.holder, empty("This metric has no values yet.")); return; }
    const several = this.options.runs.length > 1, byTime = this.options.byTime;
    const tables = [], lines = [{ label: byTime ? "time" : this.series[0].data.axis.replace("/step", " step") }], bands = [];
    for (const { key, index, data } of this.series) {
      const x = data.x, stroke = seriesColor(index), smooth = data.smooth;
      const table = [x, data.y], label = several ? key : "value";
      const value = (u, v) => num(v);
      lines.push({ label: smooth ? `${label} (raw)` : label, value, stroke: smooth ? faded(stroke, 0.35) : stroke, width: smooth ? 1 : 1.6, dash: dash(index), points: { show: data.x.length < 40, fill: color("panel"), size: 5 } });
      if (smooth) { table.push(smooth); lines.push({ label, value, stroke, width: 2, dash: dash(index), points: { show: false } }); }
      if (data.low && (!several || data.isBand)) {
        const at = lines.length;
        table.push(data.high, data.low);
        lines.push({ label: data.isBand ? `${key} + sd` : "highest", class: data.isBand ? "band" : null, value, stroke: faded(stroke, 0.25), width: 0.5, points: { show: false } }, { label: data.isBand ? `${key} − sd` : "lowest", class: data.isBand ? "band" : null, value, stroke: faded(stroke, 0.25), width: 0.5, points: { show: false } });
        bands.push({ series: [at, at + 1], fill: faded(stroke, 0.15) });
      }
      tables.push(table);
    }
    let joined = tables.length > 1 ? window.uPlot.join(tables) : tables[0];
    const log = Boolean(this.options.log) && joined.slice(1).some((column) => column.some((v) => v > 0));
    if (log) joined = [joined[0], ...joined.slice(1).map((column) => column.map((v) => (v > 0 ? v : null)))];
    lines.forEach((line) => { line.spanGaps = true; });
    this.header = lines.map((line) => line.label);
    if (this.plot && this.shape === JSON.stringify([this.header, byTime, log])) {
      this.quiet = true;
      this.plot.setData(joined, !this.range);
      this.quiet = false;
      return;
    }
    this.shape = JSON.stringify([this.header, byTime, log]);
    this.plot?.destroy();
    fill(this.holder);
    const axis = { stroke: color("dim"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid") }, font: "11px sans-serif" };
    this.plot = new window.uPlot({
      width: this.holder.clientWidth || 400, height: HEIGHT, series: lines, bands,
      scales: { x: { time: Boolean(byTime) }, ...(log ? { y: { distr: 3 } } : {}) },
      axes: [axis, { ...axis, size: 58, values: (u, ticks) => ticks.map((v) => (v === null ? "" : num(v, 3))) }],
      cursor: { sync: { key: sync().key, setSeries: false }, drag: { x: true, y: false, uni: 10 }, dataIdx: (u, i, at) => (i === 0 ? at : nearest(u.data[i], at)) },
      legend: { live: true },
      hooks: { setScale: [(u, scale) => scale === "x" && this.zoomed(u)] },
    }, joined, this.holder);
    this.holder.setAttribute("aria-label", `${this.options.metric}: ${this.series.map((s) => `${s.key} ends at ${num(s.data.y.at(-1))}`).join(", ")}. Arrow keys move the cursor, plus and minus zoom, 0 shows all.`);
    this.full = [joined[0][0], joined[0].at(-1)];
  }

  zoomed(plot) {
    if (this.quiet || this.options.byTime || !this.full) return;
    const { min, max } = plot.scales.x;
    const all = min <= this.full[0] && max >= this.full[1];
    const range = all ? null : [min, max];
    if (JSON.stringify(range) !== JSON.stringify(this.range)) { this.range = range; this.refine(); }
  }

  key(event) {
    const plot = this.plot;
    if (!plot) return;
    const x = plot.data[0], { min, max } = plot.scales.x, at = plot.cursor.idx ?? x.length - 1;
    const move = (index) => { const i = Math.max(0, Math.min(x.length - 1, index)); plot.setCursor({ left: plot.valToPos(x[i], "x"), top: 10 }); };
    const zoom = (factor) => { const middle = x[at] ?? (min + max) / 2; plot.setScale("x", { min: middle - (middle - min) * factor, max: middle + (max - middle) * factor }); };
    const acts = { ArrowLeft: () => move(at - 1), ArrowRight: () => move(at + 1), "+": () => zoom(0.5), "-": () => zoom(2), 0: () => { this.range = null; this.load(); } };
    if (acts[event.key]) { acts[event.key](); event.preventDefault(); event.stopPropagation(); }
  }

  resize() {
    const width = this.holder.clientWidth;
    if (this.plot && width && Math.abs(width - this.plot.width) > 2) this.plot.setSize({ width, height: HEIGHT });
  }

  set(changes) { Object.assign(this.options, changes); return this.load(); }

  csv() {
    if (!this.plot) return;
    csv(this.options.metric, this.header, this.plot.data[0].map((_, i) => this.plot.data.map((column) => column[i])));
  }

  png() { if (this.plot) png(this.options.metric, this.plot.ctx.canvas, this.options.metric); }

  close() { this.observer.disconnect(); this.plot?.destroy(); this.element.remove(); }
}
