/**
 * Arithmetic that a scheme's slots are written in: parsed from text, evaluated, multiplied and shown.
 * An Expression is a formula such as 1/sqrt(layer); a Product is Π atom^power, the form in which speed factors are derived.
 */

import { InputError, didYouMean, floatText, general, repr, strip } from "./errors.js";
import { SyntaxMistake, parseSyntax, replaceNames, unparse, walk } from "./syntax.js";

export const VARIABLES = {
  t: "time, 0 at the first layer",
  layer: "number of the layer, t + 1",
  depth: "number of layers in all",
  alpha: "the step that training learns and a simulation may schedule",
};
/** Values for which a formula has none: a division by zero, a root of a negative number, an overflow. */
class ArithmeticMistake extends Error {}

const FUNCTIONS = {
  sqrt: (value) => power(value, 0.5),
  exp: (value) => defined(Math.exp(value), value),
  log: (value) => (value > 0 || Number.isNaN(value) ? Math.log(value) : fail()),
  sin: (value) => (Math.abs(value) === Infinity ? fail() : Math.sin(value)),
  cos: (value) => (Math.abs(value) === Infinity ? fail() : Math.cos(value)),
};
const OPERATORS = {
  "+": { sign: "+", strength: 1, combine: (left, right) => left + right },
  "-": { sign: "−", strength: 1, combine: (left, right) => left - right },
  "*": { sign: "·", strength: 2, combine: (left, right) => left * right },
  "/": { sign: "/", strength: 2, combine: (left, right) => (right === 0 ? fail() : left / right) },
  "**": { sign: "^", strength: 4, combine: power },
};
const MINUS = { sign: "−", strength: 3 };
const ATOM = 5;
const LONGEST = 200;
const LARGEST = 1e300;
const SYMBOLS = { alpha: "α_t", depth: "T", r: "r_j", A: "|A_j|", M: "|M_j|", m: "m_j", inner: "⟨θ_j,A_j⟩" };
const TIME = parseSyntax("t + 1");

function fail() {
  throw new ArithmeticMistake();
}

function defined(value, ...given) {
  return !Number.isFinite(value) && given.every(Number.isFinite) ? fail() : value;
}

function power(base, exponent) {
  if (base === 1 || exponent === 0) return 1;
  if (base === -1 && Math.abs(exponent) === Infinity) return 1;
  return defined(base ** exponent, base, exponent);
}

/** A formula in t, layer, depth and alpha, stored as source (layer written t + 1). */
export class Expression {
  constructor(source) {
    this.source = source;
    Object.freeze(this);
  }

  /** Read a formula; ``extra`` names are allowed besides the variables. Nothing is ever executed. */
  static parse(text, extra = []) {
    if (text instanceof Expression) return text;
    if (typeof text !== "string" && typeof text !== "number") {
      throw new InputError(`a formula is a number or a text, not ${repr(text)}`);
    }
    if (typeof text === "number" && !(Math.abs(text) < LARGEST)) {
      throw new InputError(`a number in a formula is finite and below ${general(LARGEST)} in size, not ${floatText(text)}`);
    }
    const source = typeof text === "number" ? repr(text) : strip(text);
    checkLength(source);
    let tree;
    try {
      tree = parseSyntax(source);
    } catch (error) {
      if (error instanceof SyntaxMistake) throw new InputError(`cannot read the formula '${text}'`);
      throw error;
    }
    check(tree, source, [...Object.keys(VARIABLES), ...[...extra].sort()]);
    if (tree.type === "number") return new Expression(numberText(tree.value));
    const stored = unparse(replaceNames(tree, (name) => (name === "layer" ? TIME : null)));
    checkLength(stored);
    return new Expression(stored);
  }

  get tree() {
    return parsed(this.source).tree;
  }

  /** The variables that occur, a Set. */
  get names() {
    const nodes = walk(this.tree);
    const called = new Set(nodes.filter((node) => node.type === "call").map((node) => node.callee));
    return new Set(nodes.filter((node) => node.type === "name" && !called.has(node)).map((node) => node.id));
  }

  /** The formula as a reader would write it: 1/√(t+1). */
  get text() {
    return render(this.tree)[0];
  }

  /** The number for the values of the variables, {t, depth, alpha, …}; ``finiteValue`` is the one that never throws. */
  evaluate(values) {
    return parsed(this.source).evaluate(values);
  }

  /** The formula minus 1, simplified where that is plain: 0.5 gives −0.5, and 1 − α gives −α. */
  lessOne() {
    const { tree } = this;
    const value = constant(tree);
    if (value !== null) return new Expression(numberText(value - 1));
    if (tree.type === "binary" && tree.operator === "-" && tree.left.type === "number" && tree.left.value === 1) {
      const taken = unparse(tree.right);
      return new Expression(render(tree.right)[1] < ATOM ? `-(${taken})` : `-${taken}`);
    }
    return new Expression(`${this.source} - 1`);
  }
}

export const ONE = new Expression("1");

/** The value of a formula (an Expression or a Product); null where that is not a finite number. */
export function finiteValue(formula, values) {
  try {
    const value = formula.evaluate(values);
    return Number.isFinite(value) ? value : null;
  } catch (error) {
    if (error instanceof ArithmeticMistake) return null;
    throw error;
  }
}

/** Π atom^power over distinct atoms, [[source, Fraction], …]; no atom means 1. */
export class Product {
  constructor(factors = []) {
    this.factors = factors;
    Object.freeze(this);
  }

  /** Take a formula apart at its products, quotients, roots and powers. */
  static of(expression) {
    return factorise(parsed(typeof expression === "string" ? expression : expression.source).tree);
  }

  times(other) {
    const powers = new Map(this.factors);
    for (const [atom, exponent] of other.factors) powers.set(atom, (powers.get(atom) ?? ZERO).plus(exponent));
    return new Product([...powers].filter(([, exponent]) => exponent.top));
  }

  over(other) {
    return this.times(other.power(-1));
  }

  power(exponent) {
    const fraction = exponent instanceof Fraction ? exponent : new Fraction(BigInt(exponent));
    return new Product(fraction.top ? this.factors.map(([atom, own]) => [atom, own.times(fraction)]) : []);
  }

  /** Whether the product is empty: 1. */
  get isOne() {
    return !this.factors.length;
  }

  /** The variables that occur, a Set. */
  get names() {
    return new Set(this.factors.flatMap(([atom]) => [...new Expression(atom).names]));
  }

  /** The number for the values of the names in the atoms. */
  evaluate(values) {
    let result = 1;
    for (const [atom, exponent] of this.factors) {
      const base = parsed(atom).evaluate(values);
      const number = defined(exponent.value);
      result *= base === 0 && number < 0 ? Infinity : power(base, number);
    }
    return result;
  }

  /** The product as a reader would write it: r_j·|A_j|/α_t. */
  get text() {
    const above = this.factors.filter(([, exponent]) => exponent.top > 0n).map(powerText);
    const below = this.factors.filter(([, exponent]) => exponent.top < 0n).map(([atom, own]) => powerText([atom, own.negated]));
    const numerator = above.join("·") || "1";
    if (!below.length) return numerator;
    return below.length === 1 ? `${numerator}/${below[0]}` : `${numerator}/(${below.join("·")})`;
  }
}

/** top/bottom in lowest terms, of BigInts. */
class Fraction {
  constructor(top, bottom = 1n) {
    const shared = divisor(top < 0n ? -top : top, bottom);
    this.top = top / shared;
    this.bottom = bottom / shared;
  }

  plus(other) {
    return new Fraction(this.top * other.bottom + other.top * this.bottom, this.bottom * other.bottom);
  }

  times(other) {
    return new Fraction(this.top * other.top, this.bottom * other.bottom);
  }

  get negated() {
    return new Fraction(-this.top, this.bottom);
  }

  get value() {
    return Number(this.top) / Number(this.bottom);
  }

  get text() {
    return this.bottom === 1n ? `${this.top}` : `${this.top}/${this.bottom}`;
  }
}

const ZERO = new Fraction(0n);
const HALF = new Fraction(1n, 2n);

function divisor(a, b) {
  while (b) [a, b] = [b, a % b];
  return a;
}

const trees = new Map();

function parsed(source) {
  if (!trees.has(source)) {
    if (trees.size >= 1024) trees.clear();
    const tree = parseSyntax(source);
    trees.set(source, { tree, evaluate: evaluator(tree) });
  }
  return trees.get(source);
}

/** Refuse a text that is longer than any formula needs to be, before it is parsed. */
export function checkLength(source) {
  const { length } = [...source];
  if (length <= LONGEST) return;
  const beginning = [...source].slice(0, 20).join("");
  throw new InputError(`a formula has at most ${LONGEST} characters; one that begins '${beginning}' has ${length}`);
}

/** Allow numbers, the variables, + - * / ** and the listed functions of one argument; nothing else. */
function check(node, text, allowed) {
  if (node.type === "number") {
    if (Math.abs(node.value) < LARGEST) return;
    throw new InputError(`the number in '${text}' is not finite, or not below ${general(LARGEST)} in size`);
  }
  if (node.type === "name") {
    if (allowed.includes(node.id)) return;
    const close = didYouMean(node.id, allowed);
    throw new InputError(`unknown name '${node.id}' in '${text}'; allowed: ${allowed.join(", ")}${close}`);
  }
  const parts = allowedParts(node);
  if (!parts) {
    throw new InputError(
      `cannot use '${unparse(node)}' in '${text}'; allowed: numbers, ${allowed.join(", ")}, ` +
        `+ - * / **, and ${Object.keys(FUNCTIONS).join(", ")}`,
    );
  }
  for (const part of parts) check(part, text, allowed);
}

/** What stands below an operation that formulas may use; null for any other. */
function allowedParts(node) {
  if (node.type === "unary") return [node.operand];
  if (node.type === "binary") return Object.hasOwn(OPERATORS, node.operator) ? [node.left, node.right] : null;
  const listed = node.type === "call" && node.callee.type === "name" && Object.hasOwn(FUNCTIONS, node.callee.id);
  return listed && node.given.length === 1 && !node.named.length ? node.given : null;
}

function evaluator(node) {
  switch (node.type) {
    case "number":
      return () => node.value;
    case "name":
      return (values) => {
        if (values[node.id] === undefined) throw new TypeError(`the formula needs a value of ${node.id}`);
        return values[node.id];
      };
    case "unary": {
      const operand = evaluator(node.operand);
      return (values) => -operand(values);
    }
    case "binary": {
      const { combine } = OPERATORS[node.operator];
      const [left, right] = [evaluator(node.left), evaluator(node.right)];
      return (values) => combine(left(values), right(values));
    }
  }
  const apply = FUNCTIONS[node.callee.id];
  const argument = evaluator(node.given[0]);
  return (values) => apply(argument(values));
}

/** Text of a node and how tightly it binds. */
function render(node) {
  switch (node.type) {
    case "number":
      return [numberText(node.value), ATOM];
    case "name":
      return [Object.hasOwn(SYMBOLS, node.id) ? SYMBOLS[node.id] : node.id, ATOM];
    case "unary":
      return [MINUS.sign + bracketed(node.operand, MINUS.strength), MINUS.strength];
    case "binary": {
      const { sign, strength } = OPERATORS[node.operator];
      // Subtraction, division and powers do not associate to the right (a − (b − c)), and powers not to the left.
      const right = "+*".includes(node.operator) ? strength : strength + 1;
      const left = node.operator === "**" ? strength + 1 : strength;
      return [bracketed(node.left, left) + sign + bracketed(node.right, right), strength];
    }
  }
  if (node.callee.id === "sqrt") return [`√${bracketed(node.given[0], ATOM)}`, ATOM - 1];
  return [`${node.callee.id}(${render(node.given[0])[0]})`, ATOM];
}

function bracketed(node, strength) {
  const [text, binds] = render(node);
  return binds >= strength ? text : `(${text})`;
}

function factorise(node) {
  if (node.type === "number" && node.value === 1) return new Product();
  if (node.type === "binary" && node.operator === "*") return factorise(node.left).times(factorise(node.right));
  if (node.type === "binary" && node.operator === "/") return factorise(node.left).over(factorise(node.right));
  if (node.type === "binary" && node.operator === "**") {
    const exponent = rational(node.right);
    if (exponent) return raise(node.left, exponent);
  }
  if (node.type === "call" && node.callee.id === "sqrt") return raise(node.given[0], HALF);
  return new Product([[unparse(node), new Fraction(1n)]]);
}

/** A power of one factor multiplies its exponent; a power of several, such as √(2·T), and √(x²) = |x| stay together. */
function raise(base, exponent) {
  const inner = factorise(base);
  const even = inner.factors.length === 1 && inner.factors[0][1].bottom === 1n && inner.factors[0][1].top % 2n === 0n;
  if (inner.factors.length === 1 && (!even || exponent.bottom === 1n)) return inner.power(exponent);
  return new Product(exponent.top ? [[unparse(base), exponent]] : []);
}

/** The exponent as a fraction if it is one with a denominator up to 1000: 2, 0.5, 1/4, −1/2; otherwise null. */
function rational(node) {
  const value = constant(node);
  if (value === null) return null;
  const fraction = closest(exactly(value), 1000n);
  return fraction.value === value ? fraction : null;
}

/** A float64 as the fraction that it is. */
function exactly(value) {
  let [top, bottom] = [value, 1n];
  while (!Number.isInteger(top)) [top, bottom] = [top * 2, bottom * 2n];
  return new Fraction(BigInt(top), bottom);
}

/** The fraction with a denominator up to ``largest`` that is closest, by continued fractions. */
function closest(fraction, largest) {
  if (fraction.bottom <= largest) return fraction;
  let [p0, q0, p1, q1] = [0n, 1n, 1n, 0n];
  let [n, d] = [fraction.top, fraction.bottom];
  for (;;) {
    const whole = n / d - (n % d < 0n ? 1n : 0n);
    if (q0 + whole * q1 > largest) break;
    [p0, q0, p1, q1, n, d] = [p1, q1, p0 + whole * p1, q0 + whole * q1, d, n - whole * d];
  }
  const k = (largest - q0) / q1;
  const [near, far] = [new Fraction(p1, q1), new Fraction(p0 + k * p1, q0 + k * q1)];
  const distance = (other) => {
    const { top, bottom } = other.plus(fraction.negated);
    return new Fraction(top < 0n ? -top : top, bottom);
  };
  return distance(near).plus(distance(far).negated).top <= 0n ? near : far;
}

/** The value of a formula without variables; null with variables or without a value. */
function constant(node) {
  const variable = (part) => part.type === "name" && !Object.hasOwn(FUNCTIONS, part.id);
  return walk(node).some(variable) ? null : finiteValue({ evaluate: evaluator(node) }, {});
}

/** A number with all its digits, and no more: 1, 0.05, 0.123456789. */
function numberText(value) {
  return Number.isInteger(value) && Math.abs(value) < 1e15 ? String(value) : floatText(value);
}

function powerText([atom, exponent]) {
  const [text, strength] = render(parsed(atom).tree);
  const base = strength >= ATOM ? text : `(${text})`;
  if (exponent.text === "1") return base;
  if (exponent.text === "1/2") return `√${base}`;
  return exponent.bottom === 1n ? `${base}^${exponent.text}` : `${base}^(${exponent.text})`;
}
