// The parts of the lab's page: where everything stands, and the bar of the clock.
import { button, element } from "./dom.js";
import { shortNumber } from "./heatmap.js";

export const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];
const PLACES = 1000;  // of the clock's slider
const DRAG = "Press Play. Each point is the direction of a token’s hidden state; time is depth. "
  + "Drag a token to change the start; drag elsewhere to rotate.";
const TURN = "Drag to rotate the spheres. To move a token, go back to the start.";

/** The parts in `host`, by name; `on`: add(), tour(), undo(), stop(). */
export function createPage(host, on) {
  const at = {
    tour: element("section", { class: "panel lab-tour", "aria-label": "Guided tour", hidden: true }),
    circuit: element("section", { class: "lab-circuit", "aria-label": "Circuits that break", hidden: true }),
    spheres: element("div"),
    editor: element("section", { class: "panel lab-editor", "aria-label": "Slots of a scheme", hidden: true }),
    player: element("div", { class: "lab-player", role: "group", "aria-label": "Clock" }),
    strips: element("div"),
    link: element("p", { class: "problem", role: "alert" }),
    problem: element("p", { class: "problem", role: "alert" }),
    progress: element("p", { class: "note lab-progress" }),
    hint: element("p", { class: "note" }),
    form: element("form", { class: "lab-form", on: { submit: event => event.preventDefault() } }),
    begin: button("Guided tour", on.tour, { class: "main" }),
    add: button("Add a scheme", on.add),
    undo: button("Undo moved tokens", on.undo),
    stop: button("Stop computing", on.stop, { hidden: true }),
  };
  at.controls = element("details", { class: "lab-controls" }, element("summary", {}, "Settings"), at.form);
  at.controls.open = !matchMedia("(max-width: 60rem)").matches;
  const top = element("div", { class: "controls" }, at.begin, at.add, at.undo, at.stop, at.progress);
  const main = [top, at.link, at.problem, at.spheres, at.player, at.hint, at.editor, at.strips];
  const side = element("div", { class: "lab-side" }, at.controls), wide = matchMedia("(min-width: 75rem)");
  at.lab = element("div", { class: "lab" }, element("div", { class: "lab-main" }, ...main), side);
  // Beside the spheres, where there is room: what an edited slot changes stays in sight.
  const placeEditor = () => wide.matches ? side.prepend(at.editor) : at.hint.after(at.editor);
  wide.addEventListener("change", placeEditor);
  placeEditor();
  host.replaceChildren(element("h2", { class: "visually-hidden" }, "Sphere lab"), at.tour, at.circuit, at.lab);
  return at;
}

/** The bar of a player in `at.player`; `on`: scrub(t), step(count), restart(), speed(value), layers(). */
export function createBar(at, player, on) {
  const play = button("Play", () => player.toggle(), { class: "main lab-play" });
  const named = (text, action, label) => button(text, action, { "aria-label": label, title: label });
  const clock = element("input", { type: "range", min: 0, max: PLACES, step: 1, "aria-label": "Time", class: "lab-clock" });
  const reading = element("output", { class: "number lab-time" });
  const options = SPEEDS.map(value => element("option", { value }, `× ${value}`));
  const speed = element("select", { "aria-label": "Speed of the clock" }, options);
  const layers = button("Discrete layers", on.layers, { "aria-pressed": "false",
    title: "Whole layers, as in a model, instead of the continuous flow" });
  clock.addEventListener("input", () => on.scrub(player.axis.time(clock.value / PLACES)));
  speed.addEventListener("change", () => on.speed(Number(speed.value)));
  const back = named("‹", () => on.step(-1), "One step back"), forwards = named("›", () => on.step(1), "One step forwards");
  const start = button("Start", on.restart, { title: "To the start" });
  at.player.replaceChildren(play, start, back, forwards, clock, reading, speed, layers);

  return {
    setPlaying(playing) {
      play.textContent = playing ? "Pause" : "Play";
    },
    set(whole) {
      speed.value = String(player.speed);
      layers.setAttribute("aria-pressed", String(whole));
    },
    /** The clock's time; the slider that is being moved by hand stays where it is. */
    show(t) {
      const { duration, whole, axis, playing } = player;
      if (document.activeElement !== clock || playing) clock.value = String(Math.round(PLACES * axis.place(t)));
      reading.textContent = whole ? `layer ${Math.round(t)} of ${duration}` : `t = ${t.toFixed(2)} of ${shortNumber(duration)}`;
      clock.setAttribute("aria-valuetext", reading.textContent);
      at.hint.textContent = t < 1e-9 ? DRAG : TURN;
    },
  };
}
