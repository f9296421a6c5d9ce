// Panels of the atlas for one model or audit: a chosen head, a chosen token, and the next tokens before and after noise.
import { element } from "./dom.js";
import { createAttentionMap, tokenName } from "./attention_map.js";
import { shortNumber } from "./heatmap.js";
import { createSphere } from "./sphere.js";
import { csvBlob } from "./save.js";

const ROWS = [
  ["nearest_text", "nearest token", tokenName], ["nearest_cosine", "cosine", shortNumber], ["angle", "rotation °", shortNumber],
  ["radius", "norm", shortNumber], ["predicted_text", "logit lens", tokenName], ["predicted_probability", "P", shortNumber],
  ["rank", "rank of target", shortNumber], ["probability", "P of target", shortNumber],
];
const TEXTS = new Set(["nearest_text", "predicted_text"]);

function tableOf(caption, columns, rows) {
  const head = columns.map((name) => element("th", { scope: "col" }, name));
  const cell = (value, at) => {
    if (!at) return element("th", { scope: "row" }, value);
    return element("td", { class: typeof value === "object" && value ? value.kind : null }, value?.text ?? value);
  };
  return element("table", {}, element("caption", {}, caption), element("thead", {}, element("tr", {}, head)),
    element("tbody", {}, rows.map((row) => element("tr", {}, row.map(cell)))));
}

const numeric = (text) => ({ kind: "number", text });

/** A head: its attention map, its measures, and what it looks for in words. `show(detail, measures, words, place)`. */
export function createHeadPanel(host, { onToken, tip }) {
  const mapPlace = element("div"), facts = element("div", { class: "scroll" }), words = element("div", { class: "scroll" });
  const why = element("p", { class: "note" }), title = element("h4");
  host.append(title, why, mapPlace, facts, words);
  const map = createAttentionMap(mapPlace, { onToken, tip });

  /** `detail` answers "head"; `measures` are the grids of all heads; `place` is {layer, head, token, colours}. */
  function show(detail, measures, place) {
    const { layer, head, token, colours } = place;
    title.textContent = `Layer ${layer}, head ${head}`;
    why.textContent = detail?.missing ?? "";
    why.hidden = !detail?.missing;
    mapPlace.hidden = !detail?.pattern;
    if (detail?.pattern) map.set({ ...detail, name: `layer ${layer}, head ${head}`, token, colours });
    const rows = measures.map((grid) => [grid.title, numeric(shortNumber(grid.values[layer]?.[head] ?? NaN)), grid.label]);
    facts.replaceChildren(...(rows.length ? [tableOf("Measures of this head", ["measure", "value", "unit"], rows)] : []));
  }

  function showWords(answer) {
    const list = (texts) => (texts ? texts.map((text) => tokenName(text, 14)).join(" · ") : "not defined for this layer");
    const rows = answer.rows.map(({ word, keys, values }) => [tokenName(word), list(keys), list(values)]);
    const caption = "What it attends to, in words";
    const note = "The word is the query, as if its embedding entered this layer: the tokens whose keys have the largest q·k, "
      + "and those that the head's output makes most probable when the word attends to itself.";
    words.replaceChildren(...(rows.length
      ? [tableOf(caption, ["word", "attends to", "its output promotes"], rows), element("p", { class: "note" }, note)]
      : [element("p", { class: "note" }, answer.missing)]));
  }

  return { show, showWords, get maps() { return mapPlace.hidden ? [] : map.maps; }, dispose: map.dispose };
}

/** A token's journey: path over the sphere, and a row for every hidden state. `show(detail, colours)` shows an answer. */
export function createTokenPanel(host, { tip }) {
  const title = element("h4"), why = element("p", { class: "note" }), caption = element("p", { class: "note" });
  const place = element("div", { class: "atlas-sphere", hidden: true }), table = element("div", { class: "scroll atlas-rows" });
  host.append(title, why, element("div", { class: "atlas-journey" }, element("div", {}, place, caption), table));
  let sphere = null, shown = null;

  function show(detail, colours) {
    const { rows = [], scene = null, text = "", note = "", missing = "" } = detail ?? {};
    shown = detail;
    const sentence = detail?.sentence ? ` in “${detail.sentence}”` : "";
    title.textContent = text ? `Journey of ${tokenName(text)}${sentence}` : "Journey of a token";
    why.textContent = [missing, note].filter(Boolean).join(" ");
    why.hidden = !why.textContent;
    place.hidden = !scene;
    caption.textContent = scene ? detail.caption : "";
    if (scene) {
      const label = `Path of ${tokenName(text)} over the sphere, through ${rows.length} states.`;
      sphere ??= createSphere(place, { label, colours, tip });
      sphere.colours = colours;
      sphere.setScene(scene);
    }
    const columns = ROWS.filter(([name]) => rows.some((row) => row[name] !== null && row[name] !== undefined));
    const cell = (value, name, form) => (TEXTS.has(name) ? form(value) : numeric(value === null ? "" : form(value)));
    const cells = rows.map((row) => [row.layer ? `after layer ${row.layer - 1}` : "embeddings",
      ...columns.map(([name, , form]) => cell(row[name], name, form))]);
    table.replaceChildren(...(rows.length
      ? [tableOf("Hidden state by hidden state", ["state", ...columns.map(([, heading]) => heading)], cells)] : []));
  }

  /** The rows as a blob of CSV. */
  function csv() {
    const names = Object.keys(shown?.rows?.[0] ?? {});
    return csvBlob(names, (shown?.rows ?? []).map((row) => names.map((name) => row[name])));
  }

  return { show, csv, get sphere() { return place.hidden ? null : sphere; }, get rows() { return shown?.rows ?? []; },
    dispose: () => sphere?.dispose() };
}

/** Next tokens as bars, before and after noise: `show(rows, noisy)` with rows `{text, before, after?}`. */
export function createNextTokens(host) {
  const body = element("tbody"), caption = element("caption"), why = element("p", { class: "note" });
  const table = element("table", { class: "atlas-next" }, caption, body);
  host.append(element("div", { class: "scroll" }, table), why);
  let shown = [];

  const bar = (value, kind) =>
    element("span", { class: `bar ${kind}`, "aria-hidden": "true", style: { width: `${(100 * value).toFixed(1)}%` } });
  const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;

  function show(rows, noisy, text) {
    shown = rows;
    caption.textContent = rows.length ? (noisy ? "Next token before (outlined) and after noise" : "Next token") : "";
    why.textContent = text;
    why.hidden = !text;
    body.replaceChildren(...rows.map(({ text: name, before, after }) => element("tr", {},
      element("th", { scope: "row" }, tokenName(name)),
      element("td", { class: "bars" }, bar(before, noisy ? "before" : "after"), noisy ? bar(after, "after") : null),
      element("td", { class: "number" }, noisy ? `${percent(before)} → ${percent(after)}` : percent(before)))));
  }

  const csv = () =>
    csvBlob(["token", "before", "after"], shown.map(({ text, before, after }) => [text, before, after ?? null]));
  return { show, csv, get rows() { return shown; } };
}
