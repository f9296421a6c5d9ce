// Step sizes α_t as functions of time: by name, as dynamics/schedules.py has them, or by a formula in t.

import { didYouMean, general, InputError } from "./errors.js";
import { Expression, finiteValue } from "./formulas.js";

export const SCHEDULES = {
  constant: () => 1,
  root: (t) => 1 / Math.sqrt(1 + t),
  linear: (t) => 1 / (1 + t),
  mixed: (t) => 1 / (Math.abs(Math.sin(4 * t)) * (1 + t) + Math.abs(Math.cos(4 * t))),
  power: (t) => 1 / Math.sqrt(1 + t) ** 3,
};

/** α_t from the name of a schedule or from a formula in t; null, the scheme's own, for null. */
export function namedSchedule(text) {
  if (text === null || text === undefined) return null;
  if (Object.hasOwn(SCHEDULES, text)) return SCHEDULES[text];
  const names = Object.keys(SCHEDULES);
  const allowed = `alpha is one of ${names.join(", ")}, or a formula in t, not '${text}'${didYouMean(String(text), names)}`;
  let formula;
  try {
    formula = Expression.parse(text);
  } catch (error) {
    throw error instanceof InputError ? new InputError(allowed) : error;
  }
  if ([...formula.names].some((name) => name !== "t")) throw new InputError(allowed);
  return (t) => {
    const value = finiteValue(formula, { t });
    if (value === null) throw new InputError(`alpha = '${text}' is not a finite number at t = ${general(t)}`);
    return value;
  };
}
