// What the lab saves: pictures of spheres and strips, tables of the run, and all dimensions of the tokens at one time.
import { svg } from "./dom.js";
import { shortNumber } from "./heatmap.js";
import { frameAt } from "./strips.js";

const quoted = text => /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;

/** Tidy measures: scheme, time, cosine, speed, radius, clusters, and those of the theory curve where there is one. */
export function measuresCsv(names, series) {
  const keys = ["cosine", "speed", "radius", "clusters"], theory = series.some(line => line.theory) ? ["cosine", "speed", "radius"] : [];
  const rows = [["scheme", "time", ...keys, ...theory.map(key => `${key}_theory`)].join()];
  series.forEach((line, s) => {
    for (let k = 0; k < line.length; k++) {
      const at = line.theory ? frameAt(line.theory.times, line.theory.times.length, line.times[k]) : -1;
      const exact = at >= 0 && Math.abs(line.theory.times[at] - line.times[k]) < 1e-9;
      rows.push([quoted(names[s]), line.times[k], ...keys.map(key => line.values[key][k]), ...theory.map(key => exact ? line.theory[key][at] : "")].join());
    }
  });
  return `${rows.join("\n")}\n`;
}

/** States at one time: scheme, time, token, x0, x1, …; `states` is one flat array tokens × dim for each scheme. */
export function statesCsv(names, times, states, dim) {
  const rows = [["scheme", "time", "token", ...Array.from({ length: dim }, (_, k) => `x${k}`)].join()];
  states.forEach((x, s) => {
    for (let token = 0; token * dim < x.length; token++) {
      rows.push([quoted(names[s]), times[s], token, ...x.slice(token * dim, (token + 1) * dim)].join());
    }
  });
  return `${rows.join("\n")}\n`;
}

function part(text, x, y, width, height) {
  const node = document.importNode(new DOMParser().parseFromString(text, "image/svg+xml").documentElement, true);
  const [w, h] = ["width", "height"].map(name => parseFloat(node.getAttribute(name)));
  if (!node.hasAttribute("viewBox")) node.setAttribute("viewBox", `0 0 ${w} ${h}`);
  for (const [name, value] of Object.entries({ x, y, width, height })) node.setAttribute(name, value);
  return node;
}

/** One SVG file: spheres in a row with their names, strips below, two in a row. */
export function pictureSvg({ names, captions, spheres, strips, colours, time, about }) {
  const size = 360, gap = 16, width = Math.max(2, spheres.length) * (size + gap) + gap, half = (width - 3 * gap) / 2, high = 200;
  const label = (text, x, y, more = {}) => svg("text", { x, y, fill: colours.ink, "font-size": 14, "font-family": "system-ui, sans-serif", ...more }, text);
  const top = 44, below = top + 30 + size + 30, height = below + Math.ceil(strips.length / 2) * (high + 8) + gap;
  const picture = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` },
    svg("rect", { width, height, fill: colours.paper }), label(`${about}, at time ${shortNumber(time)}`, gap, 26, { fill: colours.soft }),
    spheres.flatMap((text, k) => {
      const x = gap + k * (size + gap);
      return [label(names[k], x, top + 16, { fill: colours.series[k], "font-weight": "bold" }), part(text, x, top + 28, size, size),
        label(captions[k], x, top + 28 + size + 18, { fill: colours.soft, "font-size": 12 })];
    }),
    strips.map((text, k) => part(text, gap + (k % 2) * (half + gap), below + Math.floor(k / 2) * (high + 8), half, high)));
  return new XMLSerializer().serializeToString(picture);
}
