// Elements of HTML and SVG, built from plain values; text is always text, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes are those of HTML, properties such as `value`, `style` and `dataset` as objects, and
 *  `on: {event: handler}`; null leaves one out. Children are elements or texts, or lists of them. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element, with attributes as in SVG and children as for `element`. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A label with a control inside, and its unit or value after it: `labelled("tokens", input)`. */
export function labelled(text, control, after = null) {
  return element("label", { class: "control" }, element("span", {}, text), control, after);
}

/** A button of type "button"; `attributes` may hold aria-label, aria-pressed, title. */
export function button(text, click, attributes = {}) {
  return element("button", { type: "button", ...attributes, on: { click } }, text);
}

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "selected", "indeterminate", "textContent", "htmlFor"]);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (PROPERTIES.has(name) && node instanceof HTMLElement) node[name] = value;
    else if (value === true && !name.startsWith("aria-")) node.setAttribute(name, "");
    else if (value !== false || name.startsWith("aria-")) node.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

/** A table beside the pointer: `tip(event, {name: value})`, `tip(event, [[name, value]…])` or `tip(event, null)` to hide it. */
export function createTip(box) {
  return (event, rows) => {
    box.hidden = !rows;
    if (!rows) return;
    const pairs = Array.isArray(rows) ? rows : Object.entries(rows);
    const line = ([name, value]) => element("div", {}, element("span", {}, name), element("b", {}, String(value)));
    box.replaceChildren(...pairs.map(line));
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    const above = event.clientY + 18 + height > innerHeight;
    box.style.top = `${above ? Math.max(4, event.clientY - height - 12) : event.clientY + 18}px`;
  };
}
