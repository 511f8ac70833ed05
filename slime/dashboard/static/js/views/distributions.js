// How values are distributed at each step: of samples, groups and trained tokens; and pass@k of groups.
import * as api from "../api.js";
import { h, fill, empty } from "../dom.js";
import { num } from "../format.js";
import { go, link, note } from "../route.js";
import { color, faded, seriesColor, dash } from "../colors.js";
import { csv } from "../export.js";
import { tip } from "../tip.js";

export const title = "Distributions";
const HEIGHT = 190, LEFT = 62, BELOW = 20;
const WHAT = {
  reward: ["Reward", "The rewards of single samples."],
  length: ["Response length", "Tokens of each response."],
  advantage: ["Advantage", "The advantage that the trainer computed for each sample, as a mean over its tokens."],
  staleness: ["Staleness", "The age of the oldest token of a response, in weight syncs. 0: generated with the weights of this step."],
  ratio: ["Ratio", "Of each trained token: its probability under the trained policy, divided by the one that it was sampled with as far as the loss knows. 1: no change. The first and the last bin hold everything beyond them."],
  entropy: ["Entropy", "Of each trained token: the entropy of the policy's distribution at its place, in nats. Near 0: the policy is certain. The last bin holds everything above 6."],
  difficulty: ["Prompts by difficulty", "The mean reward of each prompt's group: low is hard, high is easy. Prompts at the ends teach little: all their responses get the same reward."],
};

// One column for each step, one row for each bin; the darker a cell, the larger its share of the step's values.
class Heat {
  constructor(name, steps, data, onPick) {
    Object.assign(this, { steps, data, onPick, at: -1 });
    this.canvas = h("canvas", {});
    this.info = h("p", { class: "dim", role: "status" }, "Point at a column for its step; click to see its samples.");
    this.holder = h("div", { class: "heat", tabIndex: 0, role: "img", "aria-label": `${WHAT[name][0]} by step: the mean is ${num(data.means[0], 3)} at first and ${num(data.means.at(-1), 3)} at last. Arrow keys move, Enter opens the samples.`, onkeydown: (e) => this.key(e) }, this.canvas);
    const save = () => csv(`distribution-${name}`, ["step", "mean", ...data.edges.slice(0, -1).map((edge, i) => `${edge} to ${data.edges[i + 1]}`)], steps.map((step, i) => [step, data.means[i], ...data.counts[i]]));
    this.element = h("section", { class: "panel chart" }, h("h2", {}, h("span", { class: "t" }, WHAT[name][0]), tip(WHAT[name][1]), h("button", { class: "small", type: "button", "aria-label": `Download as CSV: ${name}`, onclick: save }, "CSV")), this.holder, this.info);
    this.canvas.addEventListener("pointermove", (e) => this.show(this.columnAt(e.offsetX), this.rowAt(e.offsetY)));
    this.canvas.addEventListener("click", (e) => this.pick(this.columnAt(e.offsetX)));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.holder);
  }

  get width() { return this.holder.clientWidth || 400; }
  columnAt(x) { return Math.floor(((x - LEFT) / (this.width - LEFT)) * this.steps.length); }
  rowAt(y) { return Math.floor((1 - y / (HEIGHT - BELOW)) * (this.data.edges.length - 1)); }
  pick(column) { if (column >= 0 && column < this.steps.length) this.onPick(this.steps[column]); }

  show(column, row = -1) {
    if (column < 0 || column >= this.steps.length) return;
    const { edges, counts, means } = this.data, sum = counts[column].reduce((a, b) => a + b, 0), count = counts[column][row];
    this.at = column;
    this.info.textContent = `step ${this.steps[column]}: mean ${num(means[column], 3)} of ${num(sum)}${count !== undefined && sum ? ` · ${num(edges[row], 3)} to ${num(edges[row + 1], 3)}: ${num(count)} (${Math.round((100 * count) / sum)}%)` : ""}`;
    this.draw();
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) this.show(Math.max(0, Math.min(this.steps.length - 1, this.at + step)));
    else if (event.key === "Enter") this.pick(this.at);
    else return;
    event.preventDefault();
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, width = this.width, pen = this.canvas.getContext("2d"), { edges, counts, means } = this.data;
    this.canvas.width = width * ratio; this.canvas.height = HEIGHT * ratio;
    this.canvas.style.height = `${HEIGHT}px`;
    pen.scale(ratio, ratio);
    const tall = HEIGHT - BELOW, each = (width - LEFT) / this.steps.length, bins = edges.length - 1, high = tall / bins, hue = seriesColor(0), low = edges[0], range = edges[bins] - low || 1;
    pen.font = "11px sans-serif";
    counts.forEach((column, i) => {
      const sum = column.reduce((a, b) => a + b, 0), x = LEFT + i * each;
      column.forEach((count, bin) => { if (count) { pen.fillStyle = faded(hue, 0.12 + 0.88 * Math.sqrt(count / sum)); pen.fillRect(x, tall - (bin + 1) * high, Math.max(1, each - (each > 4 ? 1 : 0)), Math.max(1, high - 1)); } });
      if (i === this.at) { pen.strokeStyle = color("accent"); pen.lineWidth = 1.5; pen.strokeRect(x, 0.5, each, tall - 1); }
    });
    pen.strokeStyle = seriesColor(1); pen.lineWidth = 2; pen.beginPath();
    means.forEach((mean, i) => { if (mean !== null) pen.lineTo(LEFT + (i + 0.5) * each, tall - ((mean - low) / range) * tall); });
    pen.stroke();
    pen.fillStyle = color("dim"); pen.textAlign = "right"; pen.textBaseline = "middle";
    if (bins === 1) pen.fillText(num((low + edges[1]) / 2, 3), LEFT - 8, tall / 2);
    else for (const share of [0, 0.5, 1]) pen.fillText(num(low + share * range, 3), LEFT - 8, Math.max(6, Math.min(tall - 6, tall * (1 - share))));
    pen.textBaseline = "alphabetic"; pen.textAlign = "left"; pen.fillText(`step ${this.steps[0]}`, LEFT, HEIGHT - 5);
    if (this.steps.length > 1) { pen.textAlign = "right"; pen.fillText(String(this.steps.at(-1)), width - 2, HEIGHT - 5); }
  }

  close() { this.observer.disconnect(); }
}

class Rates {
  constructor(steps, rates) {
    Object.assign(this, { steps, rates });
    this.holder = h("div", { class: "plot", role: "img", "aria-label": Object.entries(rates).map(([name, values]) => `${name} ends at ${num(values.at(-1), 3)}`).join(", ") });
    this.element = h("section", { class: "panel chart" }, h("h2", {}, h("span", { class: "t" }, "pass@k of groups"), tip("The chance that at least one of k responses to a prompt is correct, as an unbiased mean over groups. A reward of 1 counts as correct.")), this.holder);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.holder);
  }

  draw() {
    const width = this.holder.clientWidth || 400, axis = { stroke: color("dim"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid") }, font: "11px sans-serif" };
    if (this.plot?.width === width && this.theme === color("text")) return;
    this.theme = color("text");
    this.plot?.destroy();
    fill(this.holder);
    const lines = Object.keys(this.rates).map((label, i) => ({ label, stroke: seriesColor(i), dash: dash(i), width: 1.6, spanGaps: true, value: (u, v) => num(v, 3), points: { show: this.steps.length < 40, size: 5, fill: color("panel") } }));
    this.plot = new window.uPlot({ width, height: HEIGHT, series: [{ label: "step" }, ...lines], scales: { x: { time: false }, y: { range: [0, 1] } }, axes: [axis, { ...axis, size: 58 }] }, [this.steps, ...Object.values(this.rates)], this.holder);
  }

  close() { this.observer.disconnect(); this.plot?.destroy(); }
}

export async function render(main, context) {
  const key = context.keys[0];
  let kind = context.params.kind || "train", dataset = context.params.dataset || "", drawn = [];
  const body = h("div", {}), status = h("span", { class: "dim" });
  const pick = h("select", { "aria-label": "Dataset split", onchange: () => { [kind, dataset] = JSON.parse(pick.value); note({ kind, dataset: dataset || undefined }); load(); } });
  async function load() {
    const found = await api.get(api.run(key, "/distributions"), { kind, dataset }).catch((error) => ({ steps: [], error: error.message, datasets: [] }));
    const splits = [["training", ["train", ""]], ...(found.datasets.length ? [["evaluation, all datasets", ["eval", ""]], ...found.datasets.map((name) => [`evaluation: ${name}`, ["eval", name]])] : [])];
    fill(pick, splits.map(([text, value]) => h("option", { value: JSON.stringify(value) }, text)));
    pick.value = JSON.stringify([kind, dataset]);
    drawn.forEach((one) => one.close());
    drawn = [];
    if (!found.steps.length) { status.textContent = ""; fill(body, empty(found.error || "The record holds no samples of this dataset split yet.")); return; }
    status.textContent = found.steps.length < found.of_steps ? `${num(found.samples)} samples from ${found.steps.length} of ${num(found.of_steps)} steps` : `${num(found.samples)} samples of ${num(found.of_steps)} steps`;
    drawn = Object.entries(found.histograms).map(([name, data]) => new Heat(name, found.steps, data, (step) => go("samples", { runs: context.keys.join(","), kind, step })));
    const rates = Object.values(found.pass_rates).some((values) => values.some((value) => value > 0)) ? new Rates(found.steps, found.pass_rates) : null;
    if (rates) drawn.push(rates);
    fill(body, h("div", { class: "grid" }, drawn.map((one) => one.element)), found.hardest.length > 0 && h("section", { class: "panel scroll hardest" }, h("h2", {}, "Hardest prompts ", tip("The lowest mean rewards among the groups that were read of the last three steps.")),
      h("table", {}, h("thead", {}, h("tr", {}, h("th", { class: "num" }, "Mean reward"), h("th", {}, "Prompt"))), h("tbody", {}, found.hardest.map((row) => h("tr", {}, h("td", { class: "num" }, num(row.reward, 3)), h("td", {}, h("a", { href: link("prompts", { runs: context.keys.join(","), kind, prompt: row.prompt_hash }) }, row.prompt))))))));
    drawn.forEach((one) => one.draw());
  }
  fill(main, h("div", { class: "bar" }, h("label", {}, "Dataset split", pick), status), body);
  await load();
  return { refresh: load, close: () => drawn.forEach((one) => one.close()), themed: () => drawn.forEach((one) => one.draw()) };
}
