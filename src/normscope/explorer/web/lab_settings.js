// The settings of the sphere lab: what can be chosen, how a link holds it, and what the worker is to run.

import { parseScheme } from "./slots.js";

const FRAMES = 480;  // shown frames of a run, at most; the integrator takes its steps whatever their number

/** What can be chosen, in the order of the page; `when(settings)` says where a control has an effect. */
export const CONTROLS = [
  { key: "tokens", group: "Tokens", label: "Tokens n", initial: 64, min: 2, max: 512, whole: true },
  { key: "dim", group: "Tokens", label: "Dimension d", initial: 3, min: 2, max: 512, whole: true },
  { key: "start", group: "Tokens", label: "Start", initial: "uniform", options: {
    uniform: "uniform on the sphere", gaussian: "Gaussian, radii vary", orthogonal: "orthogonal", cone: "in a cone" } },
  { key: "delta", group: "Tokens", label: "Cone width δ (cosines ≥ 1 − δ)", initial: 0.1, min: 1e-6, max: 1,
    when: settings => settings.start === "cone" },
  { key: "radius", group: "Tokens", label: "Initial norm r₀", initial: 1, min: 0.01, max: 1000 },
  { key: "seed", group: "Tokens", label: "Seed", initial: 0, min: 0, max: 2 ** 31 - 1, whole: true },
  { key: "beta", group: "Attention", label: "Inverse temperature β", initial: 2, min: 0, max: 100, slider: 20 },
  { key: "weights", group: "Attention", label: "Weights", initial: "identity", options: {
    identity: "identity", kaiming: "random, Kaiming", gaussian: "random, Gaussian" } },
  { key: "heads", group: "Attention", label: "Heads (divide d)", initial: 1, min: 1, max: 64, whole: true,
    when: settings => settings.weights !== "identity" },
  { key: "causal", group: "Attention", label: "Causal mask", initial: false },
  { key: "feedforward", group: "Block", label: "Random feed-forward layer", initial: false },
  { key: "norm", group: "Block", label: "Kind of norm", initial: "scheme", options: {
    scheme: "each scheme’s own", rms: "RMSNorm", layer: "LayerNorm" } },
  { key: "solver", group: "Motion", label: "Motion", initial: "rk4", options: {
    rk4: "continuous flow, RK4", midpoint: "continuous flow, midpoint", euler: "continuous flow, Euler",
    layers: "discrete layers" } },
  { key: "step", group: "Motion", label: "Step of the solver", initial: 0.05, min: 0.001, max: 1,
    when: settings => settings.solver !== "layers" },
  { key: "time", group: "Motion", label: "Depth T (layers)", initial: 12, min: 1, max: 2000 },
];

/** How the run is looked at; also part of a link. */
export const LOOKS = [
  { key: "shells", label: "Show the norm r as", initial: "shell", options: {
    shell: "distance from the centre", colour: "colour", none: "not at all" } },
  { key: "axis", label: "Time axis", initial: "linear", options: { linear: "linear", log: "logarithmic" } },
  { key: "speeds", label: "Speed axis", initial: "linear", options: { linear: "linear", log: "logarithmic" } },
  { key: "trails", label: "Trails", initial: false },
];

export const SCHEMES_AT_ONCE = 4;
export const LETTERS = "ABCD";  // of the schemes on the page
const FIRST_SCHEMES = "post,pre";
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const isObject = value => value !== null && typeof value === "object" && !Array.isArray(value);

/** The words beside a control. */
export function labelOf(key) {
  return [...CONTROLS, ...LOOKS].find(control => control.key === key).label;
}

/** Everything at its initial value. */
export function initialSettings() {
  return Object.fromEntries([...CONTROLS, ...LOOKS].map(control => [control.key, control.initial]));
}

/** The value of a control from text (or a value); throws Error in plain words where it is not allowed. */
export function parseControl(control, given) {
  if (control.options) {
    if (!(given in control.options)) throw new Error(`Choose one of: ${Object.keys(control.options).join(", ")}.`);
    return given;
  }
  if (typeof control.initial === "boolean") return given === true || given === "true" || given === "1";
  const value = typeof given === "number" ? given : String(given).trim() === "" ? NaN : Number(given);
  const kind = control.whole ? "a whole number" : "a number";
  if (!(value >= control.min && value <= control.max) || (control.whole && !Number.isInteger(value))) {
    throw new Error(`Enter ${kind} from ${control.min} to ${control.max}.`);
  }
  return value;
}

/** Settings from the text values of a link, and for each value that is not allowed a sentence under its key. */
export function readSettings(state) {
  const settings = initialSettings(), problems = {};
  for (const control of [...CONTROLS, ...LOOKS]) {
    if (state[control.key] === undefined || state[control.key] === null) continue;
    try {
      settings[control.key] = parseControl(control, state[control.key]);
    } catch (error) {
      problems[control.key] = error.message;
    }
  }
  if (settings.solver === "layers") settings.time = Math.round(settings.time);
  return { settings, problems };
}

/** What the settings forbid together, as `{key: sentence}`. */
export function conflicts(settings) {
  const { tokens, dim, start, weights, heads, norm } = settings;
  if (start === "orthogonal" && tokens > dim) {
    return { start: `${tokens} orthogonal tokens need a dimension of at least ${tokens}: raise d, or lower n to ${dim}.` };
  }
  if (weights !== "identity" && dim % heads) return { heads: `${heads} heads do not divide a dimension of ${dim}.` };
  if (norm === "layer" && dim < 3) return { norm: "LayerNorm needs at least 3 dimensions." };
  return {};
}

/** The JSON merge patch that makes `to` of `from`; undefined where they are the same. */
export function patchBetween(from, to) {
  if (!isObject(from) || !isObject(to)) return same(from, to) ? undefined : to;
  const patch = {};
  for (const key of Object.keys(from)) if (!(key in to)) patch[key] = null;
  for (const key of Object.keys(to)) {
    const change = key in from ? patchBetween(from[key], to[key]) : to[key];
    if (change !== undefined) patch[key] = change;
  }
  return Object.keys(patch).length ? patch : undefined;
}

/** `value` with a JSON merge patch applied. */
export function patched(value, patch) {
  if (!isObject(patch)) return patch;
  const result = { ...(isObject(value) ? value : {}) };
  for (const [key, change] of Object.entries(patch)) {
    if (change === null) delete result[key];
    else result[key] = patched(result[key], change);
  }
  return result;
}

/** Chosen schemes `[{base, dictionary}]` from a link: names, or pairs of a name and how its slots were edited. */
export function readSchemes(text, named) {
  const list = text ?? FIRST_SCHEMES;
  const entries = list.startsWith("[") ? JSON.parse(list) : list.split(",");
  if (!entries.length || entries.length > SCHEMES_AT_ONCE) throw new Error(`One to ${SCHEMES_AT_ONCE} schemes can be shown.`);
  return entries.map(entry => {
    const [base, patch] = Array.isArray(entry) ? entry : [entry, null];
    const dictionary = named.find(scheme => scheme.name === base);
    if (!dictionary) throw new Error(`There is no scheme named “${base}”.`);
    return { base, dictionary: patch ? parseScheme(patched(dictionary, patch)).values : dictionary };
  });
}

/** Chosen schemes as a link holds them; null for the initial ones. */
export function writeSchemes(chosen, named) {
  const entries = chosen.map(({ base, dictionary }) => {
    const patch = patchBetween(named.find(scheme => scheme.name === base), dictionary);
    return patch ? [base, patch] : base;
  });
  const text = entries.some(Array.isArray) ? JSON.stringify(entries) : entries.join(",");
  return text === FIRST_SCHEMES ? null : text;
}

/** Whether a chosen scheme differs from the named one whose title it has. */
export function isEdited({ base, dictionary }, named) {
  const scheme = named.find(({ name }) => name === base);
  return scheme.title === dictionary.title && patchBetween(scheme, dictionary) !== undefined;
}

/** Tokens moved by hand, `Map(index → [x, y, z])`, from a link: `3:0.1,0.2,0.97;…`. */
export function readMoved(text) {
  const moved = new Map();
  for (const part of (text ?? "").split(";").filter(Boolean)) {
    const [index, place] = part.split(":"), point = (place ?? "").split(",").map(Number);
    if (!/^\d+$/.test(index) || point.length !== 3 || !point.every(Number.isFinite) || !Math.hypot(...point)) {
      throw new Error("The tokens moved by hand could not be read from the link; the start is that of the seed.");
    }
    moved.set(Number(index), point);
  }
  return moved;
}

/** Tokens moved by hand as a link holds them; null for none. */
export function writeMoved(moved) {
  const short = value => String(Number(value.toFixed(4)));
  return [...moved].sort(([a], [b]) => a - b).map(([index, point]) => `${index}:${point.map(short)}`).join(";") || null;
}

/** The time between shown frames: a layer, or a multiple of the solver's step. */
export function frameTime({ solver, step, time }) {
  const unit = solver === "layers" ? 1 : step;
  return unit * Math.max(1, Math.ceil(time / (unit * FRAMES) - 1e-9));
}

/** What simulation.js runs. */
export function runSettings(settings, chosen, moved) {
  const { tokens, dim, beta, causal, weights, heads, seed, solver, step, time } = settings;
  return {
    schemes: chosen.map(({ dictionary }) => dictionary), tokens, dim, beta, causal, weights, seed, solver, time,
    step: solver === "layers" ? 1 : step,
    heads: weights === "identity" ? 1 : heads, feedforward: settings.feedforward ? "random" : null,
    start: { kind: settings.start, delta: settings.delta, radius: settings.radius, moved: Object.fromEntries(moved) },
    every: frameTime(settings), norm: settings.norm === "scheme" ? null : settings.norm,
  };
}

/** Why the symmetric reduction says nothing about a run; empty where it does. */
export function noTheory({ start }) {
  if (start.kind !== "orthogonal") return "theory needs an orthogonal start; set Start to orthogonal and d to at least n.";
  if (Object.keys(start.moved).length) return "the symmetric reduction needs an orthogonal start; tokens were moved by hand.";
  return "";
}
