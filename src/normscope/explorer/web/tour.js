// The guided tour: six stops that set the lab, explain what it shows, and measure it in the run on the page.
import { button, element } from "./dom.js";
import { shortNumber } from "./heatmap.js";
import { formulaParts } from "./math_text.js";
import { valueAt } from "./strips.js";

/** The time at which the mean cosine of a run first reaches `level`; NaN if it does not. */
export function timeOfCosine(line, level) {
  const { times, length } = line, cosine = line.values.cosine;
  for (let k = 0; k < length; k++) {
    if (cosine[k] < level) continue;
    if (!k) return times[0];
    return times[k - 1] + (times[k] - times[k - 1]) * (level - cosine[k - 1]) / (cosine[k] - cosine[k - 1]);
  }
  return NaN;
}

/** The slope of ln(speed) against g(frame), by least squares over frames between two times. */
export function speedSlope(line, from, to, g) {
  let count = 0, x = 0, y = 0, xx = 0, xy = 0;
  for (let k = 0; k < line.length; k++) {
    const t = line.times[k], speed = line.values.speed[k];
    if (t < from || t > to || !(speed > 0)) continue;
    const [u, v] = [g(k), Math.log(speed)];
    count += 1; x += u; y += v; xx += u * u; xy += u * v;
  }
  return (count * xy - x * y) / (count * xx - x * x);
}

const at = (line, key, t) => valueAt(line.times, line.values[key], line.length, t);
const symmetric = { tokens: 32, dim: 32, start: "orthogonal", beta: 1 };

const last = line => line.times[line.length - 1];
const words = shortNumber;

function firstSpeeds([pre, peri], { tokens, beta }) {
  const measured = peri.values.speed[0] / pre.values.speed[0];
  const formula = (Math.exp(beta) + tokens - 1) / Math.sqrt(Math.exp(2 * beta) + tokens - 1);
  const text = `At t = 0 the tokens turn ${words(measured)} times as fast under Peri-LN as under Pre-LN; `
    + `the formulas give ${words(formula)}.`;
  return { text, values: { measured, formula } };
}

function lastSpeeds([post, , pre, peri]) {
  const end = Math.min(last(post), last(pre)), speeds = [post, pre, peri].map(line => at(line, "speed", end));
  const exponential = speedSlope(post, 6, 14, k => post.times[k]);
  const power = speedSlope(pre, end / 3, end, k => Math.log(pre.values.radius[k]));
  const text = `Measured here: under Post-LN ln |θ̇| falls by ${words(-exponential)} per unit of time; `
    + `under Pre-LN it falls as r to the power −${words(-power)}, and r grows as t. `
    + `At t = ${words(end)} Pre-LN is ${words(speeds[1] / speeds[0])} times as fast as Post-LN.`;
  return { text, values: { exponential, power, speeds } };
}

function collapseTimes(lines) {
  const times = lines.map(line => timeOfCosine(line, 0.9)), clusters = lines.map(line => line.values.clusters[line.length - 1]);
  const [post, pre] = times.map((t, k) => Number.isNaN(t) ? `not before t = ${words(last(lines[k]))}` : `at t = ${words(t)}`);
  const text = `The mean cosine reaches 0.9 ${post} under Post-LN and ${pre} under Pre-LN; `
    + `at the end they have ${clusters[0]} and ${clusters[1]} groups of tokens within 2.6° of each other.`;
  return { text, values: { times, clusters } };
}

function brake([pre, tangent]) {
  const [slow, fast] = [pre, tangent].map(line => timeOfCosine(line, 0.9)), half = last(pre) / 2;
  const radius = at(pre, "radius", slow), ratio = at(tangent, "speed", fast) / at(pre, "speed", slow);
  const still = at(tangent, "radius", fast);
  const growth = (at(pre, "radius", 2 * half) - at(pre, "radius", half)) / half;
  const text = `Measured here: at the same mean cosine of 0.9, not at the same time, `
    + `Pre-LN has r = ${words(radius)}, the other block r = ${words(still)}, and `
    + `Pre-LN turns its tokens ${words(ratio)} times more slowly. Late in the run r grows by ${words(growth)} per unit of time.`;
  return { text, values: { radius, still, ratio, growth } };
}

function sameClock([constant, falling]) {
  let worst = 0;
  for (let k = 0; k < falling.length; k++) {
    const inner = 2 * (Math.sqrt(falling.times[k] + 1) - 1);  // ∫α dt
    if (inner > last(constant)) break;
    worst = Math.max(worst, Math.abs(falling.values.cosine[k] - at(constant, "cosine", inner)));
  }
  const text = `Measured here: at equal ∫α dt the mean cosines of A and B differ by at most ${words(worst)}, `
    + "the error of drawing lines between frames.";
  return { text, values: { worst } };
}

/** The stops. `state` is what the lab is set to; `measure(lines, settings)` checks the stop's claim in the run. */
export const STOPS = [
  {
    title: "Initial velocity",
    state: { ...symmetric, schemes: "pre,peri,ngpt", time: 8, step: 0.02 },
    text: "A point is the direction θ of a token’s hidden state, one unit of time t is one layer, "
      + "and γ is the mean cosine of pairs. "
      + "Attention’s output A pulls on θ, and the norms set how fast θ rotates: dθ/dt = (1/s) P A, "
      + "where P A is the part of A perpendicular to θ, and s is the damping of the scheme. "
      + "At the start tokens point in unrelated directions, so attention averages them to a short vector A. "
      + "Pre-LN and Post-LN add this short vector as it is and begin slowly. "
      + "Peri-LN and nGPT normalise it first and begin at full speed.",
    formula: "dγ/dt at t = 0:   2/(r_0 (e^β + n − 1)) for Pre-LN,   2/(r_0 √(e^{2β} + n − 1)) for Peri-LN",
    question: "Raise β to 6. Each token then attends almost only to itself: is Peri-LN still faster, and why?",
    measure: firstSpeeds,
  },
  {
    title: "Terminal velocity",
    state: { ...symmetric, schemes: "post,sqrt-scaling,pre,peri", time: 24, step: 0.05, speeds: "log" },
    text: "Late in the run all tokens point nearly the same way, |A| is close to 1, "
      + "and the damping s alone sets how fast the rest dies out. "
      + "Under Post-LN s is 1 and the motion dies out exponentially: deep layers change almost nothing. "
      + "Under Pre-LN and Peri-LN s grows with the residual norm, about as t, so the motion falls only as a power of t "
      + "and late layers still have work to do.",
    formula: "γ̇ ∝ e^{−2t} for Post-LN,   e^{−4√t}/√t for sqrt-scaling,   1/t^3 for Pre-LN and Peri-LN;   "
      + "angular speeds ∝ e^{−t},   e^{−2√t}/√t,   1/t^2, in the same order",
    question: "Make the time axis logarithmic. Which of the four speeds are straight lines now, and which were before?",
    measure: lastSpeeds,
  },
  {
    title: "Collapse",
    state: { tokens: 64, dim: 3, start: "uniform", beta: 2, time: 30, step: 0.1 },
    text: "With identity weights attention pulls all tokens towards one direction (rank collapse). "
      + "From almost every start Post-LN ends in one cluster, "
      + "and so does Pre-LN as long as the residual norms keep growing. "
      + "Norms do not decide whether tokens collapse, only when. "
      + "Post-LN is there after a few layers; Pre-LN, which slows down as its norms grow, arrives much later.",
    formula: "Var = (1/n) Σ |θ_k − θ̄|^2:   dVar/dt ≈ −2 Var for Post-LN,   −2 Var/t for Pre-LN, once tokens nearly agree",
    question: "Raise β to 12 and give it T = 100: tokens gather in several clusters first. How many, and for how long?",
    measure: collapseTimes,
    partial: true,  // has words for what the run has not come to
  },
  {
    title: "The radius as a brake",
    state: { ...symmetric, schemes: "pre,tangent", time: 16, step: 0.02 },
    text: "Under Pre-LN an update rotates a token by its size divided by the residual norm r, and every update makes r larger: "
      + "Pre-LN brakes itself. Scheme B adds only the part of the update that is orthogonal to the hidden state. "
      + "Its r stays at 1, so nothing brakes it, and it clusters as fast as Post-LN: compare the mean cosines. "
      + "(Late in the run Pre-LN is the faster one, but only because B has already arrived.)",
    formula: "dθ/dt = (1/r) P A,   dr/dt = ⟨θ, A⟩ for Pre-LN;   dr/dt = 0 for orthogonal updates",
    question: "Set r₀ to 10: both start ten times slower. Why is B braked now as well, and which of the two brakes grows?",
    measure: brake,
  },
  {
    title: "nGPT’s schedule",
    state: { tokens: 64, dim: 3, start: "uniform", beta: 2, time: 10, step: 0.02, schemes: JSON.stringify([
      ["ngpt", { title: "nGPT, α = 1" }],
      ["ngpt", { alpha: "1/sqrt(t + 1)", title: "nGPT, α = 1/√(t+1)" }],
      ["ngpt", { alpha: "t", title: "nGPT, α = t" }],
    ]) },
    text: "nGPT keeps tokens on the sphere and multiplies every normalised update by α, which training learns for each layer. "
      + "α multiplies the speed of all tokens alike, so it changes only the clock, "
      + "not their paths: the time that counts is ∫α dt. "
      + "A schedule that falls with depth moves tokens early and rests late, a rising one the other way round. "
      + "(One theorem prints the late rate as Var/α; it is α·Var, see 2:4.3ii-ngpt in the ledger.)",
    formula: "dθ/dt = (α_t/|A|) P A;   1 − γ ∝ exp(−2 ∫α dt) once tokens nearly agree",
    question: "Press “Edit slots” above a sphere and change alpha: which α(t) makes nGPT slow down like Pre-LN?",
    measure: sameClock,
  },
  {
    title: "Circuits that break",
    state: {},
    circuit: true,
    text: "A circuit relies on a head that selects one key, whose logit w stands above all others. "
      + "Under Pre-LN the norm of a key also depends on content that the head does not read, so interference "
      + "changes it by some factor 1 + κ. "
      + "If another logit becomes the largest, the head attends to the wrong token: the circuit has collapsed. "
      + "QKV-Norm normalises q, k and v after their projections and removes this noise.",
    formula: "collapse:  w_t(1 + κ_t) > w_*(1 + κ_*) for some t;   impossible while |κ| < min_{t} (w_* − w_t)/(|w_*| + |w_t|)",
    question: "Turn up the noise beyond the margin and redraw it. At which RMS does another key win in one of ten draws?",
  },
];

/** Whether a run has what the claims are about: identity weights, no mask, no feed-forward layer, the flow. */
function isPlain({ weights, causal, feedforward, solver, norm }) {
  return weights === "identity" && !causal && !feedforward && solver !== "layers" && norm === "scheme";
}

/** The panel of the tour: `onGo(index|null)` when another stop is chosen or the tour is left. */
export function createTour(host, { onGo }) {
  let current = null;
  const title = element("h2", { tabindex: "-1" }), text = element("p"), formula = element("p", { class: "formula" });
  const measured = element("p", { class: "tour-measured", role: "status" }), question = element("p");
  const back = button("← Previous", () => onGo(current - 1));
  const next = button("Next →", () => onGo(current + 1 < STOPS.length ? current + 1 : null), { class: "main" });
  const stops = STOPS.map((stop, k) => button(String(k + 1), () => onGo(k), { "aria-label": `Stop ${k + 1}: ${stop.title}` }));
  const leave = button("End the tour", () => onGo(null)), ways = [back, ...stops, next, leave];
  const beside = element("div", {}, formula, measured, question);
  host.replaceChildren(title, element("div", { class: "tour-columns" }, text, beside),
    element("nav", { class: "tour-stops", "aria-label": "Stops of the tour" }, ...ways));

  return {
    /** Show a stop; null hides the panel. */
    show(index) {
      const moved = index !== null && current !== null && index !== current;
      current = index;
      host.hidden = index === null;
      if (index === null) return;
      const stop = STOPS[index];
      title.textContent = `${index + 1} of ${STOPS.length}: ${stop.title}`;
      text.textContent = stop.text;
      formula.replaceChildren(...formulaParts(stop.formula));
      question.textContent = `Try: ${stop.question}`;
      measured.textContent = "";
      delete host.dataset.measured;
      back.disabled = index === 0;
      leave.hidden = index === STOPS.length - 1;
      next.textContent = leave.hidden ? "Finish: to the lab" : "Next →";
      stops.forEach((way, k) => way.setAttribute("aria-current", k === index ? "step" : "false"));
      if (moved) title.focus();
    },
    /** Check the claim of the current stop in a finished run; `lines` is null where it is a run of other schemes. */
    measure(lines, settings) {
      const stop = STOPS[current];
      measured.textContent = "";
      delete host.dataset.measured;
      if (!lines || !stop?.measure || settings.start !== stop.state.start || !isPlain(settings)) return;
      const result = stop.measure(lines, settings);
      const missing = !stop.partial && Object.values(result.values).flat().some(Number.isNaN);
      measured.textContent = missing ? "The run is too short for this comparison: raise the last time T." : result.text;
      host.dataset.measured = JSON.stringify(result.values);
    },
    get current() { return current; },
  };
}
