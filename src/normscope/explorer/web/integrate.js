// Steps through time: explicit Runge-Kutta methods of the flow, and whole layers.

import { general, InputError } from "./errors.js";
import { hasFlow } from "./motion.js";

// Explicit methods whose every stage uses the latest velocity only, a row (c, a, b) for each stage:
// k_i = f(t + c_i h, x_i),  x_{i+1} = x + h a_i k_i,  and after the last stage x ← x + h Σ_i b_i k_i.
export const METHODS = {
  euler: [[0, 0, 1]],
  midpoint: [[0, 0.5, 0], [0.5, 0, 1]],
  rk4: [[0, 0.5, 1 / 6], [0.5, 0.5, 1 / 3], [0.5, 1, 1 / 3], [1, 0, 1 / 6]],
};
export const SOLVERS = [...Object.keys(METHODS), "layers"];

/** All times at which a step must end; a break that is a time but for rounding is that time. */
function nodes(times, breaks) {
  const last = times[times.length - 1];
  const inside = breaks.filter((t) => times[0] < t && t < last && !times.some((other) => isClose(t, other, 1e-9)));
  return [...new Set([...times, ...inside])].sort((a, b) => a - b);
}

function isClose(a, b, relative) {
  return Math.abs(a - b) <= relative * Math.max(Math.abs(a), Math.abs(b));
}

/** Steps {t, h, wanted} of length at most `step` that end at every time and every break; wanted: t is one of the times. */
export function* timeGrid(times, breaks, step) {
  const wanted = new Set(times);
  const ends = nodes(times, breaks);
  for (let i = 0; i + 1 < ends.length; i += 1) {
    const [left, right] = [ends[i], ends[i + 1]];
    const count = Math.max(1, Math.ceil((right - left) / step - 1e-9));
    const h = (right - left) / count;
    for (let k = 0; k < count; k += 1) yield { t: left + k * h, h, wanted: k === 0 && wanted.has(left) };
  }
}

/** {t, x, velocity} before every step and at the last of `times`; velocity is null where t is not one of the times.
 *  x (tokens × dim) is the integrator's and changes with the next step. */
export function* solve(motion, start, times, solver, step) {
  const x = Float64Array.from(start);
  if (solver === "layers") yield* layers(motion, x, times, step);
  else yield* flow(motion, x, times, METHODS[solver], step);
}

function* flow(motion, x, times, method, step) {
  const { tokens, dim } = motion;
  const first = new Float64Array(x.length), total = new Float64Array(x.length);
  const settle = (updates) => updates.find((update) => update.stream)?.settle(x, tokens, dim);
  let stage = null;
  const enter = (within) => {
    if (motion.stage(within) === stage) return; // the state is where this stage keeps it
    stage = motion.stage(within);
    settle(motion.slots(within, within).updates);
  };
  for (const { t, h, wanted } of timeGrid(times, motion.breaks, step)) {
    const within = t + h / 2;
    enter(within);
    for (let i = 0; i < method.length; i += 1) {
      const [c, a, b] = method[i];
      const here = motion.slots(t + c * h, within);
      const velocity = motion.velocityAt(x, here);
      if (i === 0) {
        yield { t, x, velocity: wanted ? velocity : null };
        first.set(x);
        total.set(x);
      }
      if (b) for (let j = 0; j < x.length; j += 1) total[j] += h * b * velocity[j];
      if (i === method.length - 1) x.set(total);
      else for (let j = 0; j < x.length; j += 1) x[j] = first[j] + h * a * velocity[j];
      settle(here.updates);
    }
  }
  const end = times[times.length - 1];
  enter(end);
  yield { t: end, x, velocity: motion.velocity(x, end) };
}

/** Layers at t = 0, step, 2·step, …: the state after each, with the velocity of the flow at that place. */
function* layers(motion, x, times, step) {
  if (times[0] === 0) motion.settle(x, 0);
  const begin = (t) => motion.stage(t) !== motion.stage(t - step) && motion.settle(x, t);
  const attention = new Float64Array(x.length); // at a frame it serves the velocity and the layer
  for (const { t, h, wanted } of timeGrid(times, [], step)) {
    if (!isClose(h, step, 1e-6)) {
      throw new InputError(`with layers every time is a multiple of the step ${general(step)}; ${general(t + h)} is not`);
    }
    begin(t);
    const shared = wanted && hasFlow(motion.stage(t));
    let velocity = null;
    if (shared) {
      const here = motion.slots(t, t);
      motion.evaluate(x, here);
      attention.set(motion.outputs[0]);
      velocity = motion.totalVelocity(x, here);
    } else if (wanted) velocity = motion.layerChange(x, t, h);
    yield { t, x, velocity };
    motion.layer(x, t, h, shared ? attention : null);
  }
  const end = times[times.length - 1];
  begin(end);
  yield { t: end, x, velocity: motion.velocity(x, end) };
}
