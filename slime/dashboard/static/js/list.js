// A list of any length of which only what is seen exists: rows are fetched by position, or on and on by a cursor.
import { h, fill } from "./dom.js";

const ROW = 28, PAGE = 100, AT_ONCE = 2, KEPT = 300, TALLEST = 30_000_000; // browsers draw nothing below some 33 million pixels

export class VirtualList {
  // fetchPage(offset, after) -> {rows, total, after}; render(row) -> children; onOpen(row)
  constructor({ fetchPage, render, onOpen, label }) {
    Object.assign(this, { fetchPage, render, onOpen });
    this.inner = h("div", {});
    this.inner.style.position = "relative";
    this.element = h("div", { class: "vlist", tabIndex: 0, role: "listbox", "aria-label": label, onscroll: () => this.draw(), onkeydown: (e) => this.key(e) }, this.inner);
    this.reset();
    new ResizeObserver(() => this.later()).observe(this.element);
  }

  reset() {
    this.version = (this.version || 0) + 1;
    this.pages = new Map(); this.waiting = new Set(); this.total = null; this.known = 0; this.after = ""; this.ended = false; this.selected = -1;
    this.element.scrollTop = 0;
  }

  async start() { await this.need(0); this.draw(); }

  get count() { return this.total ?? this.known; }

  row(index) { return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE]; }

  async need(page) {
    const byCursor = this.total === null && page > 0;
    if (this.pages.has(page) || this.waiting.has(page) || (byCursor && (this.ended || page * PAGE > this.known))) return;
    this.waiting.add(page);
    const version = this.version;
    try {
      const found = await this.fetchPage(page * PAGE, byCursor ? this.after : "", PAGE);
      if (version !== this.version) return;
      this.pages.set(page, found.rows);
      if (found.total !== null && this.pages.size > KEPT) this.pages.delete(this.pages.keys().next().value);
      this.total = found.total;
      if (found.total === null) {
        this.known = page * PAGE + found.rows.length;
        this.after = found.after;
        this.ended = !found.after || found.rows.length < PAGE;
      }
      this.onLoad?.(found);
    } finally { if (version === this.version) this.waiting.delete(page); }
    this.draw(); // at once: the frame after this one would be a frame later
  }

  later() { if (!this.pending) { this.pending = true; requestAnimationFrame(() => { this.pending = false; this.draw(); }); } }

  draw() {
    const height = Math.min(this.count * ROW, TALLEST), seen = this.element.clientHeight || 300;
    const scale = height > seen ? Math.max(1, (this.count * ROW - seen) / (height - seen)) : 1;
    this.scale = scale;
    this.inner.style.height = `${height}px`;
    const top = this.element.scrollTop, first = Math.max(0, Math.floor((top * scale) / ROW) - 4);
    const last = Math.min(this.count - 1, first + Math.ceil(seen / ROW) + 8);
    const shift = top - top * scale;
    const rows = [];
    for (let index = first; index <= last; index += 1) {
      const row = this.row(index);
      const line = h("div", { class: "row", role: "option", id: `row-${index}`, "aria-selected": String(index === this.selected), onclick: () => this.open(index) }, row ? this.render(row) : h("span", { class: "dim" }, "…"));
      line.style.transform = `translateY(${index * ROW + shift}px)`;
      rows.push(line);
    }
    fill(this.inner, rows);
    for (let page = Math.floor(first / PAGE); page <= Math.floor(Math.max(last, 0) / PAGE); page += 1) if (this.waiting.size < AT_ONCE) this.need(page); // whoever scrolls past needs none of what lay between
    if (this.total === null && !this.ended && last >= this.count - 20) this.need(Math.floor(this.count / PAGE));
  }

  open(index) {
    this.selected = index;
    this.element.setAttribute("aria-activedescendant", `row-${index}`);
    this.later();
    const row = this.row(index);
    if (row) this.onOpen(row);
  }

  select(index) {
    const to = Math.max(0, Math.min(this.count - 1, index));
    const top = (to * ROW) / (this.scale || 1), seen = this.element.clientHeight;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top + ROW > this.element.scrollTop + seen) this.element.scrollTop = top + ROW - seen;
    this.open(to);
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !this.count) return;
    this.select(step === Infinity ? this.count - 1 : step === -Infinity ? 0 : this.selected + step);
    event.preventDefault();
  }
}
