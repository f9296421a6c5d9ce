// RMSNorm and LayerNorm as geometry, and pointwise maps in their place; rows of numbers in Float64Arrays.
// Norms and directions are right for every vector of finite numbers, whether or not its squares are: core/norms.py.

const ORDINARY = 2 ** 660; // squared norms from 1/ORDINARY to ORDINARY are summed as they are
const SLOPE = 0.5; // where the learned slope of a pointwise map starts, in DyT and in Derf
const SERIES_END = 2;
const FRACTIONS = 64;

/** erf(x) to about 1e-15: a series of positive terms near 0, the continued fraction of 1 − erf beyond. */
export function erf(x) {
  const size = Math.abs(x);
  if (!(size < 6)) return Number.isNaN(x) ? x : Math.sign(x);
  const square = size * size;
  const bell = Math.exp(-square) / Math.sqrt(Math.PI);
  let value;
  if (size < SERIES_END) {
    let term = 2 * size;
    let total = term;
    for (let k = 1; term > 1e-17 * total; k += 1) {
      term *= (2 * square) / (2 * k + 1);
      total += term;
    }
    value = bell * total;
  } else {
    let fraction = size;
    for (let k = FRACTIONS; k > 0; k -= 1) fraction = size + k / 2 / fraction;
    value = 1 - bell / fraction;
  }
  return x < 0 ? -value : value;
}

/** |x| of the `width` numbers from `start`. */
export function lengthOf(x, start, width) {
  let square = 0;
  for (let i = start; i < start + width; i += 1) square += x[i] * x[i];
  if (square >= 1 / ORDINARY && square <= ORDINARY) return Math.sqrt(square);
  const size = powerOfTwo(x, start, width);
  if (!(size > 0 && size < Infinity)) return size;
  square = 0;
  for (let i = start; i < start + width; i += 1) square += (x[i] / size) * (x[i] / size);
  return Math.sqrt(square) * size;
}

/** x/|x| of `rows` vectors of `width` numbers, `stride` apart, in place, of the centred x for `layer`; NaN for the zero vector. */
export function unitRows(x, rows, width, start = 0, stride = width, kind = "rms") {
  for (let row = 0; row < rows; row += 1) {
    const at = start + row * stride;
    if (kind === "layer") {
      const size = powerOfTwo(x, at, width);
      if (size > 1e150 || size < 1e-150) for (let i = at; i < at + width; i += 1) x[i] /= size;
      centre(x, at, width);
    }
    toUnit(x, at, width);
  }
}

/** The norm without parameters, x ↦ x/|x|, of the centred x for `layer`. */
export class SphereNorm {
  constructor(kind) {
    this.kind = kind;
  }

  /** x on the sphere into `out`, which may be x; rows of `width` numbers. */
  apply(x, rows, width, out) {
    if (out !== x) for (let i = 0; i < rows * width; i += 1) out[i] = x[i];
    unitRows(out, rows, width, 0, width, this.kind);
  }

  /** The part of u along the sphere at x into `out`, which may be u: P_x u, of the centred u for `layer`. */
  tangent(x, u, rows, width, out) {
    if (out !== u) for (let i = 0; i < rows * width; i += 1) out[i] = u[i];
    for (let row = 0; row < rows; row += 1) {
      if (this.kind === "layer") centre(out, row * width, width);
      project(x, out, row * width, width);
    }
  }
}

/** A pointwise map in place of a norm, in theory's units: x ↦ φ(a·√d·x)/√d, where a model has φ(a·x). */
export class PointwiseNorm {
  constructor(kind) {
    this.kind = kind;
    this.map = kind === "erf" ? erf : Math.tanh;
  }

  /** Every component through the map into `out`, which may be x. */
  apply(x, rows, width, out) {
    const root = Math.sqrt(width);
    for (let i = 0; i < rows * width; i += 1) out[i] = this.map(SLOPE * root * x[i]) / root;
  }
}

/** The norm of a kind as theory has it: for states of norm 1 where a model has √d. */
export function theoryNorm(kind) {
  return kind === "rms" || kind === "layer" ? new SphereNorm(kind) : new PointwiseNorm(kind);
}

/** The part of u that is orthogonal to x, in place of u; u itself where x is zero. `spare` holds `width` numbers. */
export function orthogonalPart(u, x, rows, width, spare) {
  for (let row = 0; row < rows; row += 1) {
    const start = row * width;
    if (lengthOf(x, start, width) === 0) continue;
    for (let i = 0; i < width; i += 1) spare[i] = x[start + i];
    toUnit(spare, 0, width);
    let inner = 0;
    for (let i = 0; i < width; i += 1) inner += u[start + i] * spare[i];
    for (let i = 0; i < width; i += 1) u[start + i] -= inner * spare[i];
  }
}

function centre(x, start, width) {
  let total = 0;
  for (let i = start; i < start + width; i += 1) total += x[i];
  const mean = total / width;
  for (let i = start; i < start + width; i += 1) x[i] -= mean;
}

/** u − ⟨u, x⟩x for a row of u and a row x of norm 1. */
function project(x, u, start, width) {
  let inner = 0;
  for (let i = start; i < start + width; i += 1) inner += u[i] * x[i];
  for (let i = start; i < start + width; i += 1) u[i] -= inner * x[i];
}

function toUnit(x, start, width) {
  let square = 0;
  for (let i = start; i < start + width; i += 1) square += x[i] * x[i];
  if (!(square >= 1 / ORDINARY && square <= ORDINARY)) {
    const size = powerOfTwo(x, start, width);
    square = 0;
    for (let i = start; i < start + width; i += 1) {
      x[i] /= size;
      square += x[i] * x[i];
    }
  }
  const norm = Math.sqrt(square);
  for (let i = start; i < start + width; i += 1) x[i] /= norm;
}

/** A power of two near max|x|, by which x is divided without rounding; 0, NaN and infinity stay. */
function powerOfTwo(x, start, width) {
  let most = 0;
  for (let i = start; i < start + width; i += 1) {
    const size = Math.abs(x[i]);
    if (!(size <= most)) most = size;
    if (size !== size) return NaN;
  }
  if (!(most > 0 && most < Infinity)) return most;
  return 2 ** Math.min(1022, Math.max(-1022, Math.floor(Math.log2(most))));
}
