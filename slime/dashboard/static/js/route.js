// The address names the view: #/curves?runs=a,b&name=rollout/raw_reward. It can be copied, and the back key works.

export function current() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const params = Object.fromEntries(new URLSearchParams(query || ""));
  return { view: path || "overview", params };
}

export function link(view, params) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) if (value !== undefined && value !== null && value !== "") query.set(name, value);
  const text = query.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

export function go(view, params) { location.hash = link(view, params); }

// Changes parameters of this view without a new entry in the history and without drawing it anew.
export function note(changes) {
  const { view, params } = current();
  history.replaceState(null, "", link(view, { ...params, ...changes }));
}
