// One answer: its text coloured token by token by probability, advantage, weight version or mask.
import * as api from "../api.js";
import { h, fill, empty } from "../dom.js";
import { num } from "../format.js";
import { link, note, current } from "../route.js";
import { tip } from "../tip.js";

const SHOWN = 3000; // tokens at first
const MODES = {
  probability: ["Probability", "How likely the model found each token when it drew it. Orange: a surprise, blue: expected."],
  advantage: ["Advantage", "How much better (blue) or worse (orange) than its siblings the trainer took this answer to be."],
  version: ["Version", "Which weights wrote each token. More than one: the weights changed while it was written."],
  mask: ["Mask", "Blue tokens are trained on; struck-out ones are not (text of tools, for example)."],
  plain: ["Text", "The answer as text."],
};

export function bucketOf(share) { return Math.max(0, Math.min(7, Math.floor(share * 8))); }

export function tokenClass(mode, answer, index, scale, versions) {
  if (mode === "probability" && answer.log_probs) return `p${bucketOf(Math.exp(answer.log_probs[index] ?? 0) - 1e-9)}`;
  if (mode === "advantage" && answer.advantage) {
    const value = answer.advantage.tokens ? answer.advantage.tokens[index] : answer.advantage.value;
    return `p${bucketOf(0.5 + 0.5 * (value / scale))}`;
  }
  if (mode === "version") {
    const at = answer.versions.findIndex(([, start, end]) => index >= start && index < end);
    return at >= 0 ? `v${versions.indexOf(answer.versions[at][0]) % 8}` : "";
  }
  if (mode === "mask") return answer.mask && !answer.mask[index] ? "m0" : "m1";
  return "";
}

function legend(mode, answer, versions, scale) {
  const marks = (items) => h("div", { class: "legend" }, items.map(([name, text]) => h("i", { class: name }, text)));
  if (mode === "probability") return answer.log_probs ? marks([["p0", "0–12%"], ["p2", "25%"], ["p4", "50%"], ["p6", "75%"], ["p7", "88–100%"]]) : empty("This run kept no log-probs.");
  if (mode === "advantage") return answer.advantage ? marks([["p0", num(-scale)], ["p3", "below 0"], ["p4", "above 0"], ["p7", num(scale)]]) : empty("No advantage is recorded: the answer was not trained on, or a version of slime before 0.3 wrote the record.");
  if (mode === "version") return versions.length ? marks(versions.map((name, i) => [`v${i % 8}`, name])) : empty("The engine told no versions.");
  if (mode === "mask") return marks([["m1", "trained on"], ["m0", "left out"]]);
  return null;
}

function tokenBox(answer, mode) {
  const count = answer.tokens.length, versions = [...new Set(answer.versions.map(([name]) => name))];
  const values = answer.advantage ? answer.advantage.tokens || [answer.advantage.value] : [];
  const scale = Math.max(1e-9, ...values.map(Math.abs));
  const known = Object.keys(answer.texts).length > 0;
  const box = h("div", { class: `tokens mono ${mode === "plain" ? "" : "lines"}`, tabIndex: 0, role: "group", "aria-label": "Tokens; arrow keys move from one to the next" });
  const info = h("div", { class: "legend", role: "status" });
  let at = -1, made = 0;
  function more() {
    const end = Math.min(count, made + SHOWN), part = document.createDocumentFragment();
    for (; made < end; made += 1) {
      const text = known ? answer.texts[answer.tokens[made]] ?? "�" : `${answer.tokens[made]} `;
      const mark = document.createElement("i");
      mark.className = tokenClass(mode, answer, made, scale, versions);
      mark.textContent = text;
      mark.dataset.i = made;
      part.append(mark);
    }
    box.append(part);
    if (made < count) {
      const button = h("button", { class: "small", type: "button", onclick: () => { button.remove(); more(); } }, `${count - made} more tokens`);
      box.append(button);
    }
  }
  function show(index) {
    if (index < 0 || index >= made) return;
    box.querySelector(".at")?.classList.remove("at");
    at = index;
    const mark = box.querySelector(`[data-i="${index}"]`);
    mark?.classList.add("at");
    mark?.scrollIntoView({ block: "nearest" });
    const p = answer.log_probs?.[index], adv = answer.advantage && (answer.advantage.tokens ? answer.advantage.tokens[index] : answer.advantage.value);
    const version = answer.versions.find(([, start, end]) => index >= start && index < end);
    fill(info, `token ${index + 1} of ${count}`, h("b", {}, `“${answer.texts[answer.tokens[index]] ?? "?"}”`), `id ${answer.tokens[index]}`,
      p !== undefined && h("span", {}, `probability ${num(Math.exp(p), 3)} (log ${num(p, 3)})`), adv !== null && adv !== undefined && h("span", {}, `advantage ${num(adv, 3)}`),
      version && h("span", {}, `weights ${version[0]}`), answer.mask && !answer.mask[index] && h("span", {}, "not trained on"));
  }
  box.addEventListener("click", (event) => { const i = event.target.dataset?.i; if (i !== undefined) show(Number(i)); });
  box.addEventListener("mouseover", (event) => { const i = event.target.dataset?.i; if (i !== undefined) show(Number(i)); });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { show(Math.max(0, at + step)); event.preventDefault(); event.stopPropagation(); }
  });
  more();
  return [legend(mode, answer, versions, scale), !known && mode !== "plain" && h("p", { class: "dim" }, "The record has no text of tokens (an older version wrote it): ids are shown."), box, info];
}

export function showAnswer(pane, answer, { key, open, keys }) {
  let mode = current().params.color || "probability";
  const body = h("div", {});
  const draw = () => fill(body, mode === "plain" || !answer.tokens.length ? h("pre", { class: "text" }, answer.response) : tokenBox(answer, mode));
  const modes = h("div", { class: "chips", role: "radiogroup", "aria-label": "Colour by" }, Object.entries(MODES).map(([name, [text, what]]) => h("label", { class: "chip" },
    h("input", { type: "radio", name: "mode", value: name, checked: name === mode, onchange: () => { mode = name; note({ color: name }); draw(); } }), text, tip(what))));
  const parts = Object.entries(answer.reward_parts || {});
  fill(pane,
    h("h2", {}, `${answer.kind === "eval" ? `Evaluation ${answer.dataset ?? ""} ` : "Step "}${answer.step}, answer ${answer.sample ?? answer.id}`),
    h("p", {}, "reward ", h("b", {}, num(answer.reward)), ` · ${answer.length} tokens · ${answer.status} · ${answer.outcome}`, answer.reason && ` (${answer.reason})`, answer.advantage && ` · advantage ${num(answer.advantage.value)}`, answer.label !== null && h("span", {}, " · expected ", h("code", {}, answer.label))),
    answer.failure && h("p", { class: "trouble" }, `no reward: ${answer.failure}`),
    parts.length > 0 && h("p", { class: "dim" }, parts.map(([name, value]) => `${name} ${typeof value === "number" ? num(value) : JSON.stringify(value)}`).join(" · ")),
    h("h3", {}, "Prompt"), h("pre", { class: "text mono" }, answer.prompt),
    h("h3", {}, "Answer"), modes, body,
    answer.siblings.length > 1 && [h("h3", {}, "The group"), h("div", { class: "sib" }, answer.siblings.map((s) => h("button", { type: "button", "aria-current": s.id === answer.id ? "true" : null, onclick: () => open(s.id), title: `${s.length} tokens, ${s.status}` }, num(s.reward, 3))))],
    h("h3", {}, "This prompt over the run"), history(answer, key, keys, open));
  draw();
}

function history(answer, key, keys) {
  const box = h("div", {}, h("button", { class: "small", type: "button", onclick: load }, "Show before and after"), " ", h("a", { href: link("prompts", { runs: keys.join(","), prompt: answer.prompt_hash }) }, "all of it"));
  async function load() {
    const all = await api.get(api.run(key, `/prompts/${answer.prompt_hash}`));
    const found = all.filter((entry) => entry.kind === answer.kind && entry.dataset === answer.dataset);
    if (found.length < 2) { fill(box, h("p", { class: "dim" }, "It occurred once so far.")); return; }
    const [first, last] = [found[0], found.at(-1)];
    fill(box, h("div", { class: "beforeafter" }, [first, last].map((entry) => h("div", {}, h("b", {}, `step ${entry.step} · mean reward ${num(entry.reward, 3)}`), h("pre", { class: "text mono" }, entry.response)))));
  }
  return box;
}
