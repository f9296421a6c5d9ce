// Circuits that break: one query, five keys, noise on the norms of the keys; attention with and without norms of q, k and v.
import { button, element, svg } from "./dom.js";
import { Generator } from "./starts.js";

const QUERY = 16;  // |q|, with the factor of the logits
const ANGLES = [0, 40, -55, 80, 125].map(degrees => degrees * Math.PI / 180);
const DIAL = 0.4;  // the largest noise, an RMS; uniform noise reaches √3 of it
const MIDPOINTS = 4000;

/** Logits w_t = q·k_t of keys of these norms. */
export function logits(norms) {
  return ANGLES.map((angle, t) => QUERY * norms[t] * Math.cos(angle));
}

/** softmax(w). */
export function softmax(w) {
  const top = Math.max(...w), parts = w.map(value => Math.exp(value - top)), sum = parts.reduce((a, b) => a + b);
  return parts.map(part => part / sum);
}

/** The smallest bound on |κ| at which the largest logit can be overtaken: min_t (w_* − w_t)/(|w_*| + |w_t|). */
export function margin(w) {
  const [best, ...others] = [...w].sort((a, b) => b - a);
  return Math.min(...others.map(other => (best - other) / (Math.abs(best) + Math.abs(other))));
}

/**
 * P(some w_t(1 + κ_t) > w_*(1 + κ_*)) for κ uniform with RMS `level`, w_* > 0: the integral over κ_* of 1 − Π_t F_t, where F_t is
 * the probability that key t stays below. A common factor of the query cancels.
 */
export function collapseProbability(w, level) {
  const bound = Math.sqrt(3) * level, top = w.indexOf(Math.max(...w));
  if (!bound) return 0;
  let sum = 0;
  for (let k = 0; k < MIDPOINTS; k++) {
    const best = w[top] * (1 + bound * ((2 * k + 1) / MIDPOINTS - 1));
    let below = 1;
    w.forEach((value, t) => {
      if (t === top || !value) return;
      const share = ((best / value - 1) / bound + 1) / 2, inside = Math.max(0, Math.min(1, share));
      below *= value > 0 ? inside : 1 - inside;
    });
    sum += 1 - below;
  }
  return sum / MIDPOINTS;
}

/** Norms of the keys, 1 + κ_t with κ uniform of RMS `level`, in the draw of this number. */
export function noisyNorms(level, draw) {
  const generator = new Generator(draw);
  return ANGLES.map(() => 1 + Math.sqrt(3) * level * (2 * generator.uniform() - 1));
}

const percent = share => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
const peak = values => values.indexOf(Math.max(...values));

/** The picture in `host`; `onChange({noise, draw})` after each change by hand. `set({noise, draw})` sets both. */
export function createCircuit(host, { theme, onChange }) {
  let noise = 0, draw = 0;
  const dial = element("input", { type: "range", min: "0", max: String(100 * DIAL), step: "0.5", "aria-label": "Noise on key norms, RMS in percent" });
  const amount = element("output", { class: "number" });
  const again = button("Draw new noise", () => change({ draw: draw + 1 }));
  const plane = svg("svg", { viewBox: "-130 -110 260 220", class: "circuit-plane", role: "img" });
  const rows = [["Pre-LN", "noise on the norms reaches the logits"], ["QKV-Norm", "q and k are normalised after their projections"]]
    .map(([title, text]) => {
      const bars = svg("svg", { viewBox: "0 0 260 168", class: "circuit-bars", role: "img" });
      const verdict = element("p", { class: "circuit-verdict", role: "status" });
      return { title, bars, verdict, figure: element("figure", { class: "panel" }, element("figcaption", {}, element("b", {}, title), `: ${text}`), bars, verdict) };
    });
  const chance = element("p", { class: "circuit-chance" });
  dial.addEventListener("input", () => change({ noise: Number(dial.value) / 100 }));
  host.replaceChildren(
    element("div", { class: "controls" }, element("label", { class: "control" }, element("span", {}, "Noise on key norms (RMS)"), dial, amount), again),
    chance,
    element("div", { class: "circuit" }, element("figure", { class: "panel" },
      element("figcaption", {}, "The query (dashed) and five keys; outlines are the keys without noise"), plane), ...rows.map(row => row.figure)));

  function change(patch) {
    set(patch);
    onChange({ noise, draw });
  }

  function set(next) {
    noise = Math.max(0, Math.min(DIAL, next.noise ?? noise));
    draw = next.draw ?? draw;
    paint();
  }

  function paint() {
    const colours = theme(), norms = noisyNorms(noise, draw), clean = ANGLES.map(() => 1);
    dial.value = String(100 * noise);
    amount.textContent = percent(noise);
    again.disabled = !noise;
    const w = logits(clean), p = collapseProbability(w, noise);
    chance.textContent = `Margin of this row: ${percent(margin(w))}. Noise of this size reaches ±${percent(Math.sqrt(3) * noise)}; `
      + `the probability that the head selects another key is ${percent(p)} under Pre-LN and 0 % under QKV-Norm.`;
    host.dataset.probability = String(p);
    const arrow = (angle, size, colour, extra = {}) => svg("line", { x1: 0, y1: 0, x2: 70 * size * Math.sin(angle), y2: -70 * size * Math.cos(angle),
      stroke: colour, "stroke-width": 3, ...extra });
    const name = (text, angle, size, colour) => svg("text", { x: 70 * size * Math.sin(angle) + 11 * Math.sin(angle), y: -70 * size * Math.cos(angle) - 11 * Math.cos(angle) + 4,
      "text-anchor": "middle", "font-size": 12, fill: colour }, text);
    plane.setAttribute("aria-label", `Keys with norms ${norms.map(norm => norm.toFixed(2)).join(", ")} at angles 0, 40, −55, 80 and 125 degrees from the query`);
    plane.replaceChildren(
      ...ANGLES.map(angle => arrow(angle, 1, colours.wire, { "stroke-width": 7, "stroke-linecap": "round" })),
      ...ANGLES.map((angle, t) => arrow(angle, norms[t], colours.series[t], { "stroke-linecap": "round" })),
      arrow(0, 1.35, colours.ink, { "stroke-width": 1.5, "stroke-dasharray": "4 4" }),
      ...ANGLES.map((angle, t) => name(`k${"₁₂₃₄₅"[t]}`, angle + (t ? 0 : 0.28), norms[t], colours.ink)),
      name("q", -0.12, 1.35, colours.ink));
    for (const [k, row] of rows.entries()) {
      const now = softmax(logits(k ? clean : norms)), before = softmax(w), broken = peak(now) !== peak(before);
      row.bars.setAttribute("aria-label", `${row.title}: attention weights ${now.map((weight, t) => `key ${t + 1} ${percent(weight)}`).join(", ")}`);
      row.bars.replaceChildren(...now.flatMap((weight, t) => [
        svg("text", { x: 4, y: 32 * t + 21, "font-size": 12, fill: colours.ink }, `k${"₁₂₃₄₅"[t]}`),
        svg("rect", { x: 26, y: 32 * t + 6, width: 180 * before[t], height: 22, fill: "none", stroke: colours.soft, "stroke-dasharray": "3 3" }),
        svg("rect", { x: 26, y: 32 * t + 9, width: Math.max(1, 180 * weight), height: 16, fill: colours.series[t] }),
        svg("text", { x: 214, y: 32 * t + 21, "font-size": 12, fill: colours.ink }, percent(weight)),
      ]));
      row.figure.dataset.top = String(peak(now));
      row.verdict.textContent = broken ? `The circuit has collapsed: the head reads key ${peak(now) + 1} instead of key ${peak(before) + 1}.`
        : `The head still selects key ${peak(now) + 1}.`;
      row.verdict.classList.toggle("problem", broken);
    }
  }

  return { set, paint };
}
