/** Mistakes of a user in the words of the Python library, and values as Python writes them. */

const SPACE = "\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
export const WHITESPACE = new RegExp(`[${SPACE}]`);
const EDGES = new RegExp(`^[${SPACE}]+|[${SPACE}]+$`, "g");
const HIDDEN = /(?![\t\n])[\p{C}\p{Zl}\p{Zp}]/gu;
const CLOSE_ENOUGH = 0.6;

/** A user's mistake, in one line; what a page would not show is escaped. */
export class InputError extends Error {
  constructor(message) {
    super(visible(message));
    this.name = "InputError";
  }
}

/** Text without the spaces around it. */
export function strip(text) {
  return text.replace(EDGES, "");
}

function visible(text) {
  return text.replace(HIDDEN, escaped);
}

function escaped(character) {
  const short = { "\r": "\\r", "\t": "\\t", "\n": "\\n" }[character];
  const code = character.codePointAt(0);
  const [mark, width] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
  return short ?? `\\${mark}${code.toString(16).padStart(width, "0")}`;
}

/** A value of JSON as Python's repr writes it. */
export function repr(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "number") return Number.isSafeInteger(value) ? String(value) : floatText(value);
  if (typeof value === "string") return quoted(value);
  if (Array.isArray(value)) return `[${value.map(repr).join(", ")}]`;
  return `{${Object.entries(value).map(([key, content]) => `${quoted(key)}: ${repr(content)}`).join(", ")}}`;
}

/** A value within a sentence: a text as it is, anything else as ``repr``. */
export function shown(value) {
  return typeof value === "string" ? value : repr(value);
}

function quoted(text) {
  const mark = text.includes("'") && !text.includes('"') ? '"' : "'";
  const body = text.replaceAll("\\", "\\\\").replaceAll(mark, `\\${mark}`);
  return mark + body.replace(/(?! )[\p{C}\p{Z}]/gu, escaped) + mark;
}

/** The shortest text that gives the number again, as Python writes a float: 0.05, 1e-05, 2.0. */
export function floatText(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const text = positional(value.toExponential(), 16);
  return (Object.is(value, -0) ? "-" : "") + (/[.e]/.test(text) ? text : `${text}.0`);
}

/** A number with six digits at most, as Python's format ``g``. */
export function general(value) {
  if (!Number.isFinite(value)) return floatText(value);
  return (Object.is(value, -0) ? "-" : "") + positional(value.toExponential(5), 6);
}

function positional(exponential, widest) {
  const [, sign, first, rest = "", power] = /^(-?)(\d)(?:\.(\d+))?e([+-]\d+)$/.exec(exponential);
  const digits = (first + rest).replace(/0+$/, "") || "0";
  const exponent = Number(power);
  if (exponent < -4 || exponent >= widest) {
    const mantissa = digits.length > 1 ? `${digits[0]}.${digits.slice(1)}` : digits;
    return `${sign}${mantissa}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
  }
  if (exponent < 0) return `${sign}0.${"0".repeat(-exponent - 1)}${digits}`;
  const whole = digits.slice(0, exponent + 1).padEnd(exponent + 1, "0");
  const fraction = digits.slice(exponent + 1);
  return sign + (fraction ? `${whole}.${fraction}` : whole);
}

/** ``; did you mean 'peri'?`` when a word is close to an allowed one, else an empty text. */
export function didYouMean(word, allowed) {
  let best = null;
  for (const candidate of allowed) {
    const score = similarity(candidate, word);
    if (score >= CLOSE_ENOUGH && (!best || score > best.score || (score === best.score && candidate > best.candidate))) {
      best = { score, candidate };
    }
  }
  return best ? `; did you mean '${best.candidate}'?` : "";
}

/** Refuse keys of a table that are not among those that are allowed. */
export function requireKeys(given, allowed, where) {
  for (const key of given) {
    if (!allowed.includes(key)) {
      throw new InputError(`unknown key '${key}' in ${where}${didYouMean(key, allowed)} (allowed: ${allowed.join(", ")})`);
    }
  }
}

/** Refuse a value that is not among those that are allowed. */
export function requireOne(value, allowed, what) {
  if (!allowed.includes(value)) {
    throw new InputError(`${what} is one of ${allowed.join(", ")}, not '${shown(value)}'${didYouMean(shown(value), allowed)}`);
  }
}

/** Twice the matching characters over all characters: the longest common run, then the same on both sides of it. */
function similarity(left, right) {
  const [a, b] = [[...left], [...right]];
  return a.length + b.length ? (2 * matching(a, b)) / (a.length + b.length) : 1;
}

function matching(a, b) {
  let [length, startA, startB] = [0, 0, 0];
  let before = new Array(b.length + 1).fill(0);
  for (let i = 0; i < a.length; i++) {
    const runs = new Array(b.length + 1).fill(0);
    for (let j = 0; j < b.length; j++) {
      if (a[i] !== b[j]) continue;
      runs[j + 1] = before[j] + 1;
      if (runs[j + 1] > length) [length, startA, startB] = [runs[j + 1], i + 1 - runs[j + 1], j + 1 - runs[j + 1]];
    }
    before = runs;
  }
  if (!length) return 0;
  const after = matching(a.slice(startA + length), b.slice(startB + length));
  return length + matching(a.slice(0, startA), b.slice(0, startB)) + after;
}
