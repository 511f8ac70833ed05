// Elements are made here and nowhere else. Text is always set as text: nothing that a model wrote becomes markup.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && name !== "list" && name !== "form") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

export const $ = (id) => document.getElementById(id);

let hide = 0;
export function say(text) {
  const box = $("say");
  box.textContent = text;
  box.classList.add("on");
  clearTimeout(hide);
  hide = setTimeout(() => box.classList.remove("on"), 4000);
}

export const empty = (...words) => h("p", { class: "empty" }, ...words);

export function debounce(act, pause) {
  let timer = 0;
  return (...args) => { clearTimeout(timer); timer = setTimeout(() => act(...args), pause); };
}
