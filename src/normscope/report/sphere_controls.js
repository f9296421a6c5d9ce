// How a user turns a sphere and moves its points: pointer, touch, wheel and keys.

const PIXELS = 150;  // of a drag, for a radian
const POINTER = 14, FINGER = 24;  // pixels from a point that still are on it
const KEY_TURN = 0.1, KEY_MOVE = 0.05;  // radians

/** Listeners of a sphere until `signal` is aborted. */
export function addControls(sphere, signal) {
  addPointer(sphere, signal);
  addKeys(sphere, signal);
}

function addPointer(sphere, signal) {
  const { host } = sphere, held = new Map();
  const on = (name, listener, more) => host.addEventListener(name, listener, { signal, ...more });
  const places = event => {
    const { left, top } = host.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  };
  const draggable = (event, reach) => sphere.movable ? sphere.pick(...places(event), reach, true) : null;
  const twoFingers = () => {
    const [a, b] = held.values(), apart = Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
    return [(a.clientX + b.clientX) / 2, (a.clientY + b.clientY) / 2, Math.max(1, apart)];
  };
  const turn = (across, down, zoom = 1) => {
    const { azimuth, elevation, zoom: before } = sphere.camera;
    sphere.moveCamera({ azimuth: azimuth - across / PIXELS, elevation: elevation + down / PIXELS, zoom: before * zoom });
  };
  let fingers = null, dragged = -1;

  on("pointerdown", event => {
    held.set(event.pointerId, event);
    host.setPointerCapture(event.pointerId);
    const picked = held.size === 1 ? draggable(event, event.pointerType === "touch" ? FINGER : POINTER) : null;
    dragged = picked ? picked.index : -1;
    sphere.chosen = dragged;
    fingers = held.size === 2 ? twoFingers() : null;
    if (event.pointerType === "touch") sphere.hover(fingers ? null : sphere.pick(...places(event), FINGER), event);
  });
  // A finger on a point drags it; elsewhere a page can be scrolled.
  on("touchstart", event => {
    if (event.touches.length > 1 || draggable(event.touches[0], FINGER)) event.preventDefault();
  }, { passive: false });
  for (const end of ["pointerup", "pointercancel"]) on(end, event => {
    held.delete(event.pointerId);
    if (dragged < 0) return;
    dragged = sphere.chosen = -1;
    sphere.draw();
  });
  on("pointermove", event => {
    const before = held.get(event.pointerId);
    if (!before) return sphere.hover(sphere.pick(...places(event), POINTER), event);
    held.set(event.pointerId, event);
    if (held.size === 2 && fingers) {
      const [x, y, apart] = fingers;
      fingers = twoFingers();
      turn(fingers[0] - x, fingers[1] - y, fingers[2] / apart);
    } else if (dragged >= 0) sphere.dragTo(dragged, ...places(event));
    else if (held.size === 1) turn(event.clientX - before.clientX, event.clientY - before.clientY);
    sphere.hover(null, event);
  });
  on("pointerleave", event => {
    if (event.pointerType !== "touch") sphere.hover(null, event);  // what a finger has tapped stays when it is lifted
  });
  on("wheel", event => {
    if (!event.shiftKey && !event.ctrlKey) return;
    event.preventDefault();
    sphere.moveCamera({ zoom: sphere.camera.zoom * Math.exp(-(event.deltaY || event.deltaX) / 300) });
  }, { passive: false });
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };

/** Keys have three modes: they turn the sphere, choose a point after Enter, and move it after Enter again; Escape goes back. */
function addKeys(sphere, signal) {
  let mode = "turn";
  const degrees = angle => `${Math.round(angle * 180 / Math.PI)}°`;
  const where = index => {
    const [x, y, z] = sphere.placeOf(index);
    return `elevation ${degrees(Math.asin(z / Math.hypot(x, y, z)))}, azimuth ${degrees(Math.atan2(y, x))}`;
  };

  function choose(index) {
    sphere.chosen = index;
    const [x, y, z] = sphere.placeOf(index);
    if (sphere.project([x, y, z])[2] < 0) {
      sphere.moveCamera({ azimuth: Math.atan2(y, x), elevation: Math.asin(z / Math.hypot(x, y, z)) });
    }
    sphere.announce(`${sphere.nameOf(index)}, ${where(index)}.${sphere.movable ? " Enter: arrow keys move it." : ""}`);
    sphere.draw();
  }

  /** The nearest point in a direction of the screen, on the front. */
  function neighbour([right, up]) {
    const [x, y] = sphere.project(sphere.placeOf(sphere.chosen));
    let best = -1, least = Infinity;
    for (let i = 0; i < sphere.count; i++) {
      const [px, py, depth] = sphere.project(sphere.placeOf(i)), along = right * (px - x) - up * (py - y);
      const far = Math.hypot(px - x, py - y) + 2 * Math.abs(up * (px - x) + right * (py - y));
      if (i !== sphere.chosen && depth >= 0 && along > 0.5 && far < least) [best, least] = [i, far];
    }
    return best;
  }

  function leave(text) {
    mode = "turn";
    sphere.chosen = -1;
    sphere.announce(text);
    sphere.draw();
  }

  function turn(event) {
    const { azimuth, elevation, zoom } = sphere.camera, arrow = ARROWS[event.key];
    if (arrow) sphere.moveCamera({ azimuth: azimuth - KEY_TURN * arrow[0], elevation: elevation + KEY_TURN * arrow[1] });
    else if (event.key === "+" || event.key === "=") sphere.moveCamera({ zoom: 1.2 * zoom });
    else if (event.key === "-") sphere.moveCamera({ zoom: zoom / 1.2 });
    else if (event.key === "0") sphere.resetCamera();
    else if (event.key === "Enter" && sphere.count) {
      mode = "choose";
      const { width, height } = sphere.host.getBoundingClientRect();
      const middle = sphere.pick(width / 2, height / 2, Infinity, true);
      choose(sphere.chosen >= 0 ? sphere.chosen : middle ? sphere.numberOf(middle) : 0);
    } else return false;
    return true;
  }

  function chooseKey(event) {
    const step = event.key === "Tab" ? (event.shiftKey ? -1 : 1) : 0, next = sphere.chosen + step;
    if (ARROWS[event.key]) {
      const index = neighbour(ARROWS[event.key]);
      if (index >= 0) choose(index);
    } else if (step && next >= 0 && next < sphere.count) choose(next);
    else if (step) {  // past the last point, Tab leaves the sphere
      leave("");
      return false;
    } else if (event.key === "Enter" && sphere.movable) {
      mode = "move";
      sphere.announce(`Arrow keys move ${sphere.nameOf(sphere.chosen)}, with Shift farther. Escape ends.`);
    } else if (event.key === "Escape") leave("Arrow keys rotate the sphere.");
    else return false;
    return true;
  }

  function move(event) {
    const arrow = ARROWS[event.key];
    if (arrow) {
      const place = sphere.placeOf(sphere.chosen), length = Math.hypot(...place), far = KEY_MOVE * (event.shiftKey ? 4 : 1);
      const [right, up] = sphere.screen();
      sphere.moveTo(sphere.chosen, place.map((value, k) => value / length + far * (arrow[0] * right[k] + arrow[1] * up[k])));
      sphere.announce(where(sphere.chosen));
    } else if (event.key === "Enter" || event.key === "Escape") {
      mode = "choose";
      choose(sphere.chosen);
    } else return false;
    return true;
  }

  sphere.host.addEventListener("keydown", event => {
    if (event.target !== sphere.host || event.altKey || event.metaKey || event.ctrlKey) return;
    if (mode !== "turn" && (sphere.chosen < 0 || sphere.chosen >= sphere.count)) mode = "turn";
    if (({ turn, choose: chooseKey, move })[mode](event)) {
      event.preventDefault();
      event.stopPropagation();
    }
  }, { signal });
  sphere.host.addEventListener("blur", () => { if (mode !== "turn") leave(""); }, { signal });
}
