// Training: what a watched run measured, layer by layer, over time.
import { element } from "./dom.js";

/** The view in `host`. */
export function createTraining(host) {
  host.append(element("h2", {}, "Training"), element("p", {}, "This view will show a watched run, layer by layer, while it trains."));
  return { show() {}, hide() {}, keys: {}, saves: [] };
}
