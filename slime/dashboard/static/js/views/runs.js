// All runs of the dashboard in one table: sorted by any column, grouped by seed, selected for comparison.
import { h, fill, empty } from "../dom.js";
import { num, ago, duration, isLive, stateName } from "../format.js";
import { link, note, go } from "../route.js";
import { Chart } from "../chart.js";
import { csv } from "../export.js";
import { seedGroups, groupName } from "../seeds.js";
import { editor, tags } from "../labels.js";

export const title = "Runs";
const MOST_EVALUATIONS = 3;

function seconds(run) {
  const start = run.start ? Date.parse(run.start) / 1000 : null;
  const end = run.end ? Date.parse(run.end) / 1000 : isLive(run.state) ? Date.now() / 1000 : run.last_time;
  return start && end ? Math.max(0, end - start) : null;
}

function summary(values) {
  const known = values.filter((value) => typeof value === "number");
  if (!known.length) return { mean: null, text: "–" };
  const mean = known.reduce((a, b) => a + b) / known.length;
  const spread = known.length > 1 ? Math.sqrt(known.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (known.length - 1)) : null;
  return { mean, text: spread === null ? num(mean, 3) : `${num(mean, 3)} ± ${num(spread, 2)}` };
}

export async function render(main, context) {
  let runs = context.runs, by = context.params.sort || "", down = context.params.down === "1", grouped = context.params.each !== "1" && seedGroups(runs.map((run) => run.key), runs).some((group) => group.keys.length > 1);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.evaluations)))].sort().slice(0, MOST_EVALUATIONS);
  const mains = [...new Map(runs.map((run) => [run.main.name, run.main.title]))]; // what runs of each method are about
  const columns = [ // name, value of a run, text of a value, is a number
    ["Run", (run) => run.name], ["State", (run) => stateName(run.state)], ["Tags", (run) => run.tags.join(", ")],
    ...mains.map(([name, title]) => [title[0].toUpperCase() + title.slice(1), (run) => (run.main.name === name ? run.main.last : null), num]), ...names.map((name) => [name.replace("eval/", "").replaceAll("_", " "), (run) => run.evaluations[name] ?? null, num]),
    ["Step", (run) => run.step, num], ["Time", seconds, duration], ["Seed", (run) => run.seed, num], ["Method", (run) => run.method], ["Model", (run) => (run.model || "").split("/").slice(-2).join("/")], ["Last logged", (run) => run.last_time, ago], ["Note", (run) => run.note],
  ];
  const isNumber = (column) => Boolean(column[2]) && column[0] !== "Last logged";
  const head = h("thead", {}), body = h("tbody", {}), charts = h("div", { class: "grid" });
  const filter = h("input", { type: "search", placeholder: "filter runs", "aria-label": "Filter runs", oninput: () => draw() });
  const bySeed = h("input", { type: "checkbox", checked: grouped, onchange: () => { grouped = bySeed.checked; note({ each: grouped ? undefined : "1" }); draw(); plot(); } });
  const chosen = () => runs.filter((run) => `${run.name} ${run.method} ${run.model} ${run.state} ${run.tags.join(" ")} ${run.note}`.toLowerCase().includes(filter.value.toLowerCase()));
  const select = (keys) => go("runs", { ...context.params, runs: keys.join(","), sort: by || undefined, down: down ? "1" : undefined, each: grouped ? undefined : "1" });

  function ordered(list, valueOf) {
    const column = columns.find(([name]) => name === by);
    if (!column) return list;
    const compare = (a, b) => (a === null || a === undefined ? 1 : b === null || b === undefined ? -1 : (typeof a === "number" ? a - b : String(a).localeCompare(String(b))) * (down ? -1 : 1));
    return [...list].sort((a, b) => compare(valueOf(a, column[1]), valueOf(b, column[1])));
  }

  function cell(run, column) {
    const value = column[1](run);
    if (column[0] === "Run") return h("td", { class: "name", title: run.folder }, h("a", { href: link("overview", { runs: run.key }) }, run.name));
    if (column[0] === "State") return h("td", {}, h("span", { class: `badge ${value}`, title: run.state }, value));
    if (column[0] === "Tags") return h("td", { class: "name" }, tags(run), " ", editor(run, context.info, draw));
    if (column[0] === "Note") return h("td", { class: "note" }, value);
    if (column[0] === "Step") return h("td", { class: "num" }, run.total ? `${num(run.step)} / ${num(run.total)}` : num(run.step));
    return h("td", { class: isNumber(column) ? "num" : column[0] === "Model" ? "" : "name" }, column[2] ? column[2](value) : value || "–");
  }

  function row(run) {
    const box = h("input", { type: "checkbox", checked: context.keys.includes(run.key), "aria-label": `Show ${run.name}`, onchange: () => { const keys = box.checked ? [...context.keys, run.key] : context.keys.filter((key) => key !== run.key); if (keys.length) select(keys); else box.checked = true; } });
    return h("tr", {}, h("td", {}, box), columns.map((column) => cell(run, column)));
  }

  function groupRow(group) {
    return h("tr", { class: "seeds" }, h("td", {}), columns.map((column) => {
      const values = group.map(column[1]);
      if (column[0] === "Run") return h("td", { class: "name" }, h("b", {}, groupName(group.map((run) => run.name))));
      if (column[2] === num && column[0] !== "Seed" && column[0] !== "Step") return h("td", { class: "num" }, h("b", {}, summary(values).text));
      return h("td", {});
    }));
  }

  function draw() {
    const arrow = (name) => (name === by ? (down ? " ▼" : " ▲") : "");
    fill(head, h("tr", {}, h("th", {}), columns.map((column) => h("th", { class: isNumber(column) ? "num" : "", "aria-sort": column[0] === by ? (down ? "descending" : "ascending") : null },
      h("button", { type: "button", class: "sort", onclick: () => { down = column[0] === by ? !down : isNumber(column); by = column[0]; note({ sort: by, down: down ? "1" : undefined }); draw(); } }, column[0], arrow(column[0]))))));
    const shown = chosen();
    if (!grouped) { fill(body, ordered(shown, (run, value) => value(run)).map(row)); return; }
    const groups = seedGroups(shown.map((run) => run.key), shown).map((group) => group.keys.map((key) => shown.find((run) => run.key === key)));
    const valueOf = (group, value) => { const values = group.map(value); return typeof values.find((one) => one !== null) === "number" ? summary(values).mean : values[0]; };
    fill(body, ordered(groups, valueOf).map((group) => [group.length > 1 && groupRow(group), ordered(group, (run, value) => value(run)).map(row)]));
  }

  const isMain = (name) => mains.some(([main]) => main === name);
  const logged = (run, name) => (name.startsWith("eval/") ? name in run.evaluations : run.main.last !== null && (run.main.name === name || !isMain(name)));
  let drawn = [];
  async function plot() {
    drawn.forEach((chart) => chart.close());
    drawn = [...mains.map(([name]) => name), ...names, "rollout/response_len/mean"].filter((name) => runs.some((run) => context.keys.includes(run.key) && logged(run, name))).slice(0, 4)
      .map((metric) => new Chart({ metric, runs: context.keys, groups: seedGroups(context.keys, runs, !grouped), smooth: 0 }));
    fill(charts, drawn.length ? drawn.map((chart) => chart.element) : empty("The selected runs have logged nothing yet."));
    await Promise.all(drawn.map((chart) => chart.load()));
  }

  const save = () => csv("runs", columns.map(([name]) => name), chosen().map((run) => columns.map(([, value]) => value(run))));
  draw();
  fill(main, h("div", { class: "bar" }, filter, h("label", {}, bySeed, "group by seed"), h("button", { class: "small", type: "button", onclick: () => select(chosen().map((run) => run.key)) }, "select all shown"), h("button", { class: "small", type: "button", onclick: save }, "CSV"), h("span", { class: "dim" }, `${context.keys.length} of ${runs.length} selected`)),
    h("section", { class: "panel scroll runs" }, h("table", {}, head, body)), h("h2", {}, "Curves of the selected runs"), charts);
  await plot();
  return { refresh: (info) => { runs = info?.runs || runs; draw(); return Promise.all(drawn.map((chart) => chart.load())); }, close: () => drawn.forEach((chart) => chart.close()), themed: () => drawn.forEach((c) => { c.shape = ""; c.draw(); }) };
}
