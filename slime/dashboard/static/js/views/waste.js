// Groups that were generated and not trained on, the staleness of samples, and the load of the engines.
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
  "Groups": "The outcome of the groups of each rollout: trained, filtered, returned unfinished, failed, or too stale.",
  "Staleness": "The age of the weights that generated the trained responses, counted in weight syncs. 0: the newest weights.",
  "Engine load": "The throughput of the engines, and the share of prompt tokens that their prefix cache already held.",
  "Waits": "How long the trainer waits for samples, compared with the step time and the other phases.",
};
const WORDS = { trained: "trained", filtered: "filtered", failed: "failed", returned: "returned unfinished", aborted: "aborted", stale: "too stale" };

function reasonOf(reason) {
  const same = /^zero_std(?:_(.+))?$/.exec(reason || "");
  return same ? `all responses got the same reward${same[1] ? `, ${same[1]}` : ""} (${reason})` : reason || "";
}

export async function render(main, context) {
  const key = context.keys[0];
  const [rows, outcomes] = await Promise.all([api.get(api.run(key, "/metrics")), api.get(api.run(key, "/outcomes")).catch(() => [])]);
  const known = new Map(rows.map((row) => [row.name, row])), charts = [];
  if (!known.size) { fill(main, empty("No metric is logged yet.")); return {}; }
  const total = outcomes.reduce((sum, row) => sum + row.groups, 0);
  const table = total ? h("section", { class: "panel scroll" }, h("h2", {}, "Outcome of the groups ", tip("Covers the last 400 rollouts. A group is one prompt with all its responses. Only trained groups change the model; the others cost time."), " ", h("button", { class: "small", type: "button", onclick: () => csv(`${key}-outcomes`, ["outcome", "reason", "groups"], outcomes.map((row) => [row.outcome, row.reason, row.groups])) }, "CSV")),
    h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Outcome"), h("th", {}, "Reason"), h("th", { class: "num" }, "Groups"), h("th", { class: "num" }, "Share"), h("th", {}))), h("tbody", {}, outcomes.map((row) => h("tr", {}, h("td", {}, WORDS[row.outcome] || row.outcome), h("td", {}, reasonOf(row.reason)), h("td", { class: "num" }, num(row.groups)), h("td", { class: "num" }, `${num((100 * row.groups) / total, 3)}%`), h("td", {}, h("a", { href: link("samples", { runs: context.keys.join(","), outcome: row.outcome, order: "newest" }) }, "samples"))))))) : empty("The record has no groups, so their outcomes are not known.");
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
