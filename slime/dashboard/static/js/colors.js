// Colours by name of the style sheet, which has a set for light and one for dark; series also differ by dashes.
export const SERIES = 8;
export const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

export function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }
export const seriesColor = (index) => color(`s${index % SERIES}`);
export const dash = (index) => DASHES[Math.floor(index / SERIES) % DASHES.length];

export function faded(hex, alpha) {
  const full = hex.length === 4 ? `#${[...hex.slice(1)].map((c) => c + c).join("")}` : hex;
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(full.slice(at, at + 2), 16));
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
}
