// What the processes of a run use of their machines over time: CPU, memory, GPU memory and GPU utilisation.
import * as api from "../api.js";
import { h, fill, empty } from "../dom.js";
import { isLive, num } from "../format.js";
import { color, dash, seriesColor } from "../colors.js";
import { csv } from "../export.js";
import { tip } from "../tip.js";

export const title = "System";
const HEIGHT = 220, AGAIN_MS = 10_000;
const WHAT = {
  cpu_cores: ["CPU (cores in use)", "Processor time used per second, of a process and, for engines, of its children. 1: one core is busy all the time."],
  memory_gib: ["Memory (GiB)", "Resident memory of the process. Memory that processes share counts for each of them."],
  gpu_percent: ["GPU utilisation (%)", "The share of time in which the GPU computed anything, as NVIDIA's library reports it. Several GPUs: their mean."],
  gpu_memory_gib: ["GPU memory (GiB)", "Memory in use on the GPUs of the process, by all processes on them."],
};

const nameOf = (series) => series.name.split("/").slice(1, -1).join("/");
const order = new Intl.Collator("en", { numeric: true });

class Lines {
  constructor(key, what, series) {
    Object.assign(this, { series });
    const names = series.map(nameOf), table = () => window.uPlot.join(series.map(({ x, y }) => [x, y]));
    const save = () => { const columns = table(); csv(`${key}-${what}`, ["time", ...names], columns[0].map((_, i) => columns.map((column) => column[i]))); };
    this.holder = h("div", { class: "plot", role: "img", "aria-label": series.map((one) => `${nameOf(one)} is at ${num(one.y.at(-1), 3)}`).join(", ") });
    this.element = h("section", { class: "panel chart" }, h("h2", {}, h("span", { class: "t" }, WHAT[what][0]), tip(WHAT[what][1]), h("button", { class: "small", type: "button", "aria-label": `Download as CSV: ${what}`, onclick: save }, "CSV")), this.holder);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.holder);
  }

  draw() {
    const width = this.holder.clientWidth || 400;
    if (this.plot?.width === width && this.theme === color("text")) return;
    this.theme = color("text");
    this.plot?.destroy();
    fill(this.holder);
    const axis = { stroke: color("dim"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid") }, font: "11px sans-serif" };
    const lines = this.series.map((one, i) => ({ label: nameOf(one), stroke: seriesColor(i), dash: dash(i), width: 1.6, spanGaps: true, value: (u, v) => num(v, 3), points: { show: one.x.length < 30, size: 5, fill: color("panel") } }));
    this.plot = new window.uPlot({ width, height: HEIGHT, series: [{ label: "time" }, ...lines], scales: { x: { time: true }, y: { range: (u, low, high) => [0, (high || 1) * 1.05] } }, axes: [axis, { ...axis, size: 58, values: (u, ticks) => ticks.map((v) => num(v, 3)) }], cursor: { sync: { key: window.uPlot.sync("system").key, setSeries: false } } }, window.uPlot.join(this.series.map(({ x, y }) => [x, y])), this.holder);
  }

  close() { this.observer.disconnect(); this.plot?.destroy(); }
}

export async function render(main, context) {
  const key = context.keys[0], body = h("div", {});
  let drawn = [];
  async function refresh() {
    const all = await api.get(api.run(key, "/system"));
    drawn.forEach((one) => one.close());
    const panels = Object.keys(WHAT).map((what) => [what, all.filter((series) => series.name.endsWith(`/${what}`)).sort((a, b) => order.compare(a.name, b.name))]).filter(([, series]) => series.length);
    drawn = panels.map(([what, series]) => new Lines(key, what, series));
    fill(body, drawn.length ? [h("div", { class: "grid" }, drawn.map((one) => one.element)), !panels.some(([what]) => what.startsWith("gpu")) && h("p", { class: "dim" }, "No GPU was read: the processes were given none, or the package nvidia-ml-py is not installed.")]
      : empty("Nothing is known of the machines yet. A run reads its processes every five seconds; runs of an older version of slime did not."));
    drawn.forEach((one) => one.draw());
  }
  fill(main, context.keys.length > 1 && h("p", { class: "dim" }, `Of the first selected run, ${key}.`), body);
  await refresh();
  const again = setInterval(() => { if (isLive(context.runs.find((run) => run.key === key)?.state)) refresh().catch(() => {}); }, AGAIN_MS);
  return { refresh, close: () => { clearInterval(again); drawn.forEach((one) => one.close()); }, themed: () => drawn.forEach((one) => one.draw()) };
}
