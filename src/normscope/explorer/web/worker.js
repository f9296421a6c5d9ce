// The worker of the page: runs one simulation at a time and sends its frames as they come.

import { InputError } from "./errors.js";
import { Simulation, theoryCurves } from "./simulation.js";

const SLICE = 24; // milliseconds of integration between messages
const BUG = "the simulation failed, which is a bug: ";
const turns = new MessageChannel(); // a turn of its queue comes after messages of the page; timers would wait 4 ms

let run = null;

function send(message) {
  const arrays = Object.values(message).filter(ArrayBuffer.isView);
  self.postMessage(message, arrays.map((array) => array.buffer));
}

/** Integrate for a slice of time, send what came, and go on after the messages that wait. */
function work() {
  if (!run || run.over) return;
  const { id, simulation } = run;
  run.over = simulation.advance(performance.now() + SLICE);
  for (const news of simulation.take()) send({ kind: "text" in news ? "stopped" : "frames", id, ...news });
  if (run.over) send({ kind: "done", id });
  else turns.port2.postMessage(null);
}

const answers = {
  begin({ id, settings }) {
    run = null;
    run = { id, over: false, simulation: new Simulation(settings) };
    turns.port2.postMessage(null);
  },
  stop({ id }) {
    if (run?.id === id) run.over = true;
  },
  states({ id, scheme, frame }) {
    if (run?.id === id) send({ kind: "states", id, scheme, frame, states: run.simulation.states(scheme, frame) });
  },
  theory({ id, settings }) {
    for (const curves of theoryCurves(settings)) send({ kind: "theory", id, ...curves });
  },
};

/** A mistake in the settings is answered in words; a bug too, and it is thrown again. */
function guarded(data, action) {
  try {
    action();
  } catch (error) {
    const mistake = error instanceof InputError;
    send({ kind: "error", id: data.id, text: mistake ? error.message : BUG + error.message });
    if (!mistake) throw error;
  }
}

turns.port1.onmessage = () => guarded({ id: run?.id }, work);
self.onmessage = ({ data }) => guarded(data, () => answers[data.kind](data));
