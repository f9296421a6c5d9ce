// The sphere lab: tokens on the sphere under several schemes.
import { element } from "./dom.js";

/** The view in `host`. */
export function createLab(host) {
  host.append(element("h2", {}, "Sphere lab"), element("p", {}, "This view will show tokens that move on the sphere under two to four schemes side by side."));
  return { show() {}, hide() {}, keys: {}, saves: [] };
}
