// The spheres of the lab side by side: a heading with the scheme, the tokens at the clock's time, and their numbers.
import { button, element } from "./dom.js";
import { shortNumber } from "./heatmap.js";
import { LETTERS } from "./lab_settings.js";
import { createSphere, shareCamera } from "./sphere.js";
import { rgb } from "./sphere_colours.js";
import { LEAST_RANGE } from "./sphere_radius.js";
import { frameAt, valueAt } from "./strips.js";

const TRAIL = 40;  // frames
const RADIUS = { shell: "shells", colour: "colour", none: "none" };  // what the sphere calls the choices of the page
const KEYS = "Arrow keys rotate, plus and minus zoom, Enter chooses a token.";

/** The name of a scheme on the page. */
export function schemeTitle(dictionary, edited = false) {
  return (dictionary.title || dictionary.name) + (edited ? " (edited)" : "");
}

/**
 * Spheres in `host`. `on`: scheme(k, name), edit(k), remove(k), camera(camera). `set(chosen, {edited, open})` after a change of
 * the schemes, `setLimits(series)` after new frames, `show(series, t, look)` at every time.
 */
export function createSpheres(host, { app, on }) {
  let panels = [], limits = null, applied = "", view = null;
  const row = element("div", { class: "lab-spheres" }), scale = element("p", { class: "note lab-scale", hidden: true });
  host.replaceChildren(row, scale);

  function makePanel(k, count) {
    const picture = element("div", { class: "lab-sphere" }), letter = LETTERS[k];
    const values = element("p", { class: "lab-values" }), note = element("p", { class: "note" });
    const options = app.data.schemes.map(({ name }) => element("option", { value: name }));
    const select = element("select", { "aria-label": `Scheme ${letter}` }, options);
    select.addEventListener("change", () => on.scheme(k, select.value));
    const edit = button("Edit slots", () => on.edit(k), { "aria-expanded": "false" });
    const removal = { "aria-label": `Remove scheme ${letter}`, title: "Remove this scheme", disabled: count === 1 };
    const tools = element("span", { class: "lab-tools" }, edit, button("×", () => on.remove(k), removal));
    const mark = element("span", { class: "lab-mark", "aria-hidden": "true" }, letter);
    const heading = element("figcaption", {}, mark, select, tools);
    const figure = element("figure", { class: "lab-panel" }, heading, picture, values, note);
    const sphere = createSphere(picture, {
      label: `Tokens under scheme ${letter}.`, colours: app.theme.colours, tip: app.tip, name: index => `Token ${index}`,
    });
    if (view) sphere.camera = view;
    const panel = { figure, picture, sphere, select, edit, mark, values, note };
    Object.assign(panel, { spot: new Float32Array(0), colours: new Uint8Array(0) });
    sphere.onHover = (index, event) => app.tip(event, index === null ? null : tokenRows(panel, index));
    return panel;
  }

  function makePanels(count) {
    panels.forEach(({ sphere }) => sphere.dispose());
    panels = Array.from({ length: count }, (_, k) => makePanel(k, count));
    row.replaceChildren(...panels.map(({ figure }) => figure));
    row.dataset.count = String(count);
    shareCamera(panels.map(({ sphere }) => sphere));
    for (const { sphere } of panels) {
      const follow = sphere.onCamera;
      sphere.onCamera = camera => {
        view = camera;
        follow(camera);
        on.camera(camera);
      };
    }
    recolour();
  }

  function recolour() {
    const { colours } = app.theme;
    panels.forEach(({ sphere, mark }, k) => {
      sphere.colours = colours;
      mark.style.borderColor = colours.series[k];
    });
    applied = "";
  }

  /** What colours or distances from the centre mean; `wire` is the norm at the wire sphere. */
  function showScale(shells, wire) {
    scale.hidden = shells === "none" || !limits;
    if (scale.hidden) return;
    if (shells === "shell") {
      const [at, most] = [wire, limits[1]].map(shortNumber);
      scale.textContent = `Distance from the centre: norm r, logarithmic. Wire sphere: r = ${at}; largest of the run: r = ${most}.`;
      return;
    }
    const low = Math.min(limits[0], limits[1] / LEAST_RANGE);
    const step = colour => element("span", { class: "lab-colour", style: { background: colour }, "aria-hidden": "true" });
    const steps = app.theme.colours.steps.map(step);
    scale.replaceChildren(`Norm r, logarithmic: ${shortNumber(low)} `, ...steps, ` ${shortNumber(limits[1])}`);
  }

  /** How norms are shown on all spheres; as a distance, the smallest norm of the run is two thirds out on the log scale. */
  function applyLook(shells, wire) {
    const wanted = `${shells} ${limits} ${wire}`;
    if (applied === wanted) return;
    applied = wanted;
    const within = limits && shells === "shell" ? [limits[0] ** 3 / limits[1] ** 2, limits[1]] : limits;
    for (const { sphere } of panels) sphere.setRadius({ show: RADIUS[shells], limits: within });
    showScale(shells, wire);
  }

  function paint(panel, k, line, t, look) {
    const { sphere } = panel, { tokens, settings } = line, shellRadius = settings.start.radius;
    const frame = frameAt(line.times, line.length, t), end = (frame + 1) * tokens;
    Object.assign(panel, { line, frame });
    const radii = line.radii.subarray(frame * tokens, end);
    sphere.setPoints({ positions: positionsAt(panel, line, frame, t), radii, colours: coloursOf(panel, k), shellRadius });
    const steps = look.trails ? Math.min(TRAIL, frame + 1) : 0, first = end - steps * tokens;
    const trail = { steps, positions: line.points.subarray(3 * first, 3 * end), radii: line.radii.subarray(first, end) };
    sphere.setTrails(steps < 2 ? null : trail);
    sphere.setMarks(clusterMarks(line, frame, r => sphere.distance(r) / sphere.distance(shellRadius)));
    panel.values.textContent = numbersAt(line, frame, t);
    const words = [], share = Math.round(100 * line.values.shown[frame]);
    if (settings.dim > 3) words.push(`The projection shows ${share} % of the squared norm.`);
    if (line.stopped && t >= line.stopped.t - 1e-9) words.push(line.stopped.text);
    panel.note.textContent = words.join(" ");
  }

  function coloursOf(panel, k) {
    const size = 4 * panel.line.tokens, shade = [...rgb(app.theme.colours.series[k]), 255];
    if (panel.colours.length !== size) panel.colours = new Uint8Array(size);
    for (let i = 0; i < size; i++) panel.colours[i] = shade[i % 4];
    return panel.colours;
  }

  return {
    set(chosen, { edited, open }) {
      if (chosen.length !== panels.length) makePanels(chosen.length);
      panels.forEach(({ sphere, picture, select, edit }, k) => {
        const { base, dictionary } = chosen[k];
        app.data.schemes.forEach((scheme, n) => {
          const current = scheme.name === base;
          select.options[n].textContent = schemeTitle(current ? dictionary : scheme, current && edited[k]);
        });
        select.value = base;
        sphere.label = `Tokens under scheme ${LETTERS[k]}, ${schemeTitle(dictionary)}.`;
        picture.ariaLabel = `${sphere.label} ${KEYS}`;
        edit.setAttribute("aria-expanded", String(open === k));
      });
    },
    /** The smallest and largest norm of a run: all spheres show norms on one scale. */
    setLimits(series) {
      let [low, high] = [Infinity, 0];
      for (const line of series) {
        for (let i = 0; i < line.length * line.tokens; i++) {
          const r = line.radii[i];
          if (r < low) low = r;
          if (r > high && r < Infinity) high = r;
        }
      }
      limits = high ? [low, high] : null;
    },
    show(series, t, look) {
      applyLook(look.shells, series[0].settings.start.radius);
      panels.forEach((panel, k) => {
        if (series[k]?.length) paint(panel, k, series[k], t, look);
      });
    },
    /** A point can be dragged where `drag` is a function; null: dragging turns the sphere. */
    setDrag(drag) {
      for (const { sphere } of panels) sphere.onDrag = drag;
    },
    set camera(camera) {
      view = camera;
      for (const { sphere } of panels) sphere.camera = camera;
    },
    recolour,
    get spheres() { return panels.map(({ sphere }) => sphere); },
    get captions() { return panels.map(({ values }) => values.textContent); },
  };
}

function tokenRows({ line, frame }, index) {
  const at = frame * line.tokens + index, cluster = `${line.labels[at] + 1} of ${line.values.clusters[frame]}`;
  return [["token", index], ["norm r", shortNumber(line.radii[at])], ["cluster", cluster]];
}

function numbersAt(line, frame, t) {
  const within = Math.min(t, line.times[line.length - 1]);
  const number = key => shortNumber(valueAt(line.times, line.values[key], line.length, within));
  const sizes = new Uint16Array(line.tokens);
  for (let i = frame * line.tokens; i < (frame + 1) * line.tokens; i++) sizes[line.labels[i]] += 1;
  const count = (those, name) => {
    const found = sizes.filter(those).length;
    return found ? [`${found} ${name}${found === 1 ? "" : "s"}`] : [];
  };
  const counted = [...count(size => size > 1, "cluster"), ...count(size => size === 1, "single token")].join(", ");
  return `cosine ${number("cosine")} · speed ${number("speed")} · norm r ${number("radius")} · ${counted}`;
}

/** Points at a time: those of a frame, or in a flow on the line between two frames, with a length between theirs. */
function positionsAt(panel, line, frame, t) {
  const width = 3 * line.tokens, { points, times, settings } = line;
  const plain = points.subarray(frame * width, (frame + 1) * width);
  if (frame + 1 >= line.length || settings.solver === "layers") return plain;
  const share = (t - times[frame]) / (times[frame + 1] - times[frame]);
  if (share < 1e-6) return plain;
  if (panel.spot.length !== width) panel.spot = new Float32Array(width);
  const { spot } = panel, length = (at, i) => Math.hypot(at[i], at[i + 1], at[i + 2]);
  for (let i = 0; i < width; i += 3) {
    const a = frame * width + i, b = a + width;
    for (let axis = 0; axis < 3; axis++) spot[i + axis] = points[a + axis] + share * (points[b + axis] - points[a + axis]);
    const wanted = length(points, a) + share * (length(points, b) - length(points, a)), now = length(spot, i);
    if (now > 1e-6) for (let axis = 0; axis < 3; axis++) spot[i + axis] *= wanted / now;
  }
  return spot;
}

/** A ring around every cluster of three tokens and a 32nd of all, with its size; `distance(r)` in units of the wire sphere. */
function clusterMarks(line, frame, distance) {
  const { tokens, points, labels, radii } = line, sums = new Map();
  for (let i = frame * tokens; i < (frame + 1) * tokens; i++) {
    const sum = sums.get(labels[i]) ?? [0, 0, 0, 0, 0];
    for (let axis = 0; axis < 3; axis++) sum[axis] += points[3 * i + axis];
    sum[3] += 1;
    sum[4] += radii[i];
    sums.set(labels[i], sum);
  }
  const large = [...sums.values()].filter(sum => sum[3] >= Math.max(3, tokens / 32)).sort((a, b) => b[3] - a[3]);
  return large.map(([x, y, z, count, r]) =>
    ({ position: [x, y, z].map(value => value * distance(r / count) / count), text: String(count), size: 12 }));
}
