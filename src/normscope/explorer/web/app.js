// The frame of the explorer: views in tabs, their state in the address, theme, keyboard, messages and saved files.
import { button, createTip, element } from "./dom.js";
import { createStates } from "./state.js";
import { download } from "./save.js";
import { createServer } from "./server.js";
import { simulatedState } from "./simulated_run.js";
import { createLab } from "./lab.js";
import { createAtlas } from "./atlas.js";
import { createTraining } from "./training.js";
import { createLedger } from "./ledger.js";

const VIEWS = {
  lab: ["Sphere lab", createLab],
  atlas: ["Model atlas", createAtlas],
  training: ["Training", createTraining],
  ledger: ["Ledger", createLedger],
};
const THEME = "normscope theme";
const KEY_NAMES = { " ": "Space", ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc" };

const data = JSON.parse(document.getElementById("explorer-data").textContent);
const root = document.documentElement, names = Object.keys(VIEWS);
const get = id => document.getElementById(id);
const views = new Map(), listeners = new Set();
const screenDark = matchMedia("(prefers-color-scheme: dark)"), calm = matchMedia("(prefers-reduced-motion: reduce)");
let shown = null, making = null;  // the view, and the controller of the file that is being made

const server = data.server && createServer(data.server, text => {
  const box = get("connection");
  if (box.textContent === (text ?? "")) return;
  box.textContent = text ?? "";
  box.hidden = !text;
  if (!text) guarded(shown, () => views.get(shown)?.reconnected?.());
});
const states = createStates(names, names.includes(data.view) ? data.view : names[0], show,
  { lab: simulatedState(data.runs, data.schemes) });

const app = {
  data,
  server: data.server,
  state: view => states.of(view),
  setState: (view, patch, options) => states.update(view, patch, options),
  go: (view, patch) => states.go(view, patch),
  get theme() { return theme(); },
  onTheme(listener) { listeners.add(listener); return () => listeners.delete(listener); },
  announce,
  tip: createTip(get("tip")),
  request: (path, options) => server ? server.request(path, options) : Promise.resolve(null),
  stream: (path, onMessage) => server ? server.stream(path, onMessage) : () => {},
  save: (name, blob) => { download(name, blob); announce(`Saved ${name}.`); },
  get reducedMotion() { return calm.matches; },
  worker: () => new Worker(URL.createObjectURL(new Blob([get("worker-script").textContent], { type: "text/javascript" }))),
};

function theme() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : screenDark.matches;
  return { dark, colours: data.themes[dark ? "dark" : "light"] };
}

function announce(text) {
  const region = get("announcement");
  region.textContent = "";
  requestAnimationFrame(() => { region.textContent = text; });
}

function show(name, state) {
  for (const other of names) {
    get(`tab-${other}`).setAttribute("aria-selected", other === name);
    get(`tab-${other}`).tabIndex = other === name ? 0 : -1;
    get(`view-${other}`).hidden = other !== name;
  }
  get("dialog").close();  // was about the state before
  if (shown !== name) views.get(shown)?.hide?.();
  const title = VIEWS[name][0];
  document.title = `${title} – normscope`;
  if (shown && shown !== name) announce(title);
  shown = name;
  guarded(name, () => {
    if (!views.has(name)) views.set(name, VIEWS[name][1](get(`view-${name}`), app));
    views.get(name).show?.(state);
  });
}

/** Run a part of a view; what goes wrong is told in the view, which is never left blank. */
function guarded(name, action) {
  const clear = () => get(`view-${name}`).querySelector(":scope > .failure")?.remove();
  try {
    const result = action();
    if (result?.then) result.then(clear, error => fail(name, error));
    else clear();
  } catch (error) {
    fail(name, error);
  }
}

function fail(name, error) {
  const host = get(`view-${name}`), after = "The other views still work, and so may this one after a reload.";
  const box = host.querySelector(":scope > .failure") ?? element("p", { class: "failure", role: "alert" });
  box.textContent = `Something went wrong in this view: ${error?.message ?? error}. ${after}`;
  host.prepend(box);
}

function setTheme(name) {
  root.dataset.theme = name;
  try {
    localStorage.setItem(THEME, name);
  } catch { /* a browser that keeps nothing shows the screen's theme next time */ }
  themeChanged();
}

function themeChanged() {
  const now = theme();
  get("theme").textContent = now.dark ? "Light" : "Dark";
  get("theme").setAttribute("aria-label", `Change to ${now.dark ? "light" : "dark"} colours`);
  for (const listener of [...listeners]) listener(now);
}

const keys = {
  "?": ["this list", openKeys],
  ...Object.fromEntries(names.map((name, k) => [String(k + 1), [`view: ${VIEWS[name][0]}`, () => states.go(name)]])),
  d: ["dark or light colours", () => setTheme(theme().dark ? "light" : "dark")],
  s: ["save pictures and data", openSaves],
};

/** Whether the focused control uses the key itself. */
function used(event) {
  const at = event.target;
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || get("dialog").open) return true;
  if (at.closest?.("textarea, select, [contenteditable]")) return true;
  if (at.matches?.("input")) {
    const plain = ["checkbox", "radio", "range", "button", "color"].includes(at.type);
    return !plain || event.key.startsWith("Arrow") || [" ", "Enter", "Home", "End", "PageUp", "PageDown"].includes(event.key);
  }
  return Boolean(at.closest?.("button, a, summary, [role=tab]")) && (event.key === " " || event.key === "Enter");
}

function onKey(event) {
  if (used(event)) return;
  const [, action] = views.get(shown)?.keys?.[event.key] ?? keys[event.key] ?? [];
  if (!action) return;
  event.preventDefault();
  guarded(shown, () => action(event));
}

function openDialog(title, ...content) {
  get("dialog-title").textContent = title;
  get("dialog-content").replaceChildren(...content);
  get("dialog").showModal();
}

function openKeys() {
  const rows = [...Object.entries(views.get(shown)?.keys ?? {}), ...Object.entries(keys)];
  openDialog("Keys", element("table", { class: "keys" }, element("tbody", {}, rows.map(([key, [text]]) =>
    element("tr", {}, element("th", { scope: "row" }, element("kbd", {}, KEY_NAMES[key] ?? key)), element("td", {}, text))))));
}

function openSaves() {
  const saves = views.get(shown)?.saves ?? [], status = element("p", { role: "status" });
  const bar = element("progress", { max: 1, "aria-label": "Share that is made" });
  const work = element("p", { class: "controls", hidden: true }, bar, button("Cancel", () => making.abort()));
  const choose = async (save, origin) => {
    making?.abort();
    const mine = making = new AbortController(), { signal } = mine;
    const end = text => {
      if (making !== mine) return;
      if (work.contains(document.activeElement)) origin.focus();
      work.hidden = true;
      status.textContent = text;
    };
    bar.removeAttribute("value");
    work.hidden = false;
    status.textContent = `Making ${save.label}…`;
    try {
      const { name, blob } = await save.make({ signal, onProgress: share => { bar.value = share; } });
      signal.throwIfAborted();
      app.save(name, blob);
      end(`Saved ${name}.`);
    } catch (error) {
      end(signal.aborted ? `${save.label}: cancelled.` : `${save.label} cannot be saved: ${error.message}`);
    }
  };
  const offer = save => button(save.label, event => choose(save, event.currentTarget));
  openDialog("Save", saves.length
    ? element("ul", { class: "saves" }, saves.map(save => element("li", {}, offer(save))))
    : element("p", {}, "This view has nothing to save yet: open a run or a model first."), status, work);
}

function start() {
  try {
    const stored = localStorage.getItem(THEME);
    if (stored === "dark" || stored === "light") root.dataset.theme = stored;
  } catch { /* no storage: the screen's theme */ }
  get("tabs").replaceChildren(...names.map(name => button(VIEWS[name][0], () => states.current !== name && states.go(name), {
    role: "tab", id: `tab-${name}`, "aria-controls": `view-${name}`,
  })));
  get("views").replaceChildren(...names.map(name => element("div", {
    role: "tabpanel", id: `view-${name}`, class: "view", "aria-labelledby": `tab-${name}`, tabindex: -1, hidden: true,
  })));
  get("tabs").addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -names.length, End: names.length }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = names.indexOf(states.current), last = names.length - 1;
    const next = names[Math.abs(step) > 1 ? (step < 0 ? 0 : last) : (at + step + names.length) % names.length];
    states.go(next);
    get(`tab-${next}`).focus();
  });
  get("theme").addEventListener("click", keys.d[1]);
  get("keys").addEventListener("click", openKeys);
  get("save").addEventListener("click", openSaves);
  get("dialog-close").addEventListener("click", () => get("dialog").close());
  get("dialog").addEventListener("close", () => making?.abort());
  get("skip").addEventListener("click", event => {  // the address belongs to the views' state
    event.preventDefault();
    get(`view-${shown}`).focus();
  });
  screenDark.addEventListener("change", themeChanged);
  document.addEventListener("keydown", onKey);
  addEventListener("error", event => event.error && fail(shown, event.error));
  addEventListener("unhandledrejection", event => fail(shown, event.reason));
  document.addEventListener("scroll", () => app.tip(null, null), { passive: true, capture: true });
  themeChanged();
  show(states.current, states.of(states.current));
  if (server) server.stream("/api/events", () => {});
  root.dataset.ready = "true";
  performance.mark("interactive");
}

start();
