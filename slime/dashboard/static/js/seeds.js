// Runs whose settings differ by the seed only, as one curve: the mean at each step, and one standard deviation.

// [{label, keys, index}]: the groups of the selected runs. `index` gives the colour.
export function seedGroups(keys, runs, each = false) {
  const groups = new Map(), seen = new Set();
  keys.forEach((key, index) => {
    const run = runs.find((one) => one.key === key), one = `${run?.group} ${run?.seed}`, name = each || seen.has(one) ? key : run?.group ?? key;
    seen.add(one); // a repetition of a run is no further seed
    if (!groups.has(name)) groups.set(name, { label: key, keys: [], index });
    groups.get(name).keys.push(key);
  });
  for (const group of groups.values()) if (group.keys.length > 1) group.label = groupName(group.keys);
  return [...groups.values()];
}

export function groupName(keys) { return `${keys[0].replace(/[-_,/]?(seed)?[-_=]?[0-9]+$/, "")} (${keys.length} seeds)`; }

// One series for several: thinned curves need not have the same steps, so that values between two are interpolated.
export function meanAndBand(members) {
  const x = [...new Set(members.flatMap((one) => one.x))].sort((a, b) => a - b), columns = members.map((one) => along(one, x));
  const y = [], low = [], high = [];
  x.forEach((_, i) => {
    const values = columns.map((column) => column[i]).filter((value) => value !== null);
    if (!values.length) { y.push(null); low.push(null); high.push(null); return; }
    const mean = values.reduce((a, b) => a + b) / values.length;
    const spread = values.length > 1 ? Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1)) : 0;
    y.push(mean); low.push(mean - spread); high.push(mean + spread);
  });
  return { ...members[0], x, y, low, high, smooth: undefined };
}

function along({ x, y, smooth }, wanted) {
  const values = smooth || y;
  let at = 0;
  return wanted.map((step) => {
    while (at + 1 < x.length && x[at + 1] <= step) at += 1;
    if (step < x[0] || step > x.at(-1)) return null;
    const from = values[at], to = values[at + 1];
    if (step === x[at] || to === undefined) return from ?? null;
    if (from === null || to === null) return null;
    return from + ((to - from) * (step - x[at])) / (x[at + 1] - x[at]);
  });
}
