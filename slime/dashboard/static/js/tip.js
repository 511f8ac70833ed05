// A small question mark behind a word that needs explaining: shown on hover, on focus and on a tap.
import { h } from "./dom.js";

let box = null;

function show(target, text) {
  close();
  box = h("div", { class: "tipbox", role: "tooltip", id: "tipbox" }, text);
  document.body.append(box);
  const place = target.getBoundingClientRect();
  const left = Math.max(6, Math.min(place.left, window.innerWidth - box.offsetWidth - 6));
  const below = place.bottom + 6 + box.offsetHeight < window.innerHeight;
  box.style.left = `${left + window.scrollX}px`;
  box.style.top = `${(below ? place.bottom + 6 : place.top - box.offsetHeight - 6) + window.scrollY}px`;
  target.setAttribute("aria-describedby", "tipbox");
}

export function close() {
  box?.remove();
  box = null;
}

export function tip(text) {
  if (!text) return null;
  const mark = h("button", { class: "tip", type: "button", "aria-label": text }, "?");
  for (const name of ["mouseenter", "focus", "click"]) mark.addEventListener(name, () => show(mark, text));
  for (const name of ["mouseleave", "blur"]) mark.addEventListener(name, close);
  return mark;
}

export function explained(row) {
  return [row.what, row.normal && `Normal: ${row.normal}`].filter(Boolean).join("\n");
}

window.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
