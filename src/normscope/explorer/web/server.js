// What a page asks of the server that sent it: JSON, and streams of events that reconnect.

const TOKEN = "X-Normscope-Token", PAGE = "X-Normscope-Page", LONGEST_PAUSE = 8000;
const SILENCE = 30000;  // milliseconds after which a server that says nothing, which it does every ten seconds, is gone
const GONE = "The server does not answer. What is on the page stays; it connects again by itself.";

/** `{request, stream}` for a server with that token. `onConnection(text)` gets why there is no connection, null when there is. */
export function createServer({ token }, onConnection) {
  const page = Array.from(crypto.getRandomValues(new Uint32Array(4)), part => part.toString(36)).join("");
  const headers = { [TOKEN]: token, [PAGE]: page }, streams = new Map();

  async function request(path, { method = "GET", body, signal } = {}) {
    const json = { ...headers, "Content-Type": "application/json" };
    const sent = body === undefined ? {} : { body: JSON.stringify(body), headers: json };
    let answer;
    try {
      answer = await fetch(path, { method, headers, signal, cache: "no-store", ...sent });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      onConnection(GONE);
      throw Object.assign(new Error(GONE), { gone: true });
    }
    onConnection(null);
    const content = await answer.json().catch(() => null);
    if (!answer.ok) throw new Error(content?.detail ?? `The server refused this (${answer.status}).`);
    return content;
  }

  /** Server-sent events as parsed JSON; one connection for each path. Returns a function that ends the subscription. */
  function stream(path, onMessage) {
    if (!streams.has(path)) {
      const listeners = new Set(), stop = new AbortController();
      streams.set(path, { listeners, stop });
      follow(path, message => { for (const listener of [...listeners]) listener(message); }, stop.signal);
    }
    const { listeners, stop } = streams.get(path);
    listeners.add(onMessage);
    return () => {
      listeners.delete(onMessage);
      if (!listeners.size && streams.delete(path)) stop.abort();
    };
  }

  async function follow(path, onMessage, signal) {
    for (let pause = 500; !signal.aborted; pause = Math.min(2 * pause, LONGEST_PAUSE)) {
      // A browser opens six connections to a server: pages that nobody sees leave them to others.
      while (document.hidden) await new Promise(resolve => document.addEventListener("visibilitychange", resolve, { once: true }));
      const unseen = new AbortController(), leave = () => document.hidden && unseen.abort();
      document.addEventListener("visibilitychange", leave);
      try {
        const answer = await fetch(path, { headers, signal: AbortSignal.any([signal, unseen.signal]), cache: "no-store" });
        if (!answer.ok) {
          const content = await answer.json().catch(() => null);
          onConnection(content?.detail ?? `The server refused the page (${answer.status}); open the address that it prints.`);
        } else {
          onConnection(null);
          pause = 500;
          await readEvents(answer.body, message => { onConnection(null); onMessage(message); });
          onConnection(GONE);
        }
      } catch {
        if (signal.aborted) return;
        if (unseen.signal.aborted) continue;
        onConnection(GONE);
      } finally {
        document.removeEventListener("visibilitychange", leave);
      }
      await new Promise(resolve => setTimeout(resolve, pause));
    }
  }

  return { request, stream };
}

async function readEvents(body, onMessage) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const silence = setTimeout(() => reader.cancel().catch(() => {}), SILENCE);
    const { value, done } = await reader.read();
    clearTimeout(silence);
    if (done) return;
    const events = (text + value).replaceAll("\r\n", "\n").split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter(line => line.startsWith("data:")).map(line => line.slice(5).trim()).join("\n");
      if (data) onMessage(JSON.parse(data));
    }
  }
}
