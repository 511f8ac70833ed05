// Any metric of any run, side by side: choose, smooth, zoom, take away as CSV or PNG.
import * as api from "../api.js";
import { h, fill, empty } from "../dom.js";
import { note } from "../route.js";
import { Chart } from "../chart.js";
import { num } from "../format.js";

export const title = "Curves";
const FIRST = ["rollout/raw_reward", "rollout/response_len/mean", "rollout/truncated_ratio", "train/loss", "train/grad_norm", "train/entropy_loss", "train/kl_loss", "train/train_rollout_logprob_abs_diff", "perf/step_time"];

export async function render(main, context) {
  const lists = await Promise.all(context.keys.map((key) => api.get(api.run(key, "/metrics"))));
  const known = new Map(lists.flat().map((row) => [row.name, row]));
  if (!known.size) { fill(main, empty("No metric is logged yet. The first ones come with the first weight push.")); return {}; }
  let names = context.params.name ? context.params.name.split(",").filter((name) => known.has(name)) : [];
  if (!names.length) names = [...FIRST.filter((name) => known.has(name)), ...[...known.keys()].filter((name) => /^eval\/[^/]+$/.test(name) && !name.includes("-"))].slice(0, 9);
  let smooth = Number(context.params.smooth ?? 0), byTime = context.params.x === "time";
  const grid = h("div", { class: "grid" }), charts = new Map();
  const keep = () => note({ name: names.join(","), smooth: smooth || undefined, x: byTime ? "time" : undefined });

  function add(metric) {
    const chart = new Chart({ metric, runs: context.keys, row: known.get(metric), smooth, byTime, onClose: () => { names = names.filter((n) => n !== metric); chart.close(); charts.delete(metric); keep(); } });
    charts.set(metric, chart);
    grid.append(chart.element);
    return chart.load();
  }

  const choices = h("datalist", { id: "metrics" }, [...known.values()].map((row) => h("option", { value: row.name }, row.what)));
  const input = h("input", { type: "search", placeholder: "add a metric …", "aria-label": "Add a metric", size: 28 });
  input.setAttribute("list", "metrics");
  const box = h("details", {}, h("summary", {}, `All ${known.size} metrics`), h("div", { class: "scroll panel" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, "Metric"), h("th", { class: "num" }, "Last"), h("th", {}, "What it is"), h("th", {}, "What is normal"))),
    h("tbody", {}, [...known.values()].map((row) => h("tr", {}, h("td", {}, h("button", { class: "small", type: "button", onclick: () => choose(row.name) }, row.name)), h("td", { class: "num" }, num(row.last)), h("td", {}, row.what), h("td", {}, row.normal)))))));
  function choose(name) {
    if (known.has(name) && !charts.has(name)) { names.push(name); add(name); keep(); }
    charts.get(name)?.element.scrollIntoView({ block: "nearest" });
  }
  input.addEventListener("change", () => { if (known.has(input.value)) { choose(input.value); input.value = ""; } });
  const amount = h("output", {}, smooth.toFixed(2));
  const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: smooth, "aria-label": "Smoothing", oninput: () => { smooth = Number(slider.value); amount.textContent = smooth.toFixed(2); keep(); charts.forEach((chart) => { chart.options.smooth = smooth; chart.refine(); }); } });
  const axis = h("select", { "aria-label": "Horizontal axis", onchange: () => { byTime = axis.value === "time"; keep(); charts.forEach((chart) => { chart.range = null; chart.set({ byTime }); }); } }, h("option", { value: "step" }, "step"), h("option", { value: "time" }, "time"));
  axis.value = byTime ? "time" : "step";
  fill(main, h("div", { class: "bar" }, input, choices, h("label", {}, "Smoothing", slider, amount), h("label", {}, "Across", axis), h("span", { class: "dim" }, "drag to zoom, double-click to see all")), grid, h("p", {}), box);
  await Promise.all(names.map(add));
  return { refresh: () => Promise.all([...charts.values()].map((chart) => chart.load())), close: () => charts.forEach((chart) => chart.close()), themed: () => charts.forEach((c) => { c.shape = ""; c.draw(); }) };
}
