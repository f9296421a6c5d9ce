// Where tokens start and which random weights they meet: the numbers that `normscope simulate` draws from the same seed.
// Its generator is PyTorch's on a CPU: MT19937, with 53 bits for a number and normal numbers by Box and Muller.

import { general, InputError, requireOne } from "./errors.js";
import { unitRows } from "./norms.js";

const WORDS = 624;
const BLOCK = 16; // PyTorch turns uniform numbers into normal ones in blocks, if there are that many
const GATE = 0xb82b9894; // the stream of gates: crc32 of its name
export const STARTS = ["orthogonal", "uniform", "gaussian", "cone"];
export const RANDOM_WEIGHTS = ["kaiming", "gaussian"];
const SCALE = 0.02; // standard deviation of gaussian weights

/** A seeded generator; the same seed gives the numbers of torch.Generator().manual_seed(seed) in float64. */
export class Generator {
  constructor(seed) {
    this.state = new Uint32Array(WORDS);
    this.state[0] = seed;
    for (let i = 1; i < WORDS; i += 1) {
      const before = this.state[i - 1];
      this.state[i] = Math.imul(1812433253, before ^ (before >>> 30)) + i;
    }
    this.used = WORDS;
    this.spare = null;
  }

  /** 32 random bits. */
  bits() {
    const s = this.state;
    if (this.used === WORDS) {
      for (let i = 0; i < WORDS; i += 1) {
        const y = (s[i] & 0x80000000) | (s[(i + 1) % WORDS] & 0x7fffffff);
        s[i] = s[(i + 397) % WORDS] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
      }
      this.used = 0;
    }
    let y = s[this.used];
    this.used += 1;
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  }

  /** A number from 0 to 1, 1 excluded. */
  uniform() {
    const high = this.bits() & 0x1fffff;
    return (high * 2 ** 32 + this.bits()) * 2 ** -53;
  }

  /** `count` standard normal numbers. */
  normal(count) {
    const out = new Float64Array(count);
    if (count < BLOCK) {
      for (let i = 0; i < count; i += 1) out[i] = this.oneNormal();
      return out;
    }
    for (let i = 0; i < count; i += 1) out[i] = this.uniform();
    for (let start = 0; start + BLOCK <= count; start += BLOCK) normalBlock(out, start);
    if (count % BLOCK) {
      for (let i = count - BLOCK; i < count; i += 1) out[i] = this.uniform();
      normalBlock(out, count - BLOCK);
    }
    return out;
  }

  oneNormal() {
    if (this.spare !== null) {
      const kept = this.spare;
      this.spare = null;
      return kept;
    }
    const angle = 2 * Math.PI * this.uniform();
    const radius = Math.sqrt(-2 * Math.log1p(-this.uniform()));
    this.spare = radius * Math.sin(angle);
    return radius * Math.cos(angle);
  }
}

/** 16 uniform numbers become normal ones, the first half with the second. */
function normalBlock(x, start) {
  for (let i = start; i < start + BLOCK / 2; i += 1) {
    const radius = Math.sqrt(-2 * Math.log(1 - x[i]));
    const angle = 2 * Math.PI * x[i + BLOCK / 2];
    x[i] = radius * Math.cos(angle);
    x[i + BLOCK / 2] = radius * Math.sin(angle);
  }
}

/** Tokens × dim from {kind, delta, radius}: `orthogonal`, `uniform` on the sphere, `gaussian` or in a `cone` (starts.py). */
export function makeStart({ kind, delta = 0.01, radius = 1 }, tokens, dim, generator) {
  requireOne(kind, STARTS, "start");
  if (kind === "orthogonal" && tokens > dim) {
    throw new InputError(`${tokens} orthogonal tokens need at least ${tokens} dimensions, not ${dim}`);
  }
  if (kind === "cone" && !(delta > 0 && delta <= 1)) {
    throw new InputError(`the cone's delta is above 0 and at most 1, not ${general(delta)}`);
  }
  if (!(radius > 0 && radius < Infinity)) {
    throw new InputError(`the radius of a start is a positive number, not ${general(radius)}`);
  }
  let x = new Float64Array(tokens * dim);
  if (kind === "orthogonal") {
    for (let i = 0; i < tokens; i += 1) x[i * dim + i] = 1;
  } else {
    x = generator.normal(tokens * dim);
    if (kind === "gaussian") for (let i = 0; i < x.length; i += 1) x[i] /= Math.sqrt(dim);
    else if (kind === "uniform") unitRows(x, tokens, dim);
    else tilt(x, tokens, dim, delta, generator);
  }
  for (let i = 0; i < x.length; i += 1) x[i] *= radius;
  return x;
}

/** Tilt the first axis by at most half the angle whose cosine is 1 − delta, for each token its own way. */
function tilt(x, tokens, dim, delta, generator) {
  for (let i = 0; i < tokens; i += 1) x[i * dim] = 0;
  unitRows(x, tokens, dim);
  for (let i = 0; i < tokens; i += 1) {
    const angle = generator.uniform() * (Math.acos(1 - delta) / 2);
    for (let j = 1; j < dim; j += 1) x[i * dim + j] *= Math.sin(angle);
    x[i * dim] = Math.cos(angle);
  }
}

/** W_Q, W_K, W_V, W_O as nested arrays: `kaiming` is N(0, 2/dim), for W_O N(0, 1/dim); `gaussian` is N(0, 0.02²). */
export function randomWeights(kind, dim, heads, generator) {
  requireOne(kind, RANDOM_WEIGHTS, "weights");
  checkHeads(dim, heads);
  const read = () => sideBySide(generator.normal(dim * dim), dim, heads, deviation(kind, dim, Math.SQRT2));
  const [W_Q, W_K, W_V] = [read(), read(), read()];
  const drawn = generator.normal(dim * dim);
  const head = dim / heads, std = deviation(kind, dim, 1);
  const W_O = nested(heads, head, dim, (h, i, j) => std * drawn[(h * head + i) * dim + j]);
  return { W_Q, W_K, W_V, W_O };
}

/** W_G for schemes with a gate; its generator is another, which leaves that of the other weights alone. */
export function randomGate(kind, dim, heads, seed) {
  return sideBySide(new Generator(streamSeed(seed, GATE)).normal(dim * dim), dim, heads, deviation(kind, dim, Math.SQRT2));
}

/** W_in (dim × hidden) and W_out (hidden × dim): N(0, 2/dim) and N(0, 1/hidden). */
export function randomFeedForward(dim, hidden, generator) {
  const into = generator.normal(dim * hidden), out = generator.normal(hidden * dim);
  const [W_in] = nested(1, dim, hidden, (_, i, j) => into[i * hidden + j] * Math.sqrt(2 / dim));
  const [W_out] = nested(1, hidden, dim, (_, i, j) => out[i * dim + j] / Math.sqrt(hidden));
  return { W_in, W_out };
}

/** Refuse heads that cannot share the dimensions. */
export function checkHeads(dim, heads) {
  if (!(heads >= 1) || dim % heads) throw new InputError(`${dim} dimensions cannot be shared among ${heads} heads`);
}

function deviation(kind, dim, gain) {
  return kind === "kaiming" ? gain / Math.sqrt(dim) : SCALE;
}

function sideBySide(drawn, dim, heads, std) {
  const head = dim / heads;
  return nested(heads, dim, head, (h, i, j) => std * drawn[(i * heads + h) * head + j]);
}

function nested(heads, rows, columns, value) {
  const range = (size, make) => Array.from({ length: size }, (_, i) => make(i));
  return range(heads, (h) => range(rows, (i) => Float64Array.from({ length: columns }, (_, j) => value(h, i, j))));
}

/** The seed of a named random stream, as `core/seeds.py` derives it with numpy's SeedSequence; its lower 32 bits. */
export function streamSeed(seed, stream) {
  let key = 0x43b0d7e5;
  const hash = (word, rate) => {
    const value = word ^ key;
    key = Math.imul(key, rate);
    const mixed = Math.imul(value, key);
    return mixed ^ (mixed >>> 16);
  };
  const stir = (a, b) => {
    const mixed = Math.imul(0xca01f9dd, a) - Math.imul(0x4973f715, b);
    return mixed ^ (mixed >>> 16);
  };
  const pool = [seed, stream, 0, 0].map((word) => hash(word, 0x931e8875));
  for (let from = 0; from < 4; from += 1) {
    for (let to = 0; to < 4; to += 1) if (from !== to) pool[to] = stir(pool[to], hash(pool[from], 0x931e8875));
  }
  key = 0x8b51f9dd;
  const [low, high] = [hash(pool[0], 0x58f38ded), hash(pool[1], 0x58f38ded)];
  return ((low >>> 1) | (high << 31)) >>> 0;
}
