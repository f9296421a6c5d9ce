// Tokens under one to several schemes from one start, frame by frame: what the worker runs, usable in a page as well.

import { Attention } from "./attention.js";
import { showingAxes, showOn } from "./axes.js";
import { Clusters } from "./clusters.js";
import { general, InputError, requireOne, shown } from "./errors.js";
import { SOLVERS, solve } from "./integrate.js";
import { Measures } from "./measures.js";
import { FeedForward, hasFlow, Motion, NotFiniteError } from "./motion.js";
import { lengthOf } from "./norms.js";
import { namedSchedule } from "./schedules.js";
import { parseScheme } from "./slots.js";
import { checkHeads, Generator, makeStart, randomFeedForward, randomGate, RANDOM_WEIGHTS, randomWeights } from "./starts.js";
import { SymmetricFlow } from "./symmetric.js";

export const LIMITS = { schemes: 4, tokens: 1024, dim: 512, frames: 2000, steps: 1e6, hidden: 4096, seed: 2 ** 32 - 1 };
const KEPT = 256 * 2 ** 20; // bytes of states that are kept; those between are computed again
const HIDDEN = 4; // width of a random feed-forward layer, in dimensions
const CURVES = ["cosine", "speed", "meanRadius", "shown", "clusters"];
const DEFAULTS = {
  tokens: 64, dim: 3, beta: 1, causal: false, heads: 1, weights: "identity", feedforward: null, start: { kind: "uniform" },
  seed: 0, solver: "rk4", step: null, time: 10, every: null, norm: null, alpha: null,
};

/** Settings with their defaults, schemes parsed and every value checked; an InputError says in plain words what is wrong. */
export function checkSettings(given) {
  const settings = { ...DEFAULTS, ...given, start: { ...DEFAULTS.start, ...given.start } };
  const whole = (name, least, most) => {
    if (!(Number.isInteger(settings[name]) && settings[name] >= least && settings[name] <= most)) {
      throw new InputError(`${name} is a whole number from ${least} to ${most}, not ${shown(settings[name])}`);
    }
  };
  whole("tokens", 1, LIMITS.tokens);
  whole("dim", 1, LIMITS.dim);
  whole("seed", 0, LIMITS.seed);
  if (!Number.isFinite(settings.beta)) throw new InputError(`beta is a finite number, not ${shown(settings.beta)}`);
  requireOne(settings.solver, SOLVERS, "solver");
  settings.step ??= settings.solver === "layers" ? 1 : 0.025;
  settings.every ??= Math.max(settings.step, settings.time / 400);
  for (const name of ["step", "time", "every"]) {
    if (!(settings[name] > 0 && settings[name] < Infinity)) {
      throw new InputError(`${name} is a positive number, not ${shown(settings[name])}`);
    }
  }
  if (settings.norm !== null) requireOne(settings.norm, ["rms", "layer"], "norm");
  const { time, step, every } = settings;
  if (time / step > LIMITS.steps) {
    throw new InputError(`time ${general(time)} with step ${general(step)} is more than ${LIMITS.steps} steps`);
  }
  if (time / every > LIMITS.frames) {
    throw new InputError(`time ${general(time)} with a frame every ${general(every)} is more than ${LIMITS.frames} frames`);
  }
  settings.times = frameTimes(settings);
  settings.alpha = namedSchedule(settings.alpha);
  settings.schemes = checkSchemes(settings);
  return settings;
}

/** Times of the frames: 0, every, 2·every, … and the last time. */
function frameTimes({ time, every, step, solver }) {
  const stride = solver === "layers" ? Math.max(1, Math.round(every / step)) * step : every;
  const count = Math.ceil(time / stride - 1e-9);
  if (solver === "layers" && Math.abs(time / step - Math.round(time / step)) > 1e-6) {
    throw new InputError(`with layers the last time is a multiple of the step ${general(step)}; ${general(time)} is not`);
  }
  return [...Array.from({ length: count }, (_, i) => i * stride), time];
}

function checkSchemes({ schemes, norm, time, times, alpha, solver, step }) {
  if (!Array.isArray(schemes) || !schemes.length || schemes.length > LIMITS.schemes) {
    throw new InputError(`a run has one to ${LIMITS.schemes} schemes, not ${schemes?.length ?? "none"}`);
  }
  return schemes.map((dictionary) => {
    const parsed = parseScheme(dictionary);
    const scheme = norm === null ? parsed : parsed.withNorm(norm);
    scheme.check(time, times, alpha);
    const stiff = scheme.stages.find((stage) => !hasFlow(stage));
    if (stiff && (solver !== "layers" || step !== 1)) {
      throw new InputError(
        `scheme '${scheme.name}' has no flow: ${stiff.norm} of the stream changes x without any update; ` +
          "choose layers with step 1",
      );
    }
    return scheme;
  });
}

/** Start, attention and feed-forward layer of checked settings, drawn in the order in which `normscope simulate` draws them. */
function particles(settings) {
  const { tokens, dim, beta, causal, heads, seed, schemes } = settings;
  const generator = new Generator(seed);
  const start = drawStart(settings, generator);
  let { weights, feedforward } = settings;
  if (weights === "identity") weights = {};
  else if (typeof weights === "string") {
    requireOne(weights, ["identity", ...RANDOM_WEIGHTS], "weights");
    checkHeads(dim, heads);
    const gated = schemes.some((scheme) => scheme.stages.some((stage) => stage.attention.gate !== "none"));
    const kind = weights;
    weights = randomWeights(kind, dim, heads, generator);
    if (gated) weights.W_G = randomGate(kind, dim, heads, seed);
  }
  if (feedforward === "random") feedforward = HIDDEN * dim;
  if (typeof feedforward === "number") {
    if (!(Number.isInteger(feedforward) && feedforward >= 0 && feedforward <= LIMITS.hidden)) {
      throw new InputError(`the width of the feed-forward layer is a whole number up to ${LIMITS.hidden}, not ${feedforward}`);
    }
    feedforward = feedforward ? randomFeedForward(dim, feedforward, generator) : null;
  }
  return {
    start,
    attention: new Attention(tokens, dim, { beta, weights, causal }),
    feedforward: feedforward && new FeedForward(tokens, dim, feedforward),
  };
}

function drawStart(settings, generator) {
  return settings.start.states ? givenStart(settings) : makeStart(settings.start, settings.tokens, settings.dim, generator);
}

function givenStart({ start: { states, radius = 1 }, tokens, dim }) {
  if (states.length !== tokens || states.some((row) => row.length !== dim)) {
    throw new InputError(`the start's states are ${tokens} tokens × ${dim} dimensions`);
  }
  const broken = states.findIndex((row) => !row.every(Number.isFinite) || row.every((value) => value === 0));
  if (broken >= 0) throw new InputError(`token ${broken} of the start is zero or not finite; every token needs a direction`);
  return Float64Array.from(states.flat(), (value) => radius * value);
}

/** Tokens that were moved by hand, {token: [x, y, z]} on the run's axes: in that direction, with the norm that they had.
 *  The axes are those of the start before, so that the picture stays; they are returned. */
function moveTokens(start, { tokens, dim, start: { moved = {} } }, measures) {
  measures.locate(start);
  const axes = showingAxes(measures.directions, tokens, dim);
  for (const [token, place] of Object.entries(moved)) {
    const at = Number(token) * dim, size = Math.hypot(...place);
    if (!(at >= 0 && at < start.length) || place.length !== 3 || !(size > 0 && size < Infinity)) {
      throw new InputError(`token ${token} cannot be moved to (${place.join(", ")}): every token needs a direction`);
    }
    const direction = new Float64Array(dim);
    for (let a = 0; a < 3; a += 1) for (let k = 0; k < dim; k += 1) direction[k] += place[a] * axes[a * dim + k];
    const norm = lengthOf(direction, 0, dim); // in fewer than three dimensions there is no third axis
    if (norm > 0) for (let k = 0; k < dim; k += 1) start[at + k] = (measures.radii[token] * direction[k]) / norm;
  }
  return axes;
}

/** All schemes of a run. `advance` integrates for a while, `take` gives the frames that have come since it was last called. */
export class Simulation {
  constructor(given) {
    const settings = checkSettings(given);
    const { tokens, dim, times, schemes, time, alpha } = settings;
    Object.assign(this, { settings, tokens, dim, times, frames: times.length });
    const { start, attention, feedforward } = particles(settings);
    this.motion = (scheme) => new Motion(scheme, attention, time, feedforward, alpha);
    this.measures = new Measures(tokens, dim);
    this.clusters = new Clusters(tokens, dim);
    this.axes = moveTokens(start, settings, this.measures);
    this.start = start;
    const bytes = 8 * tokens * dim * times.length * schemes.length;
    this.between = Math.max(1, Math.ceil(bytes / KEPT)); // frames from one whose states are kept to the next
    this.runs = schemes.map((scheme, index) => {
      return { ...emptyRun(times.length, tokens), index, scheme, moments: this.moments(scheme, start, times), kept: [] };
    });
  }

  /** States on the way of a scheme; each way has a motion of its own, whose arrays hold what comes between two steps. */
  moments(scheme, start, times) {
    return solve(this.motion(scheme), start, times, this.settings.solver, this.settings.step);
  }

  /** Whether all schemes have come to the end, or stopped. */
  get done() {
    return this.runs.every((run) => run.over);
  }

  /** Integrate until the clock shows `untilMs`, the scheme that is furthest behind first; returns `done`. */
  advance(untilMs = Infinity) {
    do {
      let next = null;
      for (const run of this.runs) if (!run.over && (!next || run.length < next.length)) next = run;
      if (!next) return true;
      this.step(next);
    } while (performance.now() < untilMs);
    return this.done;
  }

  step(run) {
    try {
      const { value, done } = run.moments.next();
      if (done) run.over = true;
      else this.see(run, value);
    } catch (error) {
      if (!(error instanceof NotFiniteError)) throw error;
      run.over = true;
      run.stop = { t: error.t ?? run.t, text: error.message };
    }
  }

  /** Check a state, and take its frame if its time is one of the frames'. */
  see(run, { t, x, velocity }) {
    const { tokens, dim } = this, { name } = run.scheme;
    run.t = t;
    requireFinite(name, t, x, tokens, dim);
    if (!velocity) return;
    requireSpeed(name, t, x, velocity, tokens, dim);
    const at = run.length, measured = this.measures.take(x, velocity);
    run.times[at] = t;
    run.radius.set(this.measures.radii, at * tokens);
    run.shown[at] = showOn(this.axes, this.measures.directions, tokens, dim, run.points, at * tokens * 3);
    run.clusters[at] = this.clusters.find(this.measures.directions);
    run.labels.set(this.clusters.labels, at * tokens);
    run.cosine[at] = measured.cosine;
    run.speed[at] = measured.speed;
    run.meanRadius[at] = measured.radius;
    run.variance[at] = measured.variance;
    run.cosineRate[at] = measured.cosine_rate;
    if (at % this.between === 0) run.kept.push(x.slice());
    run.length += 1;
  }

  /** Frames and stops since the last call: {scheme, first, times, points, radius, labels, …} and {scheme, t, text}. */
  take() {
    const news = [];
    for (const run of this.runs) {
      const { taken: first, length, index: scheme } = run, { tokens } = this;
      if (length > first) {
        const frames = { scheme, first, times: run.times.slice(first, length) };
        frames.points = run.points.slice(first * tokens * 3, length * tokens * 3);
        for (const name of ["radius", "labels"]) frames[name] = run[name].slice(first * tokens, length * tokens);
        for (const name of CURVES) frames[name] = run[name].slice(first, length);
        run.taken = length;
        news.push(frames);
      }
      if (run.stop) news.push({ scheme, ...run.stop });
      run.stop = null;
    }
    return news;
  }

  /** The tokens of a scheme at a frame in all dimensions, tokens × dim. */
  states(scheme, frame) {
    const run = this.runs[scheme];
    if (!(frame >= 0 && frame < (run?.length ?? 0))) throw new InputError(`scheme ${scheme} has no frame ${frame} yet`);
    const nearest = Math.floor(frame / this.between);
    if (nearest * this.between === frame) return run.kept[nearest].slice();
    const times = this.times.slice(nearest * this.between, frame + 1);
    let last = null;
    for (const { x } of this.moments(run.scheme, run.kept[nearest], times)) last = x;
    return last;
  }
}

function emptyRun(frames, tokens) {
  const curves = [...CURVES, "times", "variance", "cosineRate"].map((name) => [name, new Float64Array(frames)]);
  return {
    ...Object.fromEntries(curves),
    points: new Float32Array(frames * tokens * 3),
    radius: new Float64Array(frames * tokens),
    labels: new Uint16Array(frames * tokens),
    length: 0, taken: 0, over: false, stop: null, t: 0,
  };
}

/** Stop at a token that has no norm or no direction. */
function requireFinite(name, t, x, tokens, dim) {
  for (let i = 0; i < tokens; i += 1) {
    const norm = lengthOf(x, i * dim, dim);
    if (norm > 0 && norm < Infinity) continue;
    const what = norm === 0 ? "underflowed to zero" : "became non-finite (NaN/Inf)";
    throw stopped(t, `scheme '${name}' ${what} at time ${general(t)}, token ${i}`);
  }
}

/** Stop at a token whose speed |ẋ|/|x| has no value. */
function requireSpeed(name, t, x, velocity, tokens, dim) {
  for (let i = 0; i < tokens; i += 1) {
    if (Number.isFinite(lengthOf(velocity, i * dim, dim) / lengthOf(x, i * dim, dim))) continue;
    const where = `at time ${general(t)}, token ${i}: its speed |ẋ|/|x| has no value`;
    throw stopped(t, `scheme '${name}' became non-finite (NaN/Inf) ${where}`);
  }
}

function stopped(t, text) {
  return Object.assign(new NotFiniteError(text), { t });
}

/** The symmetric reduction beside a scheme of a run: {times, cosine, speed, radius, note}, or {text} with the reason why there
 *  is none. `note` says how the run differs from what the curve is exact for, and is empty if it does not. */
export function theoryCurve(given, scheme) {
  try {
    const settings = checkSettings({ ...given, schemes: [given.schemes[scheme]] });
    const { tokens, dim, beta, time, times, alpha, start } = settings;
    if (settings.weights !== "identity" || settings.causal || settings.feedforward) {
      throw new InputError("the symmetric reduction is that of identity weights without causal mask and feed-forward layer");
    }
    if (settings.schemes[0].stages.some((stage) => stage.norm === "layer")) {
      throw new InputError("the symmetric reduction needs RMSNorm: LayerNorm moves the tokens of its start");
    }
    const measures = new Measures(tokens, dim), states = drawStart(settings, new Generator(settings.seed));
    moveTokens(states, settings, measures);
    const { cosine, radius } = measures.take(states, new Float64Array(tokens * dim));
    const exact = start.kind === "orthogonal" && !start.states && !Object.keys(start.moved ?? {}).length;
    const flow = new SymmetricFlow(settings.schemes[0], tokens, beta, time, alpha);
    const path = flow.solve(times, { cosine: exact ? 0 : cosine, radius });
    const names = ["times", "cosine", "speed", "radius"];
    const curves = Object.fromEntries(names.map((name) => [name, Float64Array.from(path[name])]));
    const notes = [
      exact ? "" : `the theory curve is that of tokens that all have one cosine, the mean of this start, ${general(cosine)}`,
      settings.solver === "layers" ? "the theory curve is that of the flow, not of layers" : "",
      path.stopped,
    ];
    return { ...curves, note: notes.filter(Boolean).join("; ") };
  } catch (error) {
    if (!(error instanceof InputError)) throw error;
    return { text: error.message };
  }
}
