// One clock for all schemes: play, pause, scrub, step. It runs evenly along the time axis, linear or logarithmic.

const WHOLE = 12;  // seconds in which speed 1 plays a run

/** Where a logarithmic axis of times begins: at the first frame, unless that is the end. */
export function axisStart(duration, every) {
  return every < duration ? every : duration / 10;
}

/** Places 0..1 along an axis of times up to `duration`, and back; a logarithmic one begins at `axisStart`. */
export function timeAxis(kind, duration, every) {
  if (kind !== "log") return { place: t => t / duration, time: place => place * duration };
  const first = axisStart(duration, every), width = Math.log(duration / first);
  return { place: t => Math.log(Math.max(t, first) / first) / width, time: place => first * Math.exp(place * width) };
}

/** The clock. `onTime(t)` after every change of time, `onPlaying(playing)` after play and pause. */
export class Player {
  constructor({ onTime, onPlaying }) {
    Object.assign(this, { onTime, onPlaying, time: 0, playing: false, speed: 1, whole: false });
    this.setRun({ duration: 1, every: 1, axis: "linear", whole: false });
  }

  /** A new run: its last time, the time between frames, the kind of axis, and whether only whole frames are shown. */
  setRun({ duration, every, axis, whole }) {
    Object.assign(this, { duration, every, whole, axis: timeAxis(axis, duration, every) });
    Object.assign(this, { reached: 0, wanted: null, complete: false });
  }

  /** How far the run has been computed; a time that was asked for earlier is shown as soon as it is there. */
  setReached(reached) {
    this.reached = Math.min(reached, this.duration);
    if (this.wanted !== null && this.wanted <= this.reached + 1e-9) this.seek(this.wanted);
  }

  seek(time) {
    const within = Math.max(0, Math.min(time, this.duration));
    this.wanted = within > this.reached + 1e-9 ? within : null;
    this.time = Math.min(within, this.reached);
    this.onTime(this.time);
  }

  /** Go `count` frames forwards or back. */
  step(count) {
    this.pause();
    const at = this.time / this.every, from = count > 0 ? Math.floor(at + 1e-6) : Math.ceil(at - 1e-6);
    this.seek((from + count) * this.every);
  }

  play() {
    if (this.playing) return;
    if (this.time >= this.end - 1e-9) this.seek(0);
    this.playing = true;
    this.place = null;
    this.onPlaying(true);
    const tick = now => {
      if (!this.playing) return;
      this.advance(now);
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  pause() {
    if (!this.playing) return;
    this.playing = false;
    this.onPlaying(false);
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  /** Move on by the time that has passed: a slow display shows fewer frames, not a slower run. */
  advance(now) {
    if (this.wanted !== null) {  // a new run has not come so far yet
      this.last = now;
      return;
    }
    const seconds = this.place === null ? 0 : Math.min((now - this.last) / 1000, 0.5);
    this.last = now;
    // Within single layers the place is kept between the frames, which the shown time is not.
    if (this.place === null || this.shown !== this.time) this.place = this.axis.place(this.time);
    this.place = Math.min(this.place + seconds * this.speed / WHOLE, this.axis.place(this.reached));
    const time = this.axis.time(this.place);
    this.time = Math.min(this.whole ? Math.floor(time / this.every + 1e-9) * this.every : time, this.reached);
    this.shown = this.time;
    this.onTime(this.time);
    if (this.time >= this.end - 1e-9) this.pause();
  }

  /** The last time that will be there: a run that was stopped ends early. */
  get end() {
    return this.complete ? this.reached : this.duration;
  }
}
