// One prompt over the run, in one run or in several: the responses before and after training.
import * as api from "../api.js";
import { h, fill, empty } from "../dom.js";
import { num } from "../format.js";
import { note, link } from "../route.js";
import { csv } from "../export.js";

export const title = "Before / after";

// "0.25 → 1 (6×)": the mean reward then and now, and how often the prompt occurred.
const change = (p) => `${p.seen > 1 && p.before !== null && p.after !== null ? `${num(p.before, 2)} → ${num(p.after, 2)} ` : ""}(${p.seen}×)`;

export async function render(main, context) {
  const key = context.keys[0];
  const kinds = context.params.kind ? [context.params.kind] : ["eval", "train"];
  let prompts = [], kind = kinds[0];
  for (kind of kinds) {
    prompts = await api.get(api.run(key, "/prompts"), { kind }).catch(() => []);
    if (prompts.length) break;
  }
  if (!prompts.length) { fill(main, empty("No prompt is recorded yet.")); return {}; }
  const pane = h("section", { class: "panel" });
  async function show(hash) {
    note({ prompt: hash, kind });
    for (const item of list.querySelectorAll("button")) item.setAttribute("aria-current", item.value === hash ? "true" : "false");
    const found = await Promise.all(context.keys.map((run) => api.get(api.run(run, `/prompts/${hash}`)).catch(() => [])));
    const text = found.find((groups) => groups.length)?.[0].prompt;
    const rows = context.keys.flatMap((run, i) => found[i].map((g) => [run, g.kind, g.step, g.dataset, g.outcome, g.reward, g.best, g.length, g.response]));
    const save = () => csv(`prompt-${hash}`, ["run", "kind", "step", "dataset", "outcome", "mean reward", "best reward", "tokens", "first response"], rows);
    fill(pane, text && h("pre", { class: "text mono" }, text), context.keys.map((run, i) => one(run, found[i])), rows.length > 0 && h("p", {}, h("button", { class: "small", type: "button", onclick: save }, "CSV")));
  }
  function one(run, groups) {
    if (!groups.length) return h("p", { class: "dim" }, `${run}: this prompt does not occur.`);
    const first = groups[0], last = groups.findLast((entry) => entry.kind === first.kind && entry.dataset === first.dataset);
    const boxes = last === first ? [first] : [first, last];
    return [h("h2", {}, run),
      h("div", { class: "beforeafter" }, boxes.map((entry, i) => h("div", {}, h("h3", {}, `${i ? "After" : "Before"}: step ${entry.step}${entry.dataset ? `, ${entry.dataset}` : ""}`), h("p", {}, `mean reward ${num(entry.reward, 3)} of ${entry.samples}, best ${num(entry.best, 3)}, ${num(entry.length, 3)} tokens `, h("a", { href: link("samples", { runs: run, kind: entry.kind, step: entry.step, id: entry.id }) }, "open")), h("pre", { class: "text mono" }, entry.response)))),
      groups.length > 2 && h("details", {}, h("summary", {}, `all ${groups.length} occurrences`), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["Step", "Reward", "Tokens", "Outcome", "First response"].map((name) => h("th", {}, name)))), h("tbody", {}, groups.map((entry) => h("tr", {}, h("td", {}, h("a", { href: link("samples", { runs: run, kind: entry.kind, step: entry.step, id: entry.id }) }, entry.step)), h("td", { class: "num" }, num(entry.reward, 3)), h("td", { class: "num" }, num(entry.length, 3)), h("td", {}, entry.outcome), h("td", {}, entry.response.slice(0, 200))))))))];
  }
  const list = h("div", { class: "scroll panel plist" }, prompts.map((p) => h("div", {}, h("button", { class: "small", type: "button", value: p.prompt_hash, onclick: () => show(p.prompt_hash) }, `${p.prompt.replace(/\s+/g, " ").slice(0, 70)} ${change(p)}`))));
  fill(main, h("p", { class: "dim" }, kind === "eval" ? "Prompts of the last evaluation, sorted by how much their mean reward rose. Select one to see how its responses changed." : "Prompts of the last rollout, sorted by how much their mean reward rose. Select one to see how its responses changed."), h("div", { class: "split narrow" }, list, pane));
  await show(context.params.prompt || (prompts.find((p) => p.seen > 1) || prompts[0]).prompt_hash);
  return {};
}
