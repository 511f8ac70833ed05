// Every setting and its source; with several runs, the differences between them.
import * as api from "../api.js";
import { h, fill, empty } from "../dom.js";
import { plainValue } from "../format.js";
import { csv } from "../export.js";
import { tip } from "../tip.js";

export const title = "Settings";

export async function render(main, context) {
  const all = await Promise.all(context.keys.map((key) => api.get(api.run(key, "/settings")).catch(() => ({}))));
  const names = [...new Set(all.flatMap((settings) => Object.keys(settings)))].sort();
  if (!names.length) { fill(main, empty("This folder has no run.json, the file with the settings of a run.")); return {}; }
  const several = context.keys.length > 1;
  const rows = names.map((name) => {
    const cells = all.map((settings) => settings[name]), values = cells.map((cell) => (cell ? plainValue(cell.value) : "(absent)"));
    return { name, values, sources: cells.map((cell) => cell?.source || ""), differs: new Set(values).size > 1, own: cells.some((cell) => cell && cell.source !== "default") };
  });
  const query = h("input", { type: "search", placeholder: "filter", "aria-label": "Filter settings", oninput: draw });
  const only = h("select", { "aria-label": "Which settings", onchange: draw }, h("option", { value: "own" }, "not default"), h("option", { value: "all" }, "all"), several && h("option", { value: "differs" }, "different"));
  only.value = several ? "differs" : "own";
  const body = h("tbody", {}), count = h("span", { class: "dim" });
  function chosen() {
    const word = query.value.toLowerCase();
    return rows.filter((row) => (only.value === "all" || (only.value === "differs" ? row.differs : row.own)) && (!word || row.name.includes(word.replaceAll("-", "_").replace(/^_+/, "")) || row.values.join(" ").toLowerCase().includes(word)));
  }
  function draw() {
    const shown = chosen();
    count.textContent = shown.length ? `${shown.length} of ${rows.length}` : several && only.value === "differs" ? "these runs have the same settings" : "no setting matches";
    fill(body, shown.map((row) => h("tr", { class: several && row.differs ? "differs" : "" }, h("td", { class: "mono name" }, `--${row.name.replaceAll("_", "-")}`), row.values.map((value, i) => [h("td", { class: "mono" }, value), h("td", { class: "dim" }, row.sources[i])]))));
  }
  const save = () => csv("settings", ["setting", ...context.keys.flatMap((key) => [key, `${key} source`])], chosen().map((row) => [row.name, ...row.values.flatMap((value, i) => [value, row.sources[i]])]));
  fill(main, h("div", { class: "bar" }, query, h("label", {}, "Show", only), count, h("button", { class: "small", type: "button", onclick: save }, "CSV")),
    h("div", { class: "panel scroll settings" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Setting"), context.keys.map((key) => [h("th", {}, several ? key : "Value"), h("th", {}, "Source ", tip("Where the value comes from: the command line, a file, the default, or slime, which derived it and gives the reason."))]))), body)));
  draw();
  return {};
}
