// Which point of a curve the cursor shows, where several runs share one x-axis.

// The index of the value nearest to `at` in a column with gaps; null where the curve does not reach that far:
// a run that ended earlier has no value there, and its last one must not be shown in its place.
export function nearest(column, at) {
  if (column[at] != null) return at;
  let left = at - 1, right = at + 1;
  while (left >= 0 && column[left] == null) left -= 1;
  while (right < column.length && column[right] == null) right += 1;
  if (left < 0 || right >= column.length) return null;
  return at - left <= right - at ? left : right;
}
