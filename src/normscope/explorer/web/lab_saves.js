// What the lab saves: pictures of spheres and strips, tables of the run, all dimensions of the tokens at one time, a video.
import { svg } from "./dom.js";
import { shortNumber } from "./heatmap.js";
import { csvBlob, pngOfSvg, svgBlob } from "./save.js";
import { frameAt } from "./strips.js";
import { record } from "./video.js";

const VIDEO = 360;  // frames of a video at speed 1, 12 seconds
const MEASURES = ["cosine", "speed", "radius", "clusters"], OF_THEORY = ["cosine", "speed", "radius"];
const SIZE = 360, GAP = 16, HIGH = 200, TOP = 44;  // of a sphere, between parts, of a strip, above the spheres

/** Tidy measures of a run: scheme, time, cosine, speed, radius, clusters, and those of theory where there is any. */
function measuresCsv(lines) {
  const theory = lines.some(line => line.theory) ? OF_THEORY : [], rows = [];
  for (const line of lines) {
    for (let k = 0; k < line.length; k++) {
      const t = line.times[k], at = line.theory ? frameAt(line.theory.times, line.theory.times.length, t) : -1;
      const exact = at >= 0 && Math.abs(line.theory.times[at] - t) < 1e-9;
      const beside = theory.map(key => exact ? line.theory[key][at] : null);
      rows.push([line.name, t, ...MEASURES.map(key => line.values[key][k]), ...beside]);
    }
  }
  return csvBlob(["scheme", "time", ...MEASURES, ...theory.map(key => `${key}_theory`)], rows);
}

/** States at one time: scheme, time, token, x0, x1, …; `states` is one flat array tokens × dim for each line. */
function statesCsv(lines, frames, states, dim) {
  const rows = states.flatMap((x, s) => Array.from({ length: x.length / dim }, (_, token) =>
    [lines[s].name, lines[s].times[frames[s]], token, ...x.slice(token * dim, (token + 1) * dim)]));
  return csvBlob(["scheme", "time", "token", ...Array.from({ length: dim }, (_, k) => `x${k}`)], rows);
}

function part(text, x, y, width, height) {
  const node = document.importNode(new DOMParser().parseFromString(text, "image/svg+xml").documentElement, true);
  const [w, h] = ["width", "height"].map(name => parseFloat(node.getAttribute(name)));
  if (!node.hasAttribute("viewBox")) node.setAttribute("viewBox", `0 0 ${w} ${h}`);
  for (const [name, value] of Object.entries({ x, y, width, height })) node.setAttribute(name, value);
  return node;
}

/** One SVG file: spheres in a row with their names and numbers, strips below, two in a row. */
function pictureSvg({ lines, captions, spheres, strips, colours, heading }) {
  const width = Math.max(2, spheres.length) * (SIZE + GAP) + GAP, half = (width - 3 * GAP) / 2, below = TOP + SIZE + 60;
  const height = below + Math.ceil(strips.length / 2) * (HIGH + 8) + GAP, font = { "font-family": "system-ui, sans-serif" };
  const label = (text, x, y, fill, more) => svg("text", { x, y, fill, "font-size": 14, ...font, ...more }, text);
  const picture = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` },
    svg("rect", { width, height, fill: colours.paper }), label(heading, GAP, 26, colours.soft));
  spheres.forEach((text, k) => {
    const x = GAP + k * (SIZE + GAP);
    picture.append(label(lines[k].name, x, TOP + 16, colours.ink, { "font-weight": "bold" }),
      part(text, x, TOP + 28, SIZE, SIZE), label(captions[k], x, TOP + SIZE + 46, colours.soft, { "font-size": 12 }));
  });
  strips.forEach((text, k) => {
    picture.append(part(text, GAP + (k % 2) * (half + GAP), below + Math.floor(k / 2) * (HIGH + 8), half, HIGH));
  });
  return new XMLSerializer().serializeToString(picture);
}

/** A video of the whole run, evenly along the time axis; the clock returns to where it was, unless it was moved. */
async function makeVideo({ run, player, spheres, lines, colours, about, show }, { signal, onProgress }) {
  if (!run.done) throw new Error("the run is still being computed; wait until it has come to its end.");
  player.pause();
  const before = player.time, { settings } = run, frames = Math.max(2, Math.round(VIDEO / player.speed));
  let reached = before;
  const timeOf = frame => {
    const t = frame ? player.axis.time(frame / (frames - 1)) : 0;
    return player.whole ? Math.floor(t / player.every + 1e-9) * player.every : t;
  };
  try {
    return await record({
      frames, colours, signal, onProgress,
      caption: frame => `t = ${timeOf(frame).toFixed(2)}   ${about}`,
      panels: spheres.map((sphere, k) => ({ title: lines[k].name, layers: () => sphere.layers() })),
      show: frame => {
        if (run.settings !== settings) throw new Error("what it shows was changed meanwhile.");
        show(timeOf(frame));
        reached = player.time;
      },
    });
  } finally {
    if (run.settings === settings && player.time === reached) show(before);
  }
}

/**
 * The files of the lab. `get()` returns what it shows: {run, player, lines, captions, spheres, strips, colours, about, dim},
 * with `show(t)` to bring another time onto the page at once.
 */
export function labSaves(get) {
  const svgOf = () => {
    const { spheres, strips, player, about, ...rest } = get();
    const heading = `${about}, at time ${shortNumber(player.time)}`;
    return pictureSvg({ ...rest, heading, spheres: spheres.map(sphere => sphere.svg()), strips: strips.pictures() });
  };
  const statesOf = async () => {
    const { run, player, lines, dim } = get(), frames = lines.map(line => frameAt(line.times, line.length, player.time));
    return statesCsv(lines, frames, await Promise.all(frames.map((frame, k) => run.states(k, frame))), dim);
  };
  const file = (label, ending, make) =>
    ({ label, make: async options => ({ name: `normscope-lab${ending}`, blob: await make(options) }) });
  return [
    file("Picture (SVG)", ".svg", () => svgBlob(svgOf())),
    file("Picture (PNG)", ".png", () => pngOfSvg(svgOf())),
    file("Measures of the run (CSV)", ".csv", () => measuresCsv(get().lines)),
    file("Hidden states at this time, all dimensions (CSV)", "-states.csv", statesOf),
    file("Video of the run (WebM)", ".webm", options => makeVideo(get(), options)),
  ];
}
