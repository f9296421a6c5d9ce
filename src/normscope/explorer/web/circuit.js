// Circuits that break: one query, five keys, noise on the norms of the keys; attention with and without norms of q, k and v.
import { button, element, labelled, svg } from "./dom.js";
import { csvBlob, pngOfSvg, svgBlob } from "./save.js";
import { Generator } from "./starts.js";

const QUERY = 16;  // |q|, with the factor of the logits
const ANGLES = [0, 40, -55, 80, 125].map(degrees => degrees * Math.PI / 180);
const CLEAN = ANGLES.map(() => 1);  // norms of the keys without noise
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
 * P(some w_t(1 + κ_t) > w_*(1 + κ_*)) for κ uniform with RMS `level`, w_* > 0: the integral over κ_* of 1 − Π_t F_t, where
 * F_t is the probability that key t stays below. A common factor of the query cancels.
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
const largest = values => values.indexOf(Math.max(...values));
const keyName = t => `k${"₀₁₂₃₄"[t]}`;
const SCHEMES = [
  ["Pre-LN", "noise on the norms reaches the logits"],
  ["QKV-Norm", "q and k are normalised after their projections"],
];
const PLANE = [260, 220], BARS = [260, 168], ARROW = 70, LINE = 32;  // sizes in units of the pictures

/** Arrows of the query and of keys with these norms, and outlines of the keys without noise. */
function planeParts(norms, colours) {
  const place = (angle, size, away = 0) => [Math.sin(angle), -Math.cos(angle)].map(part => (ARROW * size + away) * part);
  const arrow = (angle, size, stroke, more) => {
    const [x2, y2] = place(angle, size);
    return svg("line", { x1: 0, y1: 0, x2, y2, stroke, "stroke-linecap": "round", ...more });
  };
  const name = (text, angle, size) => {
    const [x, y] = place(angle, size, 11);
    return svg("text", { x, y: y + 4, "text-anchor": "middle", "font-size": 12, fill: colours.ink }, text);
  };
  return [
    ...ANGLES.map(angle => arrow(angle, 1, colours.wire, { "stroke-width": 7 })),
    ...ANGLES.map((angle, t) => arrow(angle, norms[t], colours.series[t], { "stroke-width": 3 })),
    arrow(0, 1.35, colours.ink, { "stroke-width": 1.5, "stroke-dasharray": "4 4" }),
    ...ANGLES.map((angle, t) => name(keyName(t), angle + (t ? 0 : 0.28), norms[t])),
    name("q", -0.12, 1.35),
  ];
}

/** Attention weights as bars, with outlines of those without noise. */
function barParts(weights, before, colours) {
  return weights.flatMap((weight, t) => {
    const text = (x, words) => svg("text", { x, y: LINE * t + 21, "font-size": 12, fill: colours.ink }, words);
    const bar = (width, y, height, more) => svg("rect", { x: 26, y: LINE * t + y, width, height, ...more });
    return [text(4, keyName(t)), bar(180 * before[t], 6, 22, { fill: "none", stroke: colours.soft, "stroke-dasharray": "3 3" }),
      bar(Math.max(1, 180 * weight), 9, 16, { fill: colours.series[t] }), text(214, percent(weight))];
  });
}

/** The picture in `host`; `onChange({noise, draw})` after each change by hand. `set({noise, draw})` sets both. */
export function createCircuit(host, { colours, onChange }) {
  let noise = 0, draw = 0;
  const name = "Noise on key norms, RMS in percent";
  const dial = element("input", { type: "range", min: 0, max: 100 * DIAL, step: 0.5, "aria-label": name });
  const amount = element("output", { class: "number" }), again = button("Draw new noise", () => change({ draw: draw + 1 }));
  const chance = element("p", { class: "circuit-chance" });
  const plane = svg("svg", { viewBox: `-130 -110 ${PLANE.join(" ")}`, class: "circuit-plane", role: "img" });
  const rows = SCHEMES.map(([title, text]) => {
    const bars = svg("svg", { viewBox: `0 0 ${BARS.join(" ")}`, class: "circuit-bars", role: "img" });
    const verdict = element("p", { class: "circuit-verdict", role: "status" });
    const heading = element("figcaption", {}, element("b", {}, title), `: ${text}`);
    return { title, bars, verdict, figure: element("figure", { class: "panel" }, heading, bars, verdict) };
  });
  dial.addEventListener("input", () => change({ noise: Number(dial.value) / 100 }));
  const words = element("figcaption", {}, "The query (dashed) and five keys; outlines are the keys without noise");
  host.replaceChildren(
    element("div", { class: "controls" }, labelled("Noise on key norms (RMS)", dial, amount), again), chance,
    element("div", { class: "circuit" }, element("figure", { class: "panel" }, words, plane), ...rows.map(row => row.figure)));

  function change(patch) {
    set(patch);
    onChange({ noise, draw });
  }

  function set(next) {
    noise = Math.max(0, Math.min(DIAL, next.noise ?? noise));
    draw = next.draw ?? draw;
    paint();
  }

  /** Weights without noise, and with it under both schemes. */
  function weights() {
    const clean = softmax(logits(CLEAN));
    return { clean, noisy: [softmax(logits(noisyNorms(noise, draw))), clean] };
  }

  function paint() {
    const norms = noisyNorms(noise, draw), w = logits(CLEAN), p = collapseProbability(w, noise), { clean, noisy } = weights();
    dial.value = String(100 * noise);
    amount.textContent = percent(noise);
    again.disabled = !noise;
    chance.textContent = `Margin of this attention row, below which noise cannot change the top key: ${percent(margin(w))}. `
      + `This noise reaches ±${percent(Math.sqrt(3) * noise)}; `
      + `the probability that the head selects another key is ${percent(p)} under Pre-LN and 0 % under QKV-Norm.`;
    host.dataset.probability = String(p);
    const angles = ANGLES.map(angle => Math.round(angle * 180 / Math.PI)), sizes = norms.map(norm => norm.toFixed(2));
    plane.setAttribute("aria-label", `Keys at ${angles.join(", ")} degrees from the query, with norms ${sizes.join(", ")}`);
    plane.replaceChildren(...planeParts(norms, colours()));
    rows.forEach((row, k) => showRow(row, noisy[k], clean));
  }

  function showRow({ title, bars, verdict, figure }, now, before) {
    const [top, first] = [largest(now), largest(before)], shares = now.map((weight, t) => `key ${t} ${percent(weight)}`);
    bars.setAttribute("aria-label", `${title}: attention weights ${shares.join(", ")}`);
    bars.replaceChildren(...barParts(now, before, colours()));
    figure.dataset.top = String(top);
    verdict.textContent = top === first ? `The head still selects key ${top}.`
      : `The circuit has collapsed: the head reads key ${top} instead of key ${first}.`;
    verdict.classList.toggle("problem", top !== first);
  }

  /** One SVG file: the plane and the bars of both schemes in a row, with their titles. */
  function pictureSvg() {
    const width = PLANE[0] + 2 * BARS[0] + 80, height = 270, { paper, ink, soft } = colours();
    const font = { "font-size": 14, "font-family": "system-ui, sans-serif" };
    const text = (x, y, fill, content) => svg("text", { x, y, fill, ...font }, content);
    const place = (node, x, [w, h]) => {
      const copy = node.cloneNode(true);
      for (const [name, value] of Object.entries({ x, y: 46, width: w, height: h })) copy.setAttribute(name, value);
      return copy;
    };
    const heading = `noise on key norms ${percent(noise)} RMS, draw ${draw}`, left = k => 40 + PLANE[0] + k * (BARS[0] + 20);
    const made = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` },
      svg("rect", { width, height, fill: paper }), text(20, 24, soft, heading), place(plane, 20, PLANE),
      rows.map(({ title, bars }, k) => [text(left(k), 38, ink, title), place(bars, left(k), BARS)]));
    return new XMLSerializer().serializeToString(made);
  }

  function table() {
    const { clean, noisy } = weights(), w = logits(CLEAN);
    return csvBlob(["scheme", "key", "logit", "weight", "weight_with_noise"],
      SCHEMES.flatMap(([title], k) => w.map((logit, t) => [title, t, logit, clean[t], noisy[k][t]])));
  }

  const file = (label, end, make) => ({ label, make: async () => ({ name: `normscope-circuit.${end}`, blob: await make() }) });
  const saves = [
    file("Picture (SVG)", "svg", () => svgBlob(pictureSvg())),
    file("Picture (PNG)", "png", () => pngOfSvg(pictureSvg())),
    file("Attention weights (CSV)", "csv", table),
  ];
  return { set, paint, saves };
}
