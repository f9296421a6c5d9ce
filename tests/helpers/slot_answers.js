import { blockRecords } from "./drawing.js";
import { createEditor } from "./editor.js";
import { InputError } from "./errors.js";
import { schemeToml } from "./files.js";
import { Expression, Product, finiteValue } from "./formulas.js";
import { factRows, lawOf, schemeTexts } from "./law.js";
import { parseScheme } from "./slots.js";

function attempt(answer) {
  try {
    return answer();
  } catch (error) {
    if (error instanceof InputError) return { error: error.message };
    throw error;
  }
}

export function formulaAnswer(text, places) {
  return attempt(() => {
    const formula = Expression.parse(text);
    const factors = Product.of(formula);
    const values = places.map(([t, depth]) => ({ t, depth, alpha: 0.3 }));
    return {
      source: formula.source,
      text: formula.text,
      names: [...formula.names].sort(),
      product: factors.text,
      inverse: Product.of("r").over(factors).text,
      lessOne: formula.lessOne().text,
      values: values.map((at) => finiteValue(formula, at)),
      products: values.map((at) => finiteValue(factors, at)),
    };
  });
}

function numbers(scheme, t, depth, measures, inner) {
  const stage = scheme.at(t, depth);
  const place = stage.place(t, depth);
  const values = { ...place, ...measures };
  const made = {
    stage: stage.name,
    alpha: place.alpha,
    sphere: stage.onSphere(),
    initial: attempt(() => ({ is: stage.initialFactor(t, depth) })),
  };
  for (const sublayer of ["attention", "feedforward"]) {
    const slots = stage[sublayer];
    const law = lawOf(slots, stage.norm);
    const { cap, sink, temperature } = slots.scoreRule;
    made[sublayer] = {
      ...Object.fromEntries(["step", "carry", "input"].map((slot) => [slot, attempt(() => ({ is: slots.number(slot, place) }))])),
      speed: attempt(() => ({ is: finiteValue(law.speed, values) })),
      radial: attempt(() => ({ is: finiteValue({ evaluate: (at) => law.radial.evaluate(inner, at) }, values) })),
      scores: [cap, sink, temperature && temperature(5)],
    };
  }
  return made;
}

export function schemeAnswer(dictionary, places, measures, inner) {
  return attempt(() => {
    const scheme = parseScheme(dictionary);
    return {
      values: scheme.values,
      texts: schemeTexts(scheme),
      facts: factRows(scheme),
      blocks: blockRecords(scheme),
      places: places.map(([t, depth]) => attempt(() => numbers(scheme, t, depth, measures, inner))),
      checks: [1, 6, 7.25].map((depth) => attempt(() => scheme.check(depth) ?? {})),
    };
  });
}

export function toml(dictionary) {
  return schemeToml(parseScheme(dictionary));
}

export function openEditor(schemes, name, depth) {
  const seen = { changes: [], saved: [] };
  const app = { save: async (file, blob) => seen.saved.push([file, await blob.text()]) };
  const scheme = schemes.find((values) => values.name === name);
  const host = document.getElementById("host");
  const onChange = (dictionary, base) => seen.changes.push({ dictionary, base });
  seen.editor = createEditor(host, { app, scheme, schemes, onChange, check: (candidate) => candidate.check(depth) });
  return seen;
}
