// The ledger: every published statement with its verdict and evidence, its picture, and for refuted ones a dial.
import { button, element, labelled } from "./dom.js";
import { shortNumber } from "./heatmap.js";
import { createLines, nearestIndex } from "./lines.js";
import { formulaParts } from "./math_text.js";
import { csvBlob, pngOfSvg, svgBlob } from "./save.js";
import { formatHash, readState, stateChanges } from "./state.js";

const DEFAULTS = { paper: "", verdict: "", text: "", statement: "", position: 0 };
const FAILS = "fails as printed";
const IN_RANGE = "holds in the tested range";
const MARKS = { "holds": "✓", [IN_RANGE]: "≈", [FAILS]: "✗", "fails": "✗", "claims nothing here": "–" };
const COUNTED = { "holds": "confirmed", [IN_RANGE]: "confirmed within the tested range", [FAILS]: "wrong as printed" };
const PAPERS = {
  1: "1: Menary et al. 2024, semantic subspaces",
  2: "2: Karagodin et al. 2025, attention dynamics",
  3: "3: Molina 2023, traveling words",
};
const RELATIONS = { "=": "must equal", "≤": "must be at most", "≥": "must be at least", "±": "must have the same sign as" };
const ORIGINS = { edge: "at edges of the hypotheses", random: "random", search: "searched", simpler: "simplified" };
const COLUMNS = ["id", "paper", "title", "verdict", "cases", "checks", "margin", "deviation", "claim", "tested", "limit",
  "remark", "worst_case", "worst_case_margin", "corrected", "why", "corrected_margin"];
const NARROW_END = 1e-3;

/** A verdict as icon and words. */
function badge(verdict) {
  return element("span", { class: "verdict", "data-verdict": verdict },
    element("span", { class: "verdict-mark", "aria-hidden": "true" }, MARKS[verdict]), ` ${verdict}`);
}

/** The address of the sphere lab with the settings of a simulation. */
function labLink({ schemes, moved, ...settings }) {
  const places = moved?.map((place, index) => `${index}:${place.map((value) => Number(value.toFixed(4)))}`).join(";");
  const chosen = schemes.some(Array.isArray) ? JSON.stringify(schemes) : schemes.join(",");
  return formatHash("lab", { schemes: chosen, moved: places, ...settings });
}

/** Where the printed claim stops holding, in words; an end that is nearer than the comparison can tell is that end itself. */
function boundaryText(dial) {
  const { value } = dial.positions;
  const [start, end] = [value[0], value.at(-1)];
  const near = (a, b) => Math.abs(a - b) < NARROW_END * Math.abs(end - start);
  if (near(dial.fails_from, start)) return `holds only at ${shortNumber(start)}, fails everywhere else`;
  if (near(dial.holds_to, end)) return `holds everywhere but at ${shortNumber(end)}`;
  return `holds from ${shortNumber(start)} to ${shortNumber(dial.holds_to)}, fails from there to ${shortNumber(end)}`;
}

/** The view in `host`. */
export function createLedger(host, app) {
  const { ledger } = app.data;
  if (!ledger?.statements?.length) {
    host.append(element("h2", {}, "Ledger"), element("p", {}, "This page was made without a ledger."));
    return { show() {}, hide() {}, keys: {}, saves: [] };
  }
  const { statements, source } = ledger;
  const byId = new Map(statements.map((statement) => [statement.id, statement]));
  let state = { ...DEFAULTS };
  let shown = null;
  let charts = {};
  let moveDial = () => {};

  const choice = (all, values, words) => element("select", {}, element("option", { value: "" }, all),
    values.map((value) => element("option", { value: String(value) }, words(value))));
  const papers = [...new Set(statements.map(({ paper }) => paper))];
  const verdicts = Object.keys(COUNTED).filter((verdict) => statements.some((statement) => statement.verdict === verdict));
  const paperChoice = choice("all papers", papers, (paper) => PAPERS[paper]);
  const verdictChoice = choice("all verdicts", verdicts, (verdict) => `${MARKS[verdict]} ${verdict}`);
  const search = element("input", { type: "search", placeholder: "words or number", autocomplete: "off" });
  const count = element("p", { class: "note", role: "status" });
  const list = element("ul", {});
  const detail = element("section", { class: "ledger-detail panel", "aria-label": "Statement" });
  const scroll = element("div", { class: "ledger-list", role: "region", "aria-label": "Statements", tabindex: "0" }, list);
  host.append(
    element("h2", {}, "Ledger: published claims, checked"),
    ledger.problem ? element("p", { class: "problem", role: "alert" }, `${ledger.problem}. Below is the packaged run.`) : "",
    element("p", {}, summaryText()),
    element("div", { class: "controls" },
      labelled("Paper", paperChoice), labelled("Verdict", verdictChoice), labelled("Text", search)),
    element("div", { class: "ledger" }, element("div", {}, count, scroll), detail));

  function summaryText() {
    const number = (verdict) => statements.filter((each) => each.verdict === verdict).length;
    const counts = verdicts.map((verdict) => `${number(verdict)} ${COUNTED[verdict]}`).join(", ");
    return `${statements.length} claims of ${papers.length} papers as executable checks: ${counts}. Each was checked at the `
      + `edges of its hypotheses, at random, and by a search for a counterexample (normscope verify: ${source.summary}).`;
  }

  function matching() {
    const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    return statements.filter((each) => {
      if (state.paper && String(each.paper) !== state.paper) return false;
      if (state.verdict && each.verdict !== state.verdict) return false;
      const all = ["id", "title", "family", "claim", "tested", "corrected", "remark"].map((name) => each[name]).join(" ");
      return words.every((word) => all.toLowerCase().includes(word));
    });
  }

  function fillList() {
    const rows = matching();
    count.textContent = rows.length ? `${rows.length} of ${statements.length} statements`
      : "No statement matches. Choose all papers and verdicts, or other words.";
    list.replaceChildren(...rows.map((each) => element("li", {}, button(
      [element("span", { class: "ledger-id" }, each.id), element("span", {}, formulaParts(each.title)), badge(each.verdict)],
      () => choose(each.id, { focus: true }),
      { class: "ledger-row", "data-statement": each.id, "aria-current": each.id === state.statement ? "true" : null }))));
  }

  function update(patch, options) {
    state = { ...state, ...patch };
    app.setState("ledger", stateChanges(state, DEFAULTS), options);
  }

  function choose(id, { focus = false } = {}) {
    update({ statement: id, position: 0 }, { push: true });
    fillList();
    fillDetail();
    list.querySelector("[aria-current=true]")?.scrollIntoView({ block: "nearest" });
    if (!focus) return app.announce(`${id} ${byId.get(id).title}: ${byId.get(id).verdict}`);
    detail.querySelector("h3").focus({ preventScroll: true });
    detail.scrollIntoView({ block: "nearest", behavior: app.reducedMotion ? "auto" : "smooth" });
  }

  function step(by) {
    const rows = matching();
    if (!rows.length) return;
    const at = rows.findIndex((each) => each.id === state.statement);
    choose(rows[Math.min(Math.max(at + by, 0), rows.length - 1)].id);
  }

  function fillDetail() {
    for (const chart of Object.values(charts)) chart.dispose();
    charts = {};
    moveDial = () => {};
    shown = byId.get(state.statement) ?? null;
    if (!shown) return detail.replaceChildren(...overview());
    const title = element("h3", { tabindex: "-1" }, `${shown.id} `, formulaParts(shown.title));
    detail.replaceChildren(element("div", { class: "ledger-title" }, title, badge(shown.verdict)),
      claimBox("printed", "As printed", shown.claim), facts());
    if (shown.corrected) detail.append(correction());
    if (shown.dial) addDial(shown.dial);
    if (shown.curves) addCurves(shown.curves);
    if (shown.groups.length) detail.append(groupTable());
    const link = shown.dial?.simulations ? null : shown.simulation;
    if (link) detail.append(element("p", {}, element("a", { href: labLink(link) }, "Watch it in the sphere lab")));
  }

  /** Which claims are wrong as printed, and where each stops holding. */
  function overview() {
    const refuted = statements.filter((each) => each.verdict === FAILS);
    const open = ({ id, title }) => button(id, () => choose(id, { focus: true }), { "aria-label": `${id} ${title}` });
    const moves = ({ dial }) => (dial ? [formulaParts(dial.label), element("br"), boundaryText(dial)] : "no dial");
    const rows = refuted.map((each) => element("tr", {},
      element("th", { scope: "row" }, open(each), " ", formulaParts(each.title)), element("td", {}, moves(each))));
    const head = ["statement", "what the dial moves, and where the printed claim holds and fails"]
      .map((name) => element("th", { scope: "col" }, name));
    const table = element("table", {}, element("caption", {}, "Wrong as printed"),
      element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows));
    return [element("h3", { tabindex: "-1" }, "Choose a statement"),
      element("p", {}, "Every statement has its claim, what was compared, the evidence and the hardest case. Those that are "
        + "wrong as printed have a correction, and a dial that moves from where the claim holds to where it fails."),
      element("div", { class: "scroll" }, table)];
  }

  function claimBox(form, label, claim, ...more) {
    return element("blockquote", { class: "ledger-claim", "data-form": form }, element("p", { class: "note" }, label),
      element("p", { class: "formula" }, formulaParts(claim)), more);
  }

  function facts() {
    const origins = Object.entries(ORIGINS).filter(([name]) => shown.origins[name])
      .map(([name, words]) => `${shown.origins[name]} ${words}`);
    const pairs = [
      ["compared", shown.tested],
      ["finite test", shown.limit],
      ["evidence", `${shown.cases} cases (${origins.join(", ")}), ${shown.checks.toLocaleString("en")} numbers compared; `
        + `${shown.deviation}; slack ${shortNumber(shown.margin)} (1 is exact, 0 the limit, below 0 a counterexample)`],
      [shown.verdict === FAILS ? "counterexample" : "hardest case", shown.worst_case],
      ["remark", shown.remark],
    ];
    return element("dl", { class: "ledger-facts" }, pairs.filter(([, words]) => words)
      .map(([name, words]) => [element("dt", {}, name), element("dd", {}, formulaParts(words))]));
  }

  function correction() {
    const kept = shown.corrected_margin >= 0 ? "holds" : "fails";
    return claimBox("corrected", "Corrected", shown.corrected, element("p", {}, formulaParts(shown.why)),
      element("p", {}, badge(kept), ` on the same ${shown.cases} cases, slack ${shortNumber(shown.corrected_margin)}`));
  }

  function colours() {
    return app.theme.colours;
  }

  function addDial(dial) {
    const { value, measured, claimed, margin, corrected, corrected_margin: slack, corrected_measured: again } = dial.positions;
    const last = value.length - 1;
    const filled = (numbers) => numbers.map((number) => number ?? NaN);
    const differs = (a, b) => a !== null && Math.abs(a - b) > 1e-6 * Math.abs(b) + 1e-12;
    const apart = again.some((number, i) => differs(number, measured[i]));
    const series = [
      { name: "corrected claim", x: value, y: filled(corrected), colour: 2, dash: 0, width: 8, opacity: 0.4 },
      { name: "printed claim", x: value, y: claimed, colour: 1, dash: 1 },
      ...(apart ? [{ name: "measured for the correction", x: value, y: filled(again), colour: 3, dash: 3 }] : []),
      { name: "measured", x: value, y: measured, colour: 0, dash: 0, width: 2.4 },
    ];
    const all = series.flatMap(({ y }) => y.filter(Number.isFinite));
    const log = Math.min(...all) > 0 && Math.max(...all) > 30 * Math.min(...all);

    const slider = element("input", { type: "range", min: 0, max: last, step: 1, id: "ledger-dial" });
    const output = element("output", { for: "ledger-dial" });
    const numbers = element("tbody", {});
    const link = dial.simulations ? element("a", {}, "Watch this position in the sphere lab") : null;
    const relation = dial.relation === "≈" ? `must be within a factor of ${dial.tolerance} of` : RELATIONS[dial.relation];
    const many = dial.checks === 1 ? "" : ` Of the ${dial.checks} numbers compared the one that is furthest off at the end is `
      + "shown; the verdict is over all of them.";
    const host = element("div", {});
    const at = () => Math.min(Math.max(state.position, 0), last);
    const set = (position) => {
      update({ position: Math.min(Math.max(position, 0), last) });
      draw();
    };
    const fails = margin.findIndex((number) => number < 0);
    const box = element("div", { class: "ledger-dial", role: "group", "aria-labelledby": "ledger-dial-title" },
      element("h4", { id: "ledger-dial-title" }, "From where it holds to where it fails"),
      element("p", {}, `The printed claim ${boundaryText(dial)}.`),
      element("label", { for: "ledger-dial" }, formulaParts(dial.label), " = ", output), slider,
      element("div", { class: "ledger-ends" },
        button("where it holds", () => set(0)), button("last that holds", () => set(fails - 1)),
        button("first that fails", () => set(fails)), button("where it fails", () => set(last))),
      element("table", { class: "ledger-numbers" },
        element("caption", { class: "visually-hidden" }, "Numbers at this position of the dial"),
        element("thead", {}, element("tr", {}, ["", formulaParts(dial.quantity), "verdict"]
          .map((words) => element("th", { scope: "col" }, words)))), numbers),
      element("p", { class: "note" }, `The measured value ${relation} the claim.${many} The other settings: ${dial.case}.`),
      link && element("p", {}, link),
      element("figure", {}, host, element("figcaption", {}, formulaParts(dial.caption))));
    detail.append(box);

    const [from, to] = [dial.fails_from, value[last]];
    charts.dial = createLines(host, { series, colours: colours(), label: `${shown.id}, dial`, height: 260,
      x: { label: plain(dial.label), log: dial.log, domain: [value[0], value[last]] }, y: { label: plain(dial.quantity), log },
      bands: [{ from, to, name: "fails as printed" }], marker: value[at()], tip: app.tip,
      onPick: (x) => set(nearestIndex(value, x)) });

    function row(name, number, verdict) {
      return element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "number" }, number),
        element("td", {}, verdict && badge(verdict)));
    }

    function draw() {
      const i = at();
      const printed = margin[i] < 0 ? "fails" : "holds";
      const right = slack[i] === null ? "claims nothing here" : slack[i] < 0 ? "fails" : "holds";
      slider.value = i;
      output.textContent = shortNumber(value[i]);
      slider.setAttribute("aria-valuetext", `${shortNumber(value[i])}: measured ${shortNumber(measured[i])}, printed `
        + `${shortNumber(claimed[i])}, ${printed}`);
      numbers.replaceChildren(
        row("measured", shortNumber(measured[i])), row("printed claim", shortNumber(claimed[i]), printed),
        ...(apart && again[i] !== null ? [row("measured for the correction", shortNumber(again[i]))] : []),
        row("corrected claim", corrected[i] === null ? "–" : shortNumber(corrected[i]), right));
      if (link) link.href = labLink(dial.simulations[i]);
      charts.dial.mark(value[i]);
    }

    slider.addEventListener("input", () => set(Number(slider.value)));
    moveDial = (by) => {
      set(at() + by);
      app.announce(slider.getAttribute("aria-valuetext"));
    };
    draw();
  }

  function addCurves(curves) {
    const host = element("div", {});
    detail.append(element("figure", {}, host, element("figcaption", {}, formulaParts(curves.caption))));
    const series = curves.lines.map(({ name, x, y }) => ({ name, x, y: y.map((number) => number ?? NaN) }));
    charts.curves = createLines(host, { series, colours: colours(), label: `${shown.id} ${shown.title}`, height: 280,
      x: { label: plain(curves.x_label), log: curves.log_x }, y: { label: plain(curves.y_label), log: curves.log_y },
      tip: app.tip });
  }

  function groupTable() {
    const head = ["choice", "claim", "cases", "slack"].map((name) => element("th", { scope: "col" }, name));
    const cell = (words) => element("td", { class: "number" }, words);
    const rows = shown.groups.map(({ group, form, cases, margin }) => element("tr", {},
      element("th", { scope: "row" }, group), element("td", {}, form), cell(cases), cell(shortNumber(margin))));
    const table = element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows));
    return element("details", {}, element("summary", {}, "Slack by choice"), element("div", { class: "scroll" }, table));
  }

  /** A label without the marks of indices, for places that take text only. */
  function plain(words) {
    return words.replaceAll(/[_^]\{([^{}]*)\}/g, "$1").replaceAll(/([\p{L}])[_^]/gu, "$1");
  }

  function filter(patch) {
    update(patch);
    fillList();
  }
  paperChoice.addEventListener("change", () => filter({ paper: paperChoice.value }));
  verdictChoice.addEventListener("change", () => filter({ verdict: verdictChoice.value }));
  search.addEventListener("input", () => filter({ text: search.value }));
  app.onTheme(() => Object.values(charts).forEach((chart) => chart.set({ colours: colours() })));

  function show(values) {
    const next = readState(values, DEFAULTS);
    state = { ...next, position: Math.round(next.position) };
    [paperChoice.value, verdictChoice.value, search.value] = [state.paper, state.verdict, state.text];
    fillList();
    fillDetail();
  }

  function chartSaves(name, words) {
    const chart = charts[name];
    if (!chart) return [];
    const file = `${shown.id.replaceAll(/[^a-z0-9.]+/gi, "-")}-${name}`;
    const picture = () => chart.svg(`${shown.id} ${shown.title}`);
    return [
      { label: `${words}, PNG`, make: async () => ({ name: `${file}.png`, blob: await pngOfSvg(picture()) }) },
      { label: `${words}, SVG`, make: async () => ({ name: `${file}.svg`, blob: svgBlob(picture()) }) },
      { label: `${words}, CSV`, make: async () => ({ name: `${file}.csv`, blob: name === "dial" ? dialBlob() : chart.csv() }) },
    ];
  }

  function dialBlob() {
    const columns = Object.keys(shown.dial.positions);
    const rows = shown.dial.positions.value.map((_, at) => columns.map((name) => shown.dial.positions[name][at]));
    return csvBlob(columns, rows);
  }

  const keys = {
    j: ["next statement", () => step(1)],
    k: ["previous statement", () => step(-1)],
    "/": ["search", () => search.focus()],
    ArrowRight: ["dial: towards where it fails", () => moveDial(1)],
    ArrowLeft: ["dial: towards where it holds", () => moveDial(-1)],
  };
  return {
    show,
    hide() {},
    keys,
    get saves() {
      const rows = () => matching().map((each) => COLUMNS.map((name) => each[name]));
      const make = async () => ({ name: "ledger.csv", blob: csvBlob(COLUMNS, rows()) });
      return [{ label: "statements listed, CSV", make }, ...chartSaves("dial", "dial"), ...chartSaves("curves", "picture")];
    },
  };
}
