/** The slot editor: a control for every slot of a scheme; block drawing, update, flow and law follow each change. */

import { drawBlocks } from "./drawing.js";
import { button, element, labelled, svg } from "./dom.js";
import { InputError } from "./errors.js";
import { schemeToml } from "./files.js";
import { factRows } from "./law.js";
import { formulaParts } from "./math_text.js";
import { svgBlob, svgText } from "./save.js";
import { CHOICES, LEARNED, NORM_TITLES, PLAIN, SCORE_PARTS, WEIGHTS, parseScheme } from "./slots.js";

const SUBLAYERS = {
  attention: ["input", "heads", "scores", "inner", "gate", "output", "step", "carry", "stream"],
  feedforward: ["input", "inner", "output", "step", "carry", "stream"],
};
const LABELS = {
  input: "input: what the sublayer reads",
  heads: "heads: norms after the projections",
  scores: "scores: how logits become weights",
  inner: "inner: norm before W_O (W_out)",
  gate: "gate: factor before the last matrix",
  output: "output: norm of the sublayer output",
  step: "step: size of the update",
  carry: "carry: weight of the residual",
  stream: "stream: norm after the residual addition",
};
const OPTIONS = { tangent: "tangent: part orthogonal to x", sigmoid: "sigmoid of W_G times the input" };
const FACTOR = "norm with a factor";
const SCORE_STARTS = { temperature: "log(n)", softcap: "50", sink: "0" };
const FORMULA_HINT =
  "Formulas may use t (0 at the first layer), layer (t + 1), depth (T), alpha, numbers, + - * / **, sqrt, exp, log, sin, cos; "
  + "for example 1/sqrt(layer).";
const STAGE_HINT = "This scheme changes with depth. Each stage has slots, a kind of norm and a step of its own.";
let made = 0;

/**
 * The editor of a scheme in ``host``. ``onChange(dictionary, base)`` is called for every change that makes a usable scheme;
 * ``check(scheme)`` may refuse more with an InputError. Returns {setScheme(dictionary), scheme, saves, dispose}.
 */
export function createEditor(host, { app = null, scheme, schemes, onChange = () => {}, check = () => {} }) {
  const id = `editor-${++made}`;
  const forms = element("div", { class: "editor-forms" });
  const results = element("div", { class: "editor-results" });
  const presets = element("select", { on: { change: () => start(presets.value) } });
  const hint = element("p", { class: "note" }, FORMULA_HINT);
  const undo = button("Undo all changes", () => start(base));
  const status = element("p", { class: "note editor-status", role: "status" });
  const named = new Map(schemes.map((values) => [values.name, values]));
  let current = null; // the scheme that runs
  let draft = null; // its dictionary as the controls have it: feedforward is null where it follows attention
  let waiting = new Map(); // path → value of each control that has no usable value, in the order of changes
  let base = "";
  let controls = new Map(); // path → {node, problem}
  let nameTyped = false;

  presets.append(...schemes.map(({ name, title }) => element("option", { value: name }, title ? `${name}: ${title}` : name)));
  const fileName = textInput("", { size: 14 }, () => (nameTyped = true));
  const nameProblem = element("span", { class: "problem", id: `${id}-name-problem`, role: "alert" });
  fileName.setAttribute("aria-describedby", nameProblem.id);
  host.replaceChildren(
    element(
      "div",
      { class: "editor", role: "group", "aria-label": "Slots of a scheme" },
      element("div", { class: "controls" }, labelled("Start from", presets), undo),
      status,
      element("div", { class: "editor-body" }, element("div", {}, forms, hint), results),
      element(
        "div",
        { class: "controls" },
        labelled("Name of the file", fileName, nameProblem),
        button("Save as TOML", () => save(tomlFile)),
        button("Save the drawing", () => save(drawingFile)),
      ),
    ),
  );

  /** Take a named scheme as it is. */
  function start(name) {
    show(parseScheme(named.get(name)));
    onChange(current.values, base);
  }

  /** Show another scheme; one that is shown already stays as it is. What is no scheme is refused with an InputError. */
  function setScheme(dictionary) {
    const next = parseScheme(dictionary);
    if (!current || !sameValues(next, current)) show(next);
  }

  function show(next) {
    take(next, linked(next));
    nameTyped = false;
    base = named.has(next.name) ? next.name : schemes[0].name;
    presets.value = base;
    build();
  }

  function take(next, values) {
    current = next;
    draft = values;
    waiting = new Map();
  }

  /** A control has another value: use it if a scheme comes of it, and whatever waited for it. */
  function change(path, value) {
    waiting.delete(path);
    waiting.set(path, value);
    let refused = new Map();
    for (let progress = true; progress; ) {
      progress = false;
      refused = new Map();
      for (const [place, wanted] of [...waiting]) {
        const attempt = withValue(draft, place.split("."), wanted);
        const problem = refusal(attempt);
        if (problem) {
          refused.set(place, problem);
          continue;
        }
        draft = attempt;
        waiting.delete(place);
        progress = true;
      }
    }
    for (const [place, control] of controls) showProblem(control, refused.get(place) ?? "");
    const next = parseScheme(draft);
    const changed = !sameValues(next, current);
    current = next;
    describe();
    if (changed) onChange(current.values, base);
  }

  /** The words in which a dictionary is refused; empty if it can be used. */
  function refusal(dictionary) {
    try {
      check(parseScheme(dictionary));
      return "";
    } catch (error) {
      if (error instanceof InputError) return error.message;
      throw error;
    }
  }

  function showProblem({ node, problem }, text) {
    if (problem.textContent !== text) problem.textContent = text;
    for (const input of node.matches("input, select") ? [node] : node.querySelectorAll("input, select")) {
      if (text) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    }
  }

  // Controls

  /** All controls, for the stages of the draft. */
  function build() {
    controls = new Map();
    const stages = stagesOf(draft);
    const several = stages.length > 1;
    forms.replaceChildren(
      ...(several ? [element("p", { class: "note" }, STAGE_HINT)] : []),
      ...stages.map((values, k) => stageForm(values, "then.".repeat(k), several ? k : null)),
      several
        ? button("Remove the last stage", () => restructure(withoutLast(draft)))
        : button("Add a stage for later layers", () => restructure(withStage(draft))),
    );
    describe();
  }

  /** Stages come or go: what waited for a usable value is given up. */
  function restructure(values) {
    take(parseScheme(values), values);
    build();
    onChange(current.values, base);
  }

  function stageForm(values, place, number) {
    const path = (key) => `${place}${key}`;
    const title = number === null ? "Scheme" : `Stage ${number + 1}${values.then ? "" : ": the remaining layers"}`;
    const until = values.then
      ? [formula(path("until"), values.until, "until: share of the depth T", "0.25, or 1/depth for the first layer")]
      : [];
    const training = element(
      "details",
      {},
      element("summary", {}, "What training does"),
      element(
        "div",
        { class: "editor-grid" },
        choice(path("learned"), values.learned, LEARNED, "learned: alpha as"),
        formula(path("initial"), values.initial, "initial: factor on W_V, W_O, W_in, W_out"),
        choice(path("weights"), values.weights, WEIGHTS, "weights: matrices"),
      ),
    );
    return element(
      "fieldset",
      { class: "editor-stage" },
      element("legend", { class: number === null ? "visually-hidden" : null }, title),
      element(
        "div",
        { class: "editor-grid" },
        ...until,
        choice(path("norm"), values.norm, Object.keys(NORM_TITLES), "norm: kind, wherever a slot has one", NORM_TITLES),
        formula(path("alpha"), values.alpha, "alpha: schedule of the step α_t"),
      ),
      element("h3", {}, "Attention"),
      slotGrid("attention", path("attention"), values.attention),
      feedforwardForm(values, path("feedforward")),
      training,
    );
  }

  /** The slots of the feed-forward layer, folded; they follow attention's until they get values of their own. */
  function feedforwardForm(values, path) {
    const grid = element("div", {});
    const stage = path.split(".").length - 1;
    const follows = element("input", { type: "checkbox", checked: values.feedforward === null });
    const fill = () => {
      const slots = stagesOf(draft)[stage].feedforward;
      for (const place of [...controls.keys()]) if (place.startsWith(`${path}.`)) controls.delete(place);
      grid.replaceChildren(slots ? slotGrid("feedforward", path, slots) : "");
    };
    follows.addEventListener("change", () => {
      for (const place of [...waiting.keys()]) if (place.startsWith(`${path}.`)) waiting.delete(place);
      change(path, follows.checked ? null : current.stages[stage].attention.withoutAttention.values);
      fill();
    });
    const box = beside(follows, "the same slots as attention");
    const problem = element("span", { class: "problem", role: "alert" });
    controls.set(path, { node: follows, problem });
    const folded = element("details", {}, element("summary", {}, "Feed-forward layer"), box, problem, grid);
    folded.open = values.feedforward !== null;
    fill();
    return folded;
  }

  function slotGrid(sublayer, path, values) {
    const slots = SUBLAYERS[sublayer].map((slot) => control(path, slot, values[slot]));
    return element("div", { class: "editor-grid" }, slots);
  }

  function control(sublayer, slot, value) {
    const path = `${sublayer}.${slot}`;
    if (slot === "step" || slot === "carry") return formula(path, value, LABELS[slot]);
    if (slot === "input") return inputControl(path, value);
    if (slot === "heads") return headsControl(path, value);
    if (slot === "scores") return scoresControl(path, value);
    return choice(path, value, CHOICES[slot], LABELS[slot], OPTIONS);
  }

  /** A control with its label above and the place of its problem below. */
  function framed(path, text, node) {
    const problem = element("span", { class: "problem", id: `${id}-${path}-problem`, role: "alert" });
    controls.set(path, { node, problem });
    node.dataset.path = path;
    const inputs = node.matches("input, select") ? [node] : [...node.querySelectorAll("input, select")];
    for (const input of inputs) input.setAttribute("aria-describedby", problem.id);
    if (inputs[0] === node) return element("div", { class: "editor-control" }, labelled(text, node), problem);
    node.setAttribute("role", "group");
    node.setAttribute("aria-label", text);
    const group = element("div", { class: "control" }, element("span", {}, text), node);
    return element("div", { class: "editor-control" }, group, problem);
  }

  function choice(path, value, allowed, text, titles = {}) {
    const options = allowed.map((name) => element("option", { value: name, selected: name === value }, titles[name] ?? name));
    const node = element("select", { on: { change: () => change(path, node.value) } }, options);
    return framed(path, text, node);
  }

  function textInput(value, attributes, onInput) {
    const plain = { type: "text", value, spellcheck: "false", autocomplete: "off", autocapitalize: "off", maxlength: 240 };
    const node = element("input", { ...plain, ...attributes, on: { input: () => onInput(node.value) } });
    return node;
  }

  function formula(path, value, text, placeholder = null) {
    const node = textInput(value, { placeholder }, (wanted) => change(path, wanted));
    return framed(path, text, node);
  }

  function inputControl(path, value) {
    const kind = value === "none" || value === "norm" ? value : FACTOR;
    const select = element(
      "select",
      { "aria-label": LABELS.input },
      ["none", "norm", FACTOR].map((name) => element("option", { value: name, selected: name === kind }, name)),
    );
    const look = { "aria-label": "norm with a factor, a formula", hidden: kind !== FACTOR };
    const text = textInput(kind === FACTOR ? value : "norm/sqrt(layer)", look, (wanted) => change(path, wanted));
    select.addEventListener("change", () => {
      text.hidden = select.value !== FACTOR;
      change(path, text.hidden ? select.value : text.value);
    });
    return framed(path, LABELS.input, element("div", { class: "editor-parts" }, select, text));
  }

  function headsControl(path, value) {
    const box = (letter) => element("input", { type: "checkbox", value: letter, checked: value.includes(letter) });
    const boxes = [..."qkv"].map(box);
    const changed = () => change(path, boxes.filter((input) => input.checked).map((input) => input.value).join("") || "none");
    const node = element(
      "div",
      { class: "editor-parts", on: { change: changed } },
      boxes.map((input) => beside(input, input.value)),
    );
    return framed(path, LABELS.heads, node);
  }

  function scoresControl(path, value) {
    const present = parseScheme({ name: "scores", attention: { scores: value } }).attention.scoreParts;
    const rows = SCORE_PARTS.map((part) => {
      const box = element("input", { type: "checkbox", checked: part in present });
      const look = { "aria-label": `${part}, its number`, disabled: !(part in present), size: 9 };
      const text = textInput(present[part]?.source ?? SCORE_STARTS[part], look, () => changed());
      box.addEventListener("change", () => {
        text.disabled = !box.checked;
        changed();
      });
      return { part, box, text };
    });
    const changed = () => {
      const parts = rows.filter(({ box }) => box.checked).map(({ part, text }) => `${part}(${text.value})`);
      change(path, parts.join("+") || PLAIN);
    };
    const lines = rows.map(({ part, box, text }) => element("div", { class: "editor-part" }, beside(box, part), text));
    return framed(path, LABELS.scores, element("div", { class: "editor-parts column" }, lines));
  }

  // What follows from the slots

  function describe() {
    const edited = isEdited();
    const about = edited ? ["note", "used by", "paper"] : [];
    const rows = factRows(current).filter(([name]) => !about.includes(name));
    undo.disabled = !edited && !waiting.size;
    const waits = waiting.size ? " A control has no usable value yet: the last scheme that could be used keeps running." : "";
    const words = (edited ? `Edited: differs from ${base}.` : `${base}, unchanged.`) + waits;
    if (status.textContent !== words) status.textContent = words;
    results.replaceChildren(
      element("div", { class: "editor-blocks" }, drawBlocks(current).map((block, k) => stageFigure(block, current.stages[k]))),
      element("dl", { class: "editor-facts" }, rows.map(([name, text]) =>
        [element("dt", {}, formulaParts(name)), element("dd", {}, formulaParts(text.replaceAll("P_θj", "P_{θ_j}")))])),
    );
    if (!nameTyped) fileName.value = edited ? `${base}-edited` : base;
  }

  function isEdited() {
    return !sameValues(parseScheme(named.get(base)), current);
  }

  // Files

  /** The scheme under the name that was typed, as a file. */
  async function tomlFile() {
    const about = isEdited() ? { title: `${current.title || current.name}, edited` } : {};
    const scheme = parseScheme({ ...current.values, ...about, name: fileName.value.trim() });
    return { name: `${scheme.name}.toml`, blob: new Blob([schemeToml(scheme)], { type: "application/toml" }) };
  }

  /** The blocks of all stages side by side, as a file. */
  async function drawingFile() {
    let width = 0;
    const blocks = drawBlocks(current);
    const height = Math.max(...blocks.map((block) => Number(block.getAttribute("height"))));
    for (const block of blocks) {
      block.setAttribute("x", width);
      block.setAttribute("y", height - Number(block.getAttribute("height")));
      width += Number(block.getAttribute("width"));
    }
    const sheet = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height }, blocks);
    results.append(sheet);
    const paper = getComputedStyle(document.documentElement).getPropertyValue("--paper").trim() || "white";
    const text = svgText(sheet, paper);
    sheet.remove();
    return { name: `${current.name}-block.svg`, blob: svgBlob(text) };
  }

  async function save(make) {
    nameProblem.textContent = "";
    try {
      const { name, blob } = await make();
      app?.save(name, blob);
    } catch (error) {
      if (!(error instanceof InputError)) throw error;
      nameProblem.textContent = error.message;
    }
  }

  setScheme(scheme);
  return {
    setScheme,
    get scheme() {
      return current;
    },
    saves: [
      { label: "Scheme as TOML", make: tomlFile },
      { label: "Block drawing (SVG)", make: drawingFile },
    ],
    dispose() {
      host.replaceChildren();
    },
  };
}

function stageFigure(block, stage) {
  return element("figure", {}, stage.then && element("figcaption", {}, `t < ${stage.endText}`), block);
}

function sameValues(scheme, other) {
  return JSON.stringify(scheme.values) === JSON.stringify(other.values);
}

/** The dictionary of a scheme with null for a feed-forward layer that has attention's slots, in every stage. */
function linked(scheme) {
  const values = scheme.values;
  const same = JSON.stringify(scheme.attention.withoutAttention.values) === JSON.stringify(values.feedforward);
  return { ...values, feedforward: same ? null : values.feedforward, then: scheme.then ? linked(scheme.then) : null };
}

function withValue(values, [key, ...rest], value) {
  return { ...values, [key]: rest.length ? withValue(values[key], rest, value) : value };
}

function stagesOf(values) {
  return values ? [values, ...stagesOf(values.then)] : [];
}

function beside(box, text) {
  return element("label", { class: "control line" }, box, element("span", {}, text));
}

function withStage(values) {
  return { ...values, until: "0.5", then: { ...values, name: `${values.name}-later` } };
}

function withoutLast(values) {
  return values.then?.then ? { ...values, then: withoutLast(values.then) } : { ...values, then: null, until: "1" };
}
