// Formulas that are written as plain text, with indices and exponents where they belong.
import { element } from "./dom.js";

// Names of code, such as size_QK, have more than a letter before the mark and no braces.
const PART = /[_^]\{(?:[^{}]|\{[^{}]*\})*\}|(?<![A-Za-z]{2})[_^](?:[A-Za-z0-9*]+|\p{Script=Greek})/gu;

/** A text as children of an element: `_j`, `_{t*}` below the line, `^q`, `^{−2t}` above it. */
export function formulaParts(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(PART)) {
    const inside = match[0][1] === "{" ? match[0].slice(2, -1) : match[0].slice(1);
    parts.push(text.slice(end, match.index), element(match[0][0] === "_" ? "sub" : "sup", {}, formulaParts(inside)));
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)].filter((part) => part !== "");
}
