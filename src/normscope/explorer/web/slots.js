/**
 * A scheme is a handful of slots: where a block normalises, how large its updates are, how much of the residual it keeps.
 * Every residual sublayer f at depth t is x ← stream(carry · x + step · output(f(input(x)))).
 */

import { InputError, WHITESPACE, general, repr, requireKeys, requireOne, strip } from "./errors.js";
import { Expression, ONE, Product, checkLength, finiteValue } from "./formulas.js";
import { SyntaxMistake, parseSyntax, unparse } from "./syntax.js";

export const NORM_TITLES = { rms: "RMSNorm", layer: "LayerNorm", tanh: "tanh", erf: "erf" };
const SPHERES = ["rms", "layer"]; // the other kinds are pointwise maps
export const WEIGHTS = ["free", "normalised"];
export const LEARNED = ["vector", "scalar"];
export const CHOICES = {
  inner: ["none", "norm"],
  gate: ["none", "sigmoid"],
  output: ["none", "norm", "tangent"],
  stream: ["none", "norm"],
};
export const PLAIN = "softmax";
export const SCORE_PARTS = ["temperature", "softcap", "sink"]; // in the order in which they act
const TRIED = [...Array(64).keys()].map((i) => i + 1).concat([...Array(14).keys()].map((i) => 2 ** (i + 7))); // values of n
const ATTENTION_ALONE = { heads: "none", scores: PLAIN, gate: "none" };
const EMPTY = {
  input: "none",
  heads: "none",
  scores: PLAIN,
  inner: "none",
  gate: "none",
  output: "none",
  step: ONE,
  carry: ONE,
  stream: "none",
};
export const SLOTS = Object.keys(EMPTY);
const SCHEME_DEFAULTS = {
  name: "",
  attention: null,
  feedforward: null,
  norm: "rms",
  alpha: ONE,
  learned: "vector",
  initial: ONE,
  weights: "free",
  until: ONE,
  then: null,
  title: "",
  users: "",
  papers: [],
  note: "",
};
const SCHEME_KEYS = Object.keys(SCHEME_DEFAULTS);
const TEXTS = ["name", "norm", "learned", "weights", "title", "users", "note"];
const MOST_STAGES = 16;
const MOST_LAYERS = 100000;
const KEYS = "n"; // the number of keys that a query sees
const SCORES_ALLOWED =
  "slot 'scores' is 'softmax', or some of temperature(log(n)), softcap(50) and sink, each once, joined by +";

function placeText({ t, depth }) {
  return `t = ${general(t)}${Number.isInteger(t) && t < depth ? `, layer ${general(t)} of ${general(depth)}` : ""}`;
}

/** The slots of one sublayer; ``step`` and ``carry`` are Expressions, every other slot is a text. */
export class Slots {
  constructor(values = {}) {
    Object.assign(this, EMPTY, values);
    const factor = slotFactor(this.input);
    for (const [slot, allowed] of Object.entries(CHOICES)) requireOne(this[slot], allowed, `slot '${slot}'`);
    const inOrder = [..."qkv"].filter((letter) => this.heads.includes(letter)).join("");
    if (this.heads !== "none" && (!this.heads || inOrder !== this.heads)) {
      throw new InputError(`slot 'heads' is 'none' or some of q, k, v in this order, such as 'qk', not '${this.heads}'`);
    }
    this.scoreParts = scoreParts(this.scores);
    this.scores = scoreText(this.scoreParts, "source", "+");
    checkLength(this.scores);
    this.step = Expression.parse(this.step);
    this.carry = Expression.parse(this.carry);
    this.formulas = { step: this.step, carry: this.carry, input: factor };
    Object.freeze(this);
  }

  /** {cap, sink, temperature}: a number or null each, and the factor on a query's logits as a function of its keys, or null. */
  get scoreRule() {
    const { temperature, softcap, sink } = this.scoreParts;
    const number = (formula) => (formula ? formula.evaluate({}) : null);
    const factor = temperature && ((keys) => finiteValue(temperature, { [KEYS]: keys }) ?? NaN);
    return { cap: number(softcap), sink: number(sink), temperature: factor ?? null };
  }

  get withoutAttention() {
    return new Slots({ ...this.values, ...ATTENTION_ALONE });
  }

  /** Whether the sublayer reads a normalised state. */
  get readsNorm() {
    return this.input !== "none";
  }

  /** Whether alpha stands in a slot, as the step that training learns. */
  get learnsAlpha() {
    return Object.values(this.formulas).some((formula) => formula.names.has("alpha"));
  }

  /** The factor c(t) on the input norm, a Product; 1 if there is none. */
  get inputFactor() {
    return this.formulas.input;
  }

  /** The value of ``step``, ``carry`` or the factor of ``input`` at {t, depth, alpha}; refused where it cannot be used. */
  number(slot, at) {
    const formula = this.formulas[slot];
    const value = finiteValue(formula, at);
    if (value === null) throw new InputError(`${slot} = '${formula.text}' is not a finite number at ${placeText(at)}`);
    const where = `'${formula.text}' is ${general(value)} at ${placeText(at)}`;
    if (slot === "carry" && this.stream === "norm" && !(value > 0)) {
      throw new InputError(`with a normalised stream carry must be positive; ${where}`);
    }
    if (slot === "input" && !(value > 0)) throw new InputError(`the factor on the input norm must be positive; ${where}`);
    return value;
  }

  /** Every slot as a file holds it. */
  get values() {
    return Object.fromEntries(SLOTS.map((slot) => [slot, plain(this[slot])]));
  }

  /** Every slot as a reader would write it. */
  get texts() {
    return {
      ...Object.fromEntries(SLOTS.map((slot) => [slot, this[slot]])),
      input: this.readsNorm ? Product.of("norm").times(this.inputFactor).text : "none",
      scores: scoreText(this.scoreParts, "text", " + "),
      step: this.step.text,
      carry: this.carry.text,
    };
  }
}

/** Slots for attention and for the feed-forward layer, and a rule for depth; made by ``parseScheme``. */
export class Scheme {
  constructor(values) {
    Object.assign(this, SCHEME_DEFAULTS, values);
    if (!this.name || [...this.name].some((letter) => WHITESPACE.test(letter) || ",/".includes(letter))) {
      throw new InputError(`a scheme's name is one word without commas or slashes, not '${this.name}'`);
    }
    this.feedforward ??= this.attention.withoutAttention;
    for (const [slot, empty] of Object.entries(ATTENTION_ALONE)) {
      if (this.feedforward[slot] !== empty) {
        throw new InputError(`slot '${slot}' belongs to attention: in a feed-forward layer it must be '${empty}'`);
      }
    }
    requireOne(this.norm, Object.keys(NORM_TITLES), "norm");
    requireOne(this.weights, WEIGHTS, "weights");
    requireOne(this.learned, LEARNED, "learned");
    for (const name of ["alpha", "initial"]) {
      this[name] = Expression.parse(this[name]);
      if (this[name].names.has("alpha")) {
        const itself = name === "alpha" ? "itself" : "alpha";
        throw new InputError(`${name} is a number or a formula in t, layer and depth; it cannot refer to ${itself}`);
      }
    }
    this.#checkUntil();
    this.#checkConstants();
    Object.freeze(this);
  }

  #checkUntil() {
    const allowed = "'until' is a share of the depth, above 0 and at most 1, or a formula in depth such as 1/depth";
    try {
      this.until = Expression.parse(this.until);
    } catch (error) {
      throw error instanceof InputError ? new InputError(`${allowed}, not ${repr(this.until)}`) : error;
    }
    const { names } = this.until;
    const share = names.size ? null : (finiteValue(this.until, {}) ?? 0);
    if ([...names].some((name) => name !== "depth") || (share !== null && !(share > 0 && share <= 1))) {
      throw new InputError(`${allowed}, not '${this.until.text}'`);
    }
    const whole = this.until.source === ONE.source;
    if (!this.then && !whole) throw new InputError("'until' below 1 needs 'then': the scheme of the remaining layers");
    if (this.then && whole) throw new InputError("'then' needs 'until' below 1: the share of the depth before it");
    if (this.then && !names.size && !this.then.until.names.size) this.checkOrder(1);
  }

  /** Refuse stages of which the second is over when it would begin. */
  checkOrder(depth) {
    if (this.then?.then && this.then.end(depth) <= this.end(depth)) {
      throw new InputError(`'${this.then.name}' holds for t < ${this.then.endText}, which is over when it would begin`);
    }
  }

  /** Formulas without t and depth have their value at every depth, so it is checked at once; ``check`` does the others. */
  #checkConstants() {
    const fixed = !this.alpha.names.size;
    const place = fixed ? this.place(0, 1) : { t: 0, depth: 12, alpha: 1 };
    for (const slots of this.sublayers) {
      for (const [name, formula] of Object.entries(slots.formulas)) {
        if ([...formula.names].every((variable) => fixed && variable === "alpha")) slots.number(name, place);
      }
    }
    if (!this.initial.names.size) this.initialFactor(0, 1);
  }

  /** The slots of attention and of the feed-forward layer. */
  get sublayers() {
    return [this.attention, this.feedforward];
  }

  /** The factor on the initial weights of W_V, W_O, W_in and W_out at time t. */
  initialFactor(t, depth) {
    const value = finiteValue(this.initial, { t, depth });
    if (value === null || !(value > 0)) {
      throw new InputError(`initial = '${this.initial.text}' is not a positive number at ${placeText({ t, depth })}`);
    }
    return value;
  }

  /** Refuse a scheme that cannot run at a depth: at every layer and at ``times``; ``alpha(t)`` replaces the schedule. */
  check(depth, times = [], alpha = null) {
    try {
      for (const stage of this.stages) {
        const share = finiteValue(stage.until, { depth });
        if (share === null || !(share > 0)) {
          throw new InputError(`until = '${stage.until.text}' is not a positive number at depth ${general(depth)}`);
        }
        stage.checkOrder(depth);
      }
      const varying = alpha !== null || this.stages.some((stage) => stage.varies);
      for (const t of [...layersOf(depth), ...times].slice(0, varying ? undefined : 1)) {
        const stage = this.at(t, depth);
        const place = stage.place(t, depth, alpha);
        stage.initialFactor(t, depth);
        for (const slots of stage.sublayers) for (const name of Object.keys(slots.formulas)) slots.number(name, place);
      }
    } catch (error) {
      if (!(error instanceof InputError)) throw error;
      throw new InputError(`scheme '${this.name}' cannot run at depth ${general(depth)}: ${error.message}`);
    }
  }

  /** Whether any formula of this stage depends on time. */
  get varies() {
    const formulas = [this.alpha, this.initial, ...this.sublayers.flatMap((slots) => Object.values(slots.formulas))];
    return formulas.some((formula) => formula.names.has("t"));
  }

  /** The time at which this stage ends. */
  end(depth) {
    return Math.min(1, this.until.evaluate({ depth })) * depth;
  }

  /** The same as a formula: 0.25·T. */
  get endText() {
    return Product.of(this.until).times(Product.of("depth")).text;
  }

  /** The stage that holds at time t of ``depth`` layers (t = 0 is the first layer). */
  at(t, depth) {
    // 0.07 · 100 is 7 layers, not 8
    return !this.then || t < this.end(depth) - 1e-9 * depth ? this : this.then.at(t, depth);
  }

  /** Whether hidden states start normalised: if any sublayer of this stage normalises the stream, by a norm with a sphere. */
  onSphere(feedforward = true) {
    const normalised = this.attention.stream === "norm" || (feedforward && this.feedforward.stream === "norm");
    return normalised && !this.pointwise;
  }

  /** Whether the kind of norm is a map of every component alone. */
  get pointwise() {
    return !SPHERES.includes(this.norm);
  }

  /** What stands in formulas and drawings where a slot says norm: Norm, or the name of the map. */
  get normText() {
    return this.pointwise ? NORM_TITLES[this.norm] : "Norm";
  }

  /** The stages from the first layer to the last, an array; one, unless the scheme changes with depth. */
  get stages() {
    return [this, ...(this.then?.stages ?? [])];
  }

  /** The variables {t, depth, alpha} of the slots at time t; ``alpha(t)`` replaces the scheme's own. */
  place(t, depth, alpha = null) {
    const value = alpha === null ? finiteValue(this.alpha, { t, depth }) : alpha(t);
    if (value === null || !Number.isFinite(value)) {
      const text = alpha === null ? ` = '${this.alpha.text}'` : "";
      throw new InputError(`alpha${text} is not a finite number at ${placeText({ t, depth })}`);
    }
    return { t, depth, alpha: value };
  }

  /** The same scheme with another kind of norm in every stage. */
  withNorm(norm) {
    requireOne(norm, Object.keys(NORM_TITLES), "norm");
    return new Scheme({ ...this, norm, then: this.then?.withNorm(norm) ?? null });
  }

  /** The dictionary that ``parseScheme`` reads. */
  get values() {
    const own = Object.fromEntries(SCHEME_KEYS.map((key) => [key, plain(this[key])]));
    return { ...own, attention: this.attention.values, feedforward: this.feedforward.values, then: this.then?.values ?? null };
  }
}

/** The scheme of a dictionary, such as a scheme file or the page's data holds it; an InputError says what is wrong. */
export function parseScheme(dictionary, readers = 0) {
  if (!isTable(dictionary)) throw new InputError(`a scheme is a table of slots, not ${repr(dictionary)}`);
  if (readers === MOST_STAGES) throw new InputError(`a scheme has at most ${MOST_STAGES} stages`);
  requireKeys(Object.keys(dictionary), SCHEME_KEYS, "a scheme");
  const given = Object.fromEntries(Object.entries(dictionary).filter(([, value]) => value !== null && value !== undefined));
  if (!Object.hasOwn(given, "attention")) {
    throw new InputError(`a scheme needs the table [attention] with some of ${SLOTS.join(", ")}`);
  }
  for (const sublayer of ["attention", "feedforward"]) {
    if (Object.hasOwn(given, sublayer)) given[sublayer] = parseSlots(given[sublayer], sublayer);
  }
  if (Object.hasOwn(given, "then")) {
    const named = isTable(given.then) ? { name: given.name, ...given.then } : given.then; // a stage needs no name of its own
    given.then = parseScheme(named, readers + 1);
  }
  for (const key of TEXTS) {
    if (typeof (given[key] ?? (key === "name" ? null : "")) !== "string") {
      throw new InputError(`'${key}' is a text, not ${repr(given[key])}`);
    }
  }
  const { papers = [] } = given;
  if (!Array.isArray(papers) || !papers.every((paper) => typeof paper === "string")) {
    throw new InputError(`'papers' is a list of texts, not ${repr(papers)}`);
  }
  return new Scheme({ ...given, papers: Object.freeze([...papers]) });
}

function parseSlots(content, where) {
  if (!isTable(content)) throw new InputError(`[${where}] is a table of slots, not ${repr(content)}`);
  requireKeys(Object.keys(content), SLOTS, `[${where}]`);
  for (const slot of SLOTS) {
    if (slot !== "step" && slot !== "carry" && Object.hasOwn(content, slot) && typeof content[slot] !== "string") {
      throw new InputError(`slot '${slot}' in [${where}] is a text such as "none", not ${repr(content[slot])}`);
    }
  }
  return new Slots(content);
}

function isTable(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function plain(value) {
  return value instanceof Expression ? value.source : Array.isArray(value) ? [...value] : value;
}

/** Every layer of a model; of one that is deeper than any, as many spread over its depth. */
function layersOf(depth) {
  const count = Math.ceil(depth);
  const most = Math.min(count, MOST_LAYERS);
  return Array.from({ length: most }, (_, i) => Math.floor((i * count) / most));
}

/** The factor beside the norm in none, norm or norm/sqrt(layer). */
function slotFactor(slot) {
  if (slot === "none") return new Product();
  const { factors } = Product.of(Expression.parse(slot, ["norm"]));
  const norm = factors.find(([atom]) => atom === "norm");
  const rest = factors.filter(([atom]) => atom !== "norm");
  if (norm?.[1].text !== "1" || rest.some(([atom]) => new Expression(atom).names.has("norm"))) {
    throw new InputError(`slot 'input' is 'none', 'norm', or 'norm' times a factor (norm/sqrt(layer)), not '${slot}'`);
  }
  return new Product(rest);
}

/** The parts of the slot ``scores`` and the formula of each, in the order in which they act; none for the plain softmax. */
function scoreParts(text) {
  if (text === PLAIN) return {};
  checkLength(strip(text));
  let tree;
  try {
    tree = parseSyntax(strip(text));
  } catch (error) {
    throw error instanceof SyntaxMistake ? new InputError(`${SCORES_ALLOWED}, not '${text}'`) : error;
  }
  const given = summands(tree).map((node) => scorePart(node, text));
  const parts = Object.fromEntries(given);
  if (Object.keys(parts).length < given.length) throw new InputError(`${SCORES_ALLOWED}, not '${text}'`);
  for (const [name, formula] of Object.entries(parts)) {
    for (const keys of formula.names.has(KEYS) ? TRIED : [2]) {
      const value = finiteValue(formula, { [KEYS]: keys });
      if (value === null || (name !== "sink" && !(value > 0 || (value === 0 && keys === 1)))) {
        const what = name === "sink" ? "a finite number" : "positive";
        const at = formula.names.has(KEYS) ? ` for n = ${keys}` : "";
        throw new InputError(`in slot 'scores' the number of ${name} must be ${what}${at}, not '${formula.text}'`);
      }
    }
  }
  return Object.fromEntries(SCORE_PARTS.filter((name) => name in parts).map((name) => [name, parts[name]]));
}

function scoreText(parts, form, joint) {
  const text = ([name, formula]) => (name === "sink" && formula[form] === "0" ? name : `${name}(${formula[form]})`);
  return Object.entries(parts).map(text).join(joint) || PLAIN;
}

function summands(node) {
  return node.type === "binary" && node.operator === "+" ? [...summands(node.left), node.right] : [node];
}

function scorePart(node, text) {
  if (node.type === "name" && node.id === "sink") return ["sink", new Expression("0")];
  const name = node.type === "call" && node.given.length === 1 && !node.named.length ? node.callee.id : null;
  if (!SCORE_PARTS.includes(name)) throw new InputError(`${SCORES_ALLOWED}, not '${text}'`);
  const formula = Expression.parse(unparse(node.given[0]), [KEYS]);
  const allowed = name === "temperature" ? [KEYS] : [];
  if ([...formula.names].some((variable) => !allowed.includes(variable))) {
    const takes = allowed.length ? "a formula of n, the number of keys that a query sees" : "a number";
    throw new InputError(`in slot 'scores' ${name} takes ${takes}, not '${unparse(node.given[0])}'`);
  }
  return [name, formula];
}
