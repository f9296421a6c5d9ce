// The ledger: published statements and their verdicts.
import { element } from "./dom.js";

/** The view in `host`. */
export function createLedger(host) {
  host.append(element("h2", {}, "Ledger"), element("p", {}, "This view will show every statement with its verdict and its evidence."));
  return { show() {}, hide() {}, keys: {}, saves: [] };
}
