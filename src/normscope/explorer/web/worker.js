// The worker of the page: runs one simulation at a time and sends its frames as they come.

import { InputError } from "./errors.js";
import { Simulation, theoryCurve } from "./simulation.js";

const SLICE = 24; // milliseconds of integration between messages
const BUG = "the simulation failed, which is a bug: ";
const turns = new MessageChannel(); // a turn of its queue comes after messages of the page; timers would wait 4 ms

let run = null;
let curves = []; // theory to compute, one scheme in a turn, so that frames come first

function send(message) {
  const arrays = Object.values(message).filter(ArrayBuffer.isView);
  self.postMessage(message, arrays.map((array) => array.buffer));
}

/** Integrate for a slice of time, send what came, then one curve of theory; the next turn is after the messages that wait. */
function work() {
  if (run && !run.over) {
    const { id, simulation } = run;
    run.over = simulation.advance(performance.now() + SLICE);
    for (const news of simulation.take()) send({ kind: "text" in news ? "stopped" : "frames", id, ...news });
    if (run.over) send({ kind: "done", id });
  }
  const next = curves.shift();
  if (next) send({ kind: "theory", id: next.id, scheme: next.scheme, ...theoryCurve(next.settings, next.scheme) });
  if ((run && !run.over) || curves.length) takeTurn();
}

let waiting = false;

function takeTurn() {
  if (!waiting) turns.port2.postMessage(null);
  waiting = true;
}

const answers = {
  begin({ id, settings }) {
    run = null;
    curves = [];
    run = { id, over: false, simulation: new Simulation(settings) };
    takeTurn();
  },
  stop({ id }) {
    if (run?.id === id) run.over = true;
  },
  states({ id, scheme, frame }) {
    if (run?.id === id) send({ kind: "states", id, scheme, frame, states: run.simulation.states(scheme, frame) });
  },
  theory({ id, settings }) {
    curves = settings.schemes.map((_, scheme) => ({ id, scheme, settings }));
    takeTurn();
  },
};

/** A mistake in the settings is answered in words; a bug too, and it is thrown again. */
function guarded(data, action) {
  try {
    action();
  } catch (error) {
    const mistake = error instanceof InputError;
    const question = data.kind === "states" ? data : { kind: "error", id: data.id };
    send({ ...question, text: mistake ? error.message : BUG + error.message });
    if (!mistake) throw error;
  }
}

turns.port1.onmessage = () => {
  waiting = false;
  guarded({ id: run?.id }, work);
};
self.onmessage = ({ data }) => guarded(data, () => answers[data.kind](data));
