/** Expressions of Python's grammar as trees and as text again: the page refuses formulas in the words of the library. */

import { floatText, repr } from "./errors.js";

const KEYWORDS = new Set(
  ("False None True and as assert async await break class continue def del elif else except finally for from global if " +
    "import in is lambda nonlocal not or pass raise return try while with yield").split(" "),
);
const CONSTANTS = ["True", "False", "None", "..."];
const DIGITS = "\\d(?:_?\\d)*";
const FLOAT = new RegExp(`(?:(?:${DIGITS})?\\.${DIGITS}|${DIGITS}\\.?)(?:[eE][+-]?${DIGITS})?[jJ]?`, "y");
const BASED = /0(?:[xX](?:_?[0-9a-fA-F])+|[oO](?:_?[0-7])+|[bB](?:_?[01])+)/y;
const NAME = /[\p{XID_Start}_]\p{XID_Continue}*/uy;
const AFTER_NUMBER = /(?:and|else|for|if|in|is|not|or)/y;
const SKIPPED = /[ \t\f]+|\\\r?\n|#[^\n\r]*/y;
const STRING = /'[^'\\\n]*'|"[^"\\\n]*"/y;
const OPERATOR = /\*\*|\/\/|<<|>>|<=|>=|==|!=|:=|->|\.\.\.|[-+*/%@&|^~<>()[\],:.=]/y;
const COMPARISONS = ["<", ">", "==", "!=", "<=", ">=", "in", "is"];
const BINARY = [["|"], ["^"], ["&"], ["<<", ">>"], ["+", "-"], ["*", "/", "//", "%", "@"]];
const [TUPLE, TEST, OR, AND, NOT, COMPARISON, BITS, FACTOR, POWER, ATOM] = [2, 4, 5, 6, 7, 8, 9, 15, 16, 18];
const STRENGTH = Object.fromEntries(BINARY.flatMap((signs, level) => signs.map((sign) => [sign, BITS + level])));
const MOST_BRACKETS = 199;
const DEEPEST = 900;

/** The text is no expression. */
export class SyntaxMistake extends Error {}

/**
 * The tree of an expression. Nodes: number {value, source}, name {id}, unary {operand} (a minus), binary {operator, left,
 * right}, call {callee, given, named}, and other {strength, pieces}, whose pieces are texts and [node, strength].
 */
export function parseSyntax(text) {
  const reader = new Reader(tokens(text));
  const tree = reader.expressions();
  while (reader.take("newline"));
  if (reader.next.kind !== "end") throw new SyntaxMistake(text);
  return tree;
}

/** The expression as Python's ``ast.unparse`` writes it. */
export function unparse(node, strength = TEST) {
  switch (node.type) {
    case "number":
      return node.source;
    case "name":
      return node.id;
    case "unary":
      return bracketed(`-${unparse(node.operand, FACTOR)}`, FACTOR < strength);
    case "binary": {
      const own = node.operator === "**" ? POWER : STRENGTH[node.operator];
      const [left, right] = node.operator === "**" ? [own + 1, own] : [own, own + 1];
      return bracketed(`${unparse(node.left, left)} ${node.operator} ${unparse(node.right, right)}`, own < strength);
    }
    case "call": {
      const named = node.named.map(([name, value]) => `${name}=${unparse(value)}`);
      return `${unparse(node.callee, ATOM)}(${[...node.given.map((part) => unparse(part)), ...named].join(", ")})`;
    }
  }
  const pieces = node.pieces.map((piece) => (typeof piece === "string" ? piece : unparse(...piece)));
  return bracketed(pieces.join(""), node.strength < strength);
}

/** Every node of a tree. */
export function walk(node) {
  const below = {
    unary: () => [node.operand],
    binary: () => [node.left, node.right],
    call: () => [node.callee, ...node.given, ...node.named.map(([, value]) => value)],
    other: () => node.pieces.filter((piece) => typeof piece !== "string").map(([part]) => part),
  }[node.type];
  return [node, ...(below ? below().flatMap(walk) : [])];
}

/** A tree whose names are replaced by what ``change`` gives for them, where it gives something. */
export function replaceNames(node, change) {
  const within = (part) => replaceNames(part, change);
  switch (node.type) {
    case "name":
      return change(node.id) ?? node;
    case "unary":
      return { ...node, operand: within(node.operand) };
    case "binary":
      return { ...node, left: within(node.left), right: within(node.right) };
    case "call":
      return { ...node, given: node.given.map(within) };
  }
  return node;
}

function bracketed(text, needed) {
  return needed ? `(${text})` : text;
}

function* tokens(text) {
  let place = 0;
  let depth = 0;
  const match = (pattern) => {
    pattern.lastIndex = place;
    const found = pattern.exec(text);
    if (found) place += found[0].length;
    return found?.[0];
  };
  while (place < text.length) {
    if (match(SKIPPED) !== undefined) continue;
    if (match(/\r?\n|\r/y) !== undefined) {
      if (!depth) yield { kind: "newline" };
      continue;
    }
    const based = match(BASED);
    const digits = based ?? match(FLOAT);
    if (digits !== undefined) {
      yield number(digits, based !== undefined);
      const after = place;
      if (match(NAME) !== undefined || match(/\d/y) !== undefined) {
        place = after;
        if (match(AFTER_NUMBER) === undefined) throw new SyntaxMistake(text);
        place = after;
      }
      continue;
    }
    const name = match(NAME)?.normalize("NFKC");
    if (name !== undefined) {
      if (`'"`.includes(text[place] ?? " ")) throw new SyntaxMistake(text);
      yield KEYWORDS.has(name) ? { kind: name } : { kind: "name", name };
      continue;
    }
    const quoted = match(STRING);
    if (quoted !== undefined) {
      yield { kind: "string", content: quoted.slice(1, -1) };
      continue;
    }
    const operator = match(OPERATOR);
    if (operator === undefined) throw new SyntaxMistake(text);
    if ("([".includes(operator) && ++depth > MOST_BRACKETS) throw new SyntaxMistake(text);
    if (")]".includes(operator) && --depth < 0) throw new SyntaxMistake(text);
    yield { kind: operator };
  }
  yield { kind: "end" };
}

function number(digits, based) {
  const plain = digits.replaceAll("_", "");
  if (!based && /[jJ]$/.test(plain)) return { kind: "other", text: `${imaginaryText(Number(plain.slice(0, -1)))}j` };
  if (!based && /[.eE]/.test(plain)) {
    const value = Number(plain);
    return { kind: "number", value, source: Number.isFinite(value) ? floatText(value) : "1e309" };
  }
  if (!based && /^0+[1-9]/.test(plain)) throw new SyntaxMistake(digits);
  const whole = BigInt(based ? plain.toLowerCase() : plain);
  return { kind: "number", value: Number(whole), source: String(whole) };
}

function imaginaryText(value) {
  return Number.isFinite(value) ? floatText(value).replace(/\.0$/, "") : "1e309";
}

function other(strength, ...pieces) {
  return { type: "other", strength, pieces };
}

function listed(nodes) {
  return nodes.flatMap((node, place) => (place ? [", ", [node, TEST]] : [[node, TEST]]));
}

function tuple(nodes) {
  if (!nodes.length) return other(ATOM, "()");
  return { ...other(TUPLE, ...listed(nodes), ...(nodes.length === 1 ? [","] : [])), nodes };
}

/** A reader of tokens, one method for each level of the grammar from the loosest to the tightest. */
class Reader {
  constructor(stream) {
    this.stream = stream;
    this.level = 0;
    this.next = stream.next().value;
    this.following = this.next.kind === "end" ? this.next : stream.next().value;
  }

  advance() {
    const token = this.next;
    this.next = this.following;
    if (this.next.kind !== "end") this.following = this.stream.next().value;
    return token;
  }

  take(...kinds) {
    return kinds.includes(this.next.kind) ? this.advance() : null;
  }

  expect(kind) {
    return this.take(kind) ?? this.fail();
  }

  fail() {
    throw new SyntaxMistake(this.next.kind);
  }

  /** One expression, or several with commas between them: a tuple. */
  expressions(last = "end") {
    const first = this.test();
    if (this.next.kind !== ",") return first;
    const nodes = [first];
    while (this.take(",") && ![last, "end", "newline"].includes(this.next.kind)) nodes.push(this.test());
    return tuple(nodes);
  }

  nested(read) {
    if (++this.level > DEEPEST) this.fail();
    const node = read();
    this.level -= 1;
    return node;
  }

  test() {
    return this.nested(() => {
      const body = this.logical("or", OR, () => this.logical("and", AND, () => this.negation()));
      if (!this.take("if")) return body;
      const condition = this.logical("or", OR, () => this.logical("and", AND, () => this.negation()));
      this.expect("else");
      return other(TEST, [body, TEST + 1], " if ", [condition, TEST + 1], " else ", [this.test(), TEST]);
    });
  }

  logical(word, strength, below) {
    const first = below();
    if (this.next.kind !== word) return first;
    const pieces = [[first, strength + 1]];
    while (this.take(word)) pieces.push(` ${word} `, [below(), Math.min(strength + 1 + (pieces.length + 1) / 2, ATOM)]);
    return other(strength, ...pieces);
  }

  negation() {
    if (!this.take("not")) return this.comparison();
    return this.nested(() => other(NOT, "not ", [this.negation(), NOT]));
  }

  comparison() {
    const pieces = [[this.binary(0), COMPARISON + 1]];
    for (;;) {
      const inverted = this.next.kind === "not" && this.following.kind === "in" && this.advance();
      const token = this.take(...COMPARISONS);
      if (!token) break;
      const sign = inverted ? "not in" : token.kind === "is" && this.take("not") ? "is not" : token.kind;
      pieces.push(` ${sign} `, [this.binary(0), COMPARISON + 1]);
    }
    return pieces.length === 1 ? pieces[0][0] : other(COMPARISON, ...pieces);
  }

  binary(level) {
    if (level === BINARY.length) return this.factor();
    let left = this.binary(level + 1);
    for (let token = this.take(...BINARY[level]); token; token = this.take(...BINARY[level])) {
      left = { type: "binary", operator: token.kind, left, right: this.binary(level + 1) };
    }
    return left;
  }

  factor() {
    const sign = this.take("-", "+", "~");
    if (!sign) return this.power();
    const operand = this.nested(() => this.factor());
    return sign.kind === "-" ? { type: "unary", operand } : other(FACTOR, sign.kind, [operand, FACTOR]);
  }

  power() {
    const left = this.primary();
    if (!this.take("**")) return left;
    return { type: "binary", operator: "**", left, right: this.nested(() => this.factor()) };
  }

  primary() {
    let node = this.atom();
    for (;;) {
      if (this.take("(")) node = this.call(node);
      else if (this.take("[")) node = this.subscript(node);
      else if (this.take(".")) {
        const space = node.type === "number" && /^\d+$/.test(node.source) ? " " : "";
        node = other(ATOM, [node, ATOM], `${space}.${this.expect("name").name}`);
      } else return node;
    }
  }

  call(callee) {
    const [given, named] = [[], []];
    while (!this.take(")")) {
      if (this.next.kind === "name" && this.following.kind === "=") {
        const { name } = this.advance();
        this.advance();
        named.push([name, this.test()]);
      } else if (this.take("*")) given.push(other(ATOM, "*", [this.binary(0), BITS]));
      else if (named.length) this.fail();
      else given.push(this.test());
      if (this.next.kind !== ")") this.expect(",");
    }
    return { type: "call", callee, given, named };
  }

  subscript(node) {
    const index = this.expressions("]");
    this.expect("]");
    return other(ATOM, [node, ATOM], "[", ...(index.nodes ? index.pieces : [[index, TEST]]), "]");
  }

  atom() {
    const token = this.advance();
    switch (token.kind) {
      case "number":
        return { type: "number", value: token.value, source: token.source };
      case "name":
        return { type: "name", id: token.name };
      case "other":
        return other(ATOM, token.text);
      case "string": {
        let { content } = token;
        for (let more = this.take("string"); more; more = this.take("string")) content += more.content;
        return other(ATOM, repr(content));
      }
      case "(": {
        const node = this.next.kind === ")" ? tuple([]) : this.expressions(")");
        this.expect(")");
        return node;
      }
      case "[": {
        const node = this.next.kind === "]" ? [] : this.expressions("]");
        this.expect("]");
        return other(ATOM, "[", ...listed(node.nodes ?? [].concat(node)), "]");
      }
    }
    return CONSTANTS.includes(token.kind) ? other(ATOM, token.kind) : this.fail();
  }
}
