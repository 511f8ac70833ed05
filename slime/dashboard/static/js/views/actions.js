// Asks something of a run; the loop answers between two steps. Every request and answer stays in the record.
import * as api from "../api.js";
import { h, fill, empty, say } from "../dom.js";
import { clock, num } from "../format.js";

export const title = "Actions";
const SURE = { stop: "End the run after this step?" };

export async function render(main, context) {
  const key = context.keys[0], body = h("tbody", {}), status = h("p", { class: "dim", role: "status" });
  const can = context.info.may_act;
  let state = "";
  async function ask(name, value) {
    if (SURE[name] && !window.confirm(SURE[name])) return;
    try {
      await api.act(key, name, value);
      say("Asked. The run answers after the step it is in.");
    } catch (error) { say(error.status === 401 ? "Actions need the token: open the address that `slime dashboard` printed." : error.message); }
    await refresh();
  }
  function one(name, row) {
    if (!row.setting) return h("div", { class: "panel" }, h("button", { class: name === "stop" ? "danger" : "main", type: "button", onclick: () => ask(name, null) }, row.title), h("p", {}, row.what));
    const input = h("input", { type: "number", step: "any", min: 0, required: true, "aria-label": row.title, placeholder: num(context.settings[row.setting]?.value) });
    return h("form", { class: "panel", onsubmit: (event) => { event.preventDefault(); ask(name, Number(input.value)); } }, h("label", {}, row.title, " ", input), h("button", {}, "Change"), h("p", {}, row.what));
  }
  async function refresh() {
    const [details, rows] = await Promise.all([api.get(api.run(key)), api.get(api.run(key, "/actions")).catch(() => [])]);
    state = details.state;
    status.textContent = !can ? "This page only shows." : state !== "running" ? `Nobody would answer: ${state === "finished" ? "the run is finished" : state}.` : api.hasToken() ? "The run runs, and answers after the step it is in." : "Actions need the token: open the address that `slime dashboard` printed.";
    for (const element of main.querySelectorAll(".acts button, .acts input")) element.disabled = !can || state !== "running" || !api.hasToken();
    fill(body, rows.length ? rows.reverse().map((row) => h("tr", {}, h("td", {}, clock(row.time)), h("td", {}, row.name, row.value !== null && ` ${num(row.value)}`), h("td", {}, row.who), h("td", {}, h("span", { class: `badge ${row.state === "done" ? "finished" : row.state === "refused" ? "ended" : "running"}` }, row.state)), h("td", {}, row.answer || ""))) : h("tr", {}, h("td", { colSpan: 5, class: "dim" }, "Nothing was asked of this run so far.")));
  }
  context.settings = await api.get(api.run(key, "/settings")).catch(() => ({}));
  const actions = Object.entries(context.info.actions);
  fill(main, status, h("div", { class: "acts" }, actions.map(([name, row]) => one(name, row))), h("section", { class: "panel scroll" }, h("h2", {}, "Asked so far"), h("table", {}, h("thead", {}, h("tr", {}, ["When", "What", "By", "State", "Answer"].map((name) => h("th", {}, name)))), body)));
  await refresh();
  return { refresh };
}
