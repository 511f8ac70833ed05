// The logs of a run: the newest lines, older ones on request, or only lines that contain a text.
import * as api from "../api.js";
import { h, fill, empty, debounce } from "../dom.js";
import { note } from "../route.js";

export const title = "Logs";

export async function render(main, context) {
  const key = context.keys[0], files = await api.get(api.run(key, "/logs"));
  if (!files.length) { fill(main, empty("There is no log in this folder: logs/ is empty or was not copied with the run.")); return {}; }
  let start = 0;
  const box = h("pre", { class: "log mono", tabIndex: 0, "aria-label": "Log" });
  const pick = h("select", { "aria-label": "File", onchange: () => { note({ file: pick.value }); load(); } }, files.map((file) => h("option", { value: file.name }, `${file.name} (${Math.ceil(file.bytes / 1024)} KiB)`)));
  pick.value = files.some((f) => f.name === context.params.file) ? context.params.file : (files.find((f) => f.name === "driver.log") || files[0]).name;
  const query = h("input", { type: "search", placeholder: "filter lines", "aria-label": "Filter lines", value: context.params.q ?? "", oninput: debounce(() => { note({ q: query.value }); load(); }, 250) });
  const older = h("button", { class: "small", type: "button", onclick: () => load(start) }, "older lines");
  const line = (text) => h("span", { class: / (ERROR|CRITICAL): /.test(text) ? "e" : / WARNING: /.test(text) ? "w" : "" }, `${text}\n`);
  async function load(end) {
    const found = await api.get(api.run(key, `/logs/${encodeURIComponent(pick.value)}`), { end, q: query.value });
    const atEnd = end === undefined && (box.scrollTop + box.clientHeight >= box.scrollHeight - 30 || !box.textContent);
    start = found.start;
    older.disabled = start === 0;
    const lines = found.lines.map(line);
    if (end === undefined) fill(box, lines.length ? lines : "no lines"); else box.prepend(...lines);
    if (atEnd) box.scrollTop = box.scrollHeight;
  }
  fill(main, h("div", { class: "bar" }, pick, query, older), box);
  await load();
  box.scrollTop = box.scrollHeight;
  return { refresh: () => load() };
}
