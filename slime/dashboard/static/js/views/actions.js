// Sends requests to a run, which carries them out between two steps. Every request and its reply stay in the record.
import * as api from "../api.js";
import { h, fill, empty, say } from "../dom.js";
import { clock, duration, isLive, num } from "../format.js";

export const title = "Actions";
const NO_TOKEN = "Actions need the token: paste the address from the file that `slime dashboard` named when it started.";
const SURE = { stop: "End the run after this step?" };

export async function render(main, context) {
  const key = context.keys[0], body = h("tbody", {}), status = h("p", { class: "dim", role: "status" });
  const can = context.info.may_act;
  const token = h("input", { type: "password", "aria-label": "Token", autocomplete: "off" });
  const unlock = h("form", { hidden: true, onsubmit: (event) => { event.preventDefault(); api.setToken(token.value); refresh(); } }, h("label", {}, "Token or address ", token), " ", h("button", {}, "Use it"));
  let state = "", since = null;
  async function ask(name, value) {
    if (SURE[name] && !window.confirm(SURE[name])) return;
    try {
      await api.act(key, name, { value });
      say("Requested. It takes effect after the current step.");
    } catch (error) {
      if (error.status === 401) api.setToken("");
      say(error.status === 401 ? NO_TOKEN : error.message);
    }
    await refresh();
  }
  function one(name, row) {
    if (!row.setting) return h("div", { class: "panel" }, h("button", { class: name === "stop" ? "danger" : "main", type: "button", onclick: () => ask(name, null), "data-action": name }, row.title), h("p", {}, row.what));
    const input = h("input", { type: "number", step: "any", min: 0, required: true, "aria-label": row.title, placeholder: num(context.settings[row.setting]?.value) });
    return h("form", { class: "panel", onsubmit: (event) => { event.preventDefault(); ask(name, Number(input.value)); } }, h("label", {}, row.title, " ", input), h("button", {}, "Change"), h("p", {}, row.what));
  }
  // How long the run has been paused, counted on every second.
  const clockText = h("b", {});
  function tick() { clockText.textContent = since ? `Paused for ${duration(Date.now() / 1000 - since)}` : ""; }
  const timer = setInterval(tick, 1000);
  async function refresh() {
    const [details, rows] = await Promise.all([api.get(api.run(key)), api.get(api.run(key, "/actions")).catch(() => [])]);
    state = details.state;
    since = details.paused_since;
    status.textContent = !can ? "Read-only: actions are disabled." : !isLive(state) ? `Read-only: this run has ended (${state}), so actions are disabled.` : !api.hasToken() ? NO_TOKEN : state === "paused" ? "The run is paused." : "The run is active. A request takes effect after the current step.";
    tick();
    unlock.hidden = !can || !isLive(state) || api.hasToken();
    for (const element of main.querySelectorAll(".acts button, .acts input")) element.disabled = !can || !isLive(state) || !api.hasToken() || element.dataset.action === (state === "paused" ? "pause" : "resume");
    fill(body, rows.length ? rows.reverse().map((row) => h("tr", {}, h("td", {}, clock(row.time)), h("td", {}, row.name, row.value !== null && ` ${typeof row.value === "number" ? num(row.value) : row.value}`), h("td", {}, row.who), h("td", {}, h("span", { class: `badge ${row.state === "done" ? "finished" : row.state === "refused" ? "ended" : "running"}` }, row.state)), h("td", {}, row.reply || ""))) : h("tr", {}, h("td", { colSpan: 5, class: "dim" }, "No actions yet.")));
  }
  context.settings = await api.get(api.run(key, "/settings")).catch(() => ({}));
  const actions = Object.entries(context.info.actions);
  fill(main, h("p", { class: "pause" }, clockText), status, unlock, h("div", { class: "acts" }, actions.map(([name, row]) => one(name, row))), h("section", { class: "panel scroll" }, h("h2", {}, "Action history"), h("table", {}, h("thead", {}, h("tr", {}, ["Time", "Action", "By", "State", "Reply"].map((name) => h("th", {}, name)))), body)));
  await refresh();
  return { refresh, close: () => clearInterval(timer) };
}
