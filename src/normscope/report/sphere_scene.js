// Scenes of report/sphere.py: clouds of points and trails with steps.
import { rgb, stepColour } from "./sphere_colours.js";

/** The parts of a scene that can be picked, trails first: {...part, at: places, rows(index): what the pointer shows}. */
export function sceneParts(scene) {
  return [...scene.trails, ...scene.clouds].map(part => {
    const rows = index => ({ [part.steps ? `${scene.order} ${part.steps[index]}` : part.name]: part.labels[index] || "" });
    return { ...part, at: numbers(part.points), rows };
  });
}

/** The typed arrays of all clouds: places, shades and sizes of points, and the places of lines to where they came from. */
export function cloudArrays(parts) {
  const at = [], shades = [], sizes = [], links = [];
  for (const part of parts.filter(({ steps }) => !steps)) {
    const count = part.at.length / 3, few = part.marked || count < 1000, bytes = [...rgb(part.colour), few ? 255 : 153];
    for (const value of part.at) at.push(value);
    for (let i = 0; i < count; i++) {
      shades.push(...bytes);
      sizes.push(part.marked ? 11 : few ? 6 : 3);
    }
    const origins = part.origins ? numbers(part.origins) : [];
    for (let k = 0; k < origins.length; k += 3) links.push(...origins.slice(k, k + 3), ...part.at.slice(k, k + 3));
  }
  const [places, between] = [at, links].map(list => Float32Array.from(list));
  return { places, shades: Uint8Array.from(shades), sizes: Float32Array.from(sizes), links: between };
}

/** Trails in the colours of their steps, and texts: `spot(part, index)` in pixels, `write(text, x, y, bold)` if there is room. */
export function drawTrails(pen, scene, parts, colours, spot, write) {
  const [low, high] = scene.steps, trails = parts.filter(part => part.steps);
  const colour = step => `rgb(${stepColour(colours.steps, (step - low) / (high - low)).join()})`;
  for (const part of trails) {
    const spots = part.steps.map((_, i) => spot(part, i)), shades = part.steps.map(colour), last = Math.max(1, spots.length - 1);
    spots.forEach(([x, y], i) => i && pen.line(...spots[i - 1], x, y, shades[i], 1, part.thin ? 1 : 2.5));
    if (part.thin) pen.disc(...spots.at(-1), 3, shades.at(-1), 1, colours.ink, 0.5);
    else spots.forEach(([x, y], i) => pen.disc(x, y, 3 + 4 * i / last, shades[i], 1, colours.paper, 1));
  }
  for (const part of parts) if (part.marked) part.labels.forEach((text, i) => write(text, ...spot(part, i), true));
  for (const { captions, ...part } of trails) {
    const inOrder = [captions[0], captions.at(-1), ...captions.slice(1, -1)].filter(Boolean);  // the ends have room first
    for (const [i, text] of inOrder) write(text, ...spot(part, i), false);
  }
}

/** Numbers of a scene: 16-bit integers in base64, in units of the scene's reach, or rows of numbers. */
function numbers(points) {
  if (typeof points !== "string") return Float32Array.from(points.flat());
  const bytes = Uint8Array.from(atob(points), letter => letter.charCodeAt(0));
  return Float32Array.from(new Int16Array(bytes.buffer), value => value / 32767);
}
