// Tags and a note of a run: shown everywhere, edited in a dialog. Changing them needs the token.
import * as api from "./api.js";
import { h, say } from "./dom.js";

const NO_TOKEN = "Tags and notes need the token: paste it, or the address from the file that `slime dashboard` named when it started.";

export const tags = (run) => (run.tags || []).map((tag) => h("span", { class: "tag" }, tag));

// A button that opens the dialog. `done` gets the new labels.
export function editor(run, info, done) {
  if (!info.may_act) return null;
  return h("button", { class: "small", type: "button", "aria-label": `Tags and note of ${run.name}`, title: "Tags and note", onclick: () => open(run, done) }, "✎");
}

function open(run, done) {
  const tagBox = h("input", { type: "text", value: (run.tags || []).join(", "), "aria-label": "Tags", placeholder: "baseline, paper" });
  const noteBox = h("textarea", { rows: 4, maxLength: 1000, "aria-label": "Note" });
  noteBox.value = run.note || "";
  const token = h("input", { type: "password", "aria-label": "Token", autocomplete: "off" });
  const unlock = h("p", { hidden: api.hasToken() }, NO_TOKEN, " ", token);
  async function save(event) {
    event.preventDefault();
    if (token.value) api.setToken(token.value);
    try {
      const labels = await api.act(run.key, "label", { tags: tagBox.value.split(","), note: noteBox.value });
      Object.assign(run, labels);
      box.close();
      done(labels);
      say("Saved in the folder of the run.");
    } catch (error) {
      if (error.status === 401) { api.setToken(""); unlock.hidden = false; }
      say(error.status === 401 ? NO_TOKEN : error.message);
    }
  }
  const box = h("dialog", { class: "labels", "aria-label": `Tags and note of ${run.name}` }, h("h2", {}, run.name), h("form", { onsubmit: save },
    h("label", {}, "Tags, separated by commas", tagBox), h("label", {}, "Note", noteBox), unlock,
    h("p", {}, h("button", { class: "main" }, "Save"), " ", h("button", { type: "button", onclick: () => box.close() }, "Cancel"))));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
}
