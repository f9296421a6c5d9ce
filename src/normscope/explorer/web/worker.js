// The worker of the page, which runs simulations; it answers every message with an error until it has any.
self.onmessage = ({ data: { id } }) => self.postMessage({ kind: "error", id, text: "this page has no simulation" });
