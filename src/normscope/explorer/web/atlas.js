// The model atlas: layers, heads and tokens of a model.
import { element } from "./dom.js";

/** The view in `host`. */
export function createAtlas(host) {
  host.append(element("h2", {}, "Model atlas"), element("p", {}, "This view will show the layers and heads of a model or of an audit."));
  return { show() {}, hide() {}, keys: {}, saves: [] };
}
