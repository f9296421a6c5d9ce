// The residual update of a sublayer, schemes/update.py once more: where slots become arithmetic.
//
//   read(x)        = factor · input(x)
//   state(x, y)    = stream(carry · x + step · output(y)), or with the part of y that is orthogonal to x
//   velocity(x, y) = ẋ of the flow whose unit Euler step is `state`

import { InputError } from "./errors.js";
import { orthogonalPart, PointwiseNorm } from "./norms.js";

/** x ← stream(carry · x + step · output(f(factor · input(x)))) at one place in depth, for tokens × dim. */
export class Update {
  constructor({ input = null, output = null, stream = null, factor = 1, step = 1, carry = 1, tangent = false }) {
    Object.assign(this, { input, output, stream, factor, step, carry, tangent });
  }

  /** The update that slots make at a place in depth, with one norm for all of them. */
  static of(slots, at, norm) {
    return new Update({
      input: slots.readsNorm ? norm : null,
      output: slots.output === "norm" ? norm : null,
      stream: slots.stream === "norm" ? norm : null,
      factor: slots.number("input", at),
      step: slots.number("step", at),
      carry: slots.number("carry", at),
      tangent: slots.output === "tangent",
    });
  }

  /** What the sublayer reads into `out`: factor · input(x), or x itself. */
  read(x, tokens, dim, out) {
    if (!this.input) {
      out.set(x);
      return;
    }
    this.input.apply(x, tokens, dim, out);
    if (this.factor !== 1) for (let i = 0; i < out.length; i += 1) out[i] *= this.factor;
  }

  /** x where the stream keeps it, in place: on the sphere of its norm, or where it is. */
  settle(x, tokens, dim) {
    this.stream?.apply(x, tokens, dim, x);
  }

  /** The states after the sublayer, in place of x; with a `stride` h < 1, those after an Euler step of length h. y is spent. */
  advance(x, y, tokens, dim, stride, spare) {
    this.change(x, y, tokens, dim, spare);
    const kept = stride === 1 || this.stream ? this.carry : 1 + stride * (this.carry - 1);
    const step = stride * this.step;
    for (let i = 0; i < x.length; i += 1) x[i] = kept * x[i] + step * y[i];
    this.settle(x, tokens, dim);
  }

  /** ẋ in place of y: (carry − 1)·x + step·u for a free stream, (step/carry)·P_x u for x on the sphere of a normalised one. */
  velocity(x, y, tokens, dim, spare) {
    this.change(x, y, tokens, dim, spare);
    if (this.stream instanceof PointwiseNorm) {
      const map = this.stream.kind;
      throw new InputError(`a stream through ${map} has no flow: without any update it still changes x; use layers`);
    }
    if (this.stream) {
      this.stream.tangent(x, y, tokens, dim, y);
      const speed = this.step / this.carry;
      for (let i = 0; i < y.length; i += 1) y[i] *= speed;
    } else {
      const growth = this.carry - 1;
      for (let i = 0; i < y.length; i += 1) y[i] = growth * x[i] + this.step * y[i];
    }
  }

  /** The output's norm of y, or its part that is orthogonal to x, in place of y. */
  change(x, y, tokens, dim, spare) {
    this.output?.apply(y, tokens, dim, y);
    if (this.tangent) orthogonalPart(y, x, tokens, dim, spare);
  }
}
