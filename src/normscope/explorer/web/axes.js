// The three axes on which a run is shown, the same for all its schemes and all its times.

const WORK = 5e7; // products that finding axes may take
const CLOSE = 1e-12;

/** Three axes (3 × dim) for directions θ, tokens × dim. Up to three dimensions they are the coordinates; with more, the first
 *  is the mean direction, on which tokens that cluster end up, the others are principal axes of what is orthogonal to it. */
export function showingAxes(directions, tokens, dim) {
  const axes = new Float64Array(3 * dim);
  if (dim <= 3) {
    for (let a = 0; a < dim; a += 1) axes[a * dim + a] = 1;
    return axes;
  }
  const mean = new Float64Array(dim);
  for (let i = 0; i < tokens; i += 1) for (let k = 0; k < dim; k += 1) mean[k] += directions[i * dim + k] / tokens;
  const rest = Float64Array.from(directions);
  const rounds = Math.min(200, Math.max(8, Math.round(WORK / (4 * tokens * dim))));
  for (let a = 0; a < 3; a += 1) {
    const axis = axes.subarray(a * dim, (a + 1) * dim);
    if (a || !normalise(axis, mean)) principal(rest, tokens, dim, axis, rounds, a);
    if (!axis.some(Boolean)) outside(axes, a, dim);
    for (let i = 0; i < tokens; i += 1) remove(rest.subarray(i * dim, (i + 1) * dim), axis);
  }
  return axes;
}

/** Where directions lie on the axes, tokens × 3, into `points` from `start`; returns the share of |θ|² = 1 that is shown. */
export function showOn(axes, directions, tokens, dim, points, start) {
  let shown = 0;
  for (let i = 0; i < tokens; i += 1) {
    for (let a = 0; a < 3; a += 1) {
      let inner = 0;
      for (let k = 0; k < dim; k += 1) inner += axes[a * dim + k] * directions[i * dim + k];
      points[start + 3 * i + a] = inner;
      shown += (inner * inner) / tokens;
    }
  }
  return shown;
}

/** `axis` ← vector/|vector|, and whether it has a direction. */
function normalise(axis, vector) {
  const norm = Math.hypot(...vector);
  if (!(norm > CLOSE)) return false;
  for (let k = 0; k < axis.length; k += 1) axis[k] = vector[k] / norm;
  return true;
}

/** The leading principal axis of the rows by power iteration; 0 where all are 0. It begins with a mixture of all rows, so that
 *  tokens which have no leading axis, such as orthogonal ones, spread over the picture instead of covering each other. */
function principal(rows, tokens, dim, axis, rounds, a) {
  const mixture = new Float64Array(dim);
  for (let i = 0; i < tokens; i += 1) {
    const factor = Math.cos((a + 1) * (i + 1) * (i + 2));
    for (let k = 0; k < dim; k += 1) mixture[k] += factor * rows[i * dim + k];
  }
  if (!normalise(axis, mixture)) return;
  const next = new Float64Array(dim);
  for (let round = 0; round < rounds; round += 1) {
    next.fill(0);
    for (let i = 0; i < tokens; i += 1) {
      let inner = 0;
      for (let k = 0; k < dim; k += 1) inner += rows[i * dim + k] * axis[k];
      for (let k = 0; k < dim; k += 1) next[k] += inner * rows[i * dim + k];
    }
    if (!normalise(axis, next)) return;
  }
}

/** An axis orthogonal to those before it, for tokens that span fewer than three dimensions. */
function outside(axes, a, dim) {
  const axis = axes.subarray(a * dim, (a + 1) * dim);
  for (let k = 0; k < dim; k += 1) {
    axis.fill(0);
    axis[k] = 1;
    for (let b = 0; b < a; b += 1) remove(axis, axes.subarray(b * dim, (b + 1) * dim));
    if (Math.hypot(...axis) > 0.5) break;
  }
  normalise(axis, Float64Array.from(axis));
}

/** vector − ⟨vector, axis⟩ axis, in place. */
function remove(vector, axis) {
  let inner = 0;
  for (let k = 0; k < axis.length; k += 1) inner += vector[k] * axis[k];
  for (let k = 0; k < axis.length; k += 1) vector[k] -= inner * axis[k];
}
