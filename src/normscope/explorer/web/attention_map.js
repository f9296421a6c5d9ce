// The attention map of a head: queries × keys as colours, under noise beside it, and the queries as a table.
import { element } from "./dom.js";
import { createHeatmap, shortNumber } from "./heatmap.js";

const BLANKS = { " ": "␣", "\n": "⏎", "\r": "⏎", "\t": "⇥" };

/** A token for people: blanks are visible, what cannot be shown is □. */
export function tokenName(text, most = 24) {
  if (text === null || text === undefined) return "–";
  const shown = Array.from(String(text), (letter) => BLANKS[letter] ?? (/\p{C}/u.test(letter) ? "□" : letter));
  return shown.length > most ? `${shown.slice(0, most - 1).join("")}…` : shown.join("");
}

const topKey = (row) => row.reduce((best, weight, key) => (weight > row[best] ? key : best), 0);

/** The queries (rows) whose top key differs between two maps of weights (queries × keys). */
export function changedQueries(before, after) {
  return before.flatMap((row, query) => (topKey(row) === topKey(after[query]) ? [] : [query]));
}

/**
 * Attention maps in `host`. `set({tokens, pattern, noisy, queries, norms, name, token, colours})`: weights (queries × keys),
 * those under noise or null, for each query `{key, text, weight, margin}`, token norms over their median, and the number of the
 * chosen token. `onToken(number)` is called where a query is chosen. Returns `{set, maps, dispose}`.
 */
export function createAttentionMap(host, { onToken, tip }) {
  const places = [element("div", { class: "atlas-map" }), element("div", { class: "atlas-map" })];
  const words = element("p", { class: "note" });
  const table = element("tbody");
  const head = ["query", "top key", "weight", "margin", "norm / median"].map((name) => element("th", { scope: "col" }, name));
  const details = element("details", {}, element("summary", {}, "Queries of this head, with their margins"),
    element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, head)), table)));
  const root = element("div", {}, element("div", { class: "atlas-pair" }, places), words, details);
  host.append(root);
  let maps = [null, null];

  function show(at, title, names, values, marks, colours) {
    const hover = (row, column, event) => tip(event, row === null ? null
      : { query: names[row], key: names[column], weight: shortNumber(values[row][column]) });
    const settings = { rows: names, columns: names, values, title, rowLabel: "query", columnLabel: "key", valueLabel: "weight",
      range: [0, 1], most: 26, marks, colours, onSelect: (row) => onToken(row), onHover: hover };
    if (maps[at]) maps[at].set(settings);
    else maps[at] = createHeatmap(places[at], settings);
  }

  function set({ tokens, pattern, noisy, queries, norms, name, token, colours }) {
    const names = tokens.map((text, number) => `${number} ${tokenName(text, 11)}`);
    const changed = noisy ? changedQueries(pattern, noisy) : [];
    show(0, `Attention of ${name}`, names, pattern, [], colours);
    places[1].hidden = !noisy;
    if (noisy) {
      show(1, `Attention of ${name} under noise`, names, noisy, changed.map((query) => [query, topKey(noisy[query])]), colours);
      words.textContent = changed.length
        ? `Under noise ${changed.length} of ${names.length} queries attend most to another key (framed).`
        : "Under noise every query still attends most to the same key.";
    }
    words.hidden = !noisy;
    for (const map of maps) map?.select(null);
    if (maps[0] && token !== null && token < names.length) maps[0].select(token, topKey(pattern[token]));
    table.replaceChildren(...queries.map((query, number) => element("tr", {},
      element("th", { scope: "row" }, names[number]), element("td", {}, names[query.key] ?? query.text),
      ...[query.weight, query.margin, norms[number]].map((value) => element("td", { class: "number" }, shortNumber(value))))));
    details.hidden = !queries.length;
  }

  function dispose() {
    for (const map of maps) map?.dispose();
    maps = [null, null];
    root.remove();
  }

  return { set, dispose, get maps() { return maps.filter((map, at) => map && !places[at].hidden); } };
}
