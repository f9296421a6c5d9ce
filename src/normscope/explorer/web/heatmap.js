// A table of numbers as colours: canvas with keyboard, legend, and the same numbers as a table; saved as SVG, PNG and CSV.
import { element } from "./dom.js";
import { csvBlob } from "./save.js";

const SIDE = { least: 4, most: 34 };
const LETTER = 6.4;
const GAP = 8;
const TALL = 360; // pixels of the rows of a map whose columns fill the width
const RIGHT = 12; // that of a line chart, so that both have one axis of time
const LEGEND = { width: 180, height: 10, steps: 45 };
const DIVERGING = ["#0072B2", "#D55E00"];
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
const hex = (numbers) => `#${numbers.map((each) => Math.round(each).toString(16).padStart(2, "0")).join("")}`;

function mixed(from, to, share) {
  const [a, b] = [channels(from), channels(to)];
  return hex(a.map((each, at) => each + share * (b[at] - each)));
}

/** The colour at a share in [0, 1] of a ramp of colours (#rrggbb). */
export function rampColour(ramp, share) {
  const place = Math.min(Math.max(share, 0), 1) * (ramp.length - 1);
  const below = Math.min(Math.floor(place), ramp.length - 2);
  return ramp.length === 1 ? ramp[0] : mixed(ramp[below], ramp[below + 1], place - below);
}

/** A number with about three significant digits, and minus signs as in formulas. */
export function shortNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not measured";
  if (!Number.isFinite(value)) return value > 0 ? "infinite" : "−infinite";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return withMinus(value.toExponential(2));
  return withMinus(Number(value.toPrecision(size >= 1000 ? 4 : 3)));
}

/** The text of a number with "−" for "-". */
export function withMinus(number) {
  return String(number).replaceAll("-", "−");
}

/** Flat values (rows × columns) of nested or flat numbers; what is no number is NaN. */
export function flatValues(values) {
  const flat = ArrayBuffer.isView(values) ? values : values.flat();
  return Float64Array.from(flat, (each) => (each === null || each === undefined ? NaN : Number(each)));
}

/** Where values lie on a scale: {low, high, share(value) in [0, 1], at(share)}; "log" falls back to linear for values ≤ 0. */
export function scaleOf(values, kind = "linear", range = null) {
  const finite = Array.from(values).filter(Number.isFinite);
  const extreme = (of, start) => finite.reduce((a, b) => of(a, b), start);
  let [low, high] = range ?? [extreme(Math.min, Infinity), extreme(Math.max, -Infinity)];
  if (!(low <= high)) [low, high] = [0, 1];
  if (kind === "diverging") [low, high] = [-Math.max(-low, high, 1e-300), Math.max(-low, high, 1e-300)];
  const log = kind === "log" && low > 0;
  const [to, from] = log ? [Math.log, Math.exp] : [(x) => x, (x) => x];
  const [start, width] = [to(low), to(high) - to(low)];
  return {
    low,
    high,
    log,
    share: (value) => (width > 0 ? (to(value) - start) / width : 0.5),
    at: (share) => from(start + share * width),
  };
}

const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const names = (given) => (typeof given === "number" ? Array.from({ length: given }, (_, at) => String(at)) : given.map(String));
const escaped = (text) => text.replace(/[&<>"]/g, (letter) => ENTITIES[letter]);
const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function canvasPen(context) {
  return {
    rect(x, y, width, height, fill) {
      context.fillStyle = fill;
      context.fillRect(x, y, width, height);
    },
    frame(x, y, width, height, stroke, thickness) {
      context.strokeStyle = stroke;
      context.lineWidth = thickness;
      context.strokeRect(x, y, width, height);
    },
    text(x, y, words, fill, anchor = "start", turned = false) {
      context.save();
      context.translate(x, y);
      if (turned) context.rotate(-Math.PI / 2);
      context.font = `11px ${FONT}`;
      context.fillStyle = fill;
      context.textAlign = anchor === "middle" ? "center" : anchor;
      context.textBaseline = "middle";
      context.fillText(words, 0, 0);
      context.restore();
    },
  };
}

function svgPen() {
  const parts = [];
  const cut = (number) => Number(number.toFixed(2));
  return {
    parts,
    rect(x, y, width, height, fill) {
      parts.push(`<rect x="${cut(x)}" y="${cut(y)}" width="${cut(width)}" height="${cut(height)}" fill="${fill}"/>`);
    },
    frame(x, y, width, height, stroke, thickness) {
      const box = `x="${cut(x)}" y="${cut(y)}" width="${cut(width)}" height="${cut(height)}"`;
      parts.push(`<rect ${box} fill="none" stroke="${stroke}" stroke-width="${thickness}"/>`);
    },
    text(x, y, words, fill, anchor = "start", turned = false) {
      const turn = turned ? ` transform="rotate(-90 ${cut(x)} ${cut(y)})"` : "";
      const place = `x="${cut(x)}" y="${cut(y)}" text-anchor="${anchor}" dominant-baseline="central"${turn}`;
      parts.push(`<text ${place} fill="${fill}">${escaped(words)}</text>`);
    },
  };
}

/**
 * A heatmap of rows × columns: `{rows, columns}` are counts or names, `{values}` flat or nested numbers (NaN: not measured),
 * `{rowLabel, columnLabel, valueLabel, title}` words, `{scale}` "linear", "log" or "diverging", `{range}` [low, high] or null,
 * `{colours}` those of the theme, `{marks}` cells [row, column] with a frame, `{onSelect, onHover}` take (row, column, event);
 * `onHover(null, null)` when the pointer leaves, `onMove(row, column)` as the keyboard moves; `{left}` is the least room for
 * row names, `{fill}` makes columns as wide as there is room. Returns
 * `{set, select, svg, png, csv, canvas, selected, box, dispose}`.
 */
export function createHeatmap(host, options) {
  let settings = { rowLabel: "row", columnLabel: "column", valueLabel: "", title: "", scale: "linear", range: null, marks: [],
    format: shortNumber, most: SIDE.most, onSelect: null, onHover: null, onMove: null, left: 0, fill: false };
  let view = null;
  let cursor = [0, 0];
  let selected = null;
  let focused = false;

  const canvas = element("canvas", { class: "heatmap-canvas", tabindex: "0", role: "application" });
  canvas.setAttribute("aria-roledescription", "heatmap");
  const live = element("p", { class: "visually-hidden", "aria-live": "polite" });
  const summary = element("summary", {}, "Table of these numbers");
  const tableHost = element("div", { class: "scroll" });
  const details = element("details", { class: "heatmap-table" }, summary, tableHost);
  const root = element("div", { class: "heatmap" }, canvas, live, details);
  host.append(root);

  function cellText(row, column) {
    const value = view.values[row * view.columns.length + column];
    const what = settings.valueLabel ? `${settings.valueLabel} ` : "";
    const place = `${settings.rowLabel} ${view.rows[row]}, ${settings.columnLabel} ${view.columns[column]}`;
    return `${place}: ${what}${settings.format(value)}`;
  }

  function layout(width) {
    const longest = (list) => Math.min(Math.max(...list.map((each) => each.length), 1), 14);
    const left = Math.max(GAP + 14 + longest(view.rows) * LETTER + 6, settings.left);
    const turned = longest(view.columns) > 3 && !settings.fill;
    const top = 16 + (turned ? longest(view.columns) * LETTER : 12) + 6;
    const room = Math.max(width - left - (settings.fill ? RIGHT : GAP), 40);
    const across = settings.fill ? room / view.columns.length : Math.min(room / view.columns.length, settings.most);
    const wide = settings.fill ? TALL / view.rows.length : Math.min(across, settings.most);
    const down = Math.min(Math.max(wide, view.rows.length > 60 ? SIDE.least : 12), settings.most);
    const bottom = top + down * view.rows.length;
    const legend = Math.min(LEGEND.width, width - left - 60);
    const below = left + legend + GAP + valueWords().length * LETTER > width;  // where the name has no room beside the legend
    return { left, top, across, down, turned, width, bottom, legend, below, height: bottom + (below ? 60 : 46) };
  }

  function valueWords() {
    return settings.valueLabel ? `${settings.valueLabel}${view.scale.log ? " (log)" : ""}` : "";
  }

  function paint(pen, at) {
    const { colours } = settings;
    const { left, top, across, down } = at;
    const [rows, columns] = [view.rows.length, view.columns.length];
    for (let row = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1) {
        const value = view.values[row * columns + column];
        // Edges are whole pixels, so that neighbouring cells leave no seams.
        const [x0, x1] = [Math.round(left + column * across), Math.max(Math.round(left + (column + 1) * across), 0)];
        const [y0, y1] = [Math.round(top + row * down), Math.round(top + (row + 1) * down)];
        const seam = across > 7 && down > 7 ? 1 : 0;
        const fill = Number.isFinite(value) ? view.colour(value) : colours.empty ?? colours.line;
        pen.rect(x0, y0, Math.max(x1 - x0 - seam, 1), Math.max(y1 - y0 - seam, 1), fill);
        if (!Number.isFinite(value) && across > 7) pen.text((x0 + x1) / 2, (y0 + y1) / 2, "·", colours.soft, "middle");
      }
    }
    const rowEvery = Math.max(Math.ceil(12 / down), 1);
    view.rows.forEach((name, row) => {
      if (row % rowEvery === 0) pen.text(left - 5, top + (row + 0.5) * down, shortened(name, 14), colours.ink, "end");
    });
    const letters = at.turned ? 13 : Math.max(...view.columns.map((each) => each.length)) * LETTER + 6;
    const columnEvery = Math.max(Math.ceil(letters / across), 1);
    view.columns.forEach((name, column) => {
      const x = left + (column + 0.5) * across;
      if (column % columnEvery) return;
      pen.text(x, top - (at.turned ? 4 : 9), shortened(name, 14), colours.ink, at.turned ? "start" : "middle", at.turned);
    });
    pen.text(left, 8, `${settings.columnLabel} →`, colours.soft);
    pen.text(9, top + (at.bottom - top) / 2, settings.rowLabel, colours.soft, "middle", true);
    for (const [row, column] of settings.marks) {
      pen.frame(left + column * across + 1.5, top + row * down + 1.5, across - 4, down - 4, colours.ink, 2);
    }
    paintLegend(pen, at);
  }

  function paintLegend(pen, at) {
    const { colours } = settings;
    const { legend: width } = at;
    const y = at.bottom + 12;
    for (let step = 0; step < LEGEND.steps; step += 1) {
      const share = step / (LEGEND.steps - 1);
      const x = at.left + (step * width) / LEGEND.steps;
      pen.rect(x, y, width / LEGEND.steps + 0.6, LEGEND.height, view.colour(view.scale.at(share)));
    }
    pen.text(at.left, y + LEGEND.height + 9, settings.format(view.scale.low), colours.ink);
    pen.text(at.left + width, y + LEGEND.height + 9, settings.format(view.scale.high), colours.ink, "end");
    const words = valueWords();
    if (words && at.below) pen.text(GAP, y + LEGEND.height + 25, shortened(words, Math.floor(at.width / LETTER)), colours.soft);
    else if (words) pen.text(at.left + width + GAP, y + LEGEND.height / 2, words, colours.soft);
  }

  function draw() {
    const width = Math.max(Math.floor(root.clientWidth), 120);
    view.at = layout(width);
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(view.at.height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${view.at.height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const pen = canvasPen(context);
    paint(pen, view.at);
    const { left, top, across, down } = view.at;
    const box = ([row, column], colour, thickness) =>
      pen.frame(left + column * across - 0.5, top + row * down - 0.5, across, down, colour, thickness);
    if (selected) {
      box(selected, settings.colours.paper, 5);
      box(selected, settings.colours.ink, 2.5);
    }
    if (focused) box(cursor, settings.colours.ink, 1.5);
  }

  function fillTable() {
    if (!details.open) return;
    const head = element("tr", {}, element("th", { scope: "col" }, `${settings.rowLabel} \\ ${settings.columnLabel}`),
      ...view.columns.map((name) => element("th", { scope: "col" }, name)));
    const text = (row, column) => settings.format(view.values[row * view.columns.length + column]);
    const body = view.rows.map((name, row) =>
      element("tr", {}, element("th", { scope: "row" }, name),
        ...view.columns.map((_, at) => element("td", { class: "number" }, text(row, at)))));
    tableHost.replaceChildren(
      element("table", {}, element("caption", {}, settings.title), element("thead", {}, head), element("tbody", {}, ...body)));
  }

  function set(patch) {
    settings = { ...settings, ...patch };
    const [rows, columns] = [names(settings.rows), names(settings.columns)];
    const values = flatValues(settings.values);
    if (values.length !== rows.length * columns.length) {
      throw new Error(`a heatmap of ${rows.length} × ${columns.length} cells got ${values.length} values`);
    }
    const scale = scaleOf(values, settings.scale, settings.range);
    const ramp = settings.scale === "diverging" ? [DIVERGING[0], settings.colours.paper, DIVERGING[1]] : settings.colours.steps;
    view = { rows, columns, values, scale, colour: (value) => rampColour(ramp, scale.share(value)) };
    cursor = [Math.min(cursor[0], rows.length - 1), Math.min(cursor[1], columns.length - 1)];
    if (selected && (selected[0] >= rows.length || selected[1] >= columns.length)) selected = null;
    const keys = settings.onSelect ? "Arrow keys move, Enter selects." : "Arrow keys read the cells.";
    canvas.setAttribute("aria-label", `${settings.title}: ${rows.length} × ${columns.length} cells. ${keys}`);
    draw();
    fillTable();
  }

  function select(row, column) {
    selected = row === null || row === undefined ? null : [row, column];
    if (selected) cursor = [row, column];
    draw();
  }

  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - view.at.left) / view.at.across);
    const row = Math.floor((event.clientY - box.top - view.at.top) / view.at.down);
    const inside = row >= 0 && column >= 0 && row < view.rows.length && column < view.columns.length;
    return inside ? [row, column] : null;
  }

  function choose([row, column], event) {
    if (!settings.onSelect) return;
    select(row, column);
    settings.onSelect(row, column, event);
  }

  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [last, end] = [view.rows.length - 1, view.columns.length - 1];
    const jumps = { Home: [cursor[0], 0], End: [cursor[0], end], PageUp: [0, cursor[1]], PageDown: [last, cursor[1]] };
    if (moves[event.key]) {
      const [down, across] = moves[event.key];
      cursor = [Math.min(Math.max(cursor[0] + down, 0), last), Math.min(Math.max(cursor[1] + across, 0), end)];
    } else if (jumps[event.key]) cursor = jumps[event.key];
    else if (event.key === "Enter" || event.key === " ") choose(cursor, event);
    else return;
    event.preventDefault();
    event.stopPropagation();
    live.textContent = cellText(...cursor);
    settings.onMove?.(...cursor);
    draw();
  }

  canvas.addEventListener("keydown", onKey);
  canvas.addEventListener("focus", () => {
    focused = canvas.matches(":focus-visible");
    draw();
  });
  canvas.addEventListener("blur", () => {
    focused = false;
    draw();
  });
  canvas.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (!cell) return;
    cursor = cell;
    choose(cell, event);
  });
  canvas.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    canvas.style.cursor = cell && settings.onSelect ? "pointer" : "";
    settings.onHover?.(cell ? cell[0] : null, cell ? cell[1] : null, event);
  });
  canvas.addEventListener("pointerleave", (event) => settings.onHover?.(null, null, event));
  details.addEventListener("toggle", fillTable);
  const resized = new ResizeObserver(() => {
    if (view && root.clientWidth && Math.floor(root.clientWidth) !== view.at.width) draw();
  });
  resized.observe(root);

  function svg() {
    const pen = svgPen();
    const at = layout(Math.max(root.clientWidth, 360));
    pen.rect(0, 0, at.width, at.height + 24, settings.colours.paper);
    pen.text(GAP, 14, settings.title, settings.colours.ink);
    const title = pen.parts.splice(0);
    paint(pen, at);
    const size = `width="${at.width}" height="${at.height + 24}" viewBox="0 0 ${at.width} ${at.height + 24}"`;
    const body = `${title.join("")}<g transform="translate(0 24)">${pen.parts.join("")}</g>`;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="${escaped(FONT)}" font-size="11">${body}</svg>`;
  }

  function png() {
    const at = layout(Math.max(root.clientWidth, 360));
    const picture = element("canvas", { width: String(2 * at.width), height: String(2 * (at.height + 24)) });
    const context = picture.getContext("2d");
    context.scale(2, 2);
    const pen = canvasPen(context);
    pen.rect(0, 0, at.width, at.height + 24, settings.colours.paper);
    pen.text(GAP, 14, settings.title, settings.colours.ink);
    context.translate(0, 24);
    paint(pen, at);
    return new Promise((done) => picture.toBlob(done, "image/png"));
  }

  /** The numbers as a blob of CSV, a line for each cell. */
  function csv() {
    const rows = view.rows.flatMap((row, down) => view.columns.map((column, across) => {
      const value = view.values[down * view.columns.length + across];
      return [row, column, Number.isNaN(value) ? null : value];
    }));
    return csvBlob([settings.rowLabel, settings.columnLabel, settings.valueLabel || "value"], rows);
  }

  function dispose() {
    resized.disconnect();
    root.remove();
  }

  set(options);
  return {
    set, select, svg, png, csv, canvas, dispose,
    get selected() { return selected; },
    get box() { return view.at; },
  };
}
