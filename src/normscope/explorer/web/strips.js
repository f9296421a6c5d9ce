// Strips: linked line charts over one clock, with a cursor, keyboard, values under the pointer, and a table of the numbers.
import { element, svg } from "./dom.js";
import { shortNumber } from "./heatmap.js";
import { createLines, DASHES, extentOf } from "./lines.js";
import { axisStart } from "./player.js";

const HEIGHT = 168, FLOOR = 1e-15;  // the smallest part of the largest value that a logarithmic axis shows
const SCHEME_DASHES = [0, 1, 3, 4], THEORY_DASH = 2;  // of the line patterns: schemes differ without colour, too
const STEPS = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 };

/** The index of the last of `length` rising times that is not after t. */
export function frameAt(times, length, t) {
  let low = 0, high = length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (times[middle] <= t + 1e-9) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** The value at time t on the line through the frames, or on steps; NaN where there is none yet. */
export function valueAt(times, values, length, t, steps = false) {
  if (!length || t > times[length - 1] + 1e-6) return NaN;
  const k = frameAt(times, length, t), next = Math.min(k + 1, length - 1);
  if (steps || next === k) return values[k];
  return values[k] + (values[next] - values[k]) * Math.max(0, t - times[k]) / (times[next] - times[k]);
}

/** A line that keeps its value between frames. */
function stairs(times, values) {
  const x = new Float64Array(Math.max(0, 2 * times.length - 1)), y = new Float64Array(x.length);
  for (let k = 0; k < x.length; k++) [x[k], y[k]] = [times[(k + 1) >> 1], values[k >> 1]];
  return [x, y];
}

/** The next round number from `high` on, so that there is a tick at the upper end of an axis. */
function roundUp(high, log) {
  if (!(high > 0)) return high;
  const power = 10 ** Math.floor(Math.log10(high)), whole = size => Math.ceil(high / size - 1e-9);
  if (log) return power * (whole(power) > 1 ? 10 : 1);
  const step = [0.1, 0.2, 0.5, 1, 2, 5].map(size => size * power).find(size => whole(size) <= 3);
  return step * whole(step);
}

/**
 * Strips in `host`; options: `colours()` of the theme, `tip`, `onScrub(t)`, `onStep(count)`.
 * `setData({strips, series, duration, every, axis, unit, theory})`: strips `[{key, label, log?, steps?, least?, most?}]`; series
 * `[{name, colour, times, length, values: {key: array}, theory: {times, key: array}|null}]`; axis "linear" or "log"; unit
 * "time" or "layer"; theory: what the theory curve is, or why it is missing.
 */
export function createStrips(host, { colours, tip, onScrub, onStep }) {
  let data = { strips: [], series: [], duration: 1, every: 1, axis: "linear", unit: "time", theory: "" }, charts = [], time = 0;
  const grid = element("div", { class: "strips" }), note = element("p", { class: "note strips-theory" });
  const head = element("tr"), body = element("tbody");
  const table = element("details", {}, element("summary", {}, "Numbers as a table"),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Numbers of the run" },
      element("table", {}, element("thead", {}, head), body)));
  const legend = element("ul", { class: "lines-legend" });
  host.replaceChildren(legend, grid, note, table);
  table.addEventListener("toggle", fillTable);

  function makeChart(strip) {
    const role = { role: "slider", tabindex: "0", "aria-label": `Time, ${strip.label}`, "aria-valuemin": "0" };
    const slider = element("div", { class: "strip", "data-strip": strip.key, ...role });
    grid.append(element("figure", {}, element("figcaption", {}, strip.label), slider));
    slider.addEventListener("keydown", event => {
      if (event.key in STEPS) onStep(STEPS[event.key]);
      else if (event.key === "Home") onScrub(0);
      else if (event.key === "End") onScrub(data.duration);
      else return;
      event.preventDefault();
    });
    return { slider, lines: createLines(slider, { colours: colours(), tip, onPick: onScrub, legend: false, height: HEIGHT }) };
  }

  function linesOf(strip) {
    const cut = (line, values) => [line.times.subarray(0, line.length), values.subarray(0, line.length)];
    const measured = data.series.map((line, k) => {
      const [x, y] = strip.steps ? stairs(...cut(line, line.values[strip.key])) : cut(line, line.values[strip.key]);
      return { name: line.name, x, y, colour: line.colour, dash: SCHEME_DASHES[k], width: 2.4 };
    });
    const dotted = { colour: colours().ink, dash: THEORY_DASH, width: 1.2, dot: false };
    const theory = data.series.filter(line => line.theory?.[strip.key]).map(line =>
      ({ name: `${line.name}, theory`, x: line.theory.times, y: line.theory[strip.key], ...dotted }));
    return [...measured, ...theory];
  }

  function domainOf(strip, series) {
    const [low, high] = extentOf(series.map(line => line.y), strip.log);
    const most = roundUp(Math.max(high, strip.most ?? high), strip.log), least = Math.min(low, strip.least ?? low);
    return [strip.log ? Math.max(least, high * FLOOR) : least, most];
  }

  function axisFrom() {
    return data.axis === "log" ? axisStart(data.duration, data.every) : 0;
  }

  function drawLegend() {
    const sample = (stroke, dash, width) => svg("svg", { width: 44, height: 10, "aria-hidden": "true" },
      svg("line", { x1: 0, y1: 5, x2: 44, y2: 5, stroke, "stroke-width": width, "stroke-dasharray": DASHES[dash] || "none" }));
    const { ink, series } = colours();
    const item = (line, k) => element("li", {}, sample(series[line.colour], SCHEME_DASHES[k], 2.4), ` ${line.name}`);
    const theory = data.series.some(line => line.theory) && element("li", {}, sample(ink, THEORY_DASH, 1.2), " theory");
    legend.replaceChildren(...data.series.map(item), ...(theory ? [theory] : []));
  }

  function draw() {
    drawLegend();
    charts.forEach(({ slider, lines }, k) => {
      const strip = data.strips[k], series = linesOf(strip);
      const first = axisFrom();
      slider.setAttribute("aria-valuemax", String(data.duration));
      const x = { label: data.unit, log: data.axis === "log", domain: [first, data.duration] };
      const y = { log: strip.log, domain: domainOf(strip, series) };
      lines.set({ series, x, y, colours: colours(), label: strip.label, marker: Math.max(first, time) });
    });
    fillTable();
  }

  /** Rows `[name, value]` of a strip at the clock's time. */
  function rowsAt(strip) {
    return data.series.map(line => [line.name, valueAt(line.times, line.values[strip.key], line.length, time, strip.steps)]);
  }

  function place() {
    charts.forEach(({ slider, lines }, k) => {
      lines.mark(Math.max(axisFrom(), time));
      slider.setAttribute("aria-valuenow", String(Number(time.toPrecision(6))));
      if (slider === document.activeElement || !slider.hasAttribute("aria-valuetext")) {
        const values = rowsAt(data.strips[k]).map(([name, value]) => `${name} ${shortNumber(value)}`);
        slider.setAttribute("aria-valuetext", [`${data.unit} ${shortNumber(time)}`, ...values].join(", "));
      }
    });
  }

  function fillTable() {
    if (!table.open) return;
    const columns = data.strips.flatMap(strip => [
      [strip.label, (line, t) => valueAt(line.times, line.values[strip.key], line.length, t, strip.steps)],
      ...(data.series.some(line => line.theory?.[strip.key]) ? [[`${strip.label}, theory`, ({ theory }, t) =>
        theory?.[strip.key] ? valueAt(theory.times, theory[strip.key], theory.times.length, t) : NaN]] : []),
    ]);
    const titles = ["Scheme", "Time", ...columns.map(([title]) => title)];
    head.replaceChildren(...titles.map(title => element("th", { scope: "col" }, title)));
    const times = Array.from({ length: 11 }, (_, k) => k * data.duration / 10);
    const cell = value => element("td", { class: "number" }, shortNumber(value));
    const row = (line, t) =>
      element("tr", {}, element("th", { scope: "row" }, line.name), cell(t), columns.map(([, value]) => cell(value(line, t))));
    body.replaceChildren(...data.series.flatMap(line => times.map(t => row(line, t))));
  }

  return {
    setData(next) {
      const changed = next.strips.map(strip => strip.key).join() !== data.strips.map(strip => strip.key).join();
      data = next;
      if (changed) {
        charts.forEach(({ lines }) => lines.dispose());
        grid.replaceChildren();
        charts = data.strips.map(makeChart);
      }
      note.textContent = data.theory;
      draw();
      place();
    },
    setTime(t) {
      time = t;
      place();
    },
    /** The charts as SVG texts. */
    pictures: () => charts.map(({ lines }) => lines.svg()),
  };
}
