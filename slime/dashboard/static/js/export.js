// What is shown, as a file: CSV of rows, PNG of a canvas.

export function download(name, blob) {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(blob);
  anchor.download = name.replace(/[^\w.-]+/g, "_");
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 1000);
}

// A cell that a spreadsheet would run as a formula is made text.
function cell(value) {
  const text = value === null || value === undefined ? "" : String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export function csv(name, header, rows) {
  const text = [header, ...rows].map((row) => row.map(cell).join(",")).join("\n");
  download(`${name}.csv`, new Blob([text + "\n"], { type: "text/csv" }));
}

export function png(name, canvas, title = "") {
  const ratio = window.devicePixelRatio || 1, head = title ? 24 * ratio : 0;
  const copy = document.createElement("canvas");
  copy.width = canvas.width;
  copy.height = canvas.height + head;
  const pen = copy.getContext("2d"), style = getComputedStyle(document.documentElement);
  pen.fillStyle = style.getPropertyValue("--panel");
  pen.fillRect(0, 0, copy.width, copy.height);
  pen.fillStyle = style.getPropertyValue("--text");
  pen.font = `${13 * ratio}px sans-serif`;
  pen.fillText(title, 8 * ratio, 17 * ratio);
  pen.drawImage(canvas, 0, head);
  copy.toBlob((blob) => download(`${name}.png`, blob));
}
