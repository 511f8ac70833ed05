// The frame: which runs, which view, what changed; keys that work everywhere.
import * as api from "./api.js";
import { $, h, fill, empty, say } from "./dom.js";
import { current, go, link } from "./route.js";
import { stateName } from "./format.js";
import { seriesColor } from "./colors.js";
import * as overview from "./views/overview.js";
import * as curves from "./views/curves.js";
import * as samples from "./views/samples.js";
import * as prompts from "./views/prompts.js";
import * as timeline from "./views/timeline.js";
import * as waste from "./views/waste.js";
import * as actions from "./views/actions.js";
import * as settings from "./views/settings.js";
import * as logs from "./views/logs.js";

const VIEWS = { overview, curves, samples, prompts, timeline, waste, settings, logs, actions };
let info = { runs: [] }, shown = null, drawing = 0;

function keysOf(params) {
  const known = new Set(info.runs.map((run) => run.key));
  const wanted = (params.runs || "").split(",").filter((key) => known.has(key));
  return wanted.length ? wanted : info.shown || [];
}

function frame(view, params, keys) {
  fill($("nav"), Object.entries(VIEWS).map(([name, module], index) => h("a", { href: link(name, { runs: keys.join(",") }), "aria-current": name === view ? "page" : null, title: `key ${index + 1}` }, module.title)));
  fill($("runs"), h("div", { class: "chips", role: "group", "aria-label": "Runs" }, info.runs.map((run) => {
    const index = keys.indexOf(run.key), swatch = h("span", { class: "swatch" });
    if (index >= 0) swatch.style.background = seriesColor(index);
    return h("label", { class: "chip" }, h("input", { type: "checkbox", checked: index >= 0, onchange: (event) => {
      const next = event.target.checked ? [...keys, run.key] : keys.filter((key) => key !== run.key);
      go(view, { ...params, runs: (next.length ? next : keys).join(",") });
      if (!next.length) event.target.checked = true;
    } }), swatch, run.name, h("span", { class: `badge ${stateName(run.state)}` }, stateName(run.state)));
  })));
  const here = $("nav").querySelector("[aria-current]"), nav = $("nav");
  if (here) nav.scrollLeft = here.offsetLeft - (nav.clientWidth - here.offsetWidth) / 2;
  document.title = `${keys.join(", ")} · ${VIEWS[view].title}`;
}

async function draw() {
  const { view, params } = current();
  const name = VIEWS[view] ? view : "overview", keys = keysOf(params), mine = (drawing += 1);
  shown?.close?.();
  shown = null;
  if (!keys.length) { fill($("main"), empty("There is no run here.")); return; }
  frame(name, params, keys);
  const started = performance.now();
  try {
    const made = await VIEWS[name].render($("main"), { keys, params, runs: info.runs, info });
    if (mine === drawing) shown = made; else made.close?.();
  } catch (error) {
    if (mine === drawing) failed(error);
  }
  document.body.dataset.view = name;
  document.body.dataset.drawn = String(mine);
  document.body.dataset.ms = String(Math.round(performance.now() - started));
}

function failed(error) {
  if (error.status === 401) { askToken(); return; }
  fill($("main"), empty(`This cannot be shown: ${error.message}`));
}

function askToken() {
  const input = h("input", { type: "password", "aria-label": "Token", autocomplete: "off" });
  const form = h("form", { onsubmit: (event) => { event.preventDefault(); api.setToken(input.value); start(); } }, h("p", {}, "This dashboard needs its token: paste the address from the file that `slime dashboard` named when it started."), input, " ", h("button", { class: "main" }, "Open"));
  fill($("main"), h("div", { class: "empty" }, form));
  input.focus();
}

function theme(value) {
  document.documentElement.dataset.theme = value;
  localStorage.setItem("theme", value);
  shown?.themed?.();
}

function help() {
  const keys = [["1 – 9", "views"], ["?", "this list"], ["t", "light or dark"], ["r", "read anew"], ["arrow keys", "move in lists, charts, tokens and the timeline"], ["+  −  0", "zoom a chart or the timeline"], ["Tab, Enter, Space", "everything else"]];
  const box = h("dialog", { "aria-label": "Keys" }, h("h2", {}, "Keys"), h("table", {}, keys.map(([key, what]) => h("tr", {}, h("td", { class: "mono" }, key), h("td", {}, what)))), h("p", {}, h("button", { class: "main", onclick: () => box.close() }, "Close")));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
}

window.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const names = Object.keys(VIEWS), number = Number(event.key);
  if (event.key >= "1" && event.key <= "9" && names[number - 1]) go(names[number - 1], { runs: keysOf(current().params).join(",") });
  else if (event.key === "?") help();
  else if (event.key === "t") $("theme").click();
  else if (event.key === "r") draw();
});

let busy = false, missed = false;
async function changed(keys) {
  if (!keys.some((key) => keysOf(current().params).includes(key))) return;
  if (busy) { missed = true; return; }
  busy = true;
  try {
    info = await api.get("/runs");
    const { view, params } = current();
    frame(VIEWS[view] ? view : "overview", params, keysOf(params));
    await shown?.refresh?.();
    document.body.dataset.refreshed = String(Number(document.body.dataset.refreshed || 0) + 1);
  } catch (error) { if (error.name !== "AbortError") say(error.message); }
  busy = false;
  if (missed) { missed = false; setTimeout(() => changed(keys), 300); }
}

async function start() {
  try {
    info = await api.get("/runs");
  } catch (error) { failed(error); return; }
  await draw();
  document.body.dataset.ready = "1";
  api.listen(changed, (on) => { $("live").textContent = on ? "live" : "not connected"; });
}

theme(localStorage.getItem("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("help").addEventListener("click", help);
window.addEventListener("hashchange", draw);
start();
