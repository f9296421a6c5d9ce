/** A block as a drawing, from its slots: first the parts in order, then the same parts as SVG in the colours of the page. */

import { svg } from "./dom.js";
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

const LETTERS = 11.5;
const BOX = 27; // height of a box
const FACTOR = 19; // height of a factor beside the line
const GAP = 15; // line between two things on the branch
const REST = 20; // line between two sublayers
const SIDE = 24; // from the trunk to the boxes of the branch
const BESIDE = 7; // from a line to the factor beside it
const CORNER = 7;
const SUM = 8; // radius of ⊕
const MARGIN = 6;
const FILL = { norm: "#fff1bd", attention: "#fbd9c6", feedforward: "#cfe5f7" };
const EDGE = { norm: "#9a7200", attention: "#b34700", feedforward: "#00639c" };
const INK_IN_BOXES = "#1f2328"; // boxes are light on every screen

/** One SVG element for each stage of a scheme, x entering at the bottom, in the colours of the page's theme. */
export function drawBlocks(scheme) {
  const records = blockRecords(scheme);
  return scheme.stages.map((_, place) => drawStage(records.slice(2 * place, 2 * place + 2), scheme.title || scheme.name));
}

function drawStage(records, title) {
  const [{ stage }] = records;
  const texts = records.flatMap(({ branch, after }) => [...branch, after]);
  const [factors, boxed] = [texts.filter(isFactor), texts.filter((text) => !isFactor(text))];
  const box = widest(boxed) + 20;
  const left = Math.max(widest(records.map(({ carry }) => carry)) + BESIDE, box / 2);
  const width = Math.ceil(left + SIDE + box / 2 + Math.max(box / 2, widest(factors) + BESIDE) + 2 * MARGIN);
  const height = records.reduce((sum, record) => sum + sublayerHeight(record), 2 * REST + 2 * MARGIN);
  const trunk = MARGIN + left;
  const parts = [label(trunk, height - MARGIN, "x", { "text-anchor": "middle", "font-style": "italic", "font-size": 13.5 })];
  let level = height - MARGIN - 13;
  for (const record of records) {
    parts.push(...drawSublayer(record, { box, trunk, branch: trunk + SIDE + box / 2, bottom: level }));
    level -= sublayerHeight(record);
  }
  parts.push(...arrow([trunk, level], [trunk, level - REST]));
  const when = stage === "after" ? ", later layers" : stage && `, ${stage}`;
  const words = `Block of ${title}${when}: ${records.map(spoken).join("; ")}.`;
  const look = { class: "drawing", role: "img", "aria-label": words, "font-size": LETTERS, "stroke-width": 1.3 };
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, ...look }, ...parts);
}

function spoken({ branch, carry, after }) {
  return `${branch.join(", ")}, added to ${carry ? `x ${carry}` : "x"}${after && `, then ${after}`}`;
}

function isFactor(text) {
  return text.startsWith("×");
}

function kindOf(text, sublayer) {
  return /^(Norm|tanh|erf)/.test(text) ? "norm" : sublayer;
}

function branchHeight({ branch }) {
  return branch.reduce((sum, text) => sum + (isFactor(text) ? FACTOR : BOX + GAP), GAP);
}

function sublayerHeight(record) {
  return REST + branchHeight(record) + SUM + (record.after ? GAP + BOX : 0);
}

/** One sublayer from ``bottom`` up: the trunk with its factor, the branch, the sum, and the norm after it. */
function drawSublayer(record, { box, trunk, branch, bottom }) {
  const fork = bottom - REST;
  const total = fork - branchHeight(record);
  const parts = [line(`M${trunk} ${bottom}V${total + SUM}`)];
  let way = [[trunk, fork], [branch, fork]];
  let level = fork - GAP;
  for (const text of record.branch) {
    if (isFactor(text)) {
      parts.push(label(branch + BESIDE, level + GAP / 2 - FACTOR / 2 + 4, text));
      level -= FACTOR;
      continue;
    }
    parts.push(...arrow(...way, [branch, level]), ...boxed(text, kindOf(text, record.sublayer), branch, level, box));
    way = [[branch, level - BOX]];
    level -= BOX + GAP;
  }
  parts.push(...arrow(...way, [branch, level], [trunk + SUM, level]));
  if (record.carry) parts.push(label(trunk - BESIDE, (fork + total + SUM) / 2 + 4, record.carry, { "text-anchor": "end" }));
  parts.push(svg("circle", { cx: trunk, cy: total, r: SUM, fill: "var(--paper)", stroke: "var(--ink)" }));
  parts.push(line(`M${trunk - SUM} ${total}h${2 * SUM}M${trunk} ${total - SUM}v${2 * SUM}`));
  if (record.after) {
    const end = total - SUM - GAP;
    parts.push(...arrow([trunk, total - SUM], [trunk, end]), ...boxed(record.after, "norm", trunk, end, box));
  }
  return parts;
}

function boxed(text, kind, x, bottom, width) {
  const rect = { x: x - width / 2, y: bottom - BOX, width, height: BOX, rx: 5, fill: FILL[kind], stroke: EDGE[kind] };
  return [svg("rect", rect), label(x, bottom - BOX / 2 + 4, text, { "text-anchor": "middle", fill: INK_IN_BOXES })];
}

function label(x, y, text, attributes = {}) {
  return svg("text", { x, y, fill: "var(--ink)", ...attributes }, text);
}

function line(d) {
  return svg("path", { d, stroke: "var(--ink)", fill: "none" });
}

/** A line through the points, its right-angled turns rounded, with a head at its end. */
function arrow(...points) {
  let way = `M${points[0].join(" ")}`;
  for (let k = 1; k < points.length - 1; k++) {
    const [before, after] = [towards(points[k], points[k - 1]), towards(points[k], points[k + 1])];
    way += `L${before.join(" ")}Q${points[k].join(" ")} ${after.join(" ")}`;
  }
  const [[x, y], [backX, backY]] = [points.at(-1), towards(points.at(-1), points.at(-2))];
  const [sideX, sideY] = [(backY - y) / 2, (x - backX) / 2];
  const head = `M${x} ${y}L${backX + sideX} ${backY + sideY}L${backX - sideX} ${backY - sideY}Z`;
  return [line(`${way}L${backX} ${backY}`), svg("path", { d: head, fill: "var(--ink)" })];
}

function towards([x, y], [otherX, otherY]) {
  const length = Math.abs(x - otherX) + Math.abs(y - otherY); // lines run along the axes
  const share = length ? Math.min(CORNER, length / 2) / length : 0;
  return [x + share * (otherX - x), y + share * (otherY - y)];
}

/** About how wide the widest of some texts is; rather too wide than too narrow. */
function widest(texts) {
  const capital = (c) => (/\p{Lu}/u.test(c) ? 0.75 : 0.62);
  const letter = (c) => (/[ijlt.,:;'|!()[\]{}f ·]/.test(c) ? 0.35 : /[mwMW@%—→]/.test(c) ? 0.95 : capital(c));
  return Math.max(0, ...texts.map((text) => LETTERS * [...text].reduce((sum, c) => sum + letter(c), 0)));
}
