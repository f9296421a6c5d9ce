// Attention as a map from tokens to tokens: weights under their usual names, heads, and what happens between them.
// Rows are padded to whole tiles of four, so that one product serves every shape; evaluating allocates nothing.

import { InputError } from "./errors.js";
import { lengthOf, unitRows } from "./norms.js";

const TILE = 4;
const PARTS = 64; // e^x = 2^-k · 2^(-j/64) · e^r with |r| ≤ ln 2/128
const RATE = PARTS / Math.LN2;
const HIGH = 47632711549 / 2 ** 42; // ln 2/64 = HIGH + LOW; any multiple of HIGH that is needed is exact
const LOW = 2.572804622327669e-14;
const SMALL = 350; // logits up to this size: e^(l − bound) is a normal number, and so is 1 over a sum of them
const ROOTS = Float64Array.from({ length: PARTS }, (_, j) => 2 ** (-j / PARTS));
const POWERS = Float64Array.from({ length: 1024 }, (_, k) => 2 ** -k);
const WEIGHTS = ["W_Q", "W_K", "W_V", "W_O", "W_G"];

/** The next multiple of the tile. */
export function padded(size) {
  return Math.ceil(size / TILE) * TILE;
}

/** e^(x − most) in place of x for `count` numbers from `start`, all from most − 700 to most; returns their sum. */
function exponentials(x, start, count, most) {
  let total = 0;
  for (let i = start; i < start + count; i += 1) {
    const value = x[i] - most;
    const whole = (0.5 - value * RATE) | 0;
    const r = value + whole * HIGH + whole * LOW, square = r * r;
    const series = 1 + r + square * (1 / 2 + r * (1 / 6) + square * (1 / 24 + r * (1 / 120)));
    const power = series * (ROOTS[whole & (PARTS - 1)] * POWERS[whole >> 6]);
    x[i] = power;
    total += power;
  }
  return total;
}

/** c_ij = Σ_k a_ik b_jk for four rows i from `a0` and `c0`, all columns j, k < inner; sizes are multiples of the tile. */
function fourRows(a, a0, aStride, b, b0, bStride, c, c0, cStride, columns, inner) {
  const a1 = a0 + aStride, a2 = a1 + aStride, a3 = a2 + aStride;
  for (let j = 0; j < columns; j += 2) {
    const first = b0 + j * bStride, second = first + bStride;
    let s00 = 0, s01 = 0, s10 = 0, s11 = 0, s20 = 0, s21 = 0, s30 = 0, s31 = 0;
    for (let k = 0; k < inner; k += 1) {
      const x = b[first + k], y = b[second + k];
      const p = a[a0 + k], q = a[a1 + k], r = a[a2 + k], s = a[a3 + k];
      s00 += p * x;
      s01 += p * y;
      s10 += q * x;
      s11 += q * y;
      s20 += r * x;
      s21 += r * y;
      s30 += s * x;
      s31 += s * y;
    }
    const at = c0 + j;
    c[at] = s00;
    c[at + 1] = s01;
    c[at + cStride] = s10;
    c[at + cStride + 1] = s11;
    c[at + 2 * cStride] = s20;
    c[at + 2 * cStride + 1] = s21;
    c[at + 3 * cStride] = s30;
    c[at + 3 * cStride + 1] = s31;
  }
}

/** C = A Bᵀ for padded A (rows × inner) and B (columns × inner). */
export function product(a, b, c, rows, columns, inner) {
  for (let i = 0; i < rows; i += TILE) fourRows(a, i * inner, inner, b, 0, inner, c, i * columns, columns, columns, inner);
}

/** Rows of `width` numbers into rows of padded width; the rest of `out` stays as it is, which is 0. */
export function pack(x, rows, width, out) {
  const wide = padded(width);
  for (let row = 0; row < rows; row += 1) {
    for (let i = 0; i < width; i += 1) out[row * wide + i] = x[row * width + i];
  }
}

/** The first `width` of each row of padded width. */
export function unpack(x, rows, width, out) {
  const wide = padded(width);
  for (let row = 0; row < rows; row += 1) {
    for (let i = 0; i < width; i += 1) out[row * width + i] = x[row * wide + i];
  }
}

/** √(w/d) · norm(√(d/w) · h) in place: the norm of w hidden components, for states of norm 1 where a model has √d. */
export function normInside(norm, hidden, rows, width, dim) {
  const size = Math.sqrt(width / dim);
  if (size !== 1) for (let i = 0; i < rows * width; i += 1) hidden[i] /= size;
  norm.apply(hidden, rows, width, hidden);
  if (size !== 1) for (let i = 0; i < rows * width; i += 1) hidden[i] *= size;
}

/** Nested arrays (heads × rows × columns, or rows × columns for one head) checked and with their sizes; null stays. */
function readWeight(name, nested) {
  if (nested === null || nested === undefined) return null;
  const heads = Array.isArray(nested[0]?.[0]) || ArrayBuffer.isView(nested[0]?.[0]) ? nested : [nested];
  const shape = [heads.length, heads[0].length, heads[0][0].length];
  const even = heads.every((head) => head.length === shape[1] && [...head].every((row) => row.length === shape[2]));
  if (!even) throw new InputError(`${name} is heads × rows × columns with rows of one length`);
  if (!heads.every((head) => [...head].every((row) => row.every(Number.isFinite)))) {
    throw new InputError(`${name} has an entry that is not a finite number`);
  }
  return { values: heads, shape };
}

/** Weights of an attention layer: q = x W_Q, k = x W_K, v = x W_V per head; the update is Σ_heads (attention · v) W_O.
 *  null is the identity, one head; W_G null is zero, a gate of 1/2. Shapes are heads × dim × head, W_O transposed. */
export class HeadWeights {
  constructor(given, dim) {
    for (const name of WEIGHTS) this[name] = readWeight(name, given[name]);
    const read = WEIGHTS.map((name) => {
      const [heads, rows, columns] = this[name]?.shape ?? [1, dim, dim];
      return name === "W_O" ? [heads, columns, rows] : [heads, rows, columns];
    });
    const [q, k, v, o, g] = read.map((shape, i) => (WEIGHTS[i] === "W_G" && !this.W_G ? read[2] : shape));
    const fits = q[2] === k[2] && v[2] === o[2] && v[2] === g[2] && [q, k, v, o, g].every((s) => s[0] === q[0] && s[1] === dim);
    if (!fits) {
      const listed = WEIGHTS.filter((name) => this[name]).map((name) => `${name} (${this[name].shape.join(", ")})`).join(", ");
      throw new InputError(
        `the weights do not fit together (${listed}; dim ${dim}): q and k need one width, v, W_O and W_G one width, all the ` +
          "same heads and dimension; a weight that is left out is the identity, one head as wide as the tokens",
      );
    }
    this.heads = q[0];
    this.head = q[2];
    this.value = v[2];
  }
}

/** A(X): tokens to tokens, with the logits' inverse temperature β and any weights. */
export class Attention {
  constructor(tokens, dim, { beta, weights = {}, causal = false }) {
    if (!Number.isFinite(beta)) throw new InputError(`beta is a finite number, not ${beta}`);
    const w = new HeadWeights(weights, dim);
    const { heads, head, value } = w;
    const rows = padded(tokens), wide = padded(dim), joined = padded(heads * value);
    Object.assign(this, { tokens, dim, beta, causal, heads, head, value, rows });
    this.queries = reading(w.W_Q, wide);
    this.keys = reading(w.W_K, wide);
    this.values = reading(w.W_V, wide);
    this.gates = reading(w.W_G, wide);
    this.output = w.W_O && new Float64Array(wide * joined);
    w.W_O?.values.forEach((weight, h) => {
      for (let i = 0; i < value; i += 1) for (let j = 0; j < dim; j += 1) this.output[j * joined + h * value + i] = weight[i][j];
    });
    this.x = new Float64Array(rows * wide);
    this.q = new Float64Array(rows * heads * padded(head));
    this.k = new Float64Array(rows * heads * padded(head));
    this.v = new Float64Array(rows * heads * padded(value));
    this.across = new Float64Array(rows * heads * padded(value)); // v of each head, transposed
    this.weights = new Float64Array(rows * rows);
    this.mixed = new Float64Array(rows * padded(value));
    this.together = new Float64Array(tokens * heads * value);
    this.packed = new Float64Array(rows * joined);
    this.gate = new Float64Array(rows * heads * padded(value));
    this.shares = new Float64Array(rows);
    this.bounds = new Float64Array(tokens);
  }

  /** A(X) of x (tokens × dim) into `out`, with what the slots say between the projections (`mixing`). */
  run(x, mixing, out) {
    const { tokens, dim, heads, value, rows } = this;
    pack(x, tokens, dim, this.x);
    this.project(this.queries, this.head, mixing, "q", this.q);
    this.project(this.keys, this.head, mixing, "k", this.k);
    this.project(this.values, value, mixing, "v", this.v);
    this.scaleQueries(mixing.scores);
    const wide = padded(value), stride = heads * wide;
    for (let j = 0; j < tokens; j += 1) for (let i = 0; i < stride; i += 1) this.across[i * rows + j] = this.v[j * stride + i];
    for (let h = 0; h < heads; h += 1) this.mix(h, mixing.scores);
    if (mixing.inner) normInside(mixing.inner, this.together, tokens, heads * value, dim);
    if (mixing.gated) this.applyGate();
    if (!this.output) {
      for (let i = 0; i < tokens * dim; i += 1) out[i] = this.together[i];
      return;
    }
    pack(this.together, tokens, heads * value, this.packed);
    product(this.packed, this.output, this.x, rows, padded(dim), padded(heads * value));
    unpack(this.x, tokens, dim, out);
  }

  /** q, k or v (`letter`) of every head, normalised where the slot names it: rows × (heads · padded width). */
  project(weight, width, mixing, letter, out) {
    const { rows, heads, tokens } = this;
    const wide = padded(width);
    if (weight) product(this.x, weight, out, rows, heads * wide, padded(this.dim));
    else for (let i = 0; i < out.length; i += 1) out[i] = this.x[i];
    if (!mixing.heads.includes(letter)) return;
    for (let h = 0; h < heads; h += 1) unitRows(out, tokens, width, h * wide, heads * wide, mixing.headNorm);
  }

  /** Queries times β and the temperature of the number of keys that each sees, so that products with keys are logits. */
  scaleQueries({ temperature }) {
    const width = this.q.length / this.rows;
    for (let i = 0; i < this.tokens; i += 1) {
      const factor = this.beta * (temperature ? temperature(this.causal ? i + 1 : this.tokens) : 1);
      for (let j = i * width; j < (i + 1) * width; j += 1) this.q[j] *= factor;
    }
  }

  /** The powers e^l of one head into `weights`, 1 over a row's total into `shares`, and Σ_j w_ij v_j into `together`. */
  mix(h, scores) {
    const { rows, tokens, heads, value, weights, mixed, together, across, shares } = this;
    const head = padded(this.head), wide = padded(value);
    this.bound(h);
    for (let i = 0; i < rows; i += TILE) {
      const keys = this.causal ? i + TILE : rows;
      const at = i * heads * head + h * head;
      fourRows(this.q, at, heads * head, this.k, h * head, heads * head, weights, i * rows, rows, keys, head);
      for (let row = i; row < i + TILE; row += 1) shares[row] = row < tokens ? 1 / this.powers(row, scores, keys) : 0;
      fourRows(weights, i * rows, rows, across, h * wide * rows, rows, mixed, i * wide, wide, wide, this.causal ? i : rows);
      if (this.causal) this.mixDiagonal(i, h * wide, wide);
    }
    for (let i = 0; i < tokens; i += 1) {
      for (let c = 0; c < value; c += 1) together[(i * heads + h) * value + c] = shares[i] * mixed[i * wide + c];
    }
  }

  /** The keys of a tile on the diagonal, each for the queries that see it: a product with 0 would let a NaN through the mask. */
  mixDiagonal(first, value, wide) {
    const { rows, tokens, weights, mixed, across } = this;
    for (let row = first; row < Math.min(first + TILE, tokens); row += 1) {
      for (let key = first; key <= row; key += 1) {
        for (let c = 0; c < wide; c += 1) mixed[row * wide + c] += weights[row * rows + key] * across[(value + c) * rows + key];
      }
    }
  }

  /** Logits of a query become e^(l − most) in place, 0 for keys that it does not see; returns their total with the sink's. */
  powers(row, { cap, sink }, keys) {
    const { weights, rows, tokens } = this;
    const start = row * rows, seen = this.causal ? row + 1 : tokens;
    for (let j = start + seen; j < start + keys; j += 1) weights[j] = 0;
    if (cap !== null) for (let j = start; j < start + seen; j += 1) weights[j] = cap * Math.tanh(weights[j] / cap);
    if (cap === null && sink === null && this.bounds[row] < SMALL) return exponentials(weights, start, seen, this.bounds[row]);
    let most = sink ?? -Infinity;
    for (let j = start; j < start + seen; j += 1) if (weights[j] > most) most = weights[j];
    let total = sink === null ? 0 : Math.exp(sink - most);
    for (let j = start; j < start + seen; j += 1) total += weights[j] = Math.exp(weights[j] - most);
    return total;
  }

  /** |q_i| max_j |k_j| of a head into `bounds`, which no logit of a query exceeds in size: where it is small, the largest need
   *  not be searched, and nothing overflows. */
  bound(h) {
    const { tokens, heads, head, bounds } = this;
    const wide = padded(head);
    let longest = 0;
    for (let j = 0; j < tokens; j += 1) longest = Math.max(longest, lengthOf(this.k, (j * heads + h) * wide, head));
    for (let i = 0; i < tokens; i += 1) bounds[i] = longest * lengthOf(this.q, (i * heads + h) * wide, head);
  }

  /** What the heads mix times σ(√d · x W_G), or 1/2. */
  applyGate() {
    const { tokens, heads, value, together, gate } = this;
    const wide = padded(value), root = Math.sqrt(this.dim);
    if (this.gates) product(this.x, this.gates, gate, this.rows, heads * wide, padded(this.dim));
    for (let i = 0; i < tokens; i += 1) {
      for (let h = 0; h < heads; h += 1) {
        for (let c = 0; c < value; c += 1) {
          together[(i * heads + h) * value + c] *= 1 / (1 + Math.exp(-root * gate[(i * heads + h) * wide + c]));
        }
      }
    }
  }
}

/** A weight that reads the stream, as rows of outputs: (heads · padded columns) × padded dim; null for none. */
function reading(weight, wide) {
  if (!weight) return null;
  const [heads, rows, columns] = weight.shape;
  const out = new Float64Array(heads * padded(columns) * wide);
  for (let h = 0; h < heads; h += 1) {
    for (let j = 0; j < columns; j += 1) {
      for (let i = 0; i < rows; i += 1) out[(h * padded(columns) + j) * wide + i] = weight.values[h][i][j];
    }
  }
  return out;
}
