// Points, trails and a wire sphere in three dimensions: by WebGL, and where there is none the same picture on a 2D canvas.
// The report shows scenes of report/sphere.py with it, the explorer points that move.
import { rgb, stepColour } from "./sphere_colours.js";
import { addControls } from "./sphere_controls.js";
import { CanvasPen, SvgPen } from "./sphere_pens.js";
import { RadiusScale } from "./sphere_radius.js";
import { cloudArrays, drawTrails, sceneParts } from "./sphere_scene.js";
import { Batch, createPainter, paintBatches, project } from "./sphere_webgl.js";

const STEEPEST = 1.55, ZOOMS = [0.5, 20];
const HALF = 0.46;  // of the picture's side, for the unit sphere
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// All spheres of a page are painted in one callback of a frame, however often they are asked to be.
const waiting = new Set();
let asked = false;
function paintAll() {
  asked = false;
  for (const sphere of waiting) sphere.paint();
}
function schedule(sphere) {
  waiting.add(sphere);
  if (!asked) requestAnimationFrame(paintAll);
  asked = true;
}

/** Turning one of these spheres turns them all. */
export function shareCamera(spheres) {
  for (const sphere of spheres) {
    sphere.onCamera = camera => { for (const other of spheres) if (other !== sphere) other.camera = camera; };
  }
}

/**
 * A sphere in an element, which gives it its size. Options: `label` for screen readers, `colours` of the page ({ink, soft,
 * paper, wire, steps, series}), `tip(event, rows)` for scenes, `axes` (three names), `name(index)` of a point; and what can
 * be set later, too: `onCamera(camera)`, `onDrag(index, [x, y, z])`, `onHover(index or null, event)`.
 */
export function createSphere(host, options) {
  return new Sphere(host, options);
}

class Sphere {
  #pen;
  #painter = null;
  #pointInput = null;
  #scene = null;
  #marks = [];
  #axes = null;
  #colours = null;
  #radius = new RadiusScale();
  #distances = new Float32Array(0);  // from the centre, as drawn
  #scratch = new Float32Array(0);
  #ramp = new Uint8Array(3 * 256);
  #plain = Uint8Array.of(0, 0, 0, 255);
  #camera = { elevation: 0.35, azimuth: -1.05, zoom: 1 };
  #start = { ...this.#camera };
  #spot = new Float64Array(3);
  #boxes = [];
  #view = { width: 0, height: 0, ratio: 1, scale: 1, zoom: 1, rows: new Float64Array(9), columns: new Float32Array(9) };
  #batches = {
    wire: new Batch(true), axes: new Batch(true), links: new Batch(true), tails: new Batch(true), points: new Batch(false),
  };
  #parts = [];  // what can be picked: {at: places, rows(index)}
  #ended = new AbortController();
  #sized;

  constructor(host, { label = "", colours, axes = null, tip, name, onCamera, onDrag, onHover }) {
    Object.assign(this, { host, label, tip, name, onCamera, onDrag, onHover, near: null, chosen: -1 });
    const [below, above] = this.canvases = [document.createElement("canvas"), document.createElement("canvas")];
    const live = this.live = document.createElement("div");
    live.setAttribute("aria-live", "polite");
    Object.assign(live.style, { position: "absolute", width: "1px", overflow: "hidden", clipPath: "inset(50%)" });
    for (const canvas of this.canvases) {
      canvas.setAttribute("aria-hidden", "true");
      Object.assign(canvas.style, { position: "absolute", inset: "0", width: "100%", height: "100%" });
    }
    Object.assign(host.style, { position: "relative", overflow: "hidden", touchAction: "pan-y", cursor: "grab" });
    host.replaceChildren(below, above, live);
    if (label) {
      host.tabIndex = 0;
      host.setAttribute("role", "application");
      host.setAttribute("aria-label", `${label} Arrow keys rotate, plus and minus zoom, Enter chooses a point.`);
    }
    this.#pen = new CanvasPen(above);
    this.#painter = createPainter(below, Object.values(this.#batches));
    const { signal } = this.#ended;
    below.addEventListener("webglcontextlost", event => {
      event.preventDefault();  // else it would never be restored
      this.#painter = null;
      this.draw();
    }, { signal });
    below.addEventListener("webglcontextrestored", () => {
      this.#painter = createPainter(below, Object.values(this.#batches));
      this.draw();
    }, { signal });
    this.#sized = new ResizeObserver(() => { this.#measure(); this.draw(); });
    this.#sized.observe(host);
    this.#measure();
    this.colours = colours;
    this.axes = axes;
    this.#wire();
    addControls(this, signal);
    this.draw();
  }

  /** Whether pictures are painted by WebGL at this moment. */
  get webgl() {
    return this.#painter !== null;
  }

  get colours() {
    return this.#colours;
  }

  /** Colours of the page: everything is drawn again in them. */
  set colours(colours) {
    this.#colours = colours;
    for (let k = 0; k < 256; k++) this.#ramp.set(stepColour(colours.steps, k / 255), 3 * k);
    this.#plain.set(rgb((colours.series ?? colours.steps)[0]));
    this.#shadeAll(this.#batches.wire, colours.wire, 0.8);
    this.#shadeAll(this.#batches.axes, colours.wire, 1);
    if (this.#scene) this.setScene(this.#scene);
    else if (this.#pointInput) this.setPoints(this.#pointInput);
    this.draw();
  }

  /** Elevation and azimuth in radians, and zoom. */
  get camera() {
    return { ...this.#camera };
  }

  set camera({ elevation = this.#camera.elevation, azimuth = this.#camera.azimuth, zoom = this.#camera.zoom }) {
    this.#camera.elevation = clamp(elevation, -STEEPEST, STEEPEST);
    this.#camera.azimuth = azimuth;
    this.#camera.zoom = clamp(zoom, ...ZOOMS);
    this.#aim();
    this.draw();
  }

  /** The camera as a user moves it: other spheres can follow. */
  moveCamera(camera) {
    this.camera = camera;
    this.onCamera?.(this.camera);
  }

  resetCamera() {
    this.moveCamera(this.#start);
  }

  /** Names of the three axes, or null for none. */
  set axes(names) {
    this.#axes = names;
    const from = this.#scene && !this.#scene.radius ? 0 : -1;  // without a sphere, axes begin in the middle
    this.#batches.axes.grow = this.#scene?.radius || 1;
    const ends = names ? [from, 0, 0, 1, 0, 0, 0, from, 0, 0, 1, 0, 0, 0, from, 0, 0, 1] : [];
    this.#batches.axes.set({ places: Float32Array.from(ends) });
    this.#shadeAll(this.#batches.axes, this.#colours.wire, 1);
  }

  /**
   * How radii are shown: `show` "shells" (distance from the centre, with the wire sphere at `shellRadius`), "colour" or
   * "none", on a `scale` "log" or "linear", between `limits` [low, high] or those of all radii since this call.
   */
  setRadius(options) {
    this.#radius = new RadiusScale(options);
    if (this.#pointInput) this.setPoints(this.#pointInput);
  }

  /** How far from the centre a radius is drawn: 1 unless shells show it. */
  distance(radius) {
    return this.#radius.distance(radius);
  }

  /**
   * Points that move: `positions` 3n (directions, or their projections), `radii` n, `colours` 4n bytes, `sizes` n in pixels,
   * `shellRadius` where the wire sphere is, `labels` n texts. Arrays are read at once, so that they can be used again.
   */
  setPoints(input) {
    const { positions, radii = null, shellRadius = 0 } = input, count = positions.length / 3, { points, wire } = this.#batches;
    if (this.#scene) this.#forgetScene();
    this.#pointInput = input;
    if (count !== this.#distances.length) this.#resize(count);
    const shells = this.#radius.show === "shells" && radii;
    if (radii) this.#radius.include(radii, shellRadius);
    for (let i = 0, at = points.places; i < count; i++) {
      const distance = this.#distances[i] = shells ? this.distance(radii[i]) : 1;
      for (let k = 3 * i; k < 3 * i + 3; k++) at[k] = distance * positions[k];
    }
    wire.grow = shells && shellRadius ? this.distance(shellRadius) : 1;
    points.changed.places = true;
    this.#colourPoints(input);
    if (input.sizes) points.sizes.set(input.sizes);
    points.changed.sizes ||= Boolean(input.sizes);
    this.#linkToShell(shells ? positions : null);
    this.draw();
  }

  /** The last `steps` `positions` of all points, oldest first (steps × 3n), with `radii` (steps × n) for shells; null: none. */
  setTrails(input) {
    const { tails } = this.#batches, count = this.#distances.length;
    if (!input || input.steps < 2 || !count) {
      if (tails.count) tails.set({ places: new Float32Array(0), shades: new Uint8Array(0), pairs: new Uint32Array(0) });
      return this.draw();
    }
    const { positions, steps, radii = null } = input;
    if (positions.length !== 3 * steps * count) throw new Error(`${positions.length} numbers for ${steps} × ${count} positions`);
    if (tails.count !== steps * count) this.#pairTails(steps, count);
    let places = positions;
    if (radii && this.#radius.show === "shells") {
      if (this.#scratch.length !== positions.length) this.#scratch = new Float32Array(positions.length);
      places = this.#scratch;
      for (let i = 0; i < steps * count; i++) {
        const distance = this.distance(radii[i]);
        for (let k = 3 * i; k < 3 * i + 3; k++) places[k] = distance * positions[k];
      }
    }
    tails.places = places;
    tails.changed.places = true;
    this.draw();
  }

  /** Rings with texts, such as those of clusters: {position: [x, y, z], radius (without: the shell's), text, size in pixels}. */
  setMarks(marks) {
    this.#marks = marks ?? [];
    this.draw();
  }

  /** A scene of report/sphere.py: clouds, trails with steps, axes, and where the camera is at first. */
  setScene(scene) {
    const first = this.#scene !== scene;
    if (first) {
      this.#scene = scene;
      this.#parts = sceneParts(scene);
      this.chosen = -1;
      this.near = null;
      this.#pointInput = null;
      this.setTrails(null);
      const [elevation, azimuth] = scene.view.map(angle => angle * Math.PI / 180);
      this.#start = { elevation, azimuth, zoom: 1 };
      this.camera = { elevation, azimuth };
      this.#batches.wire.grow = scene.radius;
      this.axes = scene.axes;
    }
    const { links, ...clouds } = cloudArrays(this.#parts);
    this.#batches.points.set(clouds);
    this.#batches.links.set({ places: links });
    this.#shadeAll(this.#batches.links, this.#colours.soft, 0.35);
    this.draw();
  }

  /** Paint with the next frame; many calls are one. */
  draw() {
    schedule(this);
  }

  /** Paint now; what a user points at is not part of a saved picture. */
  paint(pointed = true) {
    const view = this.#view, [below, above] = this.canvases, ratio = window.devicePixelRatio || 1;
    waiting.delete(this);
    if (!view.width) return;
    view.ratio = ratio;
    const width = Math.round(view.width * ratio), height = Math.round(view.height * ratio);
    if (above.width !== width || above.height !== height) {
      for (const canvas of this.canvases) Object.assign(canvas, { width, height });
    }
    below.style.display = this.#painter ? "" : "none";
    this.#painter?.paint(view);
    this.#pen.begin(view.width, view.height, ratio);
    if (!this.#painter) paintBatches(this.#pen, view, Object.values(this.#batches));
    this.#drawTexts(this.#pen, pointed);
    this.#pen.end();
  }

  /** Where a place falls: x and y in pixels of the element, and its depth, positive towards the camera. */
  project(place) {
    return [...project(this.#view, place, 0, 1, this.#spot)];
  }

  /** The direction on the front of the sphere that is drawn at a pixel; outside of the sphere, on its rim. */
  unproject(x, y, distance = 1) {
    const { rows, width, height, scale } = this.#view;
    let right = (x - width / 2) / (scale * distance), up = (height / 2 - y) / (scale * distance);
    const away = Math.max(1, Math.hypot(right, up));
    [right, up] = [right / away, up / away];
    const towards = Math.sqrt(Math.max(0, 1 - right * right - up * up));
    return [0, 1, 2].map(k => right * rows[k] + up * rows[3 + k] + towards * rows[6 + k]);
  }

  /** The directions right and up of the screen. */
  screen() {
    return [[...this.#view.rows.subarray(0, 3)], [...this.#view.rows.subarray(3, 6)]];
  }

  /** The part and index of what is drawn nearest to a pixel, among near ones the one in front; null if nothing is near. */
  pick(x, y, reach, frontOnly = false) {
    let best = null, least = reach;
    for (const part of this.#parts) {
      for (let index = 0; 3 * index < part.at.length; index++) {
        const [px, py, depth] = project(this.#view, part.at, index, 1, this.#spot);
        const far = Math.hypot(px - x, py - y) - (part.steps ? 3 : 0) - depth;
        if (far < least && !(frontOnly && depth < 0)) [least, best] = [far, { part, index }];
      }
    }
    return best;
  }

  /** Whether points can be dragged at this moment. */
  get movable() {
    return Boolean(this.onDrag && this.#pointInput);
  }

  /** How many points there are to choose from; those of a scene count through its trails, then its clouds. */
  get count() {
    return this.#parts.reduce((sum, part) => sum + part.at.length / 3, 0);
  }

  /** The part that has a point, and the point's index in it. */
  partOf(index) {
    for (const part of this.#parts) {
      if (3 * index < part.at.length) return { part, index };
      index -= part.at.length / 3;
    }
    return null;
  }

  /** The number of a point, from its part and its index in that. */
  numberOf({ part, index }) {
    for (const before of this.#parts.slice(0, this.#parts.indexOf(part))) index += before.at.length / 3;
    return index;
  }

  /** The drawn place of a point. */
  placeOf(number) {
    const { part, index } = this.partOf(number);
    return [...part.at.subarray(3 * index, 3 * index + 3)];
  }

  /** The text of a point, for labels and screen readers. */
  nameOf(number) {
    const { part, index } = this.partOf(number);
    if (part.rows) return Object.entries(part.rows(index)).flat().filter(Boolean).join(": ");
    return this.name?.(index) ?? this.#pointInput.labels?.[index] ?? `Point ${index}`;
  }

  /** What the pointer is over: a part and an index of `pick`, or null. */
  hover(picked, event) {
    if (!picked && !this.near) return;
    this.near = picked;
    if (this.#pointInput) this.onHover?.(picked ? picked.index : null, event);
    else this.tip?.(event, picked && picked.part.rows(picked.index));
    this.host.style.cursor = picked && this.movable ? "pointer" : "grab";
    this.draw();
  }

  /** A point as a user drags it, to the front of the sphere below a pixel. */
  dragTo(index, x, y) {
    this.moveTo(index, this.unproject(x, y, this.#distances[index]));
  }

  /** A point as a user moves it, to a direction. */
  moveTo(index, direction) {
    const { points } = this.#batches, length = Math.hypot(...direction), unit = direction.map(value => value / length);
    points.places.set(unit.map(value => value * this.#distances[index]), 3 * index);
    points.changed.places = true;
    this.onDrag?.(index, unit);
    this.draw();
  }

  /** The canvases of the picture to be saved, lowest first, painted now; they have to be copied before the next frame. */
  layers() {
    if (!this.#view.width) this.#measure(600, 600);
    this.paint(false);
    if (this.near || this.chosen >= 0) this.draw();
    return this.#painter ? this.canvases : this.canvases.slice(1);
  }

  /** A new canvas with the picture on the colour of the paper. */
  picture() {
    const layers = this.layers(), { width, height } = layers[0];
    const whole = Object.assign(document.createElement("canvas"), { width, height }), pen = whole.getContext("2d");
    pen.fillStyle = this.#colours.paper;
    pen.fillRect(0, 0, width, height);
    for (const layer of layers) pen.drawImage(layer, 0, 0);
    return whole;
  }

  /** The picture as a PNG file. */
  png() {
    return new Promise(done => this.picture().toBlob(done));
  }

  /** The picture as SVG text. */
  svg() {
    if (!this.#view.width) this.#measure(600, 600);
    const pen = new SvgPen(), { width, height } = this.#view;
    paintBatches(pen, this.#view, Object.values(this.#batches));
    this.#drawTexts(pen, false);
    return pen.finish(width, height, this.label, this.#colours.paper);
  }

  /** Announce a text to screen readers. */
  announce(text) {
    this.live.textContent = text;
  }

  dispose() {
    this.#ended.abort();
    this.#sized.disconnect();
    waiting.delete(this);
    this.#painter?.dispose();
    this.host.replaceChildren();
  }

  #measure(width = this.host.clientWidth, height = this.host.clientHeight) {
    Object.assign(this.#view, { width, height });
    this.#aim();
  }

  #aim() {
    const { elevation, azimuth, zoom } = this.#camera, { rows, columns, width, height } = this.#view;
    const se = Math.sin(elevation), ce = Math.cos(elevation), sa = Math.sin(azimuth), ca = Math.cos(azimuth);
    rows[0] = -sa; rows[1] = ca; rows[2] = 0;  // right
    rows[3] = -se * ca; rows[4] = -se * sa; rows[5] = ce;  // up
    rows[6] = ce * ca; rows[7] = ce * sa; rows[8] = se;  // towards the camera
    for (let k = 0; k < 9; k++) columns[k] = rows[3 * (k % 3) + Math.floor(k / 3)];
    this.#view.zoom = zoom;
    this.#view.scale = HALF * Math.min(width, height) * zoom;
  }

  /** Meridians and parallels of the unit sphere. */
  #wire() {
    const places = [], steps = 72, circles = 6;
    const ring = point => {
      for (let i = 0; i < steps; i++) places.push(...point(2 * Math.PI * i / steps), ...point(2 * Math.PI * (i + 1) / steps));
    };
    for (let k = 0; k < circles; k++) {
      const [c, s] = [Math.cos(Math.PI * k / circles), Math.sin(Math.PI * k / circles)];
      ring(a => [Math.cos(a) * c, Math.cos(a) * s, Math.sin(a)]);
      if (k) ring(a => [s * Math.cos(a), s * Math.sin(a), c]);
    }
    this.#batches.wire.set({ places: Float32Array.from(places) });
    this.#shadeAll(this.#batches.wire, this.#colours.wire, 0.8);
  }

  #shadeAll(batch, colour, opacity) {
    const bytes = [...rgb(colour), Math.round(255 * opacity)], shades = new Uint8Array(4 * batch.count);
    for (let k = 0; k < shades.length; k++) shades[k] = bytes[k % 4];
    batch.set({ shades });
  }

  /** Room for another number of points. */
  #resize(count) {
    const size = count <= 64 ? 9 : count <= 300 ? 7 : count <= 1000 ? 5 : 3;
    this.#distances = new Float32Array(count);
    const sizes = new Float32Array(count).fill(size), shades = new Uint8Array(4 * count);
    this.#batches.points.set({ places: new Float32Array(3 * count), shades, sizes });
    this.#parts = [{ at: this.#batches.points.places, rows: null }];
    this.chosen = -1;
    this.near = null;
    this.setTrails(null);
  }

  #forgetScene() {
    this.#scene = null;
    this.#distances = new Float32Array(0);
    this.axes = null;
    this.#batches.links.set({ places: new Float32Array(0), shades: new Uint8Array(0) });
  }

  #colourPoints({ radii, colours }) {
    const { shades } = this.#batches.points, byRadius = this.#radius.show === "colour" && radii;
    let changed = false;
    for (let k = 0; k < shades.length; k++) {
      const part = k % 4, own = colours ? colours[k] : this.#plain[part];
      const byte = byRadius && part < 3 ? this.#ramp[3 * Math.round(255 * this.#radius.share(radii[k >> 2])) + part] : own;
      changed ||= shades[k] !== byte;
      shades[k] = byte;
    }
    if (!changed) return;
    this.#batches.points.changed.shades = true;
    if (this.#batches.tails.count) this.#shadeTails();
  }

  /** With shells, a line from each point to the wire sphere. */
  #linkToShell(positions) {
    const { links, points, wire } = this.#batches, wanted = positions ? 2 * positions.length : 0;
    if (links.places.length !== wanted) {
      links.set({ places: new Float32Array(wanted) });
      this.#shadeAll(links, this.#colours.soft, 0.35);
    }
    for (let k = 0; k < wanted / 2; k++) {
      const start = 6 * Math.floor(k / 3) + k % 3;
      links.places[start] = points.places[k];
      links.places[start + 3] = wire.grow * positions[k];
    }
    links.changed.places = true;
  }

  #pairTails(steps, count) {
    const pairs = new Uint32Array(2 * (steps - 1) * count);
    for (let i = 0; i < (steps - 1) * count; i++) [pairs[2 * i], pairs[2 * i + 1]] = [i, i + count];
    this.#batches.tails.set({ pairs, places: new Float32Array(3 * steps * count), shades: new Uint8Array(4 * steps * count) });
    this.#shadeTails();
  }

  /** Trails have the colours of their points and fade with age. */
  #shadeTails() {
    const { tails, points } = this.#batches, count = points.count, steps = tails.count / count;
    for (let i = 0; i < tails.count; i++) {
      const point = i % count, age = (i - point) / count;
      for (let k = 0; k < 3; k++) tails.shades[4 * i + k] = points.shades[4 * point + k];
      tails.shades[4 * i + 3] = 220 * (age / (steps - 1)) ** 1.5;
    }
    tails.changed.shades = true;
  }

  /** Above points and lines: trails of a scene, rings, texts that do not cover each other, and where a user points at. */
  #drawTexts(pen, pointed) {
    const view = this.#view, spot = this.#spot, { ink, soft, paper } = this.#colours;
    this.#boxes.length = 0;
    if (this.#scene) {
      const at = (part, i) => [...project(view, part.at, i, 1, spot)].slice(0, 2);
      drawTrails(pen, this.#scene, this.#parts, this.#colours, at, (text, x, y, bold) => this.#write(pen, text, x, y, bold, ink));
    }
    const surface = this.#batches.wire.grow;
    for (const { position, radius = 0, text, size = 12 } of this.#marks) {
      project(view, position, 0, radius ? this.distance(radius) : surface, spot);
      if (!Number.isFinite(spot[0])) continue;
      pen.disc(spot[0], spot[1], size, "", spot[2] < 0 ? 0.45 : 1, ink, 1.5);
      if (text) this.#write(pen, text, spot[0], spot[1], true, ink, size + 3);
    }
    const labels = this.#pointInput?.labels;
    for (let i = 0; labels && i < labels.length; i++) {
      if (!labels[i]) continue;
      project(view, this.#batches.points.places, i, 1, spot);
      this.#write(pen, labels[i], spot[0], spot[1], i === this.chosen, ink);
    }
    for (let k = 0; this.#axes && k < 3; k++) {
      project(view, this.#batches.axes.places, 2 * k + 1, this.#batches.axes.grow, spot);
      this.#write(pen, this.#axes[k], spot[0], spot[1], false, soft);
    }
    if (!pointed) return;
    if (this.near) this.#ring(pen, this.near.part.at, this.near.index, 9, ink, paper);
    const choice = this.chosen >= 0 ? this.partOf(this.chosen) : null;
    if (!choice) return;
    this.#ring(pen, choice.part.at, choice.index, 11, ink, paper);
    this.#boxes.length = 0;
    this.#write(pen, this.nameOf(this.chosen), spot[0], spot[1], true, ink, 15);
  }

  #ring(pen, places, index, size, ink, paper) {
    const [x, y] = project(this.#view, places, index, 1, this.#spot);
    pen.disc(x, y, size, "", 1, paper, 4);
    pen.disc(x, y, size, "", 1, ink, 2);
  }

  /** A text beside a place, unless it would cover another one. */
  #write(pen, text, x, y, bold, colour, gap = 8) {
    const wide = 4 + pen.width(text, bold), left = x + gap + wide > this.#view.width ? x - gap - wide : x + gap;
    for (const box of this.#boxes) {
      if (left < box[0] + box[2] && box[0] < left + wide && Math.abs(y - box[1]) < 16) return;
    }
    this.#boxes.push([left, y, wide]);
    pen.text(left, y, text, bold, colour, this.#colours.paper);
  }
}
