// One sample: its conversation turn by turn, tokens of the policy coloured by probability, advantage, version or mask.
import * as api from "../api.js";
import { h, fill, empty, say } from "../dom.js";
import { num, duration } from "../format.js";
import { link, note, current } from "../route.js";
import { tip } from "../tip.js";
import { download } from "../export.js";
import { wordDiff } from "../diff.js";
import { conversation, isSampled, placeImages, tree } from "../turns.js";

const SHOWN = 3000; // tokens at first
const SHOWN_MESSAGES = 40;
const MODES = {
  probability: ["Probability", "The probability of each token when the policy sampled it. Orange: unlikely, blue: likely."],
  advantage: ["Advantage", "The advantage that the trainer computed: better (blue) or worse (orange) than the other responses of the group."],
  version: ["Version", "The weight version that generated each token. More than one: a weight sync happened during generation."],
  mask: ["Mask", "Blue tokens are trained; struck-out tokens are not (for example text of tools)."],
  plain: ["Text", "The response without colours."],
};

export function bucketOf(share) { return Math.max(0, Math.min(7, Math.floor(share * 8))); }

export function tokenClass(mode, answer, index, scale, versions) {
  if (mode === "mask") return answer.mask && !answer.mask[index] ? "m0" : "m1";
  if (!isSampled(answer, index)) return "env";
  if (mode === "probability" && answer.log_probs) return `p${bucketOf(Math.exp(answer.log_probs[index] ?? 0) - 1e-9)}`;
  if (mode === "advantage" && answer.advantage) {
    const value = answer.advantage.tokens ? answer.advantage.tokens[index] : answer.advantage.value;
    return `p${bucketOf(0.5 + 0.5 * (value / scale))}`;
  }
  if (mode === "version") {
    const at = answer.versions.findIndex(([, start, end]) => index >= start && index < end);
    return at >= 0 ? `v${versions.indexOf(answer.versions[at][0]) % 8}` : "";
  }
  return "";
}

function legend(mode, answer, versions, scale) {
  const marks = (items) => h("div", { class: "legend" }, items.map(([name, text]) => h("i", { class: name }, text)));
  if (mode === "probability") return answer.log_probs ? marks([["p0", "0–12%"], ["p2", "25%"], ["p4", "50%"], ["p6", "75%"], ["p7", "88–100%"]]) : empty("This run recorded no log-probs.");
  if (mode === "advantage") return answer.advantage ? marks([["p0", num(-scale)], ["p3", "below 0"], ["p4", "above 0"], ["p7", num(scale)]]) : empty("No advantage is recorded: the sample was not trained, or a version of slime before 0.3 wrote the record.");
  if (mode === "version") return versions.length ? marks(versions.map((name, i) => [`v${i % 8}`, name])) : empty("The engine reported no weight versions.");
  if (mode === "mask") return marks([["m1", "trained"], ["m0", "not trained"]]);
  return null;
}

const versionsOf = (answer) => [...new Set(answer.versions.map(([name]) => name))];
function scaleOf(answer) {
  const values = answer.advantage ? answer.advantage.tokens || [answer.advantage.value] : [];
  return values.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-9);
}

function tokenBox(answer, mode, info, start = 0, count = answer.tokens.length) {
  const versions = versionsOf(answer), scale = scaleOf(answer);
  const known = Object.keys(answer.texts).length > 0;
  const box = h("div", { class: `tokens mono ${mode === "plain" ? "" : "lines"}`, tabIndex: 0, role: "group", "aria-label": "Tokens; arrow keys move from one to the next" });
  let at = start - 1, made = start;
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
    if (index < start || index >= made) return;
    box.querySelector(".at")?.classList.remove("at");
    at = index;
    const mark = box.querySelector(`[data-i="${index}"]`);
    mark?.classList.add("at");
    mark?.scrollIntoView({ block: "nearest" });
    const sampled = isSampled(answer, index), p = sampled ? answer.log_probs?.[index] : undefined;
    const adv = sampled && answer.advantage ? (answer.advantage.tokens ? answer.advantage.tokens[index] : answer.advantage.value) : null;
    const version = answer.versions.find(([, first, end]) => index >= first && index < end);
    fill(info, `token ${index + 1} of ${answer.tokens.length}`, h("b", {}, `“${answer.texts[answer.tokens[index]] ?? "?"}”`), `id ${answer.tokens[index]}`,
      p !== undefined && h("span", {}, `probability ${num(Math.exp(p), 3)} (log ${num(p, 3)})`), adv !== null && adv !== undefined && h("span", {}, `advantage ${num(adv, 3)}`),
      version && h("span", {}, `weights ${version[0]}`), !sampled && h("span", {}, "not sampled by the policy"), answer.mask && !answer.mask[index] && h("span", {}, "not trained"));
  }
  const pointed = (event) => { const i = event.target.dataset?.i; if (i !== undefined) show(Number(i)); };
  box.addEventListener("click", pointed);
  box.addEventListener("mouseover", pointed);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) { show(Math.max(start, at + step)); event.preventDefault(); event.stopPropagation(); }
  });
  more();
  return box;
}

function toolCard(call) {
  const given = call.arguments, pairs = given && typeof given === "object" && !Array.isArray(given) ? Object.entries(given) : null;
  return h("div", { class: "call" }, h("div", {}, h("b", { class: "mono" }, call.name), h("span", { class: "dim" }, " tool call")),
    pairs ? pairs.length > 0 && h("dl", {}, pairs.map(([name, value]) => [h("dt", { class: "mono" }, name), h("dd", { class: "mono" }, typeof value === "string" ? value : JSON.stringify(value))]))
      : h("p", { class: "mono" }, given === null ? "Its arguments are in the text above." : typeof given === "string" ? given : JSON.stringify(given)),
    call.result !== undefined && [h("div", { class: "dim" }, "result"), h("pre", { class: "text mono" }, call.result)]);
}

// The record's small copies, which are PNG or JPEG files; anything else is not given to the browser.
function pictures(answer, places) {
  return places.length > 0 && h("div", { class: "images" }, places.map((place) => {
    const source = answer.images[place];
    return /^data:image\/(png|jpeg);base64,[A-Za-z0-9+/=]+$/.test(source || "") ? h("img", { src: source, alt: `image ${place + 1}`, title: `image ${place + 1} of ${answer.images.length}`, loading: "lazy" }) : h("span", { class: "dim" }, `Image ${place + 1} cannot be shown.`);
  }));
}

function facts(message) {
  const turn = message.turn || {}, tokens = message.end !== undefined && `${num(message.end - message.start)} token${message.end - message.start === 1 ? "" : "s"}`;
  return [tokens, turn.reward !== undefined && `reward ${num(turn.reward, 3)}`, turn.engine_s && `engine ${duration(turn.engine_s)}`, turn.other_s && `environment ${duration(turn.other_s)}`,
    turn.finish === "length" && "truncated", turn.trained === false && (turn.untrained ? `not trained: ${turn.untrained}` : "not trained here"), turn.fork && `fork: ${turn.fork}`].filter(Boolean).join(" · ");
}

function messageBox(message, answer, mode, info) {
  const number = message.turn?.turn, role = message.role;
  const name = `${role}${number !== undefined ? `, turn ${number}` : ""}`;
  const body = message.start !== undefined && mode !== "plain" ? tokenBox(answer, mode, info, message.start, message.end) : h("pre", { class: "text mono" }, message.text);
  return h("li", { class: `turn ${["system", "user", "assistant", "tool"].includes(role) ? role : "environment"}`, "data-turn": number },
    h("div", { class: "role" }, h("b", {}, name), h("span", { class: "dim" }, facts(message))), pictures(answer, message.images || []), body, (message.calls || []).map(toolCard));
}

// The branches of an episode: one row of turn numbers for each, children below the turn where they fork.
function branches(answer, open) {
  if (!answer.episode || answer.episode.length < 2) return null;
  const mine = new Set(answer.turns.map((turn) => turn.turn));
  const draw = (node) => h("li", {}, node.turns.map((turn) => h("button", { type: "button", class: "small", "aria-current": mine.has(turn.turn) ? "true" : null, title: (turn.tool_calls || []).join(", ") || "no tool call", onclick: () => (node.samples.some((s) => s.id === answer.id) ? toTurn(turn.turn) : open(node.samples[0].id)) }, `turn ${turn.turn}`)),
    node.children.length > 0 && h("ul", {}, node.children.map(draw)));
  const roots = new Map();
  for (const sample of answer.episode) { const key = sample.turns[0]?.turn; roots.set(key, [...(roots.get(key) || []), sample]); }
  return [h("h3", {}, `Episode: ${answer.episode.length} branches `, tip("One episode became several samples, because its history forked. Each branch is one sample. A turn that several branches share is trained in the first of them.")), h("ul", { class: "tree" }, [...roots.values()].map((part) => draw(tree(part))))];
}

function toTurn(number) { document.querySelector(`.turn[data-turn="${number}"]`)?.scrollIntoView({ block: "nearest" }); }

export function asJson(answer, messages) {
  const { prompt_tokens, tokens, texts, siblings, episode, ...rest } = answer;
  return JSON.stringify({ ...rest, messages: messages.map(({ role, text, turn, calls }) => ({ role, text, ...(turn && Object.keys(turn).length ? { turn } : {}), ...(calls?.length ? { tool_calls: calls } : {}) })), prompt_token_ids: prompt_tokens, response_token_ids: tokens }, null, 1);
}

async function copy(text, name) {
  try { await navigator.clipboard.writeText(text); say("Copied as JSON."); } catch { download(`${name}.json`, new Blob([text], { type: "application/json" })); } // no clipboard on plain http
}

export function showAnswer(pane, answer, { key, open, keys }) {
  let mode = current().params.color || "probability";
  const body = h("div", {}), info = h("div", { class: "legend", role: "status" }), messages = conversation(answer);
  const inTurns = answer.images?.length > 0 && placeImages(messages.filter((message) => message.start === undefined), answer.images.length);
  const policy = messages.filter((message) => message.start !== undefined), several = policy.length > 1 || messages.filter((m) => m.role === "user" || m.role === "system").length > 1;
  function draw() {
    const marks = legend(mode, answer, versionsOf(answer), scaleOf(answer));
    if (!policy.length) { // without token texts there is nothing to align
      const known = Object.keys(answer.texts).length > 0;
      fill(body, mode === "plain" || !answer.tokens.length ? h("pre", { class: "text" }, answer.response) : [marks, !known && h("p", { class: "dim" }, "This record has no token texts (an older version of slime wrote it), so token ids are shown."), tokenBox(answer, mode, info), info]);
      return;
    }
    if (!several) { fill(body, mode === "plain" ? h("pre", { class: "text" }, answer.response) : [marks, tokenBox(answer, mode, info), info], (policy[0].calls || []).map(toolCard)); return; }
    const list = h("ol", { class: "turns" });
    let made = 0;
    function more() {
      for (const message of messages.slice(made, made + SHOWN_MESSAGES)) list.append(messageBox(message, answer, mode, info));
      made += SHOWN_MESSAGES;
      rest.hidden = made >= messages.length;
      rest.textContent = `${messages.length - made} more messages`;
    }
    const rest = h("button", { class: "small", type: "button", onclick: more });
    more();
    fill(body, marks, info, list, rest);
  }
  const modes = h("div", { class: "chips", role: "radiogroup", "aria-label": "Colour by" }, Object.entries(MODES).map(([name, [text, what]]) => h("label", { class: "chip" },
    h("input", { type: "radio", name: "mode", value: name, checked: name === mode, onchange: () => { mode = name; note({ color: name }); draw(); } }), text, tip(what))));
  const parts = Object.entries(answer.reward_parts || {});
  const name = `${answer.kind === "eval" ? `Evaluation ${answer.dataset ?? ""} ` : "Step "}${answer.step}, sample ${answer.sample ?? answer.id}`;
  fill(pane,
    h("h2", { class: "head" }, name, " ", h("button", { class: "small", type: "button", onclick: () => copy(asJson(answer, messages), `${key}-sample-${answer.id}`) }, "Copy JSON")),
    h("p", {}, answer.reward !== null && ["reward ", h("b", {}, num(answer.reward)), " · "], `${answer.length} tokens`, policy.length > 1 && ` · ${policy.length} turns`, ` · ${answer.status} · ${answer.outcome}`, answer.reason && ` (${answer.reason})`, answer.advantage && ` · advantage ${num(answer.advantage.value)}`, answer.label !== null && h("span", {}, " · label ", h("code", {}, answer.label))),
    answer.failure && h("p", { class: "trouble" }, `no reward: ${answer.failure}`),
    parts.length > 0 && h("p", { class: "dim" }, parts.map(([part, value]) => `${part} ${typeof value === "number" ? num(value) : JSON.stringify(value)}`).join(" · ")),
    branches(answer, open),
    several ? [h("h3", {}, "Conversation"), !inTurns && pictures(answer, (answer.images || []).map((_, i) => i))] : [h("h3", {}, "Prompt"), pictures(answer, (answer.images || []).map((_, i) => i)), h("pre", { class: "text mono" }, answer.prompt), h("h3", {}, "Response")], modes, body,
    answer.siblings.length > 1 && [h("h3", {}, "Group"), h("div", { class: "sib" }, answer.siblings.map((s) => h("button", { type: "button", "aria-current": s.id === answer.id ? "true" : null, onclick: () => open(s.id), title: `${s.length} tokens, ${s.status}` }, num(s.reward, 3)))), compare(answer, key)],
    h("h3", {}, "This prompt over the run"), history(answer, key, keys, open));
  draw();
}

// Two responses of the group side by side, with the words that differ.
function compare(answer, key) {
  const box = h("div", {});
  const pick = h("select", { "aria-label": "Compare with", onchange: load }, h("option", { value: "" }, "another response …"), answer.siblings.filter((s) => s.id !== answer.id).map((s, i) => h("option", { value: s.id }, `reward ${num(s.reward, 3)}, ${s.length} tokens (${i + 1})`)));
  async function load() {
    if (!pick.value) { fill(box); return; }
    const other = await api.get(api.run(key, `/samples/${pick.value}`));
    const parts = wordDiff(answer.response, other.response);
    const side = (one, kind, tag) => h("div", {}, h("b", {}, `sample ${one.sample ?? one.id} · reward ${num(one.reward, 3)} · ${one.length} tokens`), h("pre", { class: `text mono ${kind}` }, parts.filter(([what]) => what === "same" || what === kind).map(([what, text]) => (what === kind ? h(tag, {}, text) : text))));
    fill(box, h("div", { class: "beforeafter diff" }, side(answer, "left", "del"), side(other, "right", "ins")), answer.response === other.response && h("p", { class: "dim" }, "The responses are equal."));
  }
  return h("div", {}, h("p", { class: "bar" }, h("label", {}, "Compare with", pick)), box);
}

function history(answer, key, keys) {
  const box = h("div", {}, h("button", { class: "small", type: "button", onclick: load }, "Show before and after"), " ", h("a", { href: link("prompts", { runs: keys.join(","), prompt: answer.prompt_hash }) }, "all occurrences"));
  async function load() {
    const all = await api.get(api.run(key, `/prompts/${answer.prompt_hash}`));
    const found = all.filter((entry) => entry.kind === answer.kind && entry.dataset === answer.dataset);
    if (found.length < 2) { fill(box, h("p", { class: "dim" }, "The prompt has occurred once so far.")); return; }
    const [first, last] = [found[0], found.at(-1)];
    fill(box, h("div", { class: "beforeafter" }, [first, last].map((entry) => h("div", {}, h("b", {}, `step ${entry.step} · mean reward ${num(entry.reward, 3)}`), h("pre", { class: "text mono" }, entry.response)))));
  }
  return box;
}
