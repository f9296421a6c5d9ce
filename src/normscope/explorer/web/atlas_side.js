// One side of the atlas: a model or an audit, its heads as a map, and the panels of what is chosen.
import { element } from "./dom.js";
import { createHeatmap, shortNumber } from "./heatmap.js";
import { createHeadPanel, createNextTokens, createTokenPanel } from "./atlas_panels.js";

const NOISY = [
  { name: "noise-switched", key: "switched", title: "Under noise: circuits that collapse", label: "share of near-one-hot rows",
    text: "The share of the head's near-one-hot rows whose top key changes under the noise of the dial." },
  { name: "noise-moved", key: "moved", title: "Under noise: top key changes", label: "share of queries",
    text: "The share of all queries whose top key changes under the noise of the dial." },
];
const CELLS = ["about", "map", "head", "token", "next"];

/** Grids of all heads by a measure's name, those of noise included. */
export function measuresOf(data, noise) {
  const look = { scale: "linear", limits: [0, 1] };
  const found = noise ? NOISY.map(({ key, ...words }) => ({ ...words, ...look, values: noise[key] })) : [];
  return [...(data?.heads ?? []), ...found.filter((grid) => grid.values.some((row) => row.length))];
}

/**
 * A side with a source (`createSource`). `cells` are the elements of its parts; `read` and `ask…` get what the state names, and
 * `show…` show it. `on`: `{head(layer, head), token(number), failed(text)}`.
 */
export function createSide(app, source, on) {
  const cells = Object.fromEntries(CELLS.map((name) => [name, element("div", { class: "atlas-cell" })]));
  const mapPlace = element("div"), mapWords = element("p", { class: "note" });
  cells.map.append(mapPlace, mapWords);
  const heads = createHeadPanel(cells.head, { onToken: on.token, tip: app.tip });
  const journey = createTokenPanel(cells.token, { tip: app.tip });
  const next = createNextTokens(cells.next);
  let data = null, noise = null, detail = null, followed = null, map = null;

  const colours = () => app.theme.colours;
  const lastLayer = () => (data?.about.layers ?? 1) - 1;
  const place = ({ layer, head }) => ({
    layer: Math.min(layer, lastLayer()),
    head: Math.min(head, Math.max(...(data?.heads ?? []).map(({ values }) => values[0]?.length ?? 1), 1) - 1),
  });
  const position = ({ token }) => {
    const count = data?.prompt.tokens.length ?? 0;
    return token < 0 ? Math.max(count + token, 0) : Math.min(token, Math.max(count - 1, 0));
  };
  const noiseOf = ({ noise: level, parts, at, draw }) =>
    (level > 0 && canBeNoisy() ? { level, parts, layer: at < 0 ? null : Math.min(at, lastLayer()), draw } : null);
  const canBeNoisy = () => source.kind === "model" && !data?.missing.noise;

  function showAbout() {
    const { description, lacking = {} } = data.about;
    const absent = Object.entries(lacking).map(([name, why]) => `${name} (${why})`);
    cells.about.replaceChildren(element("h3", {}, source.name), element("p", { class: "note" }, description ?? ""),
      ...(absent.length ? [element("p", { class: "note" }, `This model does not offer: ${absent.join("; ")}.`)] : []),
      ...(data.prompt.note ? [element("p", { class: "note" }, data.prompt.note)] : []));
  }

  /** The heads by a measure; `range` is shared with the other side. */
  function showMap(state, range) {
    const grid = measuresOf(data, noise).find((each) => each.name === state.measure);
    mapPlace.hidden = !grid;
    if (!grid) {
      const absent = data.missing.heads ?? "No heads were measured.";
      mapWords.textContent = data.heads.length ? `This ${source.kind} has not measured this.` : absent;
      return;
    }
    const marks = (noise?.switched ?? [])
      .flatMap((row, layer) => row.flatMap((value, head) => (value > 0 ? [[layer, head]] : [])));
    const lost = noise ? ` Framed: the ${marks.length} heads with a near-one-hot row that switches under the noise.` : "";
    mapWords.textContent = `${grid.text}${marks.length ? lost : ""}`;
    const hover = (row, column, event) => app.tip(event, row === null ? null
      : { layer: row, head: column, [grid.label]: shortNumber(grid.values[row][column] ?? NaN) });
    const settings = { rows: grid.values.length, columns: grid.values[0].length, values: grid.values,
      title: `${grid.title}, ${source.name}`, rowLabel: "layer", columnLabel: "head", valueLabel: grid.label,
      scale: grid.scale, range: grid.limits ?? range, marks,
      colours: colours(), most: 30, onSelect: on.head, onHover: hover };
    if (map) map.set(settings);
    else map = createHeatmap(mapPlace, settings);
    const { layer, head } = place(state);
    map.select(layer, head);
  }

  function showNext() {
    const plain = (followed?.next ?? []).map(({ text, probability }) => ({ text, before: probability }));
    const after = noise?.next;
    const far = after?.distance ?? null;
    const told = far === null ? ""
      : `Total variation distance of the next-token distribution: ${shortNumber(far)} (0 is unchanged, 1 is disjoint).`;
    const broken = after && far === null ? "Logits became non-finite (NaN/Inf) under this noise." : "";
    const unkept = source.kind === "audit" ? "An audit keeps no next tokens; open the model to see them." : "";
    const noisy = Boolean(after?.rows.length);
    next.show(noisy ? after.rows : plain, noisy, told || broken || (plain.length ? "" : data?.missing.lens ?? unkept));
  }

  /** What the noise does, in one sentence. */
  function noiseText() {
    if (!noise) return canBeNoisy() ? "" : data?.missing.noise ?? "";
    const shares = noise.moved.flat().filter((value) => value !== null);
    const moved = shares.length ? shares.reduce((sum, value) => sum + value, 0) / shares.length : 0;
    const all = `The top key changes for ${(100 * moved).toPrecision(2)} % of all queries.`;
    const theory = noise.expected === null ? "" : shortNumber(noise.expected);
    const expected = theory && ` (theory expects ${theory} with noise on the keys of each layer alone)`;
    if (!noise.rows) return `No attention row is near one-hot in this prompt, so that no circuit can collapse. ${all}`;
    return `${noise.lost} of ${noise.rows} near-one-hot rows collapse onto another key${expected}. ${all}`;
  }

  /** Ask about the prompt whose data is shown; a newer question takes the place of an older one. */
  async function ask(what, question, use, failed = () => {}) {
    try {
      const answer = await source.ask(what, { prompt: data.prompt.text, ...question });
      if (answer) use(answer);
    } catch (error) {
      failed();
      on.lost(error, what);
    }
  }

  async function read(state, what) {
    const answer = await source.ask(what, { prompt: state.prompt });
    if (answer) data = answer;
    return Boolean(answer);
  }

  async function askNoise(state) {
    const chosen = noiseOf(state), set = (answer) => { noise = answer; };
    if (chosen) await ask("noise", { token: position(state), noise: chosen }, set, () => set(null));
    else noise = null;
  }

  async function askHead(state) {
    const { layer, head } = place(state);
    if (data.missing.map && source.kind === "model") detail = { missing: data.missing.map };
    else await ask("head", { layer, head, noise: noise && noiseOf(state) }, (answer) => { detail = answer; });
    showHead(state);
  }

  function showHead(state) {
    heads.show(detail, measuresOf(data, noise), { ...place(state), token: position(state), colours: colours() });
  }

  function askWords(state) {
    const { layer, head } = place(state);
    return ask("words", { layer, head, token: position(state) }, heads.showWords);
  }

  const askToken = (state) => ask("token", { token: position(state) }, (answer) => {
    followed = answer;
    journey.show(followed, colours());
  });

  function redraw(state, range) {
    showMap(state, range);
    showHead(state);
    journey.show(followed, colours());
    showNext();
  }

  /** Whether a part has something to show. */
  const shows = (part) => Boolean({ head: detail, token: followed, next: followed ?? noise }[part]);

  function dispose() {
    source.forget();
    map?.dispose();
    heads.dispose();
    journey.dispose();
    for (const cell of Object.values(cells)) cell.remove();
  }

  return {
    source, cells, read, askNoise, askHead, askWords, askToken, showAbout, showMap, showNext, showHead, redraw, noiseText,
    dispose, shows, position, canBeNoisy, next, journey,
    get data() { return data; },
    get noise() { return noise; },
    get map() { return mapPlace.hidden ? null : map; },
    get maps() { return heads.maps; },
  };
}
