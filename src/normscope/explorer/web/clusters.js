// Where the clusters are: groups of directions that are connected by pairs of nearly one direction.

import { unitRows } from "./norms.js";

// A pair belongs together if its cosine is above this, 2.6° apart: of 1024 directions that are uniform on the sphere in three
// dimensions one has half a neighbour that near, so groups there do not join by chance.
export const TOGETHER = 0.999;
const APART = 2 - 2 * TOGETHER;

/** Clusters of tokens × dim directions: how many, and the number of each token's cluster in `labels`, the largest first.
 *  Pairs that are known to be connected are not compared, so the cost falls as clusters form. */
export class Clusters {
  constructor(tokens, dim) {
    Object.assign(this, { tokens, dim, count: 0, labels: new Uint16Array(tokens), sizes: new Uint32Array(tokens) });
    this.parents = new Uint32Array(tokens);
    this.roots = [];
  }

  /** Group the directions; returns the number of clusters. A token alone is a cluster of one. */
  find(directions) {
    const { tokens, parents, labels, sizes, roots } = this;
    for (let i = 0; i < tokens; i += 1) parents[i] = i;
    for (let i = 1; i < tokens; i += 1) {
      for (let j = i - 1; j >= 0; j -= 1) {
        const a = this.root(i), b = this.root(j);
        if (a !== b && this.near(directions, i, j)) parents[Math.max(a, b)] = Math.min(a, b);
      }
    }
    sizes.fill(0);
    roots.length = 0;
    for (let i = 0; i < tokens; i += 1) {
      const root = this.root(i);
      if (root === i) roots.push(i);
      sizes[root] += 1;
    }
    roots.sort((a, b) => sizes[b] - sizes[a] || a - b);
    roots.forEach((root, label) => (labels[root] = label));
    for (let i = 0; i < tokens; i += 1) labels[i] = labels[this.root(i)];
    this.count = roots.length;
    return this.count;
  }

  /** The mean directions of the clusters of `find`, count × dim. */
  centres(directions) {
    const { tokens, dim, labels, count } = this;
    const out = new Float64Array(count * dim);
    for (let i = 0; i < tokens; i += 1) for (let k = 0; k < dim; k += 1) out[labels[i] * dim + k] += directions[i * dim + k];
    unitRows(out, count, dim);
    return out;
  }

  root(i) {
    const { parents } = this;
    let at = i;
    while (parents[at] !== at) at = parents[at] = parents[parents[at]];
    return at;
  }

  /** Whether |θ_i − θ_j|² = 2 − 2cos is below that of the threshold; most pairs are known after a few components. */
  near(directions, i, j) {
    const { dim } = this;
    let square = 0;
    for (let a = i * dim, b = j * dim; a < (i + 1) * dim && square < APART; a += 1, b += 1) {
      const gap = directions[a] - directions[b];
      square += gap * gap;
    }
    return square < APART;
  }
}
