// A word diff of two texts: [kind, text] with kind "same", "left" (only in the first) or "right" (only in the second).
const MOST = 4_000_000; // cells of the table; larger differences are shown as replaced as a whole

export function words(text) { return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || []; }

export function wordDiff(first, second) {
  const a = words(first), b = words(second);
  let start = 0, end = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const found = [];
  const add = (kind, text) => { if (text) { if (found.at(-1)?.[0] === kind) found.at(-1)[1] += text; else found.push([kind, text]); } };
  add("same", a.slice(0, start).join(""));
  for (const [kind, text] of middle(a.slice(start, a.length - end), b.slice(start, b.length - end))) add(kind, text);
  add("same", a.slice(a.length - end).join(""));
  return found;
}

// The longest common subsequence, by dynamic programming.
function middle(a, b) {
  if (a.length * b.length > MOST) return [["left", a.join("")], ["right", b.join("")]];
  const width = b.length + 1, table = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
  }
  const found = [];
  let i = 0, j = 0;
  while (i < a.length && j < b.length) {
    if (a[i] === b[j]) { found.push(["same", a[i]]); i += 1; j += 1; } else if (table[(i + 1) * width + j] >= table[i * width + j + 1]) { found.push(["left", a[i]]); i += 1; } else { found.push(["right", b[j]]); j += 1; }
  }
  return [...found, ...a.slice(i).map((word) => ["left", word]), ...b.slice(j).map((word) => ["right", word])];
}
