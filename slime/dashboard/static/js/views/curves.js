// Any metric of any run, side by side: choose, smooth, zoom, use a log axis, download as CSV or PNG.
import * as api from "../api.js";
import { h, fill, empty } from "../dom.js";
import { note } from "../route.js";
import { Chart } from "../chart.js";
import { num } from "../format.js";
import { seedGroups } from "../seeds.js";

export const title = "Curves";
const FIRST = ["train/accuracy", "train/margin", "rollout/response_len/mean", "rollout/truncated_ratio", "train/loss", "train/grad_norm", "train/entropy_loss", "train/kl_loss", "train/train_rollout_logprob_abs_diff", "perf/step_time"];

export async function render(main, context) {
  const lists = await Promise.all(context.keys.map((key) => api.get(api.run(key, "/metrics"))));
  const known = new Map(lists.flat().map((row) => [row.name, row]));
  if (!known.size) { fill(main, empty("No metric is logged yet. The first metrics appear after the first weight sync.")); return {}; }
  let names = context.params.name ? context.params.name.split(",").filter((name) => known.has(name)) : [];
  const mains = context.runs.filter((run) => context.keys.includes(run.key)).map((run) => run.main.name);
  if (!names.length) names = [...new Set([...mains, ...FIRST].filter((name) => known.has(name))), ...[...known.keys()].filter((name) => /^eval\/[^/]+$/.test(name) && !name.includes("-"))].slice(0, 9);
  let smooth = Number(context.params.smooth ?? 0), byTime = context.params.x === "time", log = context.params.y === "log", each = context.params.each === "1";
  const groups = () => seedGroups(context.keys, context.runs, each), hasSeeds = seedGroups(context.keys, context.runs).some((group) => group.keys.length > 1);
  const grid = h("div", { class: "grid" }), charts = new Map();
  const keep = () => note({ name: names.join(","), smooth: smooth || undefined, x: byTime ? "time" : undefined, y: log ? "log" : undefined, each: each ? "1" : undefined });

  function add(metric) {
    const chart = new Chart({ metric, runs: context.keys, groups: groups(), row: known.get(metric), smooth, byTime, log, onClose: () => { names = names.filter((n) => n !== metric); chart.close(); charts.delete(metric); keep(); } });
    charts.set(metric, chart);
    grid.append(chart.element);
    return chart.load();
  }

  const choices = h("datalist", { id: "metrics" }, [...known.values()].map((row) => h("option", { value: row.name }, row.what)));
  const input = h("input", { type: "search", placeholder: "add a metric …", "aria-label": "Add a metric", size: 28 });
  input.setAttribute("list", "metrics");
  const box = h("details", {}, h("summary", {}, `All ${known.size} metrics`), h("div", { class: "scroll panel" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, "Metric"), h("th", { class: "num" }, "Last"), h("th", {}, "Meaning"), h("th", {}, "Normal range"))),
    h("tbody", {}, [...known.values()].map((row) => h("tr", {}, h("td", {}, h("button", { class: "small", type: "button", onclick: () => choose(row.name) }, row.name)), h("td", { class: "num" }, num(row.last)), h("td", {}, row.what), h("td", {}, row.normal)))))));
  function choose(name) {
    if (known.has(name) && !charts.has(name)) { names.push(name); add(name); keep(); }
    charts.get(name)?.element.scrollIntoView({ block: "nearest" });
  }
  input.addEventListener("change", () => { if (known.has(input.value)) { choose(input.value); input.value = ""; } });
  const amount = h("output", {}, smooth.toFixed(2));
  const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: smooth, "aria-label": "Smoothing", oninput: () => { smooth = Number(slider.value); amount.textContent = smooth.toFixed(2); keep(); charts.forEach((chart) => { chart.options.smooth = smooth; chart.refine(); }); } });
  const scale = h("button", { class: "small", type: "button", "aria-pressed": String(log), title: "Logarithmic y-axis; values of 0 and below are left out", onclick: () => { log = !log; scale.setAttribute("aria-pressed", String(log)); keep(); charts.forEach((chart) => { chart.options.log = log; chart.draw(); }); } }, "log scale");
  const seeds = h("input", { type: "checkbox", checked: !each, onchange: () => { each = !seeds.checked; keep(); charts.forEach((chart) => chart.set({ groups: groups() })); } });
  const axis = h("select", { "aria-label": "x-axis", onchange: () => { byTime = axis.value === "time"; keep(); charts.forEach((chart) => { chart.range = null; chart.set({ byTime }); }); } }, h("option", { value: "step" }, "step"), h("option", { value: "time" }, "time"));
  axis.value = byTime ? "time" : "step";
  fill(main, h("div", { class: "bar" }, input, choices, h("label", {}, "Smoothing", slider, amount), h("label", {}, "x-axis", axis), scale, hasSeeds && h("label", {}, seeds, "mean of seeds"), h("span", { class: "dim" }, "drag to zoom, double-click to reset")), grid, h("p", {}), box);
  await Promise.all(names.map(add));
  return { refresh: () => Promise.all([...charts.values()].map((chart) => chart.load())), close: () => charts.forEach((chart) => chart.close()), themed: () => charts.forEach((c) => { c.shape = ""; c.draw(); }) };
}
