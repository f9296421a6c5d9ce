// The state of views in the address: `#lab?tokens=64&beta=4`. Values are texts there; `readState` gives them their types.

const PAUSE = 250;  // milliseconds between replaced addresses: browsers refuse more than about 200 in 30 seconds

/** `{view, values}` of an address's hash; values are texts. */
export function parseHash(hash) {
  const [view, query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  return { view: decodeText(view), values: Object.fromEntries(new URLSearchParams(query)) };
}

/** The hash of a view and its values; values that are null or undefined are left out. */
export function formatHash(view, values) {
  const pairs = Object.entries(values).filter(([, value]) => value !== null && value !== undefined);
  const query = new URLSearchParams(pairs.map(([name, value]) => [name, asText(value)])).toString();
  return `#${encodeURIComponent(view)}${query && `?${query}`}`;
}

/** The values of a view in the types of its defaults; what cannot be read is its default. */
export function readState(values, defaults) {
  return Object.fromEntries(Object.entries(defaults).map(([name, usual]) => [name, typed(values[name], usual)]));
}

/** What to give to `setState` so that the address has only what differs from the defaults. */
export function stateChanges(values, defaults) {
  const pairs = Object.entries(values).filter(([name]) => name in defaults);
  return Object.fromEntries(pairs.map(([name, value]) => [name, asText(value) === asText(defaults[name]) ? null : value]));
}

/**
 * The states of all views, of which the address has the current one's. `onNavigate(view, values)` follows links and "back";
 * `initial` has the values, as texts, of views that an address without them opens with.
 */
export function createStates(views, first, onNavigate, initial = {}) {
  const states = Object.fromEntries(views.map(view => [view, { ...initial[view] }]));
  let current = first, written = 0, waiting = 0;

  function read() {
    const { view, values } = parseHash(location.hash);
    current = views.includes(view) ? view : first;
    if (views.includes(view)) states[view] = values;
  }

  function write(push) {
    clearTimeout(waiting);
    waiting = 0;
    const hash = formatHash(current, states[current]);
    if (hash === location.hash) return;
    written = performance.now();
    history[push ? "pushState" : "replaceState"](null, "", hash);
  }

  function update(view, patch, { push = false } = {}) {
    const merged = { ...states[view] };
    for (const [name, value] of Object.entries(patch)) {
      if (value === null || value === undefined) delete merged[name];
      else merged[name] = asText(value);
    }
    if (push && waiting) write(false);
    states[view] = merged;
    if (view !== current) return;
    if (push || performance.now() - written > PAUSE) write(push);
    else waiting ||= setTimeout(write, PAUSE, false);
  }

  function go(view, patch = {}) {
    if (waiting) write(false);
    current = view;
    update(view, patch, { push: true });
    onNavigate(view, states[view]);
  }

  addEventListener("popstate", () => {  // also fired for a hash that is typed or clicked
    clearTimeout(waiting);
    waiting = 0;
    read();
    onNavigate(current, states[current]);
  });
  read();
  return { update, go, of: view => ({ ...states[view] }), get current() { return current; } };
}

function asText(value) {
  return typeof value === "object" && value !== null ? JSON.stringify(value) : String(value);
}

function typed(text, usual) {
  if (text === undefined) return usual;
  if (typeof usual === "number") return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : usual;
  if (typeof usual === "boolean") return text === "true" || (text !== "false" && usual);
  if (typeof usual === "string") return text;
  try {
    return JSON.parse(text);
  } catch {
    return usual;
  }
}

function decodeText(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
