// Numbers, times and names as people read them.

export function num(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} days`;
}

export function ago(time) {
  return time ? `${duration(Math.max(0, Date.now() / 1000 - time))} ago` : "never";
}

export function clock(time) {
  return time ? new Date(time * 1000).toLocaleString("sv") : "–";
}

export const isLive = (state) => state === "running" || state === "paused";

export function stateName(state) {
  return isLive(state) ? state : state === "finished" || state.startsWith("stopped") ? "finished" : "ended";
}

export function plainValue(value) {
  return value === null || value === undefined ? "none" : typeof value === "string" ? value : JSON.stringify(value);
}
