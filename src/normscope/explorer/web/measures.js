// What is measured of tokens: how clustered they are, how far out, how fast they turn. No tokens × tokens array.

import { lengthOf, unitRows } from "./norms.js";

/** Measures of tokens × dim, with room for what they need; `directions` and `radii` are those of the last `take`. */
export class Measures {
  constructor(tokens, dim) {
    Object.assign(this, { tokens, dim });
    this.directions = new Float64Array(tokens * dim);
    this.radii = new Float64Array(tokens);
    this.turning = new Float64Array(dim);
    this.total = new Float64Array(dim);
    this.rate = new Float64Array(dim);
  }

  /** θ and r of the tokens. */
  locate(x) {
    const { tokens, dim, directions, radii } = this;
    directions.set(x);
    unitRows(directions, tokens, dim);
    for (let i = 0; i < tokens; i += 1) radii[i] = lengthOf(x, i * dim, dim);
  }

  /** {cosine, variance, radius, speed, cosine_rate} of tokens x that move with ẋ (dynamics/measures.py). */
  take(x, velocity) {
    this.locate(x);
    const { tokens, dim, directions, radii, turning, total, rate } = this;
    total.fill(0);
    rate.fill(0);
    let radius = 0, speed = 0;
    for (let i = 0; i < tokens; i += 1) {
      const start = i * dim;
      let inner = 0;
      for (let k = 0; k < dim; k += 1) inner += velocity[start + k] * directions[start + k];
      for (let k = 0; k < dim; k += 1) {
        turning[k] = (velocity[start + k] - inner * directions[start + k]) / radii[i];
        total[k] += directions[start + k];
        rate[k] += turning[k];
      }
      radius += radii[i] / tokens;
      speed += lengthOf(turning, 0, dim) / tokens;
    }
    let square = 0, change = 0, variance = 0;
    for (let k = 0; k < dim; k += 1) {
      square += total[k] * total[k];
      change += 2 * total[k] * rate[k];
    }
    for (let i = 0; i < tokens; i += 1) {
      for (let k = 0; k < dim; k += 1) variance += (directions[i * dim + k] - total[k] / tokens) ** 2 / tokens;
    }
    const pairs = Math.max(tokens * (tokens - 1), 1);
    return { cosine: tokens > 1 ? (square - tokens) / pairs : 1, variance, radius, speed, cosine_rate: change / pairs };
  }
}
