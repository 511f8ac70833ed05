// What the server is asked. The token comes with the address, is kept for this tab, and leaves the address at once.

function takeToken() {
  const found = /[#&?]token=([\w-]+)/.exec(location.hash);
  if (found) {
    sessionStorage.setItem("token", found[1]);
    history.replaceState(null, "", location.pathname + location.hash.replace(/[&?]?token=[\w-]+/, "").replace(/^#$/, ""));
  }
}
takeToken();

export const hasToken = () => Boolean(sessionStorage.getItem("token"));

export function setToken(value) { sessionStorage.setItem("token", value.trim().replace(/^.*token=/, "")); }

function headers() {
  return hasToken() ? { Authorization: `Bearer ${sessionStorage.getItem("token")}` } : {};
}

export class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export async function get(path, params = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (Array.isArray(value)) value.forEach((item) => query.append(name, item));
    else if (value !== undefined && value !== null && value !== "") query.append(name, value);
  }
  const text = query.toString();
  return answer(await fetch(`/api${path}${text ? `?${text}` : ""}`, { headers: headers(), signal }));
}

export const run = (key, rest = "") => `/runs/${encodeURIComponent(key)}${rest}`;

// more: {value} of an action, {tags, note} of "label".
export async function act(key, name, more) {
  const body = JSON.stringify({ name, ...more });
  return answer(await fetch(`/api${run(key, "/actions")}`, { method: "POST", headers: { ...headers(), "Content-Type": "application/json" }, body }));
}

async function answer(response) {
  let body = null;
  const text = await response.text();
  try { body = JSON.parse(text); } catch { body = { error: text }; }
  if (!response.ok) throw new ApiError(response.status, body?.error || text || response.statusText);
  return body;
}

// Server-sent events by fetch, which unlike EventSource can carry the token.
export async function listen(onChange, onState) {
  for (;;) {
    try {
      const response = await fetch("/api/events", { headers: headers() });
      if (!response.ok) throw new ApiError(response.status, "");
      onState(true);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        text += value;
        const parts = text.split("\n\n");
        text = parts.pop();
        for (const part of parts) {
          const data = /^event: changed\ndata: (.*)$/m.exec(part);
          if (data) onChange(JSON.parse(data[1]).runs);
        }
      }
    } catch { /* the server went away; it may come back */ }
    onState(false);
    await new Promise((done) => setTimeout(done, 3000));
  }
}
