// The page's figures: drawn when they come into view, again when colours or widths change; heads linked across maps.
import { createTip, element, svg } from "./dom.js";
import { createSphere, shareCamera } from "./sphere.js";

const page = JSON.parse(document.getElementById("figures-data").textContent), root = document.documentElement;
const screenDark = matchMedia("(prefers-color-scheme: dark)"), paper = matchMedia("print");
const plots = new Map();  // element → figure
let chosen = null, printed = false;

const isDark = () => !printed && !paper.matches && (root.dataset.theme ? root.dataset.theme === "dark" : screenDark.matches);
const tip = createTip(document.getElementById("tip"));

// Charts and heat maps.
function spec(figure, room) {
  const made = structuredClone(figure.spec), meta = made.usermeta, config = structuredClone(page[isDark() ? "dark" : "light"].config);
  config.background = null;
  made.autosize = { type: "fit-x", contains: "padding" };
  made.width = room;
  if (meta.names) {  // the page has its own legend
    for (const { encoding } of made.layer) for (const one of ["color", "strokeDash"]) if (encoding[one]?.legend) encoding[one].legend = null;
  } else {
    Object.assign(config.legend, { orient: "top", direction: "horizontal", gradientLength: Math.min(180, room - 90), titleLimit: room - 20 });
    made.width = Math.min(room, Math.max(300, 48 * meta.columns + 70));
    if (meta.columns > 20) made.height = Math.min(made.height, Math.max(120, (made.width - 90) * meta.rows / meta.columns));
  }
  if (meta.ratio) {
    const side = Math.min(room - 60, 420, 420 / meta.ratio);
    Object.assign(made, { width: side, height: side * meta.ratio, autosize: "pad" });
  }
  if (matchMedia("(pointer: coarse)").matches) made.params = made.params.filter(param => param.name !== "zoom");
  return { ...made, config };
}

// Nothing here waits for more than promises that are kept already, so that a print finds all figures drawn.
async function drawChart(figure) {
  const { plot } = figure, room = plot.clientWidth, turn = figure.turn = (figure.turn ?? 0) + 1;
  if (!room) return;
  figure.room = room;
  const inside = element("div"), meta = figure.spec.usermeta;
  const tooltip = (_, event, item, value) => tip(event, value && typeof value === "object" ? value : null);
  const options = { mode: "vega-lite", renderer: figure.cells > 1500 ? "canvas" : "svg", actions: false, tooltip, defaultStyle: false };
  const { view } = await vegaEmbed(inside, spec(figure, room), options);
  if (turn !== figure.turn) return view.finalize();
  figure.view?.finalize();
  figure.view = view;
  plot.replaceChildren(inside);
  if (meta.columns) view.resize().run();  // labels below a map are measured a second time
  plot.style.minHeight = "";
  if (meta.layers) {
    view.addEventListener("click", (_, item) => item?.datum && choose(meta.layers[item.datum.y], meta.heads[item.datum.x]));
    if (chosen) view.signal("chosen", place(meta)).run();
  } else if (figure.only) view.signal("only", figure.only).run();
}

function drawScene(figure) {
  const theme = page[isDark() ? "dark" : "light"], { plot } = figure;
  plot.closest("figure").querySelector(".bar")?.style.setProperty("background", `linear-gradient(to right, ${theme.colours.steps.join()})`);
  if (figure.scene) figure.scene.colours = theme.colours;
  else {
    figure.scene = createSphere(plot, { label: plot.ariaLabel, colours: theme.colours, tip });
    figure.scene.setScene(figure.data);
    const beside = [...plot.closest("figure").querySelectorAll(".plot")].map(other => plots.get(other)?.scene);
    shareCamera(beside.filter(Boolean));
  }
}

const draw = figure => { figure.drawn = isDark() ? "dark" : "light"; (figure.spec ? drawChart : drawScene)(figure); };
const redraw = () => { for (const figure of plots.values()) if (figure.drawn && figure.drawn !== (isDark() ? "dark" : "light")) draw(figure); };
const seen = new IntersectionObserver(entries => {
  for (const entry of entries) {
    const figure = plots.get(entry.target);
    if (entry.isIntersecting && !figure.drawn) draw(figure);
  }
}, { rootMargin: "500px" });
const sized = new ResizeObserver(entries => {
  for (const entry of entries) {
    const figure = plots.get(entry.target);
    if (figure.view && Math.abs(figure.room - entry.target.clientWidth) > 2) drawChart(figure);
  }
});
screenDark.addEventListener("change", redraw);
paper.addEventListener("change", () => paper.matches ? print() : redraw());

// On paper everything is open, drawn and light.
function print() {
  printed = true;
  for (const details of document.querySelectorAll("details")) details.open = true;
  for (const figure of plots.values()) if (figure.drawn !== "light") draw(figure);
}
addEventListener("beforeprint", print);
addEventListener("afterprint", () => { printed = false; redraw(); });

// Legends: buttons that show one line alone, in all panels of a figure that have the same lines.
function addLegend(figure) {
  const meta = figure.spec?.usermeta, legend = figure.plot.parentElement.querySelector(".legend");
  if (!meta?.names?.length) return;
  const group = [...figure.plot.closest("figure").querySelectorAll(".plot")].map(plot => plots.get(plot))
    .filter(other => other.spec?.usermeta.names?.join("\n") === meta.names.join("\n"));
  if (group[0] !== figure) return;
  meta.names.forEach((name, i) => {
    const colour = `var(--line-${i % page.light.config.range.category.length})`, dash = meta.dashes[i].join(" ");
    const mark = meta.dots ? svg("circle", { cx: 13, cy: 4, r: 4 })
      : svg("path", { d: "M0 4H26", "stroke-width": 2.5, "stroke-dasharray": dash });
    mark.style[meta.dots ? "fill" : "stroke"] = colour;
    const button = element("button", { type: "button", "aria-pressed": false },
      svg("svg", { viewBox: "0 0 26 8", "aria-hidden": true }, mark), element("span", {}, name));
    button.addEventListener("click", () => {
      const only = figure.only === name ? null : name;
      for (const other of legend.children) other.ariaPressed = String(other === button && only !== null);
      for (const other of group) { other.only = only; other.view?.signal("only", only).run(); }
    });
    legend.append(button);
  });
}
function add(figures) {
  const made = [...document.querySelectorAll(".plot")].filter(plot => !plots.has(plot));
  for (const plot of made) plots.set(plot, { ...figures[plot.dataset.figure], plot });
  for (const plot of made) { seen.observe(plot); sized.observe(plot); addLegend(plots.get(plot)); }
}
add(page.figures);

// Heads: a choice in one map shows in all, with all numbers of that head.
const heads = [...plots.values()].filter(figure => figure.spec?.usermeta.layers);
const maps = [...plots.values()].filter(figure => figure.spec?.usermeta.head);
const panel = document.getElementById("head");
const place = meta => chosen ? `${meta.heads.indexOf(chosen.head)},${meta.layers.indexOf(chosen.layer)}` : "";
const values = figure => figure.values ??= new Map(figure.spec.data.values.trim().split("\n").slice(1).map(row => {
  const [x, y, value] = row.split(",");
  return [`${x},${y}`, Number(value)];
}));

function choose(layer, head) {
  chosen = layer === undefined ? null : { layer, head };
  for (const figure of heads) figure.view?.signal("chosen", place(figure.spec.usermeta)).run();
  for (const row of document.querySelectorAll("tr[data-head]")) row.classList.toggle("chosen", !!chosen && row.dataset.head === `${layer}, ${head}`);
  panel.hidden = !chosen;
  document.body.classList.toggle("with-head", !!chosen);
  if (!chosen) return;
  panel.querySelector("h2").textContent = `Layer ${layer}, head ${head}`;
  panel.querySelector("tbody").replaceChildren(...heads.map(figure => {
    const all = values(figure), value = all.get(place(figure.spec.usermeta)), row = element("tr");
    const title = element("th", {}, element("a", { href: `#${figure.anchor}` }, figure.title)), known = value !== undefined;
    const rank = known ? [...all.values()].filter(other => other > value).length + 1 : 0;
    row.append(title, element("td", {}, known ? String(Number(value.toPrecision(4))) : "–"), element("td", {}, known ? `${rank} of ${all.size}` : ""));
    return row;
  }));
  const own = maps.filter(figure => figure.spec.usermeta.head.join() === `${layer},${head}`);
  panel.querySelector("p").replaceChildren(...own.map(figure => element("a", { href: `#${figure.anchor}` }, figure.title)));
}
panel.querySelector("button").addEventListener("click", () => choose());
for (const figure of heads) {
  figure.plot.addEventListener("keydown", event => {
    const meta = figure.spec.usermeta, steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1], Enter: [0, 0] };
    if (!steps[event.key]) return;
    event.preventDefault();
    const [across, up] = steps[event.key], clamp = (value, list) => Math.min(list.length - 1, Math.max(0, value));
    const x = clamp(Math.max(0, meta.heads.indexOf(chosen?.head)) + across, meta.heads);
    const y = clamp(Math.max(0, meta.layers.indexOf(chosen?.layer)) + up, meta.layers);
    choose(meta.layers[y], meta.heads[x]);
  });
}
addEventListener("keydown", event => { if (event.key === "Escape" && chosen) choose(); });

// On a narrow screen the contents are folded until wanted. What a link leads to is opened; the contents mark the section in view; buttons save pictures and switch colours.
const reveal = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  target.scrollIntoView();
};
const contents = document.querySelector("nav details");
if (contents && innerWidth < 1088) contents.open = false;
addEventListener("hashchange", reveal);
reveal();
const linkTo = id => document.querySelector(`nav a[href="#${CSS.escape(id)}"]`);
const current = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) linkTo(target.id)?.toggleAttribute("aria-current", isIntersecting);
}, { rootMargin: "-15% 0px -70%" });
const mark = () => { for (const section of document.querySelectorAll("main section[id]")) current.observe(section); };
mark();
document.addEventListener("click", async ({ target }) => {
  if (target.id === "theme") { root.dataset.theme = isDark() ? "light" : "dark"; redraw(); }
  if (!target.matches?.("button.save")) return;
  for (const figure of [...target.closest("figure").querySelectorAll(".plot")].map(plot => plots.get(plot))) {
    const link = element("a", { download: `${figure.name}.png` });
    link.href = await picture(figure);
    link.click();
  }
});
async function picture(figure) {
  if (figure.spec) {
    const made = { ...figure.spec, config: page.light.config, title: figure.title, padding: 12 };
    const { view } = await vegaEmbed(element("div"), made, { mode: "vega-lite", renderer: "none", actions: false });
    return view.toImageURL("png", 2);
  }
  if (!figure.drawn) draw(figure);
  return figure.scene.picture().toDataURL();
}

// The same page, later: texts are replaced, figures keep their places and are drawn again with the new numbers.
const nameOf = plot => `${plot.closest("figure").id} ${[...plot.closest("figure").querySelectorAll(".plot")].indexOf(plot)}`;
const lines = figure => figure.spec?.usermeta.names?.join("\n");
function renew(later) {
  const { figures } = JSON.parse(later.getElementById("figures-data").textContent);
  const main = document.importNode(later.querySelector("main"), true), folds = [...document.querySelectorAll("main details")].map(fold => fold.open);
  const before = new Map([...plots.keys()].map(plot => [nameOf(plot), plot]));
  const places = [...main.querySelectorAll(".plot")].map(place => [place, before.get(nameOf(place))]);
  const kept = places.filter(([place, plot]) => plot && plots.get(plot).spec && lines(plots.get(plot)) === lines(figures[place.dataset.figure]));
  for (const [place, plot] of kept) {
    Object.assign(plots.get(plot), figures[place.dataset.figure], { drawn: null, values: undefined });
    place.parentElement.querySelector(".legend").replaceWith(plot.parentElement.querySelector(".legend"));
    place.replaceWith(plot);
  }
  const stay = new Set(kept.map(([, plot]) => plot));
  for (const plot of [...plots.keys()].filter(plot => !stay.has(plot))) {
    seen.unobserve(plot);
    sized.unobserve(plot);
    plots.get(plot).view?.finalize();
    plots.get(plot).scene?.dispose();
    plots.delete(plot);
  }
  main.querySelectorAll("details").forEach((fold, i) => { fold.open = folds[i] ?? fold.open; });
  document.querySelector("main").replaceWith(main);
  document.querySelector("nav")?.replaceWith(document.importNode(later.querySelector("nav") ?? element("div"), true));
  for (const plot of stay) { seen.unobserve(plot); seen.observe(plot); }
  add(figures);
  mark();
}

// A page that has loaded itself again, since its run grows, looks as before: place, folds, heights of figures, colours.
const key = `normscope ${location.pathname}`;
const restore = place => {
  const block = place && document.getElementById(place.id);
  if (block) scrollBy({ top: block.getBoundingClientRect().top - place.top, behavior: "instant" });
};
let kept = null;
try {
  kept = JSON.parse(sessionStorage.getItem(key));
  sessionStorage.removeItem(key);
} catch { /* a page inside another one may not store anything */ }
if (kept) {
  history.scrollRestoration = "manual";
  if (kept.theme) root.dataset.theme = kept.theme;
  document.querySelectorAll("details").forEach((fold, i) => { fold.open = kept.open[i] ?? fold.open; });
  [...plots.keys()].forEach((plot, i) => { if (kept.heights[i]) plot.style.minHeight = `${kept.heights[i]}px`; });
  restore(kept.place);
}
window.normscope = { plots, draw, choose, isDark, renew, restore, key };
