// How runs are doing at a glance: trouble first, then how far, then the numbers that matter.
import * as api from "../api.js";
import { h, fill, empty } from "../dom.js";
import { num, ago, clock, duration, isLive, stateName } from "../format.js";
import { tip, explained } from "../tip.js";
import { link } from "../route.js";
import { Chart } from "../chart.js";

export const title = "Overview";

function table(context) {
  const rows = context.runs.map((run) => h("tr", {},
    h("td", {}, h("a", { href: link("overview", { runs: run.key }) }, run.name), h("div", { class: "dim" }, run.folder)),
    h("td", {}, h("span", { class: `badge ${stateName(run.state)}` }, run.state)),
    h("td", { class: "num" }, run.total ? `${run.step} / ${run.total}` : run.step),
    h("td", {}, run.method || "–"), h("td", {}, ago(run.last_time))));
  return h("section", { class: "panel scroll" }, h("h2", {}, "Runs on this page"),
    h("table", {}, h("thead", {}, h("tr", {}, ["Run", "State", "Step", "Method", "Last logged"].map((name) => h("th", {}, name)))), h("tbody", {}, rows)));
}

export function troubleList(trouble, key) {
  if (!trouble.length) return null;
  return h("ul", { class: "trouble", "aria-label": "What is wrong" }, trouble.map((entry) => h("li", { class: entry.severity },
    h("b", {}, `${{ error: "Error", warning: "Warning", advice: "Advice", note: "Note" }[entry.severity]}: `), entry.title,
    h("small", {}, entry.text), " ",
    h("a", { href: link(entry.view, { runs: key, name: entry.about }) }, "look"))));
}

function progress(run) {
  const share = run.total ? run.step / run.total : null;
  const started = run.start ? Date.parse(run.start) / 1000 : null;
  const until = run.end ? Date.parse(run.end) / 1000 : isLive(run.state) ? Date.now() / 1000 : run.last_time;
  const now = isLive(run.state) && run.record.now;
  return h("p", {},
    h("span", { class: `badge ${stateName(run.state)}` }, run.state), " ",
    share !== null && h("progress", { max: 1, value: share, "aria-label": "progress" }), " ",
    `step ${run.step}${run.total ? ` of ${run.total}` : ""}`,
    h("span", { class: "dim" }, ` · started ${clock(started)} · ${duration(started && until ? until - started : null)} ${isLive(run.state) ? "so far" : "in all"} · last logged ${ago(run.last_time)}`),
    now && now.doing && h("span", {}, ` · ${now.doing} for ${duration(Math.max(0, Date.now() / 1000 - now.since))}`));
}

export async function render(main, context) {
  const single = context.keys.length === 1;
  const boxes = h("div", {}), charts = h("div", { class: "grid" });
  let drawn = [];
  async function refresh() {
    const found = await Promise.all(context.keys.map((key) => api.get(api.run(key))));
    fill(boxes, found.map((run) => h("section", {},
      h("h1", {}, run.name, h("span", { class: "dim" }, ` ${run.method || ""}`)), progress(run), troubleList(run.trouble, run.key),
      run.headlines.length
        ? h("div", { class: "tiles" }, run.headlines.map((row) => h("div", { class: "panel tile" },
          h("div", { class: "name" }, h("a", { href: link("curves", { runs: context.keys.join(","), name: row.name }) }, row.title), tip(explained(row))),
          h("div", { class: "value" }, num(row.last)), h("div", { class: "dim" }, `from ${num(row.first)}`))))
        : empty("No step is logged yet. Numbers appear when the first rollout has been made: engines and the trainer are started before."))),
    !single || context.runs.length > 1 ? table(context) : null);
    return found;
  }
  const found = await refresh();
  fill(main, boxes, h("h2", {}, "Curves"), charts);
  const wanted = ["rollout/raw_reward", "train/loss", "rollout/response_len/mean", "perf/step_time"];
  for (const run of found) for (const row of run.headlines) if (row.name.startsWith("eval/") && !wanted.includes(row.name)) wanted.splice(1, 0, row.name);
  const rows = Object.fromEntries(found.flatMap((run) => run.headlines).map((row) => [row.name, row]));
  const there = wanted.filter((name) => rows[name]).slice(0, 4);
  drawn = there.map((metric) => new Chart({ metric, runs: context.keys, row: rows[metric], smooth: metric.startsWith("eval/") ? 0 : 0.6 }));
  fill(charts, drawn.map((chart) => chart.element));
  await Promise.all(drawn.map((chart) => chart.load()));
  return { refresh: () => Promise.all([refresh(), ...drawn.map((chart) => chart.load())]), close: () => drawn.forEach((chart) => chart.close()), themed: () => drawn.forEach((c) => { c.shape = ""; c.draw(); }) };
}
