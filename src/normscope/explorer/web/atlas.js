// The model atlas: layers × heads of a model or an audit, a head, a token, curves beside theory, and a dial of noise on norms.
import { button, element, labelled } from "./dom.js";
import { createLines } from "./lines.js";
import { createSide, measuresOf } from "./atlas_side.js";
import { createSource, sourcesOf } from "./atlas_sources.js";
import { scaleOf } from "./heatmap.js";
import { tokenName } from "./attention_map.js";
import { readState, stateChanges } from "./state.js";
import { csvBlob, svgBlob } from "./save.js";

const PAUSE = 350;  // milliseconds without a key until a prompt is read
const LEVELS = [0, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5];  // factors 1 + κ are positive below 1/√3
const PARTS = { qkm: "queries, keys and values", x: "input norms", q: "queries", k: "keys", m: "values",
  qk: "queries and keys" };
const PROMPT = "The capital of France is Paris and the capital of Italy is";
const DEFAULTS = { a: "", b: "", prompt: PROMPT, measure: "top-weight", layer: 0, head: 0, token: -1, curve: "angle", noise: 0,
  parts: "qkm", at: -1, draw: 0 };
const MOST_DRAW = 10 ** 6;
const NOTHING = "There is no model and no audit to show. Open a model with “normscope explore package:smollm2”, or audit one "
  + "and open its run folder: “normscope audit MODEL --out runs/mine”, then “normscope explore runs/mine”.";
const SIDES = ["a", "b"];
// What has to be asked again when a part of the state changes; what a change asks for comes in this order.
const ORDER = ["read", "noise", "token", "head", "words"];
const [NOISE, HEAD] = [["noise", "head"], ["head", "words"]];
const ASKS = { a: ORDER, b: [], prompt: ORDER, layer: HEAD, head: HEAD, token: ORDER.slice(1), noise: NOISE, parts: NOISE,
  at: NOISE, draw: NOISE, measure: [], curve: [] };

/** The view in `host`. */
export function createAtlas(host, app) {
  const sources = sourcesOf(app.data);
  if (!sources.length) {
    host.append(element("h2", {}, "Model atlas"), element("p", {}, NOTHING));
    return { show() {}, hide() {}, keys: {}, saves: [] };
  }
  const defaults = { ...DEFAULTS, a: sources[0].id };
  const sides = {}, pending = new Set(), missed = new Set();  // parts without an answer yet; those that no server answered
  let state = { ...defaults }, run = 0, typing = 0, visible = false, stopped = () => {}, chart = null;

  // Controls
  const option = (value, text) => element("option", { value }, text);
  const select = (label, name, change) => {
    const control = element("select", { name, on: { change: (event) => change(event.target.value) } });
    return { control, label: labelled(label, control) };
  };
  const first = select("Model or audit", "a", (value) => update({ a: value }, true));
  const other = select("Compare with", "b", (value) => update({ b: value }, true));
  const measure = select("Measure", "measure", (value) => update({ measure: value }, true));
  const curve = select("Curve", "curve", (value) => update({ curve: value }, true));
  const prompt = element("textarea", { name: "prompt", rows: 2, maxlength: 8000, spellcheck: "false" });
  const problem = element("p", { class: "problem", role: "alert", hidden: true });
  const status = element("p", { class: "note", role: "status" });
  const cancel = button("Cancel", () => app.request("/api/cancel", { method: "POST" }).catch(() => {}), { hidden: true });
  const tokens = element("div", { class: "atlas-tokens", role: "group", "aria-label": "Tokens: choose one to follow" });
  const later = button("Also measure interference and subspaces", () => readLater());
  const promptBox = element("div", {}, labelled("Prompt", prompt),
    element("div", { class: "controls" }, status, cancel));
  first.control.append(...sources.map(({ id, name, kind }) => option(id, `${name} (${kind})`)));

  // The dial
  const level = element("input", { type: "range", name: "noise", min: 0, max: LEVELS.length - 1, step: 1 });
  const levelText = element("output");
  const parts = select("On the norms of", "parts", (value) => update({ parts: value }));
  const where = select("In", "at", (value) => update({ at: Number(value) }));
  const redraw = button("Another draw", () => update({ draw: state.draw + 1 }));
  const onMap = button("Show the heads that change", () => update({ measure: "noise-switched" }, true));
  const noiseWords = element("p", { role: "status" });
  parts.control.append(...Object.entries(PARTS).map(([value, text]) => option(value, text)));
  level.addEventListener("input", () => update({ noise: LEVELS[level.value] }));

  const pair = (name) => element("div", { class: "atlas-pair", dataset: { part: name } });
  const pairs = Object.fromEntries(["about", "map", "head", "token", "next"].map((name) => [name, pair(name)]));
  const chartPlace = element("div"), chartWords = element("p", { class: "note" });
  const section = (title, ...content) =>
    element("section", { class: "panel", "aria-label": title }, element("h3", {}, title), ...content);
  const row = (...content) => element("div", { class: "controls" }, ...content);
  const panels = {
    map: section("Layers × heads", row(measure.label, later), pairs.map),
    head: section("The chosen head", pairs.head),
    dial: section("Noise on norms",
      row(labelled("RMS of the relative noise", level, levelText), parts.label, where.label, redraw, onMap), noiseWords),
    next: section("The next token", pairs.next),
    token: section("The chosen token", pairs.token),
    curve: section("Layer by layer, beside theory", row(curve.label), chartWords, chartPlace),
  };
  for (const panel of [panels.token, panels.curve]) panel.classList.add("atlas-wide");
  const grid = element("div", { class: "atlas-panels" }, Object.values(panels));
  host.append(element("h2", { class: "visually-hidden" }, "Model atlas"), row(first.label, other.label), promptBox, problem, tokens,
    pairs.about, grid);

  const all = () => SIDES.map((side) => sides[side]).filter(Boolean);
  const models = () => all().filter(({ source }) => source.kind === "model");
  const failed = (text) => {
    problem.textContent = text;
    problem.hidden = !text;
  };

  /** What went wrong with a part. That no server answers is the frame's to report; the part is asked again when one does. */
  const lost = (error, part) => {
    if (error.gone) missed.add(part);
    else failed(`${error.message[0].toUpperCase()}${error.message.slice(1)}${/[.!?]$/.test(error.message) ? "" : "."}`);
  };

  /** Change the state, in the address too, and ask for what depends on it. */
  function update(patch, push = false) {
    state = { ...state, ...patch };
    app.setState("atlas", stateChanges(patch, defaults), { push });
    return follow(new Set(Object.keys(patch).flatMap((name) => ASKS[name])));
  }

  /** Make the sides that the state names; whether one is new. */
  function makeSides() {
    const wanted = { a: state.a, b: sources.some(({ id }) => id === state.b) ? state.b : "" };
    let fresh = false;
    for (const name of SIDES) {
      if (sides[name]?.source.id === wanted[name]) continue;
      sides[name]?.dispose();
      delete sides[name];
      const found = sources.find(({ id }) => id === wanted[name]) ?? (name === "a" ? sources[0] : null);
      if (!found) continue;
      sides[name] = createSide(app, createSource(app, found), { lost, head: chooseHead,
        token: (token) => update({ token }, true) });
      fresh = true;
    }
    for (const [part, place] of Object.entries(pairs)) place.replaceChildren(...all().map(({ cells }) => cells[part]));
    return fresh;
  }

  /** Show a head and say so: on a narrow screen it is below the map, out of sight. */
  async function chooseHead(layer, head) {
    await update({ layer, head }, true);
    const far = panels.head.getBoundingClientRect().top > innerHeight - 80;
    if (far) panels.head.scrollIntoView({ behavior: app.reducedMotion ? "auto" : "smooth" });
    app.announce(`Layer ${layer}, head ${head}: see the chosen head.`);
  }

  /** Read the prompt on all sides; returns those that have. */
  async function readAll(mine) {
    const asked = all();
    status.textContent = models().length ? "Reading the prompt…" : "";
    cancel.hidden = !models().length;
    const answers = await Promise.allSettled(asked.map((side) => side.read(state, "read")));
    if (mine !== run) return [];
    cancel.hidden = true;
    status.textContent = "";
    const error = answers.find(({ reason }) => reason)?.reason;
    if (error) {
      lost(error, "read");
      const shown = models().find(({ data }) => data && data.prompt.text !== state.prompt);
      status.textContent = shown ? `What is shown is still of the prompt “${shown.data.prompt.text}”.` : "";
    }
    for (const side of asked) if (side.data) side.showAbout();
    return asked.filter((side, at) => answers[at].value);
  }

  /** Ask for parts in their order, and show them as they come; a newer change takes over, with what is not answered yet. */
  async function follow(changed) {
    const mine = ++run, began = performance.now(), since = () => ((performance.now() - began) / 1000).toFixed(1);
    host.dataset.settled = "false";
    for (const part of makeSides() ? ORDER : changed) pending.add(part);
    const asked = ORDER.filter((part) => pending.has(part));
    showControls();
    if (!asked.length) return showAll();
    failed("");
    missed.clear();
    let ready = all().filter(({ data }) => data);
    if (pending.has("read")) {
      ready = await readAll(mine);
      if (mine !== run) return undefined;
      if (!missed.has("read")) {
        pending.delete("read");
        if (!ready.length) pending.clear();  // what is shown stays as it is
      }
    }
    showControls();
    showMaps();
    showChart();
    for (const part of ready.length ? asked.filter((each) => each !== "read") : []) {
      await Promise.all(ready.map((side) => side[`ask${part[0].toUpperCase()}${part.slice(1)}`](state)));
      if (mine !== run) return undefined;
      if (!missed.has(part)) pending.delete(part);
      if (part === "noise") showNoise();
      if (part === "token") {
        for (const side of ready) side.showNext();
        showChart();
      }
      showPanels();
      const all = part === "head" && asked.includes("read") && ready.some(({ source }) => source.kind === "model");
      if (all && !status.textContent) status.textContent = `Shown after ${since()} s.`;
    }
    host.dataset.settled = "true";
    return undefined;
  }

  /** Panels without content are hidden; two sides have a column each. */
  function showPanels() {
    const shown = all().filter(({ data }) => data);
    for (const name of ["map", "curve"]) panels[name].hidden = !shown.length;
    for (const name of ["head", "token", "next"]) panels[name].hidden = !shown.some((side) => side.shows(name));
    panels.dial.hidden = !shown.some(({ source }) => source.kind === "model");
    grid.classList.toggle("atlas-beside", all().length < 2);
  }

  async function readLater() {
    later.disabled = true;
    status.textContent = "Measuring what needs the matrices of heads…";
    cancel.hidden = false;
    try {
      const done = await Promise.all(models().map((side) => side.read(state, "later")));
      status.textContent = done.every(Boolean) ? "Measured; choose interference, overlap or rank as the measure." : "";
      showControls();
      showMaps();
      for (const side of models()) side.showHead(state);
    } catch (error) {
      failed(error.message);
    }
    cancel.hidden = true;
    later.disabled = false;
  }

  // What is shown

  function showControls() {
    first.control.value = sides.a?.source.id ?? "";
    const replayed = curveOf(sides.a, state.curve)?.lines.filter(({ kind }) => kind === "scheme") ?? [];
    other.control.replaceChildren(option("", "nothing"), option("theory", "theory for its scheme"),
      ...replayed.map(({ name }) => option(name, `its updates replayed ${name}`)),
      ...sources.filter(({ id }) => id !== sides.a?.source.id).map(({ id, name, kind }) => option(id, `${name} (${kind})`)));
    if (![...other.control.options].some(({ value }) => value === state.b)) other.control.append(option(state.b, state.b));
    other.control.value = state.b;
    const grids = new Map(all().flatMap(({ data, noise }) => measuresOf(data, noise)).map((grid) => [grid.name, grid.title]));
    measure.control.replaceChildren(...[...grids].map(([name, title]) => option(name, title)));
    const unknown = grids.size && !grids.has(state.measure);
    if (unknown) measure.control.prepend(option(state.measure, `${state.measure} (not measured yet)`));
    measure.control.value = state.measure;
    measure.label.hidden = !grids.size;
    const curves = sides.a?.data?.curves ?? [];
    curve.control.replaceChildren(...curves.map(({ name, title }) => option(name, title)));
    curve.control.value = state.curve;
    curve.label.hidden = !curves.length;
    later.hidden = !models().some(({ data }) => data?.heads.length);
    if (document.activeElement !== prompt) prompt.value = state.prompt;
    promptBox.hidden = !models().length;
    prompt.disabled = models().length > 0 && models().every(({ data }) => data && !data.about.reads_text);
    showTokens();
    showDial();
    showPanels();
  }

  function showDial() {
    const noisy = models().find((side) => side.data && side.canBeNoisy());
    const offered = noisy?.data.about.parts ?? "qkm";
    for (const each of parts.control.options) each.disabled = ![...each.value].every((letter) => offered.includes(letter));
    const far = LEVELS.map((value) => Math.abs(value - state.noise));
    level.value = far.indexOf(Math.min(...far));
    level.setAttribute("aria-valuetext", `${100 * state.noise} %`);
    levelText.textContent = `${Number((100 * state.noise).toPrecision(3))} %`;
    parts.control.value = state.parts;
    const layers = noisy?.data.about.layers ?? 0;
    where.control.replaceChildren(option("-1", "all layers"),
      ...Array.from({ length: layers }, (_, at) => option(String(at), `layer ${at}`)));
    where.control.value = String(state.at);
    for (const control of [level, parts.control, where.control]) control.disabled = !noisy;
    redraw.disabled = onMap.disabled = !noisy || !(state.noise > 0);
  }

  function showTokens() {
    const side = all().find(({ data }) => data?.prompt.tokens.length);
    const texts = side?.source.kind === "model" ? side.data.prompt.tokens : [];
    tokens.hidden = !texts.length;
    const chosen = side ? side.position(state) : 0;
    tokens.replaceChildren(...texts.map((text, number) => button(tokenName(text), () => update({ token: number }, true),
      { class: "atlas-token", "aria-pressed": number === chosen, "aria-label": `token ${number}: ${tokenName(text)}` })));
  }

  function showMaps() {
    const named = ({ name }) => name === state.measure;
    const grids = all().map(({ data, noise }) => measuresOf(data, noise).find(named)).filter(Boolean);
    const known = grids.flatMap(({ values }) => values.flat().filter((value) => value !== null));
    const { low, high } = scaleOf(known, grids[0]?.scale);
    for (const side of all()) if (side.data) side.showMap(state, grids.length > 1 ? [low, high] : null);
  }

  function showNoise() {
    showControls();
    showMaps();
    for (const side of all()) if (side.data) side.showNext();
    const told = models().filter(({ data }) => data).map((side) => [side.source.name, side.noiseText()]);
    const texts = told.filter(([, text]) => text);
    noiseWords.textContent = texts.map(([name, text]) => (texts.length > 1 ? `${name}: ${text}` : text)).join(" ");
  }

  const curveOf = (side, name) => side?.data?.curves.find((each) => each.name === name);

  /** The curve of all sides, that of the chosen token where there is one, and theory or the scheme that is chosen beside it. */
  function seriesOf() {
    const series = [];
    SIDES.forEach((name, index) => {
      const side = sides[name], found = curveOf(side, state.curve);
      if (!found) return;
      const several = all().length > 1 ? `${side.source.name}, ` : "";
      for (const { kind, name: line, x, y } of found.lines) {
        const beside = (kind === "theory" && state.b === "theory") || (kind === "scheme" && line === state.b);
        if (kind !== "measured" && !beside) continue;
        series.push({ name: `${several}${kind === "theory" ? "theory" : line}`, x, y: y.map((value) => value ?? NaN),
          colour: beside ? 1 : 2 * index, dash: beside ? 1 : index });
      }
      const column = { angle: "angle", radius: "radius" }[state.curve];
      const rows = column ? side.journey.rows.filter((row) => row[column] !== null && row[column] !== undefined) : [];
      if (rows.length) {
        series.push({ name: `${several}the chosen token`, x: rows.map(({ layer }) => (column === "angle" ? layer - 1 : layer)),
          y: rows.map((row) => row[column]), colour: 3 + index, dash: 2, width: 1.5 });
      }
    });
    return series;
  }

  function showChart() {
    const found = all().map((side) => curveOf(side, state.curve)).find(Boolean);
    chartPlace.hidden = !found;
    chartWords.textContent = found?.text ?? sides.a?.data?.missing.curves ?? "No curves by layer were measured.";
    if (!found) return;
    const series = seriesOf();
    const whole = (value) => (Number.isInteger(value) ? String(value) : "");
    const pick = (x) => Math.round(x) !== state.layer && update({ layer: Math.max(Math.round(x), 0) });
    const settings = { series, label: found.title, x: { label: "layer", format: whole },
      y: { label: found.label, log: found.log }, colours: app.theme.colours, tip: app.tip, marker: state.layer, onPick: pick,
      height: 260 };
    if (chart) chart.set(settings);
    else chart = createLines(chartPlace, settings);
    if (state.b === "theory" && !series.some(({ name }) => name.endsWith("theory"))) {
      chartWords.textContent += " Theory has no formula for this curve; choose damping, or a scheme beside it.";
    }
  }

  function showAll() {
    showMaps();
    showChart();
    for (const side of all()) if (side.data) side.showHead(state);
    host.dataset.settled = "true";
    return undefined;
  }

  // Typing and events

  prompt.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => update({ prompt: prompt.value, token: -1 }), PAUSE);
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    clearTimeout(typing);
    update({ prompt: prompt.value, token: -1 }, true);
  });

  function show(values) {
    visible = true;
    stopped();
    stopped = app.stream("/api/events", (message) => {
      const told = message.kind === "queue" ? message.runs.map(({ text }) => text).find(Boolean) : null;
      if (told) status.textContent = `${told}…`;
    });
    const next = within(readState(values, defaults));
    const changed = Object.keys(defaults).filter((name) => next[name] !== state[name]);
    state = next;
    return follow(new Set(changed.flatMap((name) => ASKS[name])));
  }

  /** The state of a link within what there is; how many layers, heads and tokens there are is known with the data. */
  function within(values) {
    const most = LEVELS.at(-1), whole = (value, least) => Math.max(Math.round(value), least);
    return { ...values, layer: whole(values.layer, 0), head: whole(values.head, 0), token: Math.round(values.token),
      noise: Math.min(Math.max(values.noise, 0), most), parts: PARTS[values.parts] ? values.parts : DEFAULTS.parts,
      at: whole(values.at, -1), draw: Math.min(whole(values.draw, 0), MOST_DRAW) };
  }

  function hide() {
    visible = false;
    clearTimeout(typing);
    stopped();
    stopped = () => {};
  }

  app.onTheme(() => {
    if (!visible) return;
    for (const side of all()) if (side.data) side.redraw(state, null);
    showMaps();
    showChart();
  });

  const step = (name, by, list) => () => {
    const at = list().indexOf(state[name]);
    return update({ [name]: list()[Math.min(Math.max(at + by, 0), list().length - 1)] }, name === "measure");
  };
  const names = () => [...measure.control.options].map(({ value }) => value);
  const turn = (by) => () => {
    const side = models().find(({ data }) => data);
    if (side) update({ token: Math.min(Math.max(side.position(state) + by, 0), side.data.prompt.tokens.length - 1) }, true);
  };
  const keys = {
    "/": ["type a prompt", () => prompt.focus()],
    m: ["next measure", step("measure", 1, names)],
    M: ["previous measure", step("measure", -1, names)],
    ".": ["next token", turn(1)],
    ",": ["previous token", turn(-1)],
    n: ["more noise", step("noise", 1, () => LEVELS)],
    N: ["less noise", step("noise", -1, () => LEVELS)],
  };

  const fileName = (side, what) => `${side.source.name.replace(/[^\w.-]+/g, "-")}-${what}`;
  function saves() {
    const list = [];
    const add = (label, name, make) => list.push({ label, make: async () => ({ name, blob: await make() }) });
    const several = all().length > 1;
    for (const side of all().filter(({ data }) => data)) {
      const of = several ? `, ${side.source.name}` : "";
      const { map, maps, journey, next } = side;
      if (map) {
        add(`Layers × heads${of} (PNG)`, fileName(side, `${state.measure}.png`), () => map.png());
        add(`Layers × heads${of} (SVG)`, fileName(side, `${state.measure}.svg`), () => svgBlob(map.svg()));
        add(`Layers × heads${of} (CSV)`, fileName(side, `${state.measure}.csv`), () => map.csv());
        add(`All measures of heads${of} (CSV)`, fileName(side, "heads.csv"), () => headsBlob(side));
      }
      maps.forEach((each, at) => {
        const what = `attention${at ? "-under-noise" : ""}`;
        add(`Attention map${at ? " under noise" : ""}${of} (PNG)`, fileName(side, `${what}.png`), () => each.png());
        add(`Attention map${at ? " under noise" : ""}${of} (SVG)`, fileName(side, `${what}.svg`), () => svgBlob(each.svg()));
        add(`Attention map${at ? " under noise" : ""}${of} (CSV)`, fileName(side, `${what}.csv`), () => each.csv());
      });
      if (journey.sphere) {
        add(`Journey${of} (PNG)`, fileName(side, "journey.png"), () => journey.sphere.png());
        add(`Journey${of} (SVG)`, fileName(side, "journey.svg"), () => svgBlob(journey.sphere.svg()));
      }
      if (journey.rows.length) add(`Journey${of} (CSV)`, fileName(side, "journey.csv"), () => journey.csv());
      if (next.rows.length) add(`Next tokens${of} (CSV)`, fileName(side, "next-tokens.csv"), () => next.csv());
    }
    if (chart && !chartPlace.hidden) {
      add("Curve by layer (SVG)", `atlas-${state.curve}.svg`, () => svgBlob(chart.svg()));
      add("Curve by layer (CSV)", `atlas-${state.curve}.csv`, () => chart.csv());
    }
    return list;
  }

  function headsBlob(side) {
    const grids = measuresOf(side.data, side.noise), shape = grids[0].values;
    const rows = shape.flatMap((row, layer) => row.map((_, head) =>
      [layer, head, ...grids.map(({ values }) => values[layer]?.[head] ?? null)]));
    return csvBlob(["layer", "head", ...grids.map(({ name }) => name)], rows);
  }

  /** The server answers again: what it did not answer is asked once more. */
  const reconnected = () => pending.size && follow([]);

  return { show, hide, reconnected, keys, get saves() { return saves(); } };
}
