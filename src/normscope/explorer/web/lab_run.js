// A run of the lab: the worker that integrates it, and the frames of each scheme that have come so far.

const MEASURES = { cosine: "cosine", speed: "speed", radius: "meanRadius", clusters: "clusters", shown: "shown" };

/** Frames of one scheme: points (frames × tokens × 3), radii and labels (frames × tokens), numbers per frame in `values`. */
function emptySeries(settings) {
  const frames = Math.floor(settings.time / settings.every + 1e-9) + 2, { tokens } = settings;
  return {
    settings, tokens, length: 0, stopped: null, theory: null, reason: "",
    times: new Float64Array(frames), points: new Float32Array(frames * tokens * 3), radii: new Float64Array(frames * tokens),
    labels: new Uint16Array(frames * tokens),
    values: Object.fromEntries(Object.keys(MEASURES).map(key => [key, new Float64Array(frames)])),
  };
}

/** `onFrames()` as frames come, `onDone()`, `onProblem(text)`; `worker()` makes a worker of worker.js. */
export class Run {
  constructor(worker, { onFrames, onDone, onProblem }) {
    Object.assign(this, { onFrames, onDone, onProblem, id: 0, settings: null, series: [], next: [], done: false });
    this.waiting = new Map();
    this.worker = worker();
    this.worker.onmessage = event => this.receive(event.data);
    this.worker.onerror = event => onProblem(`The simulation stopped: ${event.message || "its worker could not be started"}.`);
  }

  /** Start a run, with theory curves or without. The frames of the one before are shown until this one has come to `until`. */
  begin(settings, { until = 0, theory = true } = {}) {
    this.id += 1;
    const next = settings.schemes.map(() => emptySeries(settings));
    Object.assign(this, { settings, next, done: false, until: Math.min(until, settings.time) });
    this.worker.postMessage({ kind: "begin", id: this.id, settings });
    if (theory) this.worker.postMessage({ kind: "theory", id: this.id, settings });
  }

  /** End the run where it is; its frames stay. */
  stop() {
    this.worker.postMessage({ kind: "stop", id: this.id });
    this.done = true;
    this.series = this.next;
  }

  /** Whether the frames on show are those of the last settings. */
  get current() {
    return this.series === this.next;
  }

  /** The time to which all schemes have come; one that became non-finite holds nobody up. */
  get reached() {
    return reachedBy(this.series);
  }

  /** All dimensions of a scheme's tokens at a frame: tokens × dim, as the worker sends them. */
  states(scheme, frame) {
    return new Promise((resolve, reject) => {
      this.waiting.set(`${this.id} ${scheme} ${frame}`, { resolve, reject });
      this.worker.postMessage({ kind: "states", id: this.id, scheme, frame });
    });
  }

  receive(message) {
    if (message.id !== this.id) return;
    const line = this.next[message.scheme];
    if (message.kind === "frames") this.#add(line, message);
    else if (message.kind === "stopped") line.stopped = { t: message.t, text: message.text };
    else if (message.kind === "theory" && message.text) line.reason = message.text;
    else if (message.kind === "theory") line.theory = message;
    else if (message.kind === "states") this.#answer(message);
    else if (message.kind === "done") this.done = true;
    else if (message.kind === "error") {
      this.done = true;
      this.onProblem(message.text);
      return;
    }
    if (!this.series.length || this.done || reachedBy(this.next) >= this.until - 1e-9) this.series = this.next;
    if (this.current) (message.kind === "done" ? this.onDone : this.onFrames)();
  }

  #add(line, message) {
    const { first, times, points, radius, labels } = message, { tokens } = line;
    line.times.set(times, first);
    line.points.set(points, first * tokens * 3);
    line.radii.set(radius, first * tokens);
    if (labels) line.labels.set(labels, first * tokens);
    for (const [key, name] of Object.entries(MEASURES)) line.values[key].set(message[name], first);
    line.length = first + times.length;
  }

  #answer(message) {
    const key = `${message.id} ${message.scheme} ${message.frame}`, waiter = this.waiting.get(key);
    this.waiting.delete(key);
    if (message.text) waiter?.reject(new Error(message.text));
    else waiter?.resolve(message.states);
  }
}

function reachedBy(series) {
  return Math.min(...series.map(line => line.stopped ? Infinity : line.length ? line.times[line.length - 1] : 0));
}
