// The turns of a sample, from its tokens: which ones the policy sampled, the messages between them, and tool calls.
// Everything here is text in, text out; nothing is turned into markup.
const MARKS = [ // how chat templates write the start of a message, its role first, and its end
  [/<\|im_start\|>\s*(\w+)\n?/g, /<\|im_end\|>/],
  [/<\|start_header_id\|>\s*(\w+)\s*<\|end_header_id\|>\n*/g, /<\|eo[tm]_id\|>/],
  [/<start_of_turn>\s*(\w+)\n?/g, /<end_of_turn>/],
  [/<\|(system|user|assistant|observation|tool)\|>\n?/g, /<\|(?:end|endoftext)\|>/],
];
const END = /(?:<\|im_end\|>|<\|eo[tm]_id\|>|<end_of_turn>|<\|end\|>|<\|endoftext\|>|<\/s>|<eos>|\s)*$/;
const ROLES = { model: "assistant", observation: "tool", ipython: "tool" };

export const textOf = (answer, ids) => ids.map((id) => answer.texts[id] ?? "�").join("");

// Whether the policy sampled a token of the response. Tokens of tools and of the template have no weight version.
export function isSampled(answer, index) {
  if (answer.versions.length) return answer.versions.some(([, start, end]) => index >= start && index < end);
  return answer.mask && answer.mask.includes(1) ? Boolean(answer.mask[index]) : true;
}

// [{start, end, turn}]: the parts of the response that the policy wrote. `turn`: what the record knows of it.
export function policyParts(answer) {
  const count = answer.tokens.length;
  if (answer.turns?.length) return answer.turns.filter((t) => t.start < count).map((turn) => ({ start: turn.start, end: Math.min(turn.end, count), turn })).sort((a, b) => a.start - b.start);
  const parts = [];
  for (let index = 0; index < count; index += 1) {
    if (!isSampled(answer, index)) continue;
    if (parts.length && parts.at(-1).end === index) parts.at(-1).end += 1; else parts.push({ start: index, end: index + 1, turn: {} });
  }
  return parts.length ? parts : [{ start: 0, end: count, turn: {} }];
}

// The messages in a text that a chat template wrote; a text without its marks is one message.
export function messagesIn(text, role) {
  const [start, end] = MARKS.find(([mark]) => text.search(mark) >= 0) || [];
  if (!start) return plain(role, text);
  const found = [...text.matchAll(start)];
  const head = plain(role, text.slice(0, found[0].index));
  return [...head, ...found.flatMap((match, i) => {
    const body = text.slice(match.index + match[0].length, found[i + 1]?.index ?? text.length).split(end)[0];
    return plain(ROLES[match[1]] || match[1], body);
  })];
}

function plain(role, text) {
  const results = role === "user" ? [...text.matchAll(/<tool_response>\n?([\s\S]*?)\n?<\/tool_response>/g)] : [];
  if (results.length) return results.map((match) => ({ role: "tool", text: match[1] }));
  const body = text.replace(END, "").replace(/^\s*<think>\s*(<\/think>)?\s*$/, "").replace(/^\n+/, "");
  return body.trim() ? [{ role, text: body }] : [];
}

// Where chat templates of vision-language models place an image, however many tokens it has.
const IMAGE = /(?:<\|vision_start\|>)?(?:<\|image_pad\|>|<image_soft_token>|<\|image\|>|<image>|\[IMG\])+(?:<\|vision_end\|>|\[IMG_END\])?/g;

// Gives messages the numbers of their images: {text, images: [place]}. Nothing, where the marks do not fit the images.
export function placeImages(messages, count) {
  const marks = messages.map((message) => (message.text.match(IMAGE) || []).length);
  if (marks.reduce((a, b) => a + b, 0) !== count) return false;
  let at = 0;
  messages.forEach((message, i) => { message.images = Array.from({ length: marks[i] }, () => at++); if (marks[i]) message.text = message.text.replace(IMAGE, " [image] ").trim(); });
  return true;
}

// Tool calls in a response as {name, arguments}. `names`: those that the run's own parser found.
export function toolCalls(text, names = []) {
  const found = [];
  for (const match of text.matchAll(/<tool_call>\s*([\s\S]*?)\s*(?:<\/tool_call>|$)/g)) found.push(call(match[1]));
  if (!found.length) { const match = /\[TOOL_CALLS\]\s*(\[[\s\S]*\])/.exec(text); if (match) for (const one of parsed(match[1]) || []) found.push(fromJson(one)); }
  if (!found.length && names.length) { const one = parsed(text.replace(/^[^{]*/, "").replace(END, "").replace(/[^}]*$/, "")); if (one?.name) found.push(fromJson(one)); }
  return found.length ? found.filter(Boolean) : names.map((name) => ({ name, arguments: null }));
}

function call(text) {
  const json = parsed(text);
  if (json) return fromJson(json);
  const name = /<function=([^>]+)>/.exec(text) || /^\s*([\w.-]+)\s*(?:\n|<arg_key>|$)/.exec(text);
  const pairs = [...text.matchAll(/<parameter=([^>]+)>\n?([\s\S]*?)\n?<\/parameter>/g), ...text.matchAll(/<arg_key>([\s\S]*?)<\/arg_key>\s*<arg_value>([\s\S]*?)<\/arg_value>/g)];
  return { name: name ? name[1] : "call that cannot be read", arguments: name ? Object.fromEntries(pairs.map((pair) => [pair[1], pair[2]])) : text };
}

function parsed(text) { try { return JSON.parse(text); } catch { return null; } }
function fromJson(one) {
  const call = one?.function || one, given = call?.arguments ?? call?.parameters ?? {};
  return call?.name ? { name: String(call.name), arguments: typeof given === "string" ? parsed(given) ?? given : given } : null;
}

// The whole conversation: [{role, text, start?, end?, turn?, calls?}]; `start` and `end` are tokens of the response.
export function conversation(answer) {
  if (!Object.keys(answer.texts).length || !answer.tokens.length) return [{ role: "user", text: answer.prompt }, { role: "assistant", text: answer.response, calls: toolCalls(answer.response) }];
  const prompt = messagesIn(textOf(answer, answer.prompt_tokens), "user");
  const found = prompt.length ? prompt : [{ role: "user", text: answer.prompt }];
  let at = 0;
  for (const { start, end, turn } of policyParts(answer)) {
    if (start > at) found.push(...messagesIn(textOf(answer, answer.tokens.slice(at, start)), "environment"));
    const text = textOf(answer, answer.tokens.slice(start, end));
    found.push({ role: "assistant", text, start, end, turn, calls: toolCalls(text, turn.tool_calls || []) });
    at = end;
  }
  if (at < answer.tokens.length) found.push(...messagesIn(textOf(answer, answer.tokens.slice(at)), "environment"));
  return withResults(found);
}

// Gives each tool call its result: the tool messages that follow, in order. They are not listed a second time.
function withResults(messages) {
  const kept = [];
  let open = [];
  for (const message of messages) {
    if (message.role === "tool" && open.length) { open.shift().result = message.text; continue; }
    if (message.role === "assistant") open = [...(message.calls || [])];
    kept.push(message);
  }
  return kept;
}

// The tree of an episode whose samples are its branches: {turns: [number], samples, children}.
export function tree(samples, at = 0) {
  const turns = [];
  for (;;) {
    const next = new Set(samples.map((sample) => sample.turns[at]?.turn));
    if (next.size !== 1 || next.has(undefined)) break;
    turns.push(samples[0].turns[at]);
    at += 1;
  }
  const groups = new Map();
  if (samples.length > 1) for (const sample of samples) { const key = sample.turns[at]?.turn; if (key !== undefined) groups.set(key, [...(groups.get(key) || []), sample]); }
  return { turns, samples, children: [...groups.values()].map((part) => tree(part, at)) };
}
