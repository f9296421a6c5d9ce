// The symmetric reduction, dynamics/symmetric.py once more: tokens that all have one common cosine γ and one norm r keep
// them in common, with identity weights, and two numbers say everything. With w = e^{−β(1−γ)}, every quantity over e^β,
//
//   Z = (n−1)w + 1,   R = (n−1)wγ + 1,   |A| = N/Z with N² = R² + (n−1)w²(1−γ)(1+(n−1)γ),   ⟨θ_j, A_j⟩ = R/Z,
//   γ̇ = (1/s) · 2w(1−γ)((n−1)γ+1)/Z,     ṙ from the scheme's radial rate.
//
// The state is (ln(1−γ), ln r), so that the approach to collapse keeps its digits.

import { general, InputError } from "./errors.js";
import { finiteValue } from "./formulas.js";
import { METHODS, timeGrid } from "./integrate.js";
import { lawOf } from "./law.js";

const STEP = 0.005; // in ln(1 + t): late times, where everything slows down, cost no more than early ones

/** Why a scheme has no symmetric reduction; empty if it has one. */
export function noReduction(scheme) {
  for (const stage of scheme.stages) {
    const slots = stage.attention;
    if (stage.pointwise && (slots.readsNorm || [slots.inner, slots.output, slots.stream].includes("norm"))) {
      return `${stage.norm} acts on every component alone, and two numbers do not determine the flow`;
    }
  }
  return "";
}

/** The reduced flow of n tokens under a scheme; `alpha` is a function of time in place of the scheme's own, or null. */
export class SymmetricFlow {
  constructor(scheme, tokens, beta, depth, alpha = null) {
    if (tokens < 2) throw new InputError(`the symmetric reduction needs at least 2 tokens, not ${tokens}`);
    if (!Number.isFinite(beta)) throw new InputError(`beta is a finite number, not ${general(beta)}`);
    const reason = noReduction(scheme);
    if (reason) throw new InputError(`scheme '${scheme.name}' has no symmetric reduction: ${reason}`);
    Object.assign(this, { scheme, tokens, beta, depth, alpha });
    this.known = new Map(scheme.stages.map((stage) => [stage, known(stage)]));
  }

  /** γ, r, the speed |θ̇_j| and time derivatives at the state (ln(1−γ), ln r). */
  rates(t, [logGap, logRadius], within = t) {
    const stage = this.scheme.at(within, this.depth);
    const { law, rule, slots } = this.known.get(stage);
    const n = this.tokens, gap = Math.exp(logGap), r = Math.exp(logRadius), gamma = 1 - gap;
    const values = { ...stage.place(t, this.depth, this.alpha), r };
    // Where A is taken at X, every unnormalised one of q, k, v carries the common radius.
    const seen = (letter) => (law.read === "X" && !slots.heads.includes(letter) ? r : 1);
    const own = this.beta * number(law.temperature, values) * seen("q") * seen("k");
    const [self, fall] = this.logits(rule, own, gap);
    const gate = slots.gate === "none" ? 1 : 0.5; // identity weights: those of a gate are zero
    const size = gate * seen("v");
    const w = Math.exp(-fall);
    const Z = (n - 1) * w + 1;
    const R = (n - 1) * w * gamma + 1;
    const sideways = w * Math.sqrt(Math.max((n - 1) * gap * (1 + (n - 1) * gamma), 0));
    values.A = (size * Math.hypot(R, sideways)) / Z;
    values.M = values.A / gate;
    const sink = rule.sink === null ? 0 : Math.exp(rule.sink - self);
    values.m = sink / (Z + sink);
    const rate = number(law.speed.power(-1), values); // 1/s, which is 0 where nothing is added
    const closing = (size * 2 * w * ((n - 1) * gamma + 1) * rate) / Z;
    const rates = {
      cosine: gamma,
      variance: ((n - 1) / n) * gap,
      radius: r,
      speed: (size * sideways * rate) / Z,
      cosine_rate: closing * gap,
      radialRate: number({ evaluate: () => law.radial.evaluate((size * R) / Z, values) }, values),
      closing,
    };
    if (!Object.values(rates).every(Number.isFinite)) throw new InputError("not a finite number");
    return rates;
  }

  /** The logit of a token with itself, and how much smaller those with the others are. */
  logits({ cap, temperature }, own, gap) {
    if (cap === null && temperature === null) return [own, own * gap];
    const factor = temperature === null ? 1 : temperature(this.tokens);
    const logit = (score) => (cap === null ? score * factor : cap * Math.tanh((score * factor) / cap));
    const first = logit(own);
    return [first, first - logit(own * (1 - gap))];
  }

  /** Measures at `times` from γ(0) and r(0): arrays of cosine, variance, radius, speed and cosine_rate; `stopped` says why
   *  the run ended early, and is empty otherwise. */
  solve(times, { cosine = 0, radius = 1 } = {}) {
    if (!(cosine > -1 / (this.tokens - 1) && cosine < 1)) {
      throw new InputError(`n tokens can have one common cosine above −1/(n−1) and below 1, not ${general(cosine)}`);
    }
    const path = { times: [], cosine: [], variance: [], radius: [], speed: [], cosine_rate: [], stopped: "" };
    try {
      for (const { t, state } of this.walk([Math.log1p(-cosine), Math.log(radius)], times)) {
        const rates = this.rates(t, state);
        path.times.push(t);
        for (const name of ["cosine", "variance", "radius", "speed", "cosine_rate"]) path[name].push(rates[name]);
      }
    } catch (error) {
      if (!(error instanceof InputError)) throw error;
      const last = path.times.length ? path.times[path.times.length - 1] : 0;
      path.stopped = `scheme '${this.scheme.name}' became non-finite (NaN/Inf) after time ${general(last)}`;
    }
    return path;
  }

  /** {t, state} at every one of the times, by fourth-order steps in u = ln(1 + t). */
  *walk(start, times) {
    const grid = times[0] === 0 ? times : [0, ...times];
    const readings = grid.map(Math.log1p), exact = new Map(readings.map((u, i) => [u, grid[i]]));
    const breaks = this.scheme.stages.filter((stage) => stage.then).map((stage) => Math.log1p(stage.end(this.depth)));
    const wanted = new Set(times);
    let state = start;
    for (const { t: u, h, wanted: node } of timeGrid(readings, breaks, STEP)) {
      const within = Math.expm1(u + h / 2);
      if (this.known.get(this.scheme.at(within, this.depth)).law.radiusFixed) state = [state[0], 0];
      if (node && wanted.has(exact.get(u))) yield { t: exact.get(u), state };
      state = this.step(state, u, h, within);
      if (!state.every(Number.isFinite)) throw new InputError("not a finite number");
    }
    yield { t: grid[grid.length - 1], state };
  }

  step(state, u, h, within) {
    let here = state;
    const total = [...state];
    for (const [c, a, b] of METHODS.rk4) {
      const t = Math.expm1(u + c * h), pace = Math.exp(u + c * h);
      const { closing, radialRate, radius } = this.rates(t, here, within);
      const slope = [-pace * closing, (pace * radialRate) / radius];
      for (const i of [0, 1]) total[i] += h * b * slope[i];
      here = [0, 1].map((i) => state[i] + h * a * slope[i]);
    }
    return total;
  }
}

function known(stage) {
  return { law: lawOf(stage.attention, stage.norm), rule: stage.attention.scoreRule, slots: stage.attention };
}

/** The value of a formula; one that is not finite ends the run. */
function number(formula, values) {
  const value = finiteValue(formula, values);
  if (value === null) throw new InputError("not a finite number");
  return value;
}
