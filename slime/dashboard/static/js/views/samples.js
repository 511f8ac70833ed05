// Prompts and responses: any of a million, sorted, searched, opened turn by turn and token by token.
import * as api from "../api.js";
import { h, fill, empty, debounce } from "../dom.js";
import { num } from "../format.js";
import { note } from "../route.js";
import { VirtualList } from "../list.js";
import { showAnswer } from "./answer.js";
import { csv } from "../export.js";
import { tip } from "../tip.js";

export const title = "Samples";
const ORDERS = { newest: "newest first", made: "oldest first", worst: "lowest reward", best: "highest reward", longest: "longest", shortest: "shortest", difference: "largest reward spread in a group" };

function bar(reward) {
  if (reward === null) return null;
  const mark = h("span", { class: "rbar" });
  mark.style.width = `${Math.round(24 * Math.max(0, Math.min(1, reward)))}px`;
  return mark;
}

export async function render(main, context) {
  const key = context.keys[0], state = { kind: "train", order: "newest", ...context.params };
  const record = await api.get(api.run(key, "/record"));
  if (record.missing || !record.rollouts) {
    fill(main, empty(record.missing || "The record holds no rollout yet.", " Samples are recorded as soon as a rollout is complete, unless the run was started with --record-max-mib 0."));
    return {};
  }
  const pane = h("section", { class: "panel", "aria-label": "Sample" }, empty("Select a sample in the list, or move with the arrow keys."));
  const status = h("span", { class: "dim" });
  const list = new VirtualList({
    label: "Samples",
    fetchPage: (offset, after, limit) => api.get(api.run(key, "/samples"), { kind: state.kind, step: state.step, outcome: state.outcome, q: state.q, order: state.order, offset, after, limit }),
    render: (row) => [h("span", { class: "num" }, `${row.kind === "eval" ? "eval " : ""}${row.step}`), h("span", { class: "num" }, bar(row.reward), num(row.reward, 3)), h("span", { class: "num" }, row.length), h("span", {}, row.outcome), h("span", { title: row.prompt }, row.prompt), h("span", { title: row.response }, row.response)],
    onOpen: (row) => { chosen = !opening; open(row.id); },
  });
  list.onLoad = (found) => {
    const searching = found.searched !== undefined;
    status.textContent = found.total !== null ? `${num(found.total)} samples` : `${num(list.known)} found${searching ? `, ${Math.round(100 * found.searched)}% searched` : ""}`;
    if (searching && found.after && found.rows.length < 100) resume.hidden = false; else resume.hidden = true;
  };
  let opened = 0, chosen = Boolean(context.params.id), opening = false; // chosen: by the user, not by default
  async function open(id) {
    note({ id });
    opened += 1;
    const mine = opened;
    const answer = await api.get(api.run(key, `/samples/${id}`));
    if (mine === opened) showAnswer(pane, answer, { key, open, keys: context.keys });
  }
  async function again() {
    note({ kind: state.kind, step: state.step, outcome: state.outcome, q: state.q, order: state.order });
    list.reset();
    try {
      await list.start();
      if (list.count && !chosen) { opening = true; list.open(0); opening = false; }
      if (!list.count) fill(pane, empty("No sample to show."));
      if (!list.count) status.textContent = state.q && !list.ended ? status.textContent : "no sample matches";
      // Text may be far down: go on while little is found.
      while (state.q && list.total === null && list.known < 50 && list.after && !resume.stopped) {
        const found = await api.get(api.run(key, "/samples"), { kind: state.kind, step: state.step, outcome: state.outcome, q: state.q, order: state.order, after: list.after, limit: 100 });
        const first = list.pages.get(0);
        first.push(...found.rows);
        list.known = first.length; list.after = found.after; list.ended = true;
        list.onLoad({ ...found, total: null });
        list.later();
        if (!found.after) break;
      }
    } catch (error) { status.textContent = error.message; list.draw(); }
  }
  const resume = h("button", { class: "small", hidden: true, type: "button", onclick: () => { resume.stopped = true; } }, "stop searching");
  const pick = (name, options, label) => {
    const box = h("select", { "aria-label": label, onchange: () => { state[name] = box.value; again(); } }, Object.entries(options).map(([value, text]) => h("option", { value }, text)));
    box.value = state[name] ?? "";
    return h("label", {}, label, box);
  };
  const step = h("input", { type: "number", min: 0, placeholder: "all", value: state.step ?? "", "aria-label": "Step", onchange: () => { state.step = step.value; again(); } });
  const query = h("input", { type: "search", placeholder: "search prompts and responses", value: state.q ?? "", "aria-label": "Search", oninput: debounce(() => { state.q = query.value; resume.stopped = false; again(); }, 250) });
  const save = () => csv(`${key}-samples`, ["step", "kind", "group", "sample", "reward", "length", "outcome", "prompt", "response"], [...list.pages.values()].flat().map((r) => [r.step, r.kind, r.group, r.sample, r.reward, r.length, r.outcome, r.prompt, r.response]));
  fill(main,
    h("div", { class: "bar" }, pick("kind", { train: "training", eval: "evaluation", "": "both" }, "Dataset split"), h("label", {}, "Step", step), pick("order", ORDERS, "Sort"), pick("outcome", { "": "any", trained: "trained", filtered: "filtered", failed: "failed", evaluated: "evaluated" }, "Outcome"), tip("The outcome of a sample's group: trained, filtered (for example because all its rewards were equal), failed, or evaluated. A group is one prompt with all its responses; its reward spread is the highest minus the lowest reward."), query, status, resume, h("button", { class: "small", type: "button", onclick: save }, "CSV")),
    h("div", { class: "split" }, h("div", {}, h("div", { class: "vhead", "aria-hidden": "true" }, ["step", "reward", "tokens", "outcome", "prompt", "response"].map((name) => h("span", {}, name))), list.element), pane));
  await again();
  if (context.params.id) open(context.params.id);
  return { refresh: async () => { if (state.order === "newest" && list.element.scrollTop === 0 && !chosen && !state.q) await again(); } };
}
