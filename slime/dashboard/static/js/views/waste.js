// What was made and not trained on, how old the weights were that made it, and how busy the engines are.
import * as api from "../api.js";
import { h, fill, empty } from "../dom.js";
import { num } from "../format.js";
import { link } from "../route.js";
import { Chart } from "../chart.js";
import { tip } from "../tip.js";
import { csv } from "../export.js";

export const title = "Waste and load";
const PARTS = {
  "Groups": ["rollout/groups/kept", "rollout/groups/filtered", "rollout/groups/returned", "rollout/groups/failed", "rollout/groups/stale"],
  "Waste by cause": ["rollout/waste/share", ...["zero_variance", "aborted", "stale", "filtered", "failed"].flatMap((cause) => [`rollout/waste/${cause}/tokens`, `rollout/waste/${cause}/seconds`])],
  "Staleness": ["rollout/staleness/mean", "rollout/staleness/max", "rollout/staleness/lag_0", "rollout/staleness/lag_1", "rollout/staleness/lag_2", "rollout/staleness/lag_3", "rollout/versions_per_sample", "rollout/mixed_version_frac", "train/train_rollout_logprob_abs_diff"],
  "Engine load": ["perf/tokens_per_gpu_per_sec", "perf/engine_forward_time", "perf/longest_sample_tokens_per_sec", "rollout/prefix_cache_hit_rate"],
  "Waits": ["perf/train_wait_time", "perf/step_time", "perf/update_weights_time", "perf/non_generation_time/mean"],
};
const WHAT = {
  "Groups": "The outcome of the groups of each rollout: trained on, dropped by a filter, given back unfinished, failed, or too old.",
  "Staleness": "How many weight pushes old the weights were that wrote the answers which are trained on. 0: the newest.",
  "Engine load": "How busy the engines are, and how much of their work was known from before.",
  "Waits": "How long the trainer waits for samples, beside how long a step takes and what else is no generation.",
};
const WORDS = { trained: "trained on", filtered: "dropped by a filter", failed: "failed for good", returned: "went back unfinished", aborted: "cut off", stale: "too old" };

function reasonOf(reason) {
  const same = /^zero_std(?:_(.+))?$/.exec(reason || "");
  return same ? `every answer got the same reward${same[1] ? `, ${same[1]}` : ""} (${reason})` : reason || "";
}

export async function render(main, context) {
  const key = context.keys[0];
  const [rows, outcomes] = await Promise.all([api.get(api.run(key, "/metrics")), api.get(api.run(key, "/outcomes")).catch(() => [])]);
  const known = new Map(rows.map((row) => [row.name, row])), charts = [];
  if (!known.size) { fill(main, empty("Nothing is logged yet.")); return {}; }
  const total = outcomes.reduce((sum, row) => sum + row.groups, 0);
  const table = total ? h("section", { class: "panel scroll" }, h("h2", {}, "Outcome of the groups ", tip("Of the last 400 rollouts at most. A group is one prompt with all its answers. Only trained ones teach the model; the others cost time."), " ", h("button", { class: "small", type: "button", onclick: () => csv(`${key}-outcomes`, ["became", "reason", "groups"], outcomes.map((row) => [row.outcome, row.reason, row.groups])) }, "CSV")),
    h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Outcome"), h("th", {}, "Reason"), h("th", { class: "num" }, "Groups"), h("th", { class: "num" }, "Share"), h("th", {}))), h("tbody", {}, outcomes.map((row) => h("tr", {}, h("td", {}, WORDS[row.outcome] || row.outcome), h("td", {}, reasonOf(row.reason)), h("td", { class: "num" }, num(row.groups)), h("td", { class: "num" }, `${num((100 * row.groups) / total, 3)}%`), h("td", {}, h("a", { href: link("samples", { runs: context.keys.join(","), outcome: row.outcome, order: "newest" }) }, "samples"))))))) : empty("The record holds no groups, so their outcomes are not known.");
  fill(main, table, Object.entries(PARTS).map(([name, metrics]) => {
    const there = metrics.filter((metric) => known.has(metric));
    if (!there.length) return null;
    const made = there.map((metric) => new Chart({ metric, runs: context.keys, row: known.get(metric), smooth: 0 }));
    charts.push(...made);
    return h("section", {}, h("h2", {}, name, " ", tip(WHAT[name])), h("div", { class: "grid" }, made.map((chart) => chart.element)));
  }));
  await Promise.all(charts.map((chart) => chart.load()));
  return { refresh: () => Promise.all(charts.map((chart) => chart.load())), close: () => charts.forEach((chart) => chart.close()), themed: () => charts.forEach((c) => { c.shape = ""; c.draw(); }) };
}
