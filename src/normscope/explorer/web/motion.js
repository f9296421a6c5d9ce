// The motion of tokens under a scheme: velocity and layer at any time, from slots, attention and feed-forward layer.

import { normInside, pack, padded, product, unpack } from "./attention.js";
import { InputError } from "./errors.js";
import { theoryNorm } from "./norms.js";
import { Update } from "./update.js";

/** A token, or a slot, became non-finite (NaN/Inf). */
export class NotFiniteError extends Error {}

/** F(x) = inner(relu(x W_in)) W_out for tokens × dim, with W_in dim × hidden and W_out hidden × dim as nested arrays. */
export class FeedForward {
  constructor(tokens, dim, { W_in, W_out }) {
    for (const [name, rows] of Object.entries({ W_in, W_out })) {
      const [height, width] = name === "W_in" ? [dim, W_out?.length] : [W_in?.[0]?.length, dim];
      if (!rows?.length || rows.length !== height || !rows.every((row) => row.length === width)) {
        throw new InputError(`the feed-forward layer has W_in, ${dim} × hidden, and W_out, hidden × ${dim}`);
      }
      const finite = rows.every((row) => row.every(Number.isFinite));
      if (!finite) throw new InputError(`${name} has an entry that is not a finite number`);
    }
    const hidden = W_out.length, rows = padded(tokens);
    Object.assign(this, { tokens, dim, hidden, rows });
    this.into = transposed(W_in, dim, hidden);
    this.outOf = transposed(W_out, hidden, dim);
    this.x = new Float64Array(rows * padded(dim));
    this.wide = new Float64Array(rows * padded(hidden));
    this.activation = new Float64Array(tokens * hidden);
  }

  /** F of every token of x into `out`, with the norm `inner` of `mixing`. */
  run(x, mixing, out) {
    const { tokens, dim, hidden, rows, wide, activation } = this;
    pack(x, tokens, dim, this.x);
    product(this.x, this.into, wide, rows, padded(hidden), padded(dim));
    unpack(wide, tokens, hidden, activation);
    for (let i = 0; i < activation.length; i += 1) if (activation[i] < 0) activation[i] = 0;
    if (mixing.inner) normInside(mixing.inner, activation, tokens, hidden, dim);
    pack(activation, tokens, hidden, wide);
    product(wide, this.outOf, this.x, rows, padded(dim), padded(hidden));
    unpack(this.x, tokens, dim, out);
  }
}

/** Nested rows × columns as padded columns × padded rows. */
function transposed(nested, rows, columns) {
  const out = new Float64Array(padded(columns) * padded(rows));
  for (let i = 0; i < rows; i += 1) for (let j = 0; j < columns; j += 1) out[j * padded(rows) + i] = nested[i][j];
  return out;
}

/** Whether short layers of a stage are near the identity: a pointwise map of the stream changes x without any update. */
export function hasFlow(stage) {
  return !(stage.pointwise && (stage.attention.stream === "norm" || stage.feedforward.stream === "norm"));
}

/** How tokens move under a scheme; `depth` is the number of layers, or the length of time, and `alpha` a function of time
 *  in place of the scheme's own, or null. */
export class Motion {
  constructor(scheme, attention, depth, feedforward = null, alpha = null) {
    const { tokens, dim } = attention;
    Object.assign(this, { scheme, attention, depth, feedforward, alpha, tokens, dim });
    this.maps = feedforward ? [attention, feedforward] : [attention];
    this.reading = new Float64Array(tokens * dim);
    this.outputs = this.maps.map(() => new Float64Array(tokens * dim));
    this.settled = new Float64Array(tokens * dim);
    this.spare = new Float64Array(dim);
    this.known = new Map();
  }

  /** The times at which the scheme changes its slots; an integrator's steps end there. */
  get breaks() {
    return this.scheme.stages.filter((stage) => stage.then).map((stage) => stage.end(this.depth));
  }

  /** The stage of the scheme that holds at time t. */
  stage(t) {
    return this.scheme.at(t, this.depth);
  }

  /** The sublayers' updates at t and what happens inside them, `{updates, inside, norm}`, by the slots at the time `within`. */
  slots(t, within) {
    const stage = this.stage(within);
    const known = this.known.get(stage);
    if (known && !known.varies) return known;
    const sublayers = this.feedforward ? [stage.attention, stage.feedforward] : [stage.attention];
    const norm = known?.norm ?? theoryNorm(stage.norm);
    let updates;
    try {
      const at = stage.place(t, this.depth, this.alpha);
      updates = sublayers.map((slots) => Update.of(slots, at, norm));
    } catch (error) {
      if (!(error instanceof InputError)) throw error;
      throw new NotFiniteError(`scheme '${this.scheme.name}' stopped: ${error.message}`);
    }
    const inside = known?.inside ?? sublayers.map((slots) => mixingOf(slots, norm));
    const made = { updates, inside, norm, varies: this.alpha !== null || stage.varies };
    this.known.set(stage, made);
    return made;
  }

  /** What each sublayer computes of a state, into `outputs`. */
  evaluate(x, { updates, inside }) {
    this.maps.forEach((map, i) => {
      updates[i].read(x, this.tokens, this.dim, this.reading);
      map.run(this.reading, inside[i], this.outputs[i]);
    });
  }

  /** ẋ of what the sublayers computed at x, into outputs[0], which is returned. */
  totalVelocity(x, { updates }) {
    const { tokens, dim, outputs, spare } = this;
    updates.forEach((update, i) => update.velocity(x, outputs[i], tokens, dim, spare));
    if (outputs.length > 1) {
      for (let i = 0; i < x.length; i += 1) outputs[0][i] += outputs[1][i];
      // Where one sublayer's norm brings the stream back to the sphere, what the other adds outwards is undone too.
      updates.find((update) => update.stream)?.stream.tangent(x, outputs[0], tokens, dim, outputs[0]);
    }
    return outputs[0];
  }

  /** ẋ of a state by the slots `here`; the array is overwritten by the next evaluation. */
  velocityAt(x, here) {
    this.evaluate(x, here);
    return this.totalVelocity(x, here);
  }

  /** ẋ at time t, of x where the stream keeps it; of a stage without a flow, what a whole layer changes. */
  velocity(x, t) {
    if (!hasFlow(this.stage(t))) return this.layerChange(x, t, 1);
    const here = this.slots(t, t);
    const stream = here.updates.find((update) => update.stream);
    this.settled.set(x);
    stream?.settle(this.settled, this.tokens, this.dim);
    return this.velocityAt(this.settled, here);
  }

  /** One layer, or an Euler step of length `stride`, in place of x: attention, then the feed-forward layer if there is one.
   *  `attended` is what attention computes at x, where it is known. */
  layer(x, t, stride, attended = null) {
    const { updates, inside } = this.slots(t, t);
    this.maps.forEach((map, i) => {
      if (i === 0 && attended) this.outputs[0].set(attended);
      else {
        updates[i].read(x, this.tokens, this.dim, this.reading);
        map.run(this.reading, inside[i], this.outputs[i]);
      }
      updates[i].advance(x, this.outputs[i], this.tokens, this.dim, stride, this.spare);
    });
  }

  /** What a layer changes, x left as it is. */
  layerChange(x, t, stride) {
    const moved = x.slice();
    this.layer(moved, t, stride);
    for (let i = 0; i < x.length; i += 1) moved[i] -= x[i];
    return moved;
  }

  /** Tokens where the scheme keeps them, in place: on the unit sphere if any sublayer normalises the stream. */
  settle(x, t) {
    const stage = this.stage(t);
    if (stage.onSphere(this.feedforward !== null)) theoryNorm(stage.norm).apply(x, this.tokens, this.dim, x);
  }
}

/** What the slots of a sublayer say of its inside. */
function mixingOf(slots, norm) {
  const { heads, scoreRule: scores, inner, gate } = slots;
  const headNorm = norm.kind === "layer" ? "layer" : "rms"; // a pointwise map leaves heads RMSNorm
  return { heads, headNorm, scores, inner: inner === "norm" ? norm : null, gated: gate !== "none" };
}
