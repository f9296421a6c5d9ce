/** A block as a drawing, from its slots: first the parts in order, then the same parts as SVG in the colours of the page. */

import { PLAIN } from "./slots.js";

const TITLES = { attention: "Attention", feedforward: "Feed-forward" };

/** The parts of a sublayer in the order in which a token passes them: {branch: [text, …], carry, after}. */
function sublayerParts(slots, sublayer, norm) {
  const branch = [];
  if (slots.readsNorm) branch.push(norm);
  if (slots.readsNorm && !slots.inputFactor.isOne) branch.push(`× ${slots.inputFactor.text}`);
  if (slots.heads !== "none") branch.push(`Norm(${[...slots.heads].join(", ")})`);
  if (slots.scores !== PLAIN) branch.push(slots.texts.scores);
  branch.push(TITLES[sublayer]);
  const inside = [...(slots.inner === "norm" ? [norm] : []), ...(slots.gate === "sigmoid" ? ["× σ(W_G·)"] : [])];
  if (inside.length) branch.push(...inside, sublayer === "feedforward" ? "W_out" : "W_O");
  if (slots.output !== "none") branch.push({ norm, tangent: "part ⟂ x" }[slots.output]);
  if (slots.step.source !== "1") branch.push(`× ${slots.step.text}`);
  return {
    branch,
    carry: slots.carry.source === "1" ? "" : `× ${slots.carry.text}`,
    after: slots.stream === "norm" ? norm : "",
  };
}

/** The drawing as a table: {scheme, stage, sublayer, branch, carry, after} for each sublayer of each stage. */
export function blockRecords(scheme) {
  return scheme.stages.flatMap((stage) => {
    const holds = stage.then ? `t < ${stage.endText}` : stage === scheme ? "" : "after";
    return Object.keys(TITLES).map((sublayer) => ({
      scheme: scheme.name,
      stage: holds,
      sublayer,
      ...sublayerParts(stage[sublayer], sublayer, stage.normText),
    }));
  });
}
