// The spheres of the lab side by side: a heading with the scheme, the tokens at the clock's time, and their numbers.
import { button, element } from "./dom.js";
import { shortNumber } from "./heatmap.js";
import { createSphere, shareCamera } from "./sphere.js";
import { rgb } from "./sphere_colours.js";
import { LEAST_RANGE } from "./sphere_radius.js";
import { frameAt, valueAt } from "./strips.js";

const TRAIL = 40;  // frames
const LETTERS = "ABCD";

/** Name of the scheme at a place on the page, such as "A Pre-LN". */
export function schemeTitle(dictionary) {
  return dictionary.title || dictionary.name;
}

/**
 * Spheres in `host`. `on`: scheme(k, name), edit(k), remove(k), drag(token, [x, y, z]), camera(camera).
 * `set(chosen, {edited, open})` after a change of the schemes, `show(series, t, settings)` at every time.
 */
export function createSpheres(host, { app, on }) {
  let panels = [], limits = null, applied = "";
  const row = element("div", { class: "lab-spheres" }), scale = element("p", { class: "note lab-scale", hidden: true });
  host.replaceChildren(row, scale);

  /** Colours of the norm r, from the smallest to the largest of the run. */
  function showScale(coloured) {
    scale.hidden = !coloured || !limits;
    if (scale.hidden) return;
    const low = Math.min(limits[0], limits[1] / LEAST_RANGE);
    scale.replaceChildren(`Norm r, logarithmic: ${shortNumber(low)} `,
      ...app.theme.colours.steps.map(colour => element("span", { class: "lab-colour", style: { background: colour }, "aria-hidden": "true" })), ` ${shortNumber(limits[1])}`);
  }

  function makePanel(k, count) {
    const picture = element("div", { class: "lab-sphere" }), values = element("p", { class: "lab-values" }), note = element("p", { class: "note" });
    const select = element("select", { "aria-label": `Scheme ${LETTERS[k]}`, on: { change: () => on.scheme(k, select.value) } },
      app.data.schemes.map(scheme => element("option", { value: scheme.name }, schemeTitle(scheme))));
    const edit = button("Edit slots", () => on.edit(k), { "aria-expanded": "false" });
    const remove = button("×", () => on.remove(k), { "aria-label": `Remove scheme ${LETTERS[k]}`, title: "Remove this scheme", disabled: count === 1 });
    const mark = element("span", { class: "lab-mark", "aria-hidden": "true" }, LETTERS[k]);
    const figure = element("figure", { class: "lab-panel" }, element("figcaption", {}, mark, select, element("span", { class: "lab-tools" }, edit, remove)), picture, values, note);
    const sphere = createSphere(picture, { label: `Tokens under scheme ${LETTERS[k]}.`, colours: app.theme.colours, tip: app.tip });
    return { figure, picture, sphere, select, edit, mark, values, note, spot: new Float32Array(0), colours: new Uint8Array(0) };
  }

  function recolour() {
    const { colours } = app.theme;
    panels.forEach((panel, k) => {
      panel.sphere.colours = colours;
      panel.mark.style.borderColor = colours.series[k];
    });
    applied = "";
  }

  /** Points at a time between two frames, on the line between them with the length between theirs. */
  function place(panel, line, k, share) {
    const width = 3 * line.tokens, { points } = line;
    if (!share) return points.subarray(k * width, (k + 1) * width);
    if (panel.spot.length !== width) panel.spot = new Float32Array(width);
    const { spot } = panel, length = (at, i) => Math.hypot(at[i], at[i + 1], at[i + 2]);
    for (let i = 0; i < width; i += 3) {
      const a = k * width + i, b = a + width;
      for (let axis = 0; axis < 3; axis++) spot[i + axis] = points[a + axis] + share * (points[b + axis] - points[a + axis]);
      const wanted = length(points, a) + share * (length(points, b) - length(points, a)), now = length(spot, i);
      if (now > 1e-6) for (let axis = 0; axis < 3; axis++) spot[i + axis] *= wanted / now;
    }
    return spot;
  }

  function tokenRows({ line, frame }, index) {
    const at = frame * line.tokens + index;
    return [["token", index], ["norm r", shortNumber(line.radii[at])], ["cluster", `${line.labels[at] + 1} of ${line.values.clusters[frame]}`]];
  }

  function paint(panel, line, t, look) {
    const { tokens, settings } = line, k = frameAt(line.times, line.length, t), last = k + 1 >= line.length;
    const share = last || settings.solver === "layers" ? 0 : Math.max(0, t - line.times[k]) / (line.times[k + 1] - line.times[k]);
    const at = share < 1e-6 ? 0 : share;
    Object.assign(panel, { line, frame: k });
    panel.sphere.setPoints({ positions: place(panel, line, k, at), radii: line.radii.subarray(k * tokens, (k + 1) * tokens),
      colours: panel.colours, shellRadius: settings.start.radius });
    const steps = look.trails ? Math.min(TRAIL, k + 1) : 0, from = k + 1 - steps;
    panel.sphere.setTrails(steps < 2 ? null : { steps, positions: line.points.subarray(3 * from * tokens, 3 * (k + 1) * tokens),
      radii: line.radii.subarray(from * tokens, (k + 1) * tokens) });
    const { sphere } = panel, shell = sphere.distance(settings.start.radius);  // rings are drawn in units of the wire sphere
    sphere.setMarks(clusterMarks(line, k, radius => sphere.distance(radius) / shell));
    const number = key => shortNumber(valueAt(line.times, line.values[key], line.length, Math.min(t, line.times[line.length - 1]), key === "clusters"));
    panel.values.textContent = `cosine ${number("cosine")} · speed ${number("speed")} · norm r ${number("radius")} · ${clusterWords(line.values.clusters[k])}`;
    const shown = line.values.shown[k], words = [];
    if (settings.dim > 3) words.push(`The projection shows ${Math.round(100 * shown)} % of the squared norm.`);
    if (line.stopped && t >= line.stopped.t - 1e-9) words.push(line.stopped.text);
    panel.note.textContent = words.join(" ");
  }

  return {
    set(chosen, { edited, open }) {
      const created = chosen.length !== panels.length;
      if (created) {
        panels.forEach(panel => panel.sphere.dispose());
        panels = chosen.map((_, k) => makePanel(k, chosen.length));
        row.replaceChildren(...panels.map(panel => panel.figure));
        row.dataset.count = String(panels.length);
        applied = "";
        const spheres = panels.map(panel => panel.sphere);
        shareCamera(spheres);
        for (const sphere of spheres) {
          const follow = sphere.onCamera;
          sphere.onCamera = camera => { follow(camera); on.camera(camera); };
          sphere.onHover = (index, event) => app.tip(event, index === null ? null : tokenRows(panels.find(panel => panel.sphere === sphere), index));
        }
      }
      if (created) recolour();
      panels.forEach((panel, k) => {
        const title = schemeTitle(chosen[k].dictionary);
        panel.sphere.label = `Tokens under scheme ${LETTERS[k]}, ${title}.`;
        panel.picture.ariaLabel = `${panel.sphere.label} Arrow keys rotate, plus and minus zoom, Enter chooses a token.`;
        panel.select.value = chosen[k].base;
        for (const option of panel.select.options) {
          const scheme = option.value === chosen[k].base ? chosen[k].dictionary : app.data.schemes.find(({ name }) => name === option.value);
          option.textContent = schemeTitle(scheme) + (option.value === chosen[k].base && edited[k] ? " (edited)" : "");
        }
        panel.edit.setAttribute("aria-expanded", String(open === k));
      });
    },
    /** Where radii lie in the whole run, so that all spheres show them on one scale. */
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
      const wanted = `${look.shells} ${limits}`;
      // As a distance, the smallest norm of the run is halfway out on the log scale.
      const within = limits && look.shells === "shell" ? [limits[0] ** 2 / limits[1], limits[1]] : limits;
      if (applied !== wanted) showScale(look.shells === "colour");
      panels.forEach((panel, k) => {
        if (applied !== wanted) panel.sphere.setRadius({ show: { shell: "shells", colour: "colour", none: "none" }[look.shells], limits: within });
        if (!series[k]?.length) return;
        if (panel.colours.length !== 4 * series[k].tokens) panel.colours = new Uint8Array(4 * series[k].tokens);
        const shade = rgb(app.theme.colours.series[k]);
        for (let i = 0; i < panel.colours.length; i++) panel.colours[i] = i % 4 < 3 ? shade[i % 4] : 255;
        paint(panel, series[k], t, look);
      });
      applied = wanted;
    },
    /** A point can be dragged where `drag` is a function; null: dragging turns the sphere. */
    setDrag(drag) {
      for (const { sphere } of panels) sphere.onDrag = drag;
    },
    set camera(camera) {
      for (const { sphere } of panels) sphere.camera = camera;
    },
    recolour,
    get spheres() { return panels.map(panel => panel.sphere); },
  };
}

function clusterWords(count) {
  return count === 1 ? "1 cluster" : `${count} clusters`;
}

/** A ring with its number of tokens around every cluster of three tokens and a 32nd of all, largest first; `distance(r)` says how far out. */
function clusterMarks(line, k, distance) {
  const { tokens, points, labels, radii } = line, sums = new Map();
  for (let i = k * tokens; i < (k + 1) * tokens; i++) {
    const sum = sums.get(labels[i]) ?? [0, 0, 0, 0, 0];
    for (let axis = 0; axis < 3; axis++) sum[axis] += points[3 * i + axis];
    sum[3] += 1;
    sum[4] += radii[i];
    sums.set(labels[i], sum);
  }
  return [...sums.values()].filter(sum => sum[3] >= Math.max(3, tokens / 32)).sort((a, b) => b[3] - a[3]).map(([x, y, z, count, r]) =>
    ({ position: [x, y, z].map(value => value * distance(r / count) / count), text: String(count), size: 12 }));
}
