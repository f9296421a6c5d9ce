// The sphere lab: tokens on the sphere under one to four schemes, one start, one clock.
import { createCircuit } from "./circuit.js";
import { createEditor } from "./editor.js";
import { shortNumber } from "./heatmap.js";
import { createControls } from "./lab_controls.js";
import { createBar, createPage, SPEEDS } from "./lab_page.js";
import { Run } from "./lab_run.js";
import { labSaves } from "./lab_saves.js";
import { conflicts, frameTime, initialSettings, isEdited, labelOf, LETTERS, LOOKS, noTheory } from "./lab_settings.js";
import { readMoved, readSchemes, readSettings, runSettings } from "./lab_settings.js";
import { SCHEMES_AT_ONCE, writeMoved, writeSchemes } from "./lab_settings.js";
import { createSpheres, schemeTitle } from "./lab_spheres.js";
import { Player } from "./player.js";
import { checkSettings } from "./simulation.js";
import { parseScheme } from "./slots.js";
import { stateChanges } from "./state.js";
import { createStrips } from "./strips.js";
import { createTour, STOPS } from "./tour.js";

const PAUSE = 120;  // milliseconds between strips that are drawn while frames come
const THEORY = "Dotted: theory. From an orthogonal start all tokens share one cosine and one norm: two equations.";
const unique = list => [...new Set(list.filter(Boolean))];

/** The view in `host`. */
export function createLab(host, app) {
  const named = app.data.schemes.map(dictionary => parseScheme(dictionary).values);
  const byName = name => named.find(scheme => scheme.name === name);
  // What a link holds: settings, chosen schemes, tokens moved by hand, the scheme in the editor, the stop of the tour.
  let settings = initialSettings(), chosen = readSchemes(undefined, named), moved = new Map();
  let open = null, stop = null, circuit = {};
  let editor = null, begun = "", drawing = false, feeding = 0, shown = false;

  const undo = () => { moved = new Map(); changed({ push: true }); };
  const at = createPage(host, { add: addScheme, tour: () => goTo(0), undo, stop: stopRun });
  const player = new Player({ onTime: drawSoon, onPlaying: played });
  const bar = createBar(at, player, { scrub, step, restart, speed: setSpeed, layers: toggleLayers });
  const run = new Run(app.worker, { onFrames: framesCame, onDone: runDone, onProblem: runFailed });
  const spheres = createSpheres(at.spheres, { app, on: {
    scheme: (k, name) => setScheme(k, { base: name, dictionary: byName(name) }, { push: true }),
    edit: k => edit(open === k ? null : k),
    remove: removeScheme,
    camera: ({ azimuth: a, elevation: e, zoom }) => link({ camera: [a, e, zoom].map(part => Number(part.toFixed(2))).join() }),
  } });
  const strips = createStrips(at.strips, { colours: () => app.theme.colours, tip: app.tip, onScrub: scrub, onStep: step });
  const controls = createControls(at.form, { onChange: choose });
  const tour = createTour(at.tour, { onGo: goTo });
  const picture = createCircuit(at.circuit, { colours: () => app.theme.colours, onChange: next => {
    circuit = next;
    link({ noise: next.noise || null, draw: next.draw || null });
  } });
  app.onTheme(() => {
    spheres.recolour();
    picture.paint();
    if (!shown) return;
    feedStrips();
    drawSoon();
  });

  // The link

  function link(patch, options) {
    app.setState("lab", patch, options);
  }

  function linkTime() {
    link({ t: linkedTime() });
  }

  function linkedTime() {
    const t = player.wanted ?? player.time;
    return t > 1e-9 ? Number(t.toPrecision(6)) : null;
  }

  /** Take over a state; what it cannot mean is explained above the spheres. */
  function read(state) {
    const { settings: next, problems } = readSettings(state), words = [];
    const attempt = (action, otherwise) => {
      try {
        return action();
      } catch (error) {
        words.push(error instanceof SyntaxError ? "The schemes could not be read from the link." : error.message);
        return otherwise;
      }
    };
    settings = next;
    chosen = attempt(() => readSchemes(state.schemes, named), readSchemes(undefined, named));
    moved = attempt(() => readMoved(state.moved), new Map());
    open = state.edit !== undefined && chosen[Number(state.edit)] ? Number(state.edit) : null;
    stop = STOPS[Number(state.tour) - 1] ? Number(state.tour) - 1 : null;
    circuit = { noise: Number(state.noise) || 0, draw: Number(state.draw) || 0 };
    player.speed = SPEEDS.includes(Number(state.speed)) ? Number(state.speed) : 1;
    for (const [key, text] of Object.entries(problems)) words.push(`${labelOf(key)}: ${text}`);
    if (words.length) words.push("Defaults are used instead.");
    at.link.textContent = words.join(" ");
    const [azimuth, elevation, zoom] = (state.camera ?? "").split(",").map(Number);
    if ([azimuth, elevation, zoom].every(Number.isFinite)) spheres.camera = { azimuth, elevation, zoom };
    return problems;
  }

  /** Settings, schemes or moved tokens have changed: the link, the page and the run follow. */
  function changed(options) {
    at.link.textContent = "";
    const held = { schemes: writeSchemes(chosen, named), moved: writeMoved(moved), edit: open, t: linkedTime() };
    link({ ...stateChanges(settings, initialSettings()), ...held }, options);
    arrange({});
    simulate(player.wanted ?? player.time);
  }

  function choose(key, value) {
    settings = { ...settings, [key]: value };
    if (settings.solver === "layers") settings.time = Math.round(settings.time);
    if (key === "tokens") moved = new Map([...moved].filter(([index]) => index < value));
    if (!LOOKS.some(look => look.key === key)) return changed();
    link(stateChanges(settings, initialSettings()));
    setClock();
    arrange({});
    feedStrips();
    drawSoon();
  }

  /** The page as the state has it. */
  function arrange(problems) {
    const broken = Boolean(STOPS[stop]?.circuit), sentences = { ...conflicts(settings), ...problems };
    at.circuit.hidden = !broken;
    at.lab.hidden = broken;
    at.begin.hidden = stop !== null;
    at.add.disabled = chosen.length >= SCHEMES_AT_ONCE;
    at.undo.hidden = !moved.size;
    at.controls.open ||= Object.keys(sentences).length > 0;
    spheres.set(chosen, { edited: chosen.map(scheme => isEdited(scheme, named)), open });
    controls.set(settings, sentences);
    bar.set(settings.solver === "layers");
    picture.set(circuit);
    showEditor();
  }

  // The run

  /** The clock of the settings; as far as a run has come, unless it begins anew. */
  function setClock(reached = player.reached) {
    const time = player.wanted ?? player.time, { time: duration, axis, solver } = settings;
    player.setRun({ duration, every: frameTime(settings), axis, whole: solver === "layers" });
    player.reached = Math.min(reached, duration);
    if (reached) player.time = Math.min(time, player.reached);
  }

  /** Run what is set, unless it has been; at the time `t` as soon as it has come so far. */
  function simulate(t) {
    if (STOPS[stop]?.circuit) return;
    const impossible = Object.values(conflicts(settings));
    at.problem.textContent = impossible.join(" ");
    if (impossible.length) return progress("");
    const wanted = runSettings(settings, chosen, moved), key = JSON.stringify(wanted);
    if (key === begun) {
      setClock();
      return player.seek(t);
    }
    begun = key;
    host.dataset.run = "computing";
    progress("Computing…");
    setClock(0);
    player.wanted = Math.min(t, settings.time);
    run.begin(wanted, { until: player.wanted, theory: !noTheory(wanted) });
  }

  function framesCame() {
    player.setReached(run.reached);
    if (!run.done) progress(`Computing… ${Math.round(100 * Math.min(1, run.reached / settings.time))} %`);
    feeding ||= setTimeout(feedStrips, PAUSE);
    drawSoon();
  }

  function runDone() {
    ended("done", "");
    measureStop();
  }

  function runFailed(text) {
    begun = "";
    at.problem.textContent = text;
    ended("failed", "");
  }

  function stopRun() {
    run.stop();
    begun = "";
    ended("stopped", `Stopped at t = ${shortNumber(Math.min(run.reached, settings.time))}. Start computes again.`);
  }

  function ended(how, words) {
    host.dataset.run = how;
    progress(words);
    player.setReached(Math.min(run.reached, settings.time));
    player.complete = true;
    player.wanted = null;
    feedStrips();
    drawSoon();
  }

  function progress(text) {
    at.progress.textContent = text;
    at.stop.hidden = host.dataset.run !== "computing" || !text;
  }

  /** Check the claim of a stop of the tour, where the schemes are still those of the stop. */
  function measureStop() {
    if (stop === null || STOPS[stop].circuit) return;
    const same = writeSchemes(chosen, named) === writeSchemes(readSchemes(STOPS[stop].state.schemes, named), named);
    tour.measure(same ? lines() : null, settings);
  }

  // What is drawn

  const names = () => chosen.map((scheme, k) => `${LETTERS[k]} ${schemeTitle(scheme.dictionary, isEdited(scheme, named))}`);
  const lines = () => run.series.map((line, k) => ({ ...line, name: names()[k], colour: k }));

  function feedStrips() {
    clearTimeout(feeding);
    feeding = 0;
    if (run.series.length !== chosen.length) return;
    const log = settings.speeds === "log";
    spheres.setLimits(run.series);
    const unit = settings.solver === "layers" ? "layer" : "time", theory = theoryWords();
    strips.setData({ series: lines(), duration: settings.time, every: player.every, axis: settings.axis, unit, theory,
      strips: [
        { key: "cosine", label: "Mean cosine of pairs, γ", least: 0, most: 1 },
        { key: "speed", label: "Mean angular speed", log, ...(log ? {} : { least: 0 }) },
        { key: "radius", label: "Mean residual norm r", least: 0 },
        { key: "clusters", label: "Clusters within 2.6°, single tokens included", log: true, steps: true, least: 1, most: 2 },
      ] });
  }

  function theoryWords() {
    const curves = run.series.filter(line => line.theory);
    const reasons = unique([noTheory(run.settings), ...run.series.map(line => line.reason)]);
    const missing = reasons.length ? [`No theory curve: ${reasons.join(" ")}`] : [];
    return [...(curves.length ? [THEORY] : []), ...unique(curves.map(line => line.theory.note)), ...missing].join(" ");
  }

  function drawSoon() {
    if (drawing || !shown) return;
    drawing = true;
    requestAnimationFrame(() => {
      drawing = false;
      draw();
    });
  }

  function draw() {
    const t = player.time, start = t < 1e-9;
    bar.show(t);
    spheres.setDrag(start ? dragged : null);
    const dragging = start && moved.size && !run.current;  // a token that is being dragged is not put back to where it was
    if (run.series.length === chosen.length && !dragging) spheres.show(run.series, t, settings);
    strips.setTime(t);
    host.dataset.time = String(t);
  }

  // The clock

  /** Another time on the page at once, not with the next frame of the screen. */
  function showNow(t) {
    drawing = true;  // once is enough
    player.seek(t);
    drawing = false;
    draw();
  }

  function played(playing) {
    bar.setPlaying(playing);
    if (!playing) linkTime();
  }

  function scrub(t) {
    player.pause();
    player.seek(player.whole ? Math.round(t / player.every) * player.every : t);
    linkTime();
  }

  function step(count) {
    player.step(count);
    linkTime();
  }

  function restart() {
    scrub(0);
    simulate(0);
  }

  function setSpeed(speed) {
    player.speed = speed;
    link({ speed: speed === 1 ? null : speed });
  }

  function toggleLayers() {
    choose("solver", settings.solver === "layers" ? "rk4" : "layers");
  }

  // Schemes and the start

  function setScheme(k, scheme, options) {
    chosen = chosen.map((other, index) => index === k ? scheme : other);
    changed(options);
  }

  function addScheme() {
    if (chosen.length >= SCHEMES_AT_ONCE) return;
    const last = named.findIndex(({ name }) => name === chosen.at(-1).base), after = [...named.slice(last + 1), ...named];
    const next = after.find(({ name }) => !chosen.some(({ base }) => base === name));
    chosen = [...chosen, { base: next.name, dictionary: next }];
    changed({ push: true });
  }

  function removeScheme(k) {
    chosen = chosen.filter((_, index) => index !== k);
    open = null;
    changed({ push: true });
  }

  function edit(k) {
    open = k;
    link({ edit: k });
    arrange({});
    if (k !== null) at.editor.querySelector("select, input, button")?.focus();
  }

  function showEditor() {
    at.editor.hidden = open === null;
    const scheme = chosen[open]?.dictionary;
    if (editor && editor.place === open) {
      if (JSON.stringify(editor.made.scheme.values) !== JSON.stringify(scheme)) editor.made.setScheme(scheme);
      return;
    }
    editor?.made.dispose();
    editor = null;
    if (!scheme) return;
    const place = open, onChange = (dictionary, base) => setScheme(place, { base, dictionary });
    const check = ({ values }) => checkSettings(runSettings(settings, [{ dictionary: values }], new Map()));
    editor = { place, made: createEditor(at.editor, { app, scheme, schemes: named, onChange, check }) };
  }

  function dragged(index, point) {
    player.pause();
    moved = new Map(moved).set(index, point.map(value => Number(value.toFixed(4))));
    changed();
  }

  // The tour, and the view as a whole

  /** To a stop of the tour, or with null out of it: then the settings stay as they are. */
  function goTo(index, options = { push: true }) {
    if (index !== null && !STOPS[index]) return;
    player.pause();
    const before = app.state("lab"), cleared = Object.fromEntries(Object.keys(before).map(key => [key, null]));
    const state = index === null ? { ...before, tour: null } : { ...STOPS[index].state, tour: index + 1 };
    link({ ...cleared, ...state }, options);
    show(app.state("lab"));
    if (index === null) at.begin.focus();
  }

  function show(state) {
    shown = true;
    const asked = STOPS[Number(state.tour) - 1];
    if (asked && !asked.circuit && Object.keys(state).length === 1) {  // a short link to a stop
      return goTo(Number(state.tour) - 1, { push: false });
    }
    const before = stop, problems = read(state), time = Number(state.t) || 0;
    tour.show(stop);
    arrange(problems);
    simulate(time);
    if (run.done && run.current) measureStop();
    if (stop !== null && stop !== before && !time && !app.reducedMotion && !asked.circuit) player.play();
    drawSoon();
  }

  function hide() {
    shown = false;
    player.pause();
  }

  const labFiles = labSaves(() => ({
    run, player, strips, dim: settings.dim, colours: app.theme.colours,
    lines: lines(), spheres: spheres.spheres, captions: spheres.captions, show: showNow,
    about: `n = ${settings.tokens}, d = ${settings.dim}, β = ${settings.beta}, ${settings.start} start, seed ${settings.seed}`,
  }));
  const keys = {
    " ": ["play or pause", () => player.toggle()],
    ArrowRight: ["one step forwards", () => step(1)],
    ArrowLeft: ["one step back", () => step(-1)],
    Home: ["to the start", restart],
    End: ["to the end", () => scrub(settings.time)],
    l: ["discrete layers or flow", toggleLayers],
    a: ["add a scheme", addScheme],
    e: ["edit the slots of the next scheme", () => edit(open === null ? 0 : open + 1 < chosen.length ? open + 1 : null)],
    t: ["guided tour, or out of it", () => goTo(stop === null ? 0 : null)],
    n: ["next stop of the tour", () => goTo(stop === null ? 0 : Math.min(stop + 1, STOPS.length - 1))],
    p: ["previous stop of the tour", () => stop && goTo(stop - 1)],
  };
  return { show, hide, keys, get saves() { return STOPS[stop]?.circuit ? picture.saves : labFiles; } };
}
