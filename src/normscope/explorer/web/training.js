// Training: layers × time of watched runs, as they grow, with alarms, losses and single layers or heads on one axis of time.
import { button, element, labelled } from "./dom.js";
import { createHeatmap, scaleOf, shortNumber } from "./heatmap.js";
import { createLines } from "./lines.js";
import { csvBlob, pngOfSvg, svgBlob } from "./save.js";
import { readState, stateChanges } from "./state.js";
import { WatchedRun } from "./watched_run.js";

const DEFAULTS = { runs: "", quantity: "layers-norm", row: "", head: "", curve: "loss", scale: "auto", step: -1 };
const TABLES = { layers: "Layers", heads: "Attention heads", sublayers: "Sublayers", norms: "Gains of norms",
  scales: "Learned scales" };
const LISTED = 50, ROW = 22;
const ALARM = ["step", "severity", "rule", "layer", "head", "number", "text"];
const MARKS = { warning: "▲", notice: "●" };
const HELP = ["A watched training shows every layer over time, while it runs:", "normscope train --watch 100 --out runs/mine",
  "normscope explore runs/mine"];

const stepText = step => step.toLocaleString("en-US");
const severityOf = alarm => (alarm.severity === "notice" ? "notice" : "warning");
const finite = value => Number.isFinite(value);
const layerName = row => row.replace(/ \(end\)$/, "");

/** The view in `host`. */
export function createTraining(host, app) {
  const runs = new Map(), panels = new Map();
  let values = { ...DEFAULTS }, visible = false, hovered = null, stopStream = null, overview = null;

  const runList = element("fieldset", { class: "training-runs" });
  const problems = element("div");
  const quantity = chooser("quantity", "Quantity", value => change({ quantity: value, head: "" }));
  const row = chooser("row", "Layer", value => change({ row: value }));
  const head = chooser("head", "Head", value => change({ head: value }));
  const curve = chooser("curve", "Curve", value => change({ curve: value }));
  const scale = chooser("scale", "Colours", value => change({ scale: value }));
  const controls = element("div", { class: "controls" }, [quantity, row, head, curve, scale].map(each => each.label));
  const grid = element("div", { class: "training-panels" });
  const together = element("div", { class: "training-panels" });
  const caption = element("p", { class: "note" });
  const commands = HELP.slice(1).map(line => element("pre", {}, line));
  const help = element("div", { class: "note" }, element("p", {}, HELP[0]), commands);
  host.append(element("h2", {}, "Training"), runList, problems, help, controls, caption, grid, together);

  function chooser(name, text, choose) {
    const select = element("select", { id: `training-${name}`, on: { change: () => choose(select.value) } });
    const label = labelled(text, select);
    const fill = (groups, value) => {
      const wanted = JSON.stringify(groups);
      if (select.dataset.options !== wanted) {
        select.dataset.options = wanted;
        select.replaceChildren(...groups.map(([title, options]) => {
          const made = options.map(([key, words]) => element("option", { value: key }, words));
          return title ? element("optgroup", { label: title }, made) : made;
        }).flat());
      }
      select.value = value;
      label.hidden = !groups.some(([, options]) => options.length);
    };
    return { label, fill };
  }

  /** Take what differs into the address, and draw. */
  function change(patch, { push = true } = {}) {
    values = { ...values, ...patch };
    app.setState("training", stateChanges(patch, DEFAULTS), { push });
    draw();
    if (values.head !== "") for (const run of measured()) loadChosen(run);
  }

  const shownRuns = () => {
    const wanted = values.runs ? values.runs.split(",").filter(id => runs.has(id)) : [...runs.keys()].slice(0, 2);
    return wanted.map(id => runs.get(id));
  };
  const measured = () => shownRuns().filter(run => run.steps.length);
  const mapOf = run => run.maps.get(values.quantity);
  const quantityMap = () => measured().map(mapOf).find(Boolean) ?? null;

  /** The quantity in the address, or, where no run has it, the first of all. */
  function settle() {
    const first = measured().find(run => run.maps.size);
    if (first && !quantityMap()) values.quantity = [...first.maps.keys()][0];
  }

  async function refresh(run) {
    if (!app.server) return;
    if (run.loading) {
      run.again = true;
      return;
    }
    run.loading = true;
    try {
      do {
        run.again = false;
        run.add(await app.request(`/api/runs/${run.id}/watch?${run.query()}`));
        await loadHeads(run);
        run.problem = null;
      } while (run.again);
    } catch (error) {
      if (!run.steps.length || !/does not answer/.test(error.message)) run.problem = error.message;
    } finally {
      run.loading = false;
    }
    if (visible) draw();
  }

  const layerOf = run => {
    const map = mapOf(run);
    return map?.table === "heads" ? map.layers[run.rowOf(map.name, values.row)] : null;
  };

  /** Ask for the heads of the chosen layer, unless they are there; whether there is something new. */
  async function loadHeads(run) {
    const layer = layerOf(run), known = run.heads.get(layer);
    if (!app.server || layer === null || values.head === "") return false;
    if (known?.epoch === run.epoch && known.probes === run.probes) return false;
    run.addHeads(layer, await app.request(`/api/runs/${run.id}/heads?layer=${layer}`));
    return true;
  }

  function setRuns(list) {
    for (const about of list.filter(each => each.kind === "watch")) {
      if (!runs.has(about.id)) runs.set(about.id, new WatchedRun(about));
    }
    const damaged = list.filter(each => each.problem && each.kind !== "watch");
    problems.replaceChildren(...damaged.map(each => element("p", { class: "problem" }, `${each.name}: ${each.problem}`)));
    help.hidden = runs.size > 0;
  }

  async function listRuns() {
    try {
      setRuns(await app.request("/api/runs"));
      draw();
    } catch { /* the page reports that there is no connection */ }
  }

  function onEvent(message) {
    if (message.kind === "runs") listRuns();
    if (message.kind === "ready") for (const run of shownRuns()) refresh(run);
    const run = runs.get(message.run);
    if (message.kind === "grown" && run && visible && shownRuns().includes(run)) refresh(run);
  }

  function drawControls() {
    const shown = shownRuns();
    runList.hidden = runs.size < 2;
    const boxes = [...runs.values()].map(run => {
      const state = { type: "checkbox", checked: shown.includes(run), value: run.id };
      const box = element("input", { ...state, on: { change: chooseRuns } });
      return element("label", { class: "control line" }, box, element("span", {}, run.name));
    });
    const focused = document.activeElement?.value;
    const held = runList.contains(document.activeElement);
    runList.replaceChildren(element("legend", {}, "Runs"), ...boxes);
    if (held) runList.querySelector(`input[value="${focused}"]`)?.focus();
    const maps = new Map(measured().flatMap(run => [...run.maps.values()].map(map => [map.name, map])));
    const groups = Object.entries(TABLES).map(([table, title]) =>
      [title, [...maps.values()].filter(map => map.table === table).map(map => [map.name, map.title])]);
    quantity.fill(groups.filter(([, options]) => options.length), values.quantity);
    const map = quantityMap(), run = measured().find(each => mapOf(each));
    const rows = new Map();  // a layer may be the end of one run and not of another
    for (const text of measured().flatMap(each => mapOf(each)?.rows ?? [])) {
      const layer = layerName(text);
      rows.set(layer, (rows.get(layer) ?? text) === text ? text : layer);
    }
    row.fill([["", [...rows]]], map ? layerName(map.rows[run.rowOf(map.name, values.row)]) : "");
    const heads = map?.table === "heads" ? run.heads.get(layerOf(run))?.heads ?? [] : [];
    const word = map?.largest ? "largest of the layer" : "mean of the layer";
    const known = values.head && values.head !== "all" ? [...new Set([...heads, Number(values.head)])] : heads;
    const named = known.map(each => [String(each), `head ${each}`]);
    head.fill([["", map?.table === "heads" ? [["", word], ["all", "every head"], ...named] : []]], values.head);
    const curves = new Map(measured().flatMap(each => [...each.curves.values()].map(one => [one.name, one.title])));
    curve.fill([["", [...curves]]], curveName());
    scale.fill([["", map ? [["auto", "automatic"], ["linear", "linear"], ["log", "logarithmic"]] : []]], values.scale);
    caption.textContent = map ? `${map.title}: ${map.label}. ${map.caption}` : "";
  }

  function chooseRuns() {
    const ids = [...runList.querySelectorAll("input")].filter(box => box.checked).map(box => box.value);
    change({ runs: ids.join(",") || "none" });
    for (const run of shownRuns()) if (!run.steps.length) refresh(run);
  }

  const curveName = () => {
    const names = measured().flatMap(run => [...run.curves.keys()]);
    return names.includes(values.curve) ? values.curve : names[0] ?? "";
  };

  /** The colours' scale and range, the same for all runs that are shown. */
  function colourScale() {
    const maps = measured().map(mapOf).filter(Boolean), limits = maps[0]?.limits;
    const { low, high } = scaleOf(maps.flatMap(map => Array.from(map.values).filter(finite)));
    const spans = low > 0 && high > 10 * low && !limits;
    const kind = values.scale === "auto" ? (spans ? "log" : "linear") : values.scale;
    return { scale: kind, range: limits && values.scale !== "log" ? limits : [low, high] };
  }

  function draw() {
    settle();
    drawControls();
    const shown = shownRuns(), colours = colourScale();
    for (const [id, panel] of panels) {
      if (shown.some(run => run.id === id)) continue;
      panel.dispose();
      panels.delete(id);
    }
    for (const run of shown) {
      if (!panels.has(run.id)) panels.set(run.id, createPanel(run));
      panels.get(run.id).draw(colours);
    }
    grid.replaceChildren(...shown.map(run => panels.get(run.id).root));
    for (const panel of panels.values()) panel.place();
    drawTogether();
    point(hovered);
  }

  /** The lines of a run's chosen layer or heads: `[{name, x: columns, y}]`, and the steps of the columns. */
  function chosenLines(run) {
    const map = mapOf(run), at = run.rowOf(map.name, values.row), heads = run.heads.get(layerOf(run));
    if (map.table === "heads" && values.head !== "" && heads) {
      const numbers = heads.values[map.column], count = heads.heads.length;
      return heads.heads.flatMap((each, place) => (values.head !== "all" && String(each) !== values.head ? [] : [{
        name: `layer ${layerOf(run)}, head ${each}`,
        steps: heads.steps,
        y: Float64Array.from(heads.steps, (_, column) => numbers[column * count + place]),
      }]));
    }
    return [{ name: rowText(map, at), steps: run.steps, y: run.row(map.name, at) }];
  }

  const rowText = (map, at) => (["norms", "scales"].includes(map.table) ? map.rows[at] : `layer ${map.rows[at]}`);
  const isLog = lists => {
    const [low, high] = lists.flatMap(list => Array.from(list)).filter(finite)
      .reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    return low > 0 && high > 10 * low;
  };

  /** Two runs or more: their curves and chosen layers over steps, in one picture each. */
  function drawTogether() {
    const shown = measured(), name = curveName(), several = shown.length > 1;
    together.hidden = !several;
    if (!several) return;
    const { colours } = app.theme, x = { label: "step", format: stepText };
    const losses = shown.filter(run => run.curves.has(name))
      .map(run => ({ name: run.name, x: run.steps, y: run.curves.get(name).mean }));
    const chosen = shown.filter(mapOf).flatMap(run =>
      chosenLines(run).map(line => ({ name: `${run.name}: ${line.name}`, x: line.steps, y: line.y })));
    overview ??= ["Curves of all runs", "The chosen layer in all runs"].map(title => {
      const box = element("div");
      together.append(element("div", { class: "panel" }, element("h3", {}, title), box));
      const onPick = step => change({ step: Math.round(step) }, { push: false });
      return createLines(box, { colours, tip: app.tip, onPick, height: 200 });
    });
    const pictures = [[name, losses], [quantityMap()?.label ?? "", chosen]];
    pictures.forEach(([label, series], at) => {
      const y = { label, log: isLog(series.map(line => line.y)) };
      overview[at].set({ series, x, y, colours, label: `${label} of all runs` });
    });
  }

  /** Move the cursor of all panels to a step that is hovered over, or back to the chosen one. */
  function point(step) {
    hovered = step;
    const at = step ?? (values.step >= 0 ? values.step : null);
    for (const panel of panels.values()) panel.point(at);
    for (const chart of overview ?? []) chart.mark(at);
  }

  function createPanel(run) {
    const title = element("h3", {}, run.name), about = element("p", { class: "note" });
    const problem = element("p", { class: "problem", role: "alert" });
    const mapHost = element("div", { class: "training-chart" });
    const cursor = element("div", { class: "training-cursor", hidden: true });
    const frame = element("div", { class: "training-row", hidden: true });
    const alarmLine = element("div", { class: "training-alarms", role: "group", "aria-label": `Alarms of ${run.name}` });
    const alarmCursor = element("div", { class: "training-cursor", hidden: true });
    const curveTitle = element("h4"), curveHost = element("div", { class: "training-chart" });
    const lineTitle = element("h4"), lineHost = element("div", { class: "training-chart" });
    const readout = element("p", { class: "training-readout" });
    const list = element("ol", { class: "training-list" }), summary = element("summary");
    const charts = element("div", {}, mapHost, alarmLine, readout, curveTitle, curveHost, lineTitle, lineHost);
    const root = element("section", { class: "panel", "aria-label": run.name, dataset: { run: run.id } },
      title, about, problem, charts, element("details", {}, summary, list));
    let heat = null, curves = null, lines = null;

    const columnAt = event => {
      const { left, across } = heat.box, x = event.clientX - mapHost.getBoundingClientRect().left - left;
      const column = Math.floor(x / across);
      return column >= 0 && column < run.steps.length ? column : null;
    };
    charts.addEventListener("pointermove", event => {
      if (!heat || event.target.closest("details")) return;
      const column = columnAt(event);
      point(column === null ? null : run.steps[column]);
    });
    charts.addEventListener("pointerleave", () => point(null));
    alarmLine.addEventListener("keydown", event => {
      const marks = [...alarmLine.querySelectorAll("button")], at = marks.indexOf(event.target);
      const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: marks.length - 1 }[event.key];
      if (at < 0 || next === undefined) return;
      event.preventDefault();
      marks.at(Math.min(Math.max(next, 0), marks.length - 1)).focus();
    });
    const sized = new ResizeObserver(() => requestAnimationFrame(() => place()));
    sized.observe(charts);

    const pick = column => {
      const at = Math.min(Math.max(Math.round(column), 0), run.steps.length - 1);
      change({ step: run.steps[at] }, { push: false });
    };
    const axis = () => ({ label: "step", domain: [-0.5, run.steps.length - 0.5],
      format: column => (Number.isInteger(column) && run.steps[column] !== undefined ? stepText(run.steps[column]) : "") });

    function drawMap(colourScale) {
      const map = mapOf(run), { colours } = app.theme;
      mapHost.hidden = !map;
      if (!map) return;
      const settings = { rows: map.rows, columns: run.steps.map(stepText), values: run.grid(map.name), colours, ...colourScale,
        title: `${run.name}: ${map.title}`, rowLabel: ["norms", "scales"].includes(map.table) ? "name" : "layer",
        columnLabel: "step", valueLabel: map.label, most: ROW, fill: true };
      const choose = (at, column, how) => change({ row: mapOf(run).rows[at], step: run.steps[column] }, how);
      if (heat) heat.set(settings);
      else {
        const onMove = (at, column) => choose(at, column, { push: false });
        const onHover = (at, column, event) => app.tip(event, at === null ? null : cellRows(at, column));
        heat = createHeatmap(mapHost, { ...settings, onSelect: (at, column) => choose(at, column), onMove, onHover });
        mapHost.append(frame, cursor);
      }
      const cell = values.row && values.step >= 0 ? [run.rowOf(map.name, values.row), run.columnOf(values.step)] : null;
      if (String(cell) !== String(heat.selected)) heat.select(...(cell ?? [null]));  // from where arrow keys move on
    }

    const cellRows = (at, column) => {
      const map = mapOf(run), value = map.values[column * map.rows.length + at];
      return { step: stepText(run.steps[column]), [rowText(map, at)]: shortNumber(value) };
    };

    function drawLines() {
      const { colours } = app.theme, name = curveName(), found = run.curves.get(name), x = axis(), map = mapOf(run);
      const columns = run.steps.map((_, column) => column);
      curveTitle.textContent = found ? found.title : "";
      curveHost.hidden = !found;
      if (found) {
        const band = (run.block > 1 ? ["least", "largest"] : [])
          .map(each => ({ name: `${each} of a column`, x: columns, y: found[each], width: 1 }));
        const series = [{ name: run.block > 1 ? "mean of a column" : found.label, x: columns, y: found.mean }, ...band];
        const settings = { series, x, y: { label: found.label, log: isLog(series.map(line => line.y)) }, colours, height: 170,
          legend: series.length > 1, label: `${run.name}: ${found.title}` };
        if (curves) curves.set(settings);
        else curves = createLines(curveHost, { ...settings, tip: app.tip, onPick: pick });
      }
      const series = (map ? chosenLines(run) : [])
        .map(({ name: text, steps, y }) => ({ name: text, x: steps.map(step => run.columnOf(step)), y }));
      const what = series.length === 1 ? series[0].name : `layer ${layerOf(run)}, every head`;
      lineTitle.textContent = map ? `${map.title}, ${what}` : "";
      lineHost.hidden = !map;
      if (map) {
        const settings = { series, x, y: { label: map.label, log: isLog(series.map(line => line.y)) }, colours, height: 190,
          legend: series.length > 1, label: `${run.name}: ${map.title}` };
        if (lines) lines.set(settings);
        else lines = createLines(lineHost, { ...settings, tip: app.tip, onPick: pick });
      }
    }

    /** One axis of time for all charts. */
    function align() {
      const shown = [heat, curves, lines].filter((chart, at) => chart && ![mapHost, curveHost, lineHost][at].hidden);
      const left = Math.max(...shown.map(chart => chart.box.left));
      for (const chart of shown) if (chart.box.left !== left) chart.set({ left });
    }

    function drawAlarms() {
      const groups = grouped(run.alarms, alarm => run.columnOf(alarm.step));
      const marks = [...groups].map(([column, alarms], at) => {
        const kind = alarms.some(alarm => severityOf(alarm) === "warning") ? "warning" : "notice";
        const words = alarms.map(alarm => `step ${stepText(alarm.step)}, ${alarm.rule}: ${alarm.text}`);
        const lines = words.map((text, k) => [severityOf(alarms[k]), text]);
        const show = event => app.tip(event.clientX ? event : centre(event.target), lines);
        const mark = button(MARKS[kind], () => {
          change({ step: alarms[0].step });
          app.announce(words.join(" "));
        }, { class: kind, "aria-label": words.join(" "), tabindex: at ? -1 : 0, dataset: { column } });
        for (const name of ["pointerenter", "focus"]) mark.addEventListener(name, show);
        for (const name of ["pointerleave", "blur"]) mark.addEventListener(name, event => app.tip(event, null));
        return mark;
      });
      const held = alarmLine.contains(document.activeElement) ? document.activeElement.dataset.column : null;
      alarmLine.replaceChildren(element("span", {}, run.alarms.length ? "alarms" : "no alarm"), ...marks, alarmCursor);
      if (held) alarmLine.querySelector(`button[data-column="${held}"]`)?.focus();
      const all = run.alarmsBefore + run.alarms.length, shown = run.alarms.slice(-LISTED).reverse();
      const some = all > shown.length ? `, the last ${shown.length}` : "";
      summary.textContent = `${all} alarm${all === 1 ? "" : "s"}${some}`;
      list.replaceChildren(...shown.map(alarm => element("li", { class: severityOf(alarm) },
        button(`step ${stepText(alarm.step)}`, () => change({ step: alarm.step })),
        `${severityOf(alarm)}, ${alarm.rule}: ${alarm.text}`)));
      list.parentElement.hidden = !all;
    }

    const centre = node => {
      const box = node.getBoundingClientRect();
      return { clientX: box.left + box.width / 2, clientY: box.bottom };
    };

    function draw(colourScale) {
      problem.textContent = run.problem ?? "";
      problem.hidden = !run.problem;
      charts.hidden = !run.steps.length;
      about.textContent = aboutText();
      if (!root.isConnected) grid.append(root);  // charts measure the room that they have
      if (!run.steps.length) return;
      drawMap(colourScale);
      drawLines();
      drawAlarms();
      align();
    }

    function aboutText() {
      if (!run.steps.length) return run.problem ? "" : "No probe yet: the first numbers appear with the first probe.";
      const map = mapOf(run), kind = map?.largest ? "largest" : "mean";
      const columns = run.block > 1 ? ` A column is the ${kind} of ${run.block} probes.` : "";
      const heads = run.headBlock > run.block ? ` A point of a head is of ${run.headBlock} probes.` : "";
      const none = map ? "" : " This run did not measure the chosen quantity.";
      const words = `${run.state}, step ${stepText(run.steps.at(-1))}, ${stepText(run.probes)} probes.`;
      return `${run.summary ? `${run.summary}; ` : ""}${words}${columns}${heads}${none}`;
    }

    /** Put alarms, the chosen row and the cursor where the charts' columns and rows are. */
    function place() {
      if (!heat || !run.steps.length || mapHost.hidden) {
        alarmLine.hidden = !heat || mapHost.hidden;
        return;
      }
      alarmLine.hidden = false;
      const { left, top, across, down } = heat.box, map = mapOf(run), at = run.rowOf(map.name, values.row);
      for (const mark of alarmLine.querySelectorAll("button")) {
        mark.style.left = `${left + (Number(mark.dataset.column) + 0.5) * across}px`;
      }
      frame.hidden = !values.row;
      const size = { width: `${across * run.steps.length + 2}px`, height: `${down + 2}px` };
      Object.assign(frame.style, { left: `${left - 1}px`, top: `${top + at * down - 1}px`, ...size });
      pointTo(shownStep);
    }

    let shownStep = null;
    function pointTo(step) {
      shownStep = step;
      const column = step === null || !run.steps.length ? null : run.columnOf(step);
      for (const line of [cursor, alarmCursor]) line.hidden = column === null || !heat;
      for (const chart of [curves, lines]) chart?.mark(column);
      readout.textContent = column === null ? "" : readoutText(column);
      if (column === null || !heat) return;
      const { left, top, across, bottom } = heat.box, x = left + (column + 0.5) * across - 1;
      Object.assign(cursor.style, { left: `${x}px`, top: `${top}px`, height: `${bottom - top}px` });
      Object.assign(alarmCursor.style, { left: `${x}px`, top: "0", height: "100%" });
    }

    function readoutText(column) {
      const found = run.curves.get(curveName()), map = mapOf(run), at = map ? run.rowOf(map.name, values.row) : 0;
      const parts = [`step ${stepText(run.steps[column])}`];
      if (found) parts.push(`${found.label} ${shortNumber(found.mean[column])}`);
      if (map) parts.push(`${rowText(map, at)}: ${map.label} ${shortNumber(map.values[column * map.rows.length + at])}`);
      return parts.join(" · ");
    }

    function dispose() {
      sized.disconnect();
      for (const chart of [heat, curves, lines]) chart?.dispose();
      root.remove();
    }

    return { root, draw, place, point: pointTo, readoutText, dispose, run, get charts() { return { heat, curves, lines }; } };
  }

  /** Move the chosen step by columns of the first run. */
  function moveStep(by) {
    const run = measured()[0];
    if (!run) return;
    const last = run.steps.length - 1, from = values.step < 0 ? (by > 0 ? -1 : last + 1) : run.columnOf(values.step);
    const at = Math.min(Math.max(from + by, 0), last);
    change({ step: run.steps[at] }, { push: false });
    app.announce(panels.get(run.id).readoutText(at));
  }

  function moveRow(by) {
    const run = measured().find(mapOf);
    if (!run) return;
    const { name, rows } = mapOf(run), at = values.row ? run.rowOf(name, values.row) + by : by > 0 ? 0 : rows.length - 1;
    change({ row: rows[Math.min(Math.max(at, 0), rows.length - 1)] }, { push: false });
    app.announce(panels.get(run.id).readoutText(run.columnOf(values.step < 0 ? Infinity : values.step)));
  }

  function moveAlarm(by) {
    const steps = [...new Set(measured().flatMap(run => run.alarms.map(alarm => alarm.step)))].sort((a, b) => a - b);
    const end = values.step < 0 ? Infinity : values.step;
    const next = by > 0 ? steps.find(step => step > values.step) : steps.filter(step => step < end).at(-1);
    if (next === undefined) {
      app.announce(steps.length ? "No further alarm." : "No alarm.");
      return;
    }
    change({ step: next }, { push: false });
    const texts = measured().flatMap(run => run.alarms.filter(alarm => alarm.step === next)
      .map(alarm => `${run.name}, step ${stepText(next)}: ${alarm.text}`));
    app.announce(texts.join(" "));
  }

  function moveQuantity(by) {
    const names = [...(measured()[0]?.maps.keys() ?? [])], at = names.indexOf(values.quantity);
    if (!names.length) return;
    change({ quantity: names[(at + by + names.length) % names.length], head: "" });
    app.announce(quantityMap().title);
  }

  async function loadChosen(run) {
    try {
      if (await loadHeads(run) && visible) draw();
    } catch (error) {
      run.problem = error.message;
      if (visible) draw();
    }
  }

  app.onTheme(() => visible && draw());

  return {
    async show(state) {
      visible = true;
      values = readState(state, DEFAULTS);
      if (!runs.size) setRuns(app.data.runs ?? []);
      stopStream ??= app.stream("/api/events", onEvent);
      draw();
      await Promise.all(shownRuns().map(refresh));
    },
    hide() {
      visible = false;
      hovered = null;
    },
    keys: {
      ArrowLeft: ["cursor one column back", () => moveStep(-1)],
      ArrowRight: ["cursor one column on", () => moveStep(1)],
      ArrowUp: ["layer above", () => moveRow(-1)],
      ArrowDown: ["layer below", () => moveRow(1)],
      a: ["next alarm", () => moveAlarm(1)],
      b: ["alarm before", () => moveAlarm(-1)],
      q: ["next quantity", () => moveQuantity(1)],
      l: ["logarithmic or linear colours", () => change({ scale: colourScale().scale === "log" ? "linear" : "log" })],
      Escape: ["no cursor", () => change({ step: -1, row: "" })],
    },
    get saves() {
      const shown = [...panels.values()].filter(panel => panel.charts.heat && mapOf(panel.run));
      return shown.flatMap(panel => savesOf(panel, mapOf(panel.run)));
    },
  };

  function savesOf({ run, charts }, map) {
    const file = run.name.replace(/[^\w.-]+/g, "-"), name = `${file}-${map.name}`, words = `${run.name}: ${map.title}`;
    const number = value => (finite(value) ? value : null), curves = [...run.curves.values()];
    const cells = () => map.rows.flatMap((text, at) =>
      run.steps.map((step, column) => [step, text, number(map.values[column * map.rows.length + at])]));
    const points = () => chosenLines(run).flatMap(line =>
      Array.from(line.y, (value, at) => [line.name, line.steps[at], number(value)]));
    const losses = () => run.steps.map((step, at) => [step, ...curves.map(each => number(each.mean[at]))]);
    const alarms = () => run.alarms.map(alarm => ALARM.map(column => alarm[column]));
    const save = (label, end, make) => ({ label, make: async () => ({ name: end, blob: await make() }) });
    return [
      save(`${words}, map as PNG`, `${name}.png`, () => charts.heat.png()),
      save(`${words}, map as SVG`, `${name}.svg`, () => svgBlob(charts.heat.svg())),
      save(`${words}, map as CSV`, `${name}.csv`, () => csvBlob(["step", "row", map.column], cells())),
      save(`${words}, chosen layer as PNG`, `${name}-line.png`, () => pngOfSvg(charts.lines.svg())),
      save(`${words}, chosen layer as CSV`, `${name}-line.csv`, () => csvBlob(["line", "step", map.column], points())),
      save(`${run.name}: curves as CSV`, `${file}-curves.csv`, () => csvBlob(["step", ...run.curves.keys()], losses())),
      save(`${run.name}: alarms as CSV`, `${file}-alarms.csv`, () => csvBlob(ALARM, alarms())),
    ];
  }
}

function grouped(list, key) {
  const groups = new Map();
  for (const each of list) groups.set(key(each), [...(groups.get(key(each)) ?? []), each]);
  return groups;
}
