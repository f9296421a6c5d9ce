// The sphere lab: tokens on the sphere under one to four schemes, one start, one clock.
import { button, element } from "./dom.js";
import { createCircuit } from "./circuit.js";
import { createEditor } from "./editor.js";
import { createControls } from "./lab_controls.js";
import { Run } from "./lab_run.js";
import { measuresCsv, pictureSvg, statesCsv } from "./lab_saves.js";
import { CONTROLS, LOOKS, conflicts, frameTime, initialSettings, isEdited, noTheory, readMoved, readSchemes, readSettings, runSettings, SCHEMES_AT_ONCE, writeMoved, writeSchemes } from "./lab_settings.js";
import { createSpheres, schemeTitle } from "./lab_spheres.js";
import { Player } from "./player.js";
import { pngOfSvg, svgBlob } from "./save.js";
import { shortNumber } from "./heatmap.js";
import { checkSettings } from "./simulation.js";
import { parseScheme } from "./slots.js";
import { stateChanges } from "./state.js";
import { createStrips, frameAt } from "./strips.js";
import { createTour, STOPS } from "./tour.js";
import { record } from "./video.js";

const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];
const LETTERS = "ABCD";
const VIDEO = 360;  // frames of a video at speed 1, 12 seconds

/** The view in `host`. */
export function createLab(host, app) {
  const named = app.data.schemes.map(dictionary => parseScheme(dictionary).values);
  let settings = initialSettings(), chosen = readSchemes(undefined, named), moved = new Map(), open = null, stop = null, circuit = {};
  let editor = null, begun = "", drawing = false, shown = false;
  const at = {};  // parts of the page

  // Parts of the page

  at.tour = element("section", { class: "panel lab-tour", "aria-label": "Guided tour", hidden: true });
  at.circuit = element("section", { class: "lab-circuit", "aria-label": "Circuits that break", hidden: true });
  at.spheres = element("div", {});
  at.editor = element("section", { class: "panel lab-editor", "aria-label": "Slots of a scheme", hidden: true });
  at.player = element("div", { class: "lab-player", role: "group", "aria-label": "Clock" });
  at.strips = element("div", {});
  at.problem = element("p", { class: "problem", role: "alert" });
  at.link = element("p", { class: "problem", role: "alert" });
  at.progress = element("p", { class: "note lab-progress" });
  at.stop = button("Stop computing", stopRun, { hidden: true });
  at.hint = element("p", { class: "note" });
  at.form = element("form", { class: "lab-form", on: { submit: event => event.preventDefault() } });
  at.controls = element("details", { class: "lab-controls" }, element("summary", {}, "Settings"), at.form);
  at.controls.open = !matchMedia("(max-width: 60rem)").matches;
  at.add = button("Add a scheme", addScheme);
  at.begin = button("Guided tour", () => goTo(0), { class: "main" });
  at.reset = button("Undo moved tokens", () => { moved = new Map(); changed({ push: true }); });
  at.lab = element("div", { class: "lab" },
    element("div", { class: "lab-main" }, element("div", { class: "controls" }, at.begin, at.add, at.reset, at.stop, at.progress), at.link, at.problem, at.spheres, at.player, at.hint, at.editor, at.strips),
    at.controls);
  host.replaceChildren(element("h2", { class: "visually-hidden" }, "Sphere lab"), at.tour, at.circuit, at.lab);

  const play = button("Play", () => player.toggle(), { class: "main lab-play" });
  const layers = button("Single layers", () => choose("solver", settings.solver === "layers" ? "rk4" : "layers"), { "aria-pressed": "false" });
  const clock = element("input", { type: "range", min: 0, max: 1000, step: 1, value: 0, "aria-label": "Time", class: "lab-clock" });
  const reading = element("output", { class: "number lab-time" });
  const speed = element("select", { "aria-label": "Speed of the clock" }, SPEEDS.map(value => element("option", { value }, `× ${value}`)));
  clock.addEventListener("input", () => scrub(player.axis.time(clock.value / 1000)));
  speed.addEventListener("change", () => { player.speed = Number(speed.value); app.setState("lab", { speed: player.speed === 1 ? null : player.speed }); });
  at.player.replaceChildren(play, button("Start", restart, { title: "To the start" }),
    button("−1", () => step(-1), { "aria-label": "One step back", title: "One step back" }), button("+1", () => step(1), { "aria-label": "One step forwards", title: "One step forwards" }),
    clock, reading, speed, layers);

  const player = new Player({ onTime: drawSoon, onPlaying: playing => {
    play.textContent = playing ? "Pause" : "Play";
    if (!playing) app.setState("lab", { t: linkedTime() });
  } });
  const run = new Run(app.worker, { onFrames: framesCame, onDone: runDone, onProblem: runFailed });
  const spheres = createSpheres(at.spheres, { app, on: {
    scheme: (k, name) => setScheme(k, { base: name, dictionary: named.find(scheme => scheme.name === name) }, { push: true }),
    edit: k => edit(open === k ? null : k),
    remove: removeScheme,
    camera: ({ azimuth, elevation, zoom }) => app.setState("lab", { camera: [azimuth, elevation, zoom].map(value => Number(value.toFixed(2))).join() }),
  } });
  const strips = createStrips(at.strips, { colours: () => app.theme.colours, tip: app.tip,
    onScrub: scrub, onStep: step });
  const controls = createControls(at.form, { onChange: choose });
  const tour = createTour(at.tour, { onGo: goTo });
  const picture = createCircuit(at.circuit, { theme: () => app.theme.colours, onChange: next => {
    circuit = next;
    app.setState("lab", { noise: next.noise || null, draw: next.draw || null });
  } });
  app.onTheme(() => {
    spheres.recolour();
    picture.paint();
    if (shown) { feedStrips(); drawSoon(); }
  });

  // State: everything that a link holds

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
    const asked = Number(state.tour);
    stop = Number.isInteger(asked) && asked >= 1 && asked <= STOPS.length ? asked - 1 : null;
    circuit = { noise: Number(state.noise) || 0, draw: Number(state.draw) || 0 };
    player.speed = SPEEDS.includes(Number(state.speed)) ? Number(state.speed) : 1;
    speed.value = String(player.speed);
    const camera = (state.camera ?? "").split(",").map(Number);
    for (const [key, text] of Object.entries(problems)) words.push(`${[...CONTROLS, ...LOOKS].find(control => control.key === key).label}: ${text}`);
    at.link.textContent = words.join(" ");
    return { problems, time: Number(state.t) || 0, camera: camera.length === 3 && camera.every(Number.isFinite) ? camera : null };
  }

  function linkedTime() {
    const t = player.wanted ?? player.time;
    return t > 1e-9 ? Number(t.toPrecision(6)) : null;
  }

  /** Settings, schemes or moved tokens have changed: the link, the page and the run follow. */
  function changed({ push = false } = {}) {
    at.link.textContent = "";
    app.setState("lab", { ...stateChanges(settings, initialSettings()), schemes: writeSchemes(chosen, named), moved: writeMoved(moved),
      edit: open, t: linkedTime() }, { push });
    arrange({});
    simulate(player.wanted ?? player.time);
  }

  function choose(key, value) {
    settings = { ...settings, [key]: value };
    if (settings.solver === "layers") settings.time = Math.round(settings.time);
    if (key === "tokens") moved = new Map([...moved].filter(([index]) => index < value));
    if (LOOKS.some(look => look.key === key)) {
      app.setState("lab", stateChanges(settings, initialSettings()));
      setClock();
      arrange({});
      feedStrips();
      drawSoon();
    } else changed();
  }

  /** The page as the state has it. */
  function arrange(problems) {
    const edited = chosen.map(one => isEdited(one, named)), broken = STOPS[stop]?.circuit;
    at.circuit.hidden = !broken;
    at.lab.hidden = Boolean(broken);
    at.begin.hidden = stop !== null;
    at.add.disabled = chosen.length >= SCHEMES_AT_ONCE;
    at.reset.hidden = !moved.size;
    spheres.set(chosen, { edited, open });
    const sentences = { ...conflicts(settings), ...problems };
    controls.set(settings, sentences);
    at.controls.open ||= Object.keys(sentences).length > 0;
    layers.setAttribute("aria-pressed", String(settings.solver === "layers"));
    picture.set(circuit);
    showEditor();
  }

  // The run

  function setClock() {
    const time = player.wanted ?? player.time, reached = player.reached;
    player.setRun({ duration: settings.time, every: frameTime(settings), axis: settings.axis, whole: settings.solver === "layers" });
    player.reached = Math.min(reached, settings.time);
    player.time = Math.min(time, player.reached);
  }

  /** Run what is set, unless it has been; at the time `t` when it has come so far. */
  function simulate(t) {
    if (STOPS[stop]?.circuit) return;
    if (Object.keys(conflicts(settings)).length) {
      progress("");
      return;
    }
    const wanted = runSettings(settings, chosen, moved), key = JSON.stringify(wanted);
    if (key === begun) {
      setClock();
      player.seek(t);
      return;
    }
    begun = key;
    problem("");
    host.dataset.run = "computing";
    progress("Computing…");
    player.setRun({ duration: settings.time, every: frameTime(settings), axis: settings.axis, whole: settings.solver === "layers" });
    player.wanted = Math.min(t, settings.time);
    run.begin(wanted, { until: player.wanted, theory: !noTheory(wanted) });
  }

  function framesCame() {
    player.setReached(run.reached);
    const share = Math.min(1, run.reached / settings.time);
    if (!run.done) progress(`Computing… ${Math.round(100 * share)} %`);
    feedSoon();
    drawSoon();
  }

  function runDone() {
    host.dataset.run = "done";
    progress("");
    player.setReached(Math.min(run.reached, settings.time));
    feedStrips();
    measureStop();
    drawSoon();
  }

  /** Check the claim of a stop of the tour, where the schemes are still those of the stop. */
  function measureStop() {
    if (stop === null || STOPS[stop].circuit) return;
    const same = writeSchemes(chosen, named) === writeSchemes(readSchemes(STOPS[stop].state.schemes, named), named);
    tour.measure(same ? lines() : null, settings);
  }

  function runFailed(text) {
    host.dataset.run = "failed";
    begun = "";
    player.wanted = null;
    player.setReached(run.reached);
    problem(text);
  }

  function problem(text) {
    at.problem.textContent = text;
    if (text) progress("");
  }

  function progress(text) {
    at.progress.textContent = text;
    at.stop.hidden = host.dataset.run !== "computing" || !text;
  }

  function stopRun() {
    run.stop();
    begun = "";
    host.dataset.run = "stopped";
    player.setReached(Math.min(run.reached, settings.time));
    player.complete = true;
    player.wanted = null;
    feedStrips();
    progress(`Stopped at t = ${shortNumber(player.reached)}; change a setting or press Start to compute again.`);
    drawSoon();
  }

  // What is drawn

  const names = () => chosen.map(({ dictionary }, k) => `${LETTERS[k]} ${schemeTitle(dictionary)}${isEdited(chosen[k], named) ? " (edited)" : ""}`);
  const lines = () => run.series.map((line, k) => ({ ...line, name: names()[k], colour: k }));

  let feeding = 0;
  function feedSoon() {
    feeding ||= setTimeout(feedStrips, 120);
  }

  function feedStrips() {
    clearTimeout(feeding);
    feeding = 0;
    if (run.series.length !== chosen.length) return;
    const log = settings.speeds === "log";
    spheres.setLimits(run.series);
    strips.setData({ series: lines(), duration: settings.time, every: player.every, axis: settings.axis, theory: theoryWords(),
      strips: [
        { key: "cosine", label: "Mean cosine of pairs, γ", most: 1, least: 0 },
        { key: "speed", label: "Mean angular speed", log, ...(log ? {} : { least: 0 }) },
        { key: "radius", label: "Mean residual norm r", least: 0 },
        { key: "clusters", label: "Clusters", log: true, steps: true, least: 1, most: 2 },
      ] });
  }

  function theoryWords() {
    const curves = run.series.filter(line => line.theory), unique = list => [...new Set(list.filter(Boolean))];
    const words = curves.length ? ["Dotted: theory, the symmetric reduction to one cosine and one norm.", ...unique(curves.map(line => line.theory.note))] : [];
    const reasons = unique([noTheory(run.settings), ...run.series.map(line => line.reason)]);
    return [...words, ...(reasons.length ? [`No theory curve: ${reasons.join(" ")}`] : [])].join(" ");
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
    if (document.activeElement !== clock || player.playing) clock.value = String(Math.round(1000 * player.axis.place(t)));
    reading.textContent = settings.solver === "layers" ? `layer ${Math.round(t)} of ${settings.time}` : `t = ${t.toFixed(2)} of ${shortNumber(settings.time)}`;
    clock.setAttribute("aria-valuetext", reading.textContent);
    at.hint.textContent = start ? "Drag a token to move the start by hand; drag elsewhere to turn the spheres." : "At time 0 tokens can be dragged; drag to turn the spheres.";
    spheres.setDrag(start ? dragged : null);
    const dragging = start && moved.size && !run.current;  // a token that is being dragged is not put back to where it was
    if (run.series.length === chosen.length && !dragging) spheres.show(run.series, t, settings);
    strips.setTime(t);
    host.dataset.time = String(t);
  }

  // Schemes, start, tour

  function setScheme(k, one, options) {
    chosen = chosen.map((other, index) => index === k ? one : other);
    changed(options);
  }

  function addScheme() {
    const used = chosen.map(({ base }) => base), next = ["peri", "ngpt", "post", "pre"].find(name => !used.includes(name) && named.some(scheme => scheme.name === name))
      ?? named.find(scheme => !used.includes(scheme.name)).name;
    chosen = [...chosen, { base: next, dictionary: named.find(scheme => scheme.name === next) }];
    changed({ push: true });
  }

  function removeScheme(k) {
    chosen = chosen.filter((_, index) => index !== k);
    open = null;
    changed({ push: true });
  }

  function edit(k) {
    open = k;
    app.setState("lab", { edit: k });
    arrange({});
    if (k !== null) at.editor.querySelector("select, input, button")?.focus();
  }

  function showEditor() {
    at.editor.hidden = open === null;
    if (open === editor?.place) {
      if (open !== null && JSON.stringify(editor.made.scheme.values) !== JSON.stringify(chosen[open].dictionary)) editor.made.setScheme(chosen[open].dictionary);
      return;
    }
    editor?.made.dispose();
    editor = null;
    if (open === null) return;
    const place = open;
    editor = { place, made: createEditor(at.editor, { app, scheme: chosen[open].dictionary, schemes: named,
      onChange: (dictionary, base) => setScheme(place, { base, dictionary }),
      check: scheme => checkSettings(runSettings(settings, [{ dictionary: scheme.values }], new Map())) }) };
  }

  function dragged(index, point) {
    player.pause();
    moved = new Map(moved).set(index, point.map(value => Number(value.toFixed(4))));
    changed();
  }

  function scrub(t) {
    player.pause();
    player.seek(settings.solver === "layers" ? Math.round(t / player.every) * player.every : t);
    app.setState("lab", { t: linkedTime() });
  }

  function step(count) {
    player.step(count);
    app.setState("lab", { t: linkedTime() });
  }

  function restart() {
    scrub(0);
    simulate(0);
  }

  /** To a stop of the tour, or out of it: the settings stay as they are then. */
  function goTo(index, { push = true } = {}) {
    if (index !== null && !STOPS[index]) return;
    player.pause();
    const state = index === null ? { ...app.state("lab"), tour: null } : { ...STOPS[index].state, tour: index + 1 };
    const cleared = Object.fromEntries(Object.keys(app.state("lab")).map(key => [key, null]));
    app.setState("lab", { ...cleared, ...state }, { push });
    show(app.state("lab"));
  }

  function show(state) {
    shown = true;
    const asked = STOPS[Number(state.tour) - 1];
    if (asked && !asked.circuit && Object.keys(state).length === 1) return goTo(Number(state.tour) - 1, { push: false });  // a short link to a stop
    const before = stop, { problems, time, camera } = read(state);
    tour.show(stop);
    arrange(problems);
    if (camera) spheres.camera = { azimuth: camera[0], elevation: camera[1], zoom: camera[2] };
    simulate(time);
    if (run.done && run.current) measureStop();
    if (stop !== null && stop !== before && !time && !app.reducedMotion && !STOPS[stop].circuit) player.play();
    drawSoon();
  }

  // Files

  const about = () => `n = ${settings.tokens}, d = ${settings.dim}, β = ${settings.beta}, ${settings.start} start, seed ${settings.seed}`;
  const captions = () => [...at.spheres.querySelectorAll(".lab-values")].map(node => node.textContent);
  const makeSvg = () => pictureSvg({ names: names(), captions: captions(), spheres: spheres.spheres.map(sphere => sphere.svg()), strips: strips.pictures(),
    colours: app.theme.colours, time: player.time, about: about() });
  async function makeVideo() {
    if (!run.done) throw new Error("the run is still being computed; wait until it has come to its end.");
    player.pause();
    const before = player.time, frames = Math.max(2, Math.round(VIDEO / player.speed)), layers = settings.solver === "layers";
    const timeOf = frame => {
      const t = frame ? player.axis.time(frame / (frames - 1)) : 0;
      return layers ? Math.floor(t / player.every + 1e-9) * player.every : t;
    };
    try {
      return await record({
        frames, colours: app.theme.colours, caption: frame => `t = ${timeOf(frame).toFixed(2)}   ${about()}`,
        panels: spheres.spheres.map((sphere, k) => ({ title: names()[k], layers: () => { sphere.paint(); return sphere.canvases.slice(sphere.webgl ? 0 : 1); } })),
        show: frame => { player.seek(timeOf(frame)); draw(); },
        onProgress: share => progress(`Recording… ${Math.round(100 * share)} %`),
      });
    } finally {
      progress("");
      player.seek(before);
    }
  }
  const csv = text => new Blob([text], { type: "text/csv" });
  const saves = [
    { label: "Picture (SVG)", make: async () => ({ name: "normscope-lab.svg", blob: svgBlob(makeSvg()) }) },
    { label: "Picture (PNG)", make: async () => ({ name: "normscope-lab.png", blob: await pngOfSvg(makeSvg()) }) },
    { label: "Measures of the run (CSV)", make: async () => ({ name: "normscope-lab.csv", blob: csv(measuresCsv(names(), run.series)) }) },
    { label: "Hidden states at this time, all dimensions (CSV)", make: async () => {
      const frames = run.series.map(line => frameAt(line.times, line.length, player.time));
      const states = await Promise.all(frames.map((frame, k) => run.states(k, frame)));
      const text = statesCsv(names(), frames.map((frame, k) => run.series[k].times[frame]), states, settings.dim);
      return { name: "normscope-lab-states.csv", blob: csv(text) };
    } },
    { label: "Video of the run (WebM)", make: async () => ({ name: "normscope-lab.webm", blob: await makeVideo() }) },
  ];

  const keys = {
    " ": ["play or pause", () => player.toggle()],
    ArrowRight: ["one step forwards", () => step(1)],
    ArrowLeft: ["one step back", () => step(-1)],
    Home: ["to the start", restart],
    End: ["to the end", () => scrub(settings.time)],
    l: ["single layers or flow", () => choose("solver", settings.solver === "layers" ? "rk4" : "layers")],
    a: ["add a scheme", () => chosen.length < SCHEMES_AT_ONCE && addScheme()],
    e: ["edit the slots of the next scheme", () => edit(open === null ? 0 : open + 1 < chosen.length ? open + 1 : null)],
    t: ["guided tour", () => goTo(stop === null ? 0 : null)],
    n: ["next stop of the tour", () => goTo(stop === null ? 0 : Math.min(stop + 1, STOPS.length - 1))],
    p: ["previous stop of the tour", () => stop && goTo(stop - 1)],
  };
  return { show, hide() { shown = false; player.pause(); }, keys, saves };
}
