/** A scheme as a TOML file, which ``normscope simulate --scheme file.toml`` reads. */

import { parseScheme } from "./slots.js";

const KEYS = ["title", "norm", "alpha", "learned", "initial", "weights", "until"];
const EMPTY = parseScheme({ name: "none", attention: {} }).values;

/** The text of the file: what differs from empty slots, one table for each sublayer and each later stage. */
export function schemeToml(scheme) {
  return `${table(scheme.values, "").join("\n")}\n`;
}

function table(values, place) {
  const lines = [`name = ${quoted(values.name)}`, ...entries(values, EMPTY, KEYS)];
  for (const sublayer of ["attention", "feedforward"]) {
    const slots = entries(values[sublayer], EMPTY[sublayer], Object.keys(EMPTY[sublayer]));
    lines.push("", `[${place}${sublayer}]`, ...slots);
  }
  if (values.then) lines.push("", `[${place}then]`, ...table(values.then, `${place}then.`));
  return lines;
}

function entries(values, empty, keys) {
  return keys.filter((key) => values[key] !== empty[key]).map((key) => `${key} = ${quoted(values[key])}`);
}

function quoted(text) {
  return JSON.stringify(text.replace(/\p{Cs}/gu, "\ufffd")).replaceAll("\x7f", "\\u007f");
}
