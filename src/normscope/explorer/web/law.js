/**
 * What follows from the slots of a sublayer: speed factor, radial rate, update and flow, as numbers and as text.
 * With x_j = r_j θ_j, directions obey θ̇_j = (1/s_j) P_{θ_j} A_j, and s_j is a product of powers that the slots contribute.
 */

import { InputError } from "./errors.js";
import { ONE, Product } from "./formulas.js";
import { NORM_TITLES, SLOTS } from "./slots.js";

const RADIUS = Product.of("r");
const LENGTH = Product.of("A");
const MIXED = Product.of("M");
const KEPT = Product.of("1 - m");
const GATED =
  "the gate acts on each component separately: A_j includes it, and s_j has no factor for it, except ½ where W_G is zero";
const LAYER_NORM = "A_j is taken at Norm(X), and is its centred part where the output or the stream is normalised";
const INSIDE = {
  m_j: "m_j is the share of attention that the sink takes",
  M_j: "M_j is what the head mixes, before W_O",
};
const LEARNS = { vector: "learned for each component", scalar: "learned as one number" };
const SYMBOLS = "x_j = r_j θ_j is the hidden state of token j, A_j what attention computes for it; layer t from 0, T layers";

/** What stands in place of a formula that theory does not have: its text is a dash, and it refuses to compute. */
class NoFormula {
  text = "–";

  constructor(why) {
    this.why = why;
  }

  evaluate() {
    throw new InputError(`theory has no law of motion here: ${this.why}`);
  }
}

/** ṙ_j = growth · r_j + pull · ⟨θ_j, A_j⟩; either is null where it vanishes. */
class RadialRate {
  constructor(pull, growth) {
    this.pull = pull;
    this.growth = growth;
  }

  /** ṙ_j as a number, from ⟨θ_j, A_j⟩ and the values of r, A, t, depth, alpha (with an inner norm M, with a sink m). */
  evaluate(inner, values) {
    const growth = this.growth ? this.growth.evaluate(values) * values.r : 0;
    return this.pull ? this.pull.evaluate(values) * inner + growth : growth;
  }

  get text() {
    const grown = this.growth ? [Product.of(this.growth).times(RADIUS).text] : [];
    const pulled = this.pull ? [this.pull.times(Product.of("inner")).text] : [];
    return [...grown, ...pulled].join(" + ") || "0";
  }
}

/**
 * The law of motion from the slots of a sublayer and the kind of their norms: {speed, radial, known, radiusFixed, read,
 * attention, temperature, flows, statement}. ``speed.evaluate(values)`` is s_j, ``radial.evaluate(inner, values)`` is ṙ_j, and
 * both have ``text``.
 */
export function lawOf(slots, norm = "rms") {
  const free = slots.stream === "none";
  const pointwise = norm !== "rms" && norm !== "layer";
  const mapped = ["inner", "output", "stream"].filter((slot) => pointwise && slots[slot] === "norm");
  const gated = slots.gate !== "none";
  let statement = gated ? GATED : "";
  let [speed, radial] = [null, null];
  if (mapped.length) {
    statement = `${norm} as ${mapped.join(" and ")} acts on every component alone and keeps no direction`;
    speed = radial = new NoFormula(statement);
  } else {
    speed = (free ? RADIUS : Product.of(slots.carry)).over(Product.of(slots.step).times(addedLength(slots)));
    const growth = free && slots.carry.source !== ONE.source ? slots.carry.lessOne() : null;
    radial = new RadialRate(free && slots.output !== "tangent" ? RADIUS.over(speed) : null, growth);
  }
  const normalised = (!free && !pointwise) || (slots.heads === "qkv" && !gated); // a gate reads what q, k and v are made of
  const read = pointwise && slots.readsNorm ? `${norm}(X)` : slots.readsNorm || normalised ? "Θ" : "X";
  const temperature = slots.inputFactor.power([..."qk"].filter((letter) => !slots.heads.includes(letter)).length);
  const factors = [["β", temperature], ...(gated ? [["W_G", slots.inputFactor]] : [])].filter(([, factor]) => !factor.isOne);
  const at = factors.map(([name, factor]) => Product.of(name).times(factor).text).join(", ");
  return Object.freeze({
    speed,
    radial,
    known: !mapped.length,
    radiusFixed: !free && !pointwise,
    read,
    attention: `A_j(${read})${at && ` at ${at}`}`,
    temperature,
    flows: free || !pointwise,
    statement,
  });
}

/** |u_j|/|A_j|: what the slots between attention and the residual stream make of the length of A_j. */
function addedLength(slots) {
  if (slots.output === "norm") return LENGTH.power(-1);
  if (slots.inner === "norm") return MIXED.power(-1);
  const kept = "sink" in slots.scoreParts ? KEPT : new Product();
  return slots.heads.includes("v") ? kept : kept.times(slots.inputFactor);
}

/** The layer as a formula: X ← Norm(X + α_t·Norm(A(X))). */
export function updateText(slots, symbol = "A", norm = "Norm") {
  const written = times(Product.of(slots.step), writtenText(slots, symbol, norm));
  return `X ← ${wrap(slots.stream, `${times(Product.of(slots.carry), "X")} + ${written}`, norm)}`;
}

/** The flow as a formula: Ẋ = α_t·P_X Norm(A(X)). */
export function flowText(slots, symbol = "A", norm = "Norm") {
  const [step, carry] = [Product.of(slots.step), Product.of(slots.carry)];
  const written = writtenText(slots, symbol, norm);
  if (slots.stream === "norm") return `Ẋ = ${times(step.over(carry), `P_X ${written}`)}`;
  const grows = carry.isOne ? "" : `${times(Product.of(slots.carry.lessOne()), "X")} + `;
  return `Ẋ = ${grows}${times(step, written)}`;
}

/** Everything that the slots say and imply, as text, by the names of Python's ``scheme_record``; stages are joined. */
export function schemeTexts(scheme) {
  const { stages } = scheme;
  const joined = (text) => joinStages(scheme, stages.map(text));
  const slotTexts = (sublayer) =>
    Object.fromEntries(SLOTS.map((slot) => [slot, joined((stage) => stage[sublayer].texts[slot])]));
  const law = (stage) => lawOf(stage.attention, stage.norm);
  return {
    name: scheme.name,
    title: scheme.title,
    norm: joined((stage) => NORM_TITLES[stage.norm]),
    ...slotTexts("attention"),
    speed: joined((stage) => law(stage).speed.text),
    radial: joined((stage) => law(stage).radial.text),
    radius: joined(blockRadius),
    attention: joined((stage) => law(stage).attention),
    statement: joined((stage) => law(stage).statement),
    update: joined((stage) => updateText(stage.attention, "A", stage.normText)),
    flow: joined((stage) => (law(stage).flows ? flowText(stage.attention, "A", stage.normText) : "–")),
    feedforward: {
      ...slotTexts("feedforward"),
      update: joined((stage) => updateText(stage.feedforward, "F", stage.normText)),
    },
    alpha: joined((stage) => stage.alpha.text),
    learned: joined((stage) => stage.learned),
    initial: joined((stage) => stage.initial.text),
    weights: joined((stage) => stage.weights),
    users: scheme.users,
    papers: [...scheme.papers],
    note: scheme.note,
  };
}

/** What follows from the slots, and what is known of the scheme: [[label, text], …]. */
export function factRows(scheme) {
  const record = schemeTexts(scheme);
  const feedforward = record.feedforward.update;
  const inside = Object.entries(INSIDE).filter(([symbol]) => record.speed.includes(symbol));
  const learning = scheme.stages.filter((stage) => stage.sublayers.some((slots) => slots.learnsAlpha));
  const schedule = `α_t = ${record.alpha}, ${[...new Set(learning.map((stage) => LEARNS[stage.learned]))].join(" and ")}`;
  const map = (norm) =>
    `gain ⊙ ${norm}(a·x + s) + bias with learned a and s (tanh has no s), in theory ${norm}(√d·x/2)/√d for x of norm 1`;
  const pointwise = [...new Set(scheme.stages.filter((stage) => stage.pointwise).map((stage) => stage.norm))];
  const facts = [
    ["attention", record.update],
    ["feed-forward", feedforward],
    ["flow", record.flow],
    ["directions", record.speed === "–" ? "" : "θ̇_j = (1/s_j) P_θj A_j"],
    ["damping", `s_j = ${record.speed}`],
    ["radius", `ṙ_j = ${record.radial}   (over a block: ${record.radius})`],
    ["A_j", record.attention],
    ["where", [SYMBOLS, ...inside.map(([, text]) => text)].join("; ")],
    ["theory", record.statement],
    ["alpha", (record.update + feedforward).includes("α_t") ? schedule : ""],
    ["initial", record.initial === "1" ? "" : `W_V, W_O, W_in and W_out times ${record.initial}`],
    ["LayerNorm", scheme.stages.some((stage) => stage.norm === "layer") ? LAYER_NORM : ""],
    ...pointwise.map((norm) => [norm, map(norm)]),
    ["note", record.note],
    ["used by", record.users],
    ...record.papers.map((paper) => ["paper", paper]),
  ];
  return facts.filter(([, text]) => text);
}

/** What a whole block of one stage does to r_j: fixed, free, or which sublayer resets it. */
function blockRadius(stage) {
  const [attention, feedforward] = stage.sublayers.map((slots) => lawOf(slots, stage.norm).radiusFixed);
  if (attention && feedforward) return "fixed";
  if (attention || feedforward) return `reset by ${attention ? "attention" : "the feed-forward layer"}`;
  return "free";
}

/** 1 for t < 0.25·T, then r_j; a single text when all stages agree. An empty one is a dash. */
function joinStages(scheme, texts) {
  if (new Set(texts).size === 1) return texts[0];
  const shown = texts.map((text) => text || "–");
  const parts = scheme.stages.flatMap((stage, place) => (stage.then ? [`${shown[place]} for t < ${stage.endText}`] : []));
  return [...parts, shown.at(-1)].join(", then ");
}

/** output(f(input(X))) as text; what acts inside f stands below it. */
function writtenText(slots, symbol, norm) {
  const inside = [
    ...(slots.heads === "none" ? [] : [slots.heads]),
    ...Object.keys(slots.scoreParts),
    ...(slots.inner === "none" ? [] : ["inner"]),
    ...(slots.gate === "none" ? [] : ["gate"]),
  ];
  const below = inside.length ? `_${inside.join(",")}` : "";
  const read = slots.readsNorm ? times(slots.inputFactor, `${norm}(X)`) : "X";
  return wrap(slots.output, `${symbol}${below}(${read})`, norm);
}

function wrap(slot, text, norm) {
  return { none: text, norm: `${norm}(${text})`, tangent: `P_X ${text}` }[slot];
}

/** A text with a factor: text/√(t+1) or α_t·text. */
function times(factor, text) {
  if (factor.isOne) return text;
  if (factor.factors.every(([, exponent]) => exponent.top < 0n)) return text + factor.text.replace(/^1/, "");
  return `${factor.text}·${text}`;
}
