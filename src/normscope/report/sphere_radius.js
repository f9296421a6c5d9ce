// How the norm of a token is shown: as its distance from the centre, or as a colour.

const INNERMOST = 0.3;  // where the smallest radius of a log scale is drawn
export const LEAST_RANGE = 4;  // of a log scale: smaller differences of the radius look small
const clamp = value => Math.min(1, Math.max(0, value));

/** A scale of radii: `show` "shells", "colour" or "none", `scale` "log" or "linear", `limits` [low, high] or those seen. */
export class RadiusScale {
  #seen = [Infinity, 0];

  constructor({ show = "none", scale = "log", limits = null } = {}) {
    Object.assign(this, { show, scale, limits });
  }

  /** Limits that are not given include these radii from now on. */
  include(radii, shellRadius) {
    for (let i = -1; !this.limits && i < radii.length; i++) {
      const radius = i < 0 ? shellRadius : radii[i];
      if (!(radius > 0 && radius < Infinity)) continue;
      if (radius < this.#seen[0]) this.#seen[0] = radius;
      if (radius > this.#seen[1]) this.#seen[1] = radius;
    }
  }

  /** Where a radius is on the scale, from 0 to 1. */
  share(radius) {
    const limits = this.limits ?? this.#seen, high = limits[1], low = Math.min(limits[0], high / LEAST_RANGE);
    return clamp(this.scale === "linear" ? radius / high : Math.log(radius / low) / Math.log(high / low));
  }

  /** How far from the centre a radius is drawn: 1 unless shells show it. */
  distance(radius) {
    if (this.show !== "shells") return 1;
    return this.scale === "linear" ? this.share(radius) : INNERMOST + (1 - INNERMOST) * this.share(radius);
  }
}
