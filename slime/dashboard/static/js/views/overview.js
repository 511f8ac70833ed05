// The state of the runs at a glance: problems first, then the progress, then the headline metrics.
import * as api from "../api.js";
import { h, fill, empty } from "../dom.js";
import { num, ago, clock, duration, isLive, stateName } from "../format.js";
import { tip, explained } from "../tip.js";
import { link } from "../route.js";
import { editor, tags } from "../labels.js";
import { Chart } from "../chart.js";
import { seedGroups } from "../seeds.js";

export const title = "Overview";
const FEW = 3; // runs with all their tiles; of more only progress, errors and warnings are shown

export function troubleList(trouble, key) {
  if (!trouble.length) return null;
  return h("ul", { class: "trouble", "aria-label": "Problems" }, trouble.map((entry) => h("li", { class: entry.severity },
    h("b", {}, `${{ error: "Error", warning: "Warning", advice: "Advice", note: "Note" }[entry.severity]}: `), entry.title,
    h("small", {}, entry.text), " ",
    h("a", { href: link(entry.view, { runs: key, name: entry.about }) }, "details"))));
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
    h("span", { class: "dim" }, ` · started ${clock(started)} · ${duration(started && until ? until - started : null)} ${isLive(run.state) ? "so far" : "in total"} · last logged ${ago(run.last_time)}`),
    run.paused_since && h("b", {}, ` · paused for ${duration(Date.now() / 1000 - run.paused_since)}`), now && now.doing && now.doing !== "paused" && h("span", {}, ` · ${now.doing} for ${duration(Math.max(0, Date.now() / 1000 - now.since))}`));
}

export async function render(main, context) {
  const few = context.keys.length <= FEW, boxes = h("div", {}), charts = h("div", { class: "grid four" });
  let drawn = [];
  async function refresh() {
    const found = await Promise.all(context.keys.map((key) => api.get(api.run(key))));
    fill(boxes, found.map((run) => h("section", {},
      h("h1", {}, run.name, h("span", { class: "dim" }, ` ${run.method || ""} `), tags(run), " ", editor(run, context.info, refresh)), run.note && h("p", { class: "note" }, run.note), progress(run), troubleList(few ? run.trouble : run.trouble.filter((entry) => entry.severity === "error" || entry.severity === "warning"), run.key),
      !few ? null : run.headlines.length
        ? h("div", { class: "tiles" }, run.headlines.map((row) => h("div", { class: "panel tile" },
          h("div", { class: "name" }, h("a", { href: link("curves", { runs: context.keys.join(","), name: row.name }) }, row.title), tip(explained(row))),
          h("div", { class: "value" }, num(row.last)), h("div", { class: "dim" }, `from ${num(row.first)}`))))
        : empty("No step is logged yet. Metrics appear after the first rollout, once the engines and the trainer have started."))),
    context.runs.length > 1 && h("p", {}, !few && "Advice and metrics are shown for up to three selected runs. ", h("a", { href: link("runs", { runs: context.keys.join(",") }) }, `Compare all ${context.runs.length} runs in a table`)));
    return found;
  }
  const found = await refresh();
  fill(main, boxes, h("h2", {}, "Curves"), charts);
  const wanted = [...new Set([...found.map((run) => run.main.name), "train/accuracy", "train/loss", "rollout/response_len/mean", "perf/step_time"])];
  for (const run of found) for (const row of run.headlines) if (row.name.startsWith("eval/") && !wanted.includes(row.name)) wanted.splice(1, 0, row.name);
  const rows = Object.fromEntries(found.flatMap((run) => run.headlines).map((row) => [row.name, row]));
  const there = wanted.filter((name) => rows[name]).slice(0, 4);
  drawn = there.map((metric) => new Chart({ metric, runs: context.keys, groups: seedGroups(context.keys, context.runs), row: rows[metric], smooth: metric.startsWith("eval/") ? 0 : 0.6 }));
  fill(charts, drawn.map((chart) => chart.element));
  await Promise.all(drawn.map((chart) => chart.load()));
  return { refresh: () => Promise.all([refresh(), ...drawn.map((chart) => chart.load())]), close: () => drawn.forEach((chart) => chart.close()), themed: () => drawn.forEach((c) => { c.shape = ""; c.draw(); }) };
}
