// The frame: which runs, which view, what changed; keys that work everywhere.
import * as api from "./api.js";
import { $, h, fill, empty, say } from "./dom.js";
import { current, go, link } from "./route.js";
import { isLive, stateName } from "./format.js";
import { seriesColor } from "./colors.js";
import * as overview from "./views/overview.js";
import * as allRuns from "./views/runs.js";
import * as curves from "./views/curves.js";
import * as samples from "./views/samples.js";
import * as prompts from "./views/prompts.js";
import * as distributions from "./views/distributions.js";
import * as system from "./views/system.js";
import * as timeline from "./views/timeline.js";
import * as waste from "./views/waste.js";
import * as actions from "./views/actions.js";
import * as settings from "./views/settings.js";
import * as logs from "./views/logs.js";

const VIEWS = { overview, runs: allRuns, curves, samples, prompts, distributions, timeline, system, waste, settings, logs, actions };
const KEYS = { 1: "overview", 2: "curves", 3: "samples", 4: "prompts", 5: "timeline", 6: "waste", 7: "settings", 8: "logs", 9: "actions", 0: "distributions", a: "runs", s: "system" };
const keyOf = (view) => Object.keys(KEYS).find((key) => KEYS[key] === view);
let info = { runs: [] }, shown = null, drawing = 0, connected = null;
const MANY = 4; // chips of runs; more are in a menu

function keysOf(params) {
  const known = new Set(info.runs.map((run) => run.key));
  const wanted = (params.runs || "").split(",").filter((key) => known.has(key));
  return wanted.length ? wanted : info.shown || [];
}

function frame(view, params, keys) {
  fill($("nav"), Object.entries(VIEWS).filter(([name]) => name !== "runs" || info.runs.length > 1).map(([name, module]) => h("a", { href: link(name, { runs: keys.join(",") }), "aria-current": name === view ? "page" : null, title: `key ${keyOf(name)}` }, module.title)));
  badge(keys);
  const chips = h("div", { class: "chips", role: "group", "aria-label": "Runs" }, info.runs.map((run) => {
    const index = keys.indexOf(run.key), swatch = h("span", { class: "swatch" });
    if (index >= 0) swatch.style.background = seriesColor(index);
    return h("label", { class: "chip" }, h("input", { type: "checkbox", checked: index >= 0, onchange: (event) => {
      const next = event.target.checked ? [...keys, run.key] : keys.filter((key) => key !== run.key);
      go(view, { ...params, runs: (next.length ? next : keys).join(",") });
      if (!next.length) event.target.checked = true;
    } }), swatch, run.name, h("span", { class: `badge ${stateName(run.state)}` }, stateName(run.state)));
  }));
  const open = $("runs").querySelector("details")?.open;
  fill($("runs"), info.runs.length > MANY ? h("details", { class: "picker", open }, h("summary", {}, `${keys.length} of ${info.runs.length} runs selected`), chips) : chips);
  const here = $("nav").querySelector("[aria-current]"), nav = $("nav");
  if (here) nav.scrollLeft = here.offsetLeft - (nav.clientWidth - here.offsetWidth) / 2;
  document.title = `${keys.join(", ")} · ${VIEWS[view].title}`;
}

// "live" is a statement about the shown runs; without a live run only a lost connection is worth a word.
function badge(keys) {
  const live = info.runs.some((run) => keys.includes(run.key) && isLive(run.state));
  const text = connected === false ? "disconnected" : live && connected ? "live" : "";
  $("live").textContent = text;
  $("live").className = text ? `badge ${live && connected ? "running" : "ended"}` : "";
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
  const keys = [["1 – 9, 0", "views; the title of a tab names its key"], ["a", "all runs"], ["s", "system"], ["?", "this list"], ["t", "light or dark"], ["r", "reload the data"], ["arrow keys", "move in lists, charts, tokens and the timeline"], ["+  −  0", "zoom a chart or the timeline"], ["Tab, Enter, Space", "everything else"]];
  const box = h("dialog", { "aria-label": "Keys" }, h("h2", {}, "Keys"), h("table", {}, keys.map(([key, what]) => h("tr", {}, h("td", { class: "mono" }, key), h("td", {}, what)))), h("p", {}, h("button", { class: "main", onclick: () => box.close() }, "Close")));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
}

window.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (KEYS[event.key]) go(KEYS[event.key], { runs: keysOf(current().params).join(",") });
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
    await shown?.refresh?.(info);
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
  api.listen(changed, (on) => { connected = on; badge(keysOf(current().params)); });
}

theme(localStorage.getItem("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("help").addEventListener("click", help);
window.addEventListener("hashchange", draw);
start();
