// A line chart in SVG: axes, legend, marker and tips; redrawn when data, width or theme change. Strips and the ledger use it.
import { element, svg } from "./dom.js";
import { shortNumber, withMinus } from "./heatmap.js";
import { formulaParts } from "./math_text.js";
import { csvBlob } from "./save.js";

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
const SIZE = 11;
const LETTER = 6.2;
const LETTERS = { "font-size": SIZE, "font-family": FONT };
export const DASHES = ["", "6 3", "2 2", "9 3 2 3", "12 4", "2 5"];
const TICK = 4;
const [APART_X, APART_Y] = [40, 15]; // pixels between the last round tick and one at the upper end

/** At most `count` round numbers within [low, high]; of a logarithmic axis powers of ten, with 2 and 5 where there is room. */
export function ticksOf(low, high, count, log = false) {
  if (log) {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const ticks = (factors, every) => {
      const powers = Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, at) => first + at * every);
      const all = powers.flatMap((power) => factors.map((factor) => Number(`${factor}e${power}`)));
      return all.filter((tick) => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9));
    };
    const dense = ticks([1, 2, 5], 1);
    return dense.length <= count + 1 ? dense : ticks([1], Math.max(Math.ceil((last - first + 1) / count), 1));
  }
  const rough = (high - low) / Math.max(count - 1, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => (high - low) / size <= count) ?? 10 * power;
  const first = Math.ceil(low / step - 1e-9);
  const ticks = [];
  for (let at = first; at * step <= high + 1e-9 * step; at += 1) ticks.push(Number((at * step).toPrecision(12)));
  return ticks;
}

/** The ticks with one at the largest value shown, where the last of them is further than `apart` pixels away. */
function withEnd(ticks, { largest, log, ends, place }, apart) {
  const unit = 10 ** Math.floor(Math.log10(ends[1] - ends[0]) - 2);
  const end = Number((log ? Number(largest.toPrecision(3)) : Math.round(largest / unit) * unit).toPrecision(12));
  return ticks.length && Math.abs(place(ticks.at(-1)) - place(end)) < apart ? ticks : [...ticks, end];
}

/** A tick's number, as short as it can be. */
function tickText(value) {
  const size = Math.abs(value);
  if (size && (size >= 1e5 || size < 1e-3)) return withMinus(Number(value.toPrecision(4)).toExponential());
  return withMinus(Number(value.toPrecision(6)));
}

/** [low, high] of finite numbers (of positive ones with `log`), widened where all are equal. */
export function extentOf(lists, log = false) {
  let [low, high] = [Infinity, -Infinity];
  for (const list of lists) {
    for (const value of list) {
      if (!Number.isFinite(value) || (log && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return log ? [0.1, 10] : [0, 1];
  if (low < high) return [low, high];
  return log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
}

function axisOf(options, lists, from, to, room) {
  const { log = false, domain = null } = options;
  let [low, high] = domain ?? extentOf(lists, log);
  const largest = Math.max(low, high);
  if (room && !domain) {
    const margin = (log ? Math.log(high / low) : high - low) * room;
    [low, high] = log ? [low * Math.exp(-margin), high * Math.exp(margin)] : [low - margin, high + margin];
  }
  const [start, width] = log ? [Math.log(low), Math.log(high / low)] : [low, high - low];
  const share = (value) => ((log ? Math.log(value) : value) - start) / width;
  const at = (place) => {
    const value = start + ((place - from) / (to - from)) * width;
    return log ? Math.exp(value) : value;
  };
  const ends = [Math.min(low, high), Math.max(low, high)];
  return { ends, largest, log, at, place: (value) => from + share(value) * (to - from) };
}

/** A path through points; a gap where a number is missing, and at most four points for each column of pixels. */
function pathOf(xs, ys, across, down) {
  const parts = [];
  let [drawing, column, held] = [false, NaN, null];
  const put = (x, y) => {
    parts.push(`${drawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`);
    drawing = true;
  };
  const flush = () => {
    if (!held) return;
    const order = held.lowAt < held.highAt ? [held.low, held.high] : [held.high, held.low];
    for (const y of [...order, held.last]) put(held.x, y);
    held = null;
  };
  for (let i = 0; i < xs.length; i += 1) {
    const [x, y] = [across.place(xs[i]), down.place(ys[i])];
    if (!Number.isFinite(x) || !Number.isFinite(y)) {
      flush();
      drawing = false;
      column = NaN;
    } else if (Math.round(x) !== column) {
      flush();
      column = Math.round(x);
      put(x, y);
    } else if (held) {
      if (y < held.low) [held.low, held.lowAt] = [y, i];
      if (y > held.high) [held.high, held.highAt] = [y, i];
      held.last = y;
    } else held = { x, low: y, high: y, last: y, lowAt: i, highAt: i };
  }
  flush();
  return parts.join("");
}

/** Index of the entry of rising or falling `xs` nearest to x; −1 for none. */
export function nearestIndex(xs, x) {
  let best = -1;
  for (let i = 0; i < xs.length; i += 1) if (best < 0 || Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
  return best;
}

/**
 * A line chart. `{series}`: `[{name, x, y, colour?, dash?, width?, opacity?, dots?, dot?}]`, x and y of equal length (NaN: a
 * gap), `colour` and `dash` indices of the theme's series and of dash patterns, or a colour, `dot: false` for no dot at the
 * marker; `{x, y}`: `{label, log?, domain?, format?}`, a domain [1, 0] runs from right to left; `{colours}` those of the theme;
 * `{label}` words for screen readers; `{marker}` a value of x or null; `{bands}` `[{from, to, name}]` shaded stretches of x;
 * `{rules}` `[{y, name}]` horizontal lines; `{height, legend, left, tip, onPick}`: `left` is the least room for the y
 * axis, `tip(event, rows | null)` shows a small table, `onPick(x)` is called where the chart is clicked or dragged.
 * Returns `{set(patch), mark(x), svg(title?), csv(), element, marker, box, dispose}`.
 */
export function createLines(host, options) {
  let settings = { series: [], x: {}, y: {}, bands: [], rules: [], label: "", marker: null, height: 220, legend: true,
    left: 0, tip: null, onPick: null };
  let view = null;

  const picture = svg("svg", { class: "lines-picture", role: "img" });
  const legend = element("ul", { class: "lines-legend" });
  const root = element("div", { class: "lines" }, picture, legend);
  host.append(root);

  const inkOf = (line, at) => {
    const { series } = settings.colours;
    return typeof line.colour === "string" ? line.colour : series[(line.colour ?? at) % series.length];
  };
  const dashOf = (line, at) => DASHES[(line.dash ?? at) % DASHES.length];
  const lookOf = (line, at) => ({ stroke: inkOf(line, at), "stroke-width": line.width ?? 2, "stroke-opacity": line.opacity ?? 1,
    "stroke-dasharray": dashOf(line, at) || "none" });
  const formatX = (value) => (settings.x.format ?? shortNumber)(value);
  const formatY = (value) => (settings.y.format ?? shortNumber)(value);

  const tickX = (value) => (settings.x.format ?? tickText)(value);
  const tickY = (value) => (settings.y.format ?? tickText)(value);

  function layout(width, above = 0) {
    const { series, height, x, y } = settings;
    // A name that is too long for the axis stands above the chart.
    const long = (y.label ?? "").length * LETTER > height - 40;
    const top = above + 10 + (long ? 18 : 0);
    const bottom = above + height - 34;
    const rules = settings.rules.map((rule) => rule.y);
    const down = axisOf(y, [...series.map((line) => line.y), rules], bottom, top, 0.05);
    const yTicks = withEnd(ticksOf(...down.ends, Math.max(Math.floor((bottom - top) / 34), 2), down.log), down, APART_Y);
    const longest = Math.max(...yTicks.map((tick) => tickY(tick).length), 1);
    const left = Math.max((y.label && !long ? 18 : 4) + longest * LETTER + TICK + 4, settings.left);
    const across = axisOf(x, series.map((line) => line.x), left, Math.max(width - 12, left + 20), 0);
    const xTicks = withEnd(ticksOf(...across.ends, Math.max(Math.floor((width - left) / 64), 2), across.log), across, APART_X);
    const right = Math.max(width - 12, left + 20);
    return { width, height: above + height, long, above, top, bottom, left, right, across, down, xTicks, yTicks };
  }

  /** The chart's elements, from back to front, without its marker. */
  function paint(at) {
    const { colours, series } = settings;
    const { across, down, left, right, top, bottom } = at;
    const parts = [];
    const text = (x, y, words, fill, more = {}) =>
      parts.push(svg("text", { x: x.toFixed(1), y: y.toFixed(1), fill, ...LETTERS, ...more }, words));
    const line = (x1, y1, x2, y2, stroke, more = {}) =>
      parts.push(svg("line", { x1: x1.toFixed(1), y1: y1.toFixed(1), x2: x2.toFixed(1), y2: y2.toFixed(1), stroke, ...more }));
    const names = [];
    for (const band of settings.bands) {
      const ends = [band.from, band.to].map((value) => Math.min(Math.max(across.place(value), left), right));
      const [x, width] = [Math.min(...ends), Math.abs(ends[1] - ends[0])];
      const box = { x: x.toFixed(1), y: top, width: width.toFixed(1), height: bottom - top };
      parts.push(svg("rect", { ...box, fill: band.colour ?? colours.line, "fill-opacity": 0.45 }));
      if (band.name && width > band.name.length * LETTER) {
        names.push([x + width / 2, band.name]);
      }
    }
    for (const tick of at.yTicks) {
      const y = down.place(tick);
      line(left, y, right, y, colours.line);
      text(left - TICK - 3, y + 3.5, tickY(tick), colours.ink, { "text-anchor": "end" });
    }
    for (const tick of at.xTicks) {
      const x = across.place(tick);
      line(x, bottom, x, bottom + TICK, colours.soft);
      const within = Math.min(x, at.width - 2 - (tickX(tick).length * LETTER) / 2);
      text(within, bottom + TICK + 12, tickX(tick), colours.ink, { "text-anchor": "middle" });
    }
    line(left, bottom, right, bottom, colours.soft);
    for (const rule of settings.rules) {
      const y = down.place(rule.y);
      if (!(y >= top && y <= bottom)) continue;
      line(left, y, right, y, colours.ink, { "stroke-width": 1 });
      if (rule.name) text(right - 2, y - 4, rule.name, colours.soft, { "text-anchor": "end" });
    }
    const room = Math.floor((right - left) / LETTER);
    if (settings.x.label) {
      text((left + right) / 2, bottom + 32, settings.x.label.slice(0, room), colours.soft, { "text-anchor": "middle" });
    }
    if (settings.y.label) {
      const middle = (top + bottom) / 2;
      const [x, y] = at.long ? [2, at.above + 12] : [11, middle];
      const turned = at.long ? {} : { "text-anchor": "middle", transform: `rotate(-90 11 ${middle.toFixed(1)})` };
      text(x, y, settings.y.label, colours.soft, turned);
    }
    series.forEach((each, index) => {
      const ink = inkOf(each, index);
      const look = lookOf(each, index);
      const path = { d: pathOf(each.x, each.y, across, down), fill: "none", "stroke-linejoin": "round", class: "lines-path" };
      parts.push(svg("path", { ...path, ...look }));
      if (!each.dots) return;
      for (let i = 0; i < each.x.length; i += 1) {
        const [x, y] = [across.place(each.x[i]), down.place(each.y[i])];
        if (!Number.isFinite(x) || !Number.isFinite(y)) continue;
        parts.push(svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: 2, fill: ink }));
      }
    });
    const halo = { "text-anchor": "middle", stroke: colours.paper, "stroke-width": 3, "paint-order": "stroke" };
    for (const [x, name] of names) text(x, top + 12, name, colours.ink, halo);
    return parts;
  }

  /** The marker: a vertical line, and a dot on every series at the x nearest to it. */
  function markerOf(at) {
    const { marker, series, colours } = settings;
    if (marker === null || marker === undefined) return [];
    const x = at.across.place(marker);
    if (!(x >= at.left - 1 && x <= at.right + 1)) return [];
    const ends = { x1: x.toFixed(1), x2: x.toFixed(1), y1: at.top, y2: at.bottom };
    const parts = [svg("line", { ...ends, stroke: colours.ink, "stroke-width": 1.5, class: "lines-marker" })];
    series.forEach((each, index) => {
      const i = each.dot === false ? -1 : nearestIndex(each.x, marker);
      const y = i < 0 ? NaN : at.down.place(each.y[i]);
      if (!Number.isFinite(y)) return;
      parts.push(svg("circle", { cx: at.across.place(each.x[i]).toFixed(1), cy: y.toFixed(1), r: 4, fill: inkOf(each, index),
        stroke: colours.paper, "stroke-width": 1.5 }));
    });
    return parts;
  }

  const keyOf = (each, index) => svg("line", { x1: 0, y1: 5, x2: 26, y2: 5, ...lookOf(each, index) });

  const markers = svg("g", {});
  function draw() {
    const width = Math.max(Math.floor(root.clientWidth), 160);
    view = layout(width);
    picture.setAttribute("width", width);
    picture.setAttribute("height", view.height);
    picture.setAttribute("viewBox", `0 0 ${width} ${view.height}`);
    picture.setAttribute("aria-label", describe());
    markers.replaceChildren(...markerOf(view));
    picture.replaceChildren(...paint(view), markers);
    legend.hidden = !settings.legend;
    legend.replaceChildren(...settings.series.map((each, index) =>
      element("li", {}, svg("svg", { width: 28, height: 10, "aria-hidden": "true" }, keyOf(each, index)), " ",
        formulaParts(each.name))));
  }

  /** What the chart shows, in words: axes, and the ends of every line. */
  function describe() {
    const ends = settings.series.map(({ name, y }) => {
      const finite = Array.from(y).filter(Number.isFinite);
      return finite.length ? `${name} from ${formatY(finite[0])} to ${formatY(finite.at(-1))}` : `${name}: no values`;
    });
    const axes = `${settings.y.label ?? "value"} over ${settings.x.label ?? "x"}`;
    return `${settings.label ? `${settings.label}: ` : ""}${axes}. ${ends.join("; ")}.`;
  }

  function set(patch) {
    settings = { ...settings, ...patch };
    draw();
  }

  function mark(x) {
    settings = { ...settings, marker: x };
    if (view) markers.replaceChildren(...markerOf(view));
  }

  function valueAt(event) {
    const x = view.across.at(event.clientX - picture.getBoundingClientRect().left);
    return Math.min(Math.max(x, view.across.ends[0]), view.across.ends[1]);
  }

  function rowsAt(x) {
    const rows = { [settings.x.label ?? "x"]: formatX(x) };
    for (const each of settings.series) {
      const i = nearestIndex(each.x, x);
      if (i < 0) continue;
      rows[settings.x.label ?? "x"] = formatX(each.x[i]);
      rows[each.name] = Number.isFinite(each.y[i]) ? formatY(each.y[i]) : "none";
    }
    return rows;
  }

  picture.addEventListener("pointermove", (event) => {
    settings.tip?.(event, rowsAt(valueAt(event)));
    if (settings.onPick && event.buttons === 1) settings.onPick(valueAt(event));
  });
  picture.addEventListener("pointerleave", (event) => settings.tip?.(event, null));
  picture.addEventListener("pointerdown", (event) => {
    if (!settings.onPick || event.button !== 0) return;
    picture.setPointerCapture(event.pointerId);
    settings.onPick(valueAt(event));
  });
  const resized = new ResizeObserver(() => {
    if (view && root.clientWidth && Math.floor(root.clientWidth) !== view.width) draw();
  });
  resized.observe(root);

  /** The chart with title and legend as the text of an SVG file. */
  function svgText(title = settings.label) {
    const width = Math.max(root.clientWidth, 480);
    const at = layout(width, 4 + (title ? 20 : 0) + (settings.legend ? 16 * settings.series.length : 0));
    const { colours } = settings;
    const words = { ...LETTERS, fill: colours.ink };
    const names = settings.series.map((each, index) => {
      const y = (title ? 24 : 6) + 16 * index;
      const key = svg("g", { transform: `translate(${at.left} ${y})` }, keyOf(each, index));
      return svg("g", {}, key, svg("text", { x: at.left + 34, y: y + 9, ...words }, each.name));
    });
    const size = { xmlns: "http://www.w3.org/2000/svg", width, height: at.height, viewBox: `0 0 ${width} ${at.height}` };
    const made = svg("svg", size, svg("rect", { width, height: at.height, fill: colours.paper }),
      ...(title ? [svg("text", { x: 8, y: 16, ...words, "font-size": 13 }, title)] : []),
      ...(settings.legend ? names : []), ...paint(at), ...markerOf(at));
    return new XMLSerializer().serializeToString(made);
  }

  /** The numbers of all lines as a blob of CSV. */
  function csv() {
    const rows = settings.series.flatMap(({ name, x, y }) =>
      Array.from(x, (value, i) => [name, value, Number.isFinite(y[i]) ? y[i] : null]));
    return csvBlob(["line", settings.x.label ?? "x", settings.y.label ?? "y"], rows);
  }

  function dispose() {
    resized.disconnect();
    settings.tip?.(null, null);
    root.remove();
  }

  set(options);
  return {
    set, mark, svg: svgText, csv, element: root, dispose,
    get marker() { return settings.marker; },
    get box() { return view; },
  };
}
