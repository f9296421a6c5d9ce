// Points, trails and a wire sphere in three dimensions, by WebGL: drag or arrow keys rotate, shift and wheel or + and − zoom.
// normscopeSphere(host, scene, colours, tip) draws into an element; `scene` comes from report/sphere.py.
function normscopeSphere(host, scene, colours, tip) {
  "use strict";
  const glCanvas = document.createElement("canvas"), flat = document.createElement("canvas");
  host.replaceChildren(glCanvas, flat);
  const gl = glCanvas.getContext("webgl", { antialias: true, preserveDrawingBuffer: true });
  if (!gl) return null;
  const pen = flat.getContext("2d");
  const unpack = text => {
    const bytes = Uint8Array.from(atob(text), one => one.charCodeAt(0));
    return Float32Array.from(new Int16Array(bytes.buffer), one => one / 32767);
  };
  const rgb = colour => [1, 3, 5].map(k => parseInt(colour.slice(k, k + 2), 16) / 255);
  const mixed = share => {
    const steps = colours.steps, place = Math.min(1, Math.max(0, share)) * (steps.length - 1);
    const low = Math.min(Math.floor(place), steps.length - 2);
    const [from, to] = [rgb(steps[low]), rgb(steps[low + 1])];
    return `rgb(${from.map((one, k) => Math.round(255 * (one + (place - low) * (to[k] - one)))).join()})`;
  };
  const clouds = scene.clouds.map(cloud => ({ ...cloud, at: unpack(cloud.points) }));
  const trails = scene.trails.map(trail => ({ ...trail, at: unpack(trail.points) }));

  // Buffers: three numbers of place, four of colour, one of size for every vertex.
  const vertices = [], lines = [];
  const push = (list, at, k, colour, alpha, size) => list.push(at[k], at[k + 1], at[k + 2], ...rgb(colour), alpha, size);
  for (const cloud of clouds) {
    const count = cloud.at.length / 3, few = cloud.marked || count < 1000;
    for (let k = 0; k < cloud.at.length; k += 3) push(vertices, cloud.at, k, cloud.colour, few ? 1 : 0.6, cloud.marked ? 11 : few ? 6 : 3);
    if (!cloud.origins) continue;
    const from = unpack(cloud.origins);
    for (let k = 0; k < from.length; k += 3) { push(lines, from, k, colours.soft, 0.35, 1); push(lines, cloud.at, k, colours.soft, 0.35, 1); }
  }
  const segment = (from, to, alpha) => { push(lines, from, 0, colours.wire, alpha, 1); push(lines, to, 0, colours.wire, alpha, 1); };
  const ring = point => { for (let i = 0; i < 72; i++) segment(point(i * Math.PI / 36), point((i + 1) * Math.PI / 36), 0.8); };
  const r = scene.radius, reach = r || 1;
  for (let k = 0; r && k < 6; k++) {
    const turn = Math.PI * k / 6;
    ring(a => [r * Math.cos(a) * Math.cos(turn), r * Math.cos(a) * Math.sin(turn), r * Math.sin(a)]);
    if (k) ring(a => [r * Math.sin(turn) * Math.cos(a), r * Math.sin(turn) * Math.sin(a), r * Math.cos(turn)]);
  }
  const axes = [[reach, 0, 0], [0, reach, 0], [0, 0, reach]];
  for (const end of axes) segment(r ? end.map(one => -one) : [0, 0, 0], end, 1);

  const shader = (kind, text) => {
    const made = gl.createShader(kind);
    gl.shaderSource(made, text); gl.compileShader(made);
    return made;
  };
  const program = gl.createProgram();
  gl.attachShader(program, shader(gl.VERTEX_SHADER, `
    attribute vec3 place; attribute vec4 colour; attribute float size;
    uniform mat3 turn; uniform vec2 zoom; uniform float ratio; varying vec4 shade;
    void main() {
      vec3 seen = turn * place;
      gl_Position = vec4(seen.xy * zoom, -0.3 * seen.z, 1.0);
      gl_PointSize = size * ratio;
      shade = vec4(colour.rgb, colour.a * mix(0.45, 1.0, 0.5 + 0.5 * clamp(seen.z, -1.0, 1.0)));
    }`));
  gl.attachShader(program, shader(gl.FRAGMENT_SHADER, `
    precision mediump float; varying vec4 shade; uniform bool round;
    void main() {
      if (round && length(gl_PointCoord - 0.5) > 0.5) discard;
      gl_FragColor = vec4(shade.rgb * shade.a, shade.a);
    }`));
  gl.linkProgram(program); gl.useProgram(program);
  gl.enable(gl.BLEND); gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  const buffers = [lines, vertices].map(list => {
    const made = gl.createBuffer();
    gl.bindBuffer(gl.ARRAY_BUFFER, made); gl.bufferData(gl.ARRAY_BUFFER, new Float32Array(list), gl.STATIC_DRAW);
    return made;
  });
  const uniform = name => gl.getUniformLocation(program, name);

  let [elevation, azimuth] = scene.view.map(angle => angle * Math.PI / 180), zoom = 1, width = 0, height = 0, near = null;
  const start = [elevation, azimuth];
  const turned = () => {
    const [se, ce, sa, ca] = [Math.sin(elevation), Math.cos(elevation), Math.sin(azimuth), Math.cos(azimuth)];
    return [[-sa, ca, 0], [-se * ca, -se * sa, ce], [ce * ca, ce * sa, se]];  // right, up, towards the camera
  };
  const spot = (rows, at, k) => {
    const [x, y, z] = rows.map(row => row[0] * at[k] + row[1] * at[k + 1] + row[2] * at[k + 2]);
    const scale = 0.46 * Math.min(width, height) * zoom;
    return [width / 2 + x * scale, height / 2 - y * scale, z];
  };

  function draw() {
    const ratio = window.devicePixelRatio || 1, rows = turned();
    [width, height] = [host.clientWidth, host.clientHeight];
    if (!width) return;
    for (const canvas of [glCanvas, flat]) [canvas.width, canvas.height] = [width * ratio, height * ratio];
    gl.viewport(0, 0, glCanvas.width, glCanvas.height);
    gl.clearColor(0, 0, 0, 0); gl.clear(gl.COLOR_BUFFER_BIT);
    const scale = 0.92 * zoom * Math.min(width, height);
    gl.uniformMatrix3fv(uniform("turn"), false, [0, 1, 2].flatMap(k => rows.map(row => row[k])));
    gl.uniform2f(uniform("zoom"), scale / width, scale / height);
    gl.uniform1f(uniform("ratio"), ratio * Math.sqrt(zoom));
    buffers.forEach((buffer, points) => {
      gl.bindBuffer(gl.ARRAY_BUFFER, buffer);
      [["place", 3, 0], ["colour", 4, 12], ["size", 1, 28]].forEach(([name, count, offset]) => {
        const place = gl.getAttribLocation(program, name);
        if (place < 0) return;
        gl.enableVertexAttribArray(place); gl.vertexAttribPointer(place, count, gl.FLOAT, false, 32, offset);
      });
      gl.uniform1i(uniform("round"), points);
      gl.drawArrays(points ? gl.POINTS : gl.LINES, 0, (points ? vertices : lines).length / 8);
    });
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif"; pen.lineJoin = "round"; pen.textBaseline = "middle";
    const taken = [];
    const write = (text, x, y, bold, colour) => {
      pen.font = `${bold ? "bold " : ""}12px system-ui, sans-serif`;
      const box = [x + 8, y - 8, x + 12 + pen.measureText(text).width, y + 8];
      if (box[2] > width) { const wide = box[2] - box[0]; box[0] = x - 8 - wide; box[2] = x - 8; }
      if (taken.some(other => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) return;
      taken.push(box);
      pen.strokeStyle = colours.paper; pen.lineWidth = 3; pen.strokeText(text, box[0], y);
      pen.fillStyle = colour; pen.fillText(text, box[0], y);
    };
    for (const trail of trails) {
      const spots = trail.steps.map((_, i) => spot(rows, trail.at, 3 * i)), [low, high] = scene.steps;
      pen.lineWidth = 2.5;
      spots.forEach((at, i) => {
        if (!i) return;
        pen.strokeStyle = mixed((trail.steps[i] - low) / (high - low));
        pen.beginPath(); pen.moveTo(spots[i - 1][0], spots[i - 1][1]); pen.lineTo(at[0], at[1]); pen.stroke();
      });
      spots.forEach((at, i) => {
        pen.beginPath(); pen.arc(at[0], at[1], 3 + 4 * i / Math.max(1, spots.length - 1), 0, 7);
        pen.fillStyle = mixed((trail.steps[i] - low) / (high - low)); pen.fill();
        pen.lineWidth = 1; pen.strokeStyle = colours.paper; pen.stroke();
      });
    }
    for (const cloud of clouds) if (cloud.marked) cloud.labels.forEach((text, i) => {
      const [x, y] = spot(rows, cloud.at, 3 * i);
      write(text, x, y, true, colours.ink);
    });
    for (const trail of trails) {
      const [first, last] = [trail.captions[0], trail.captions.at(-1)];
      for (const [i, text] of [first, last, ...trail.captions.slice(1, -1)].filter(Boolean)) {
        const [x, y] = spot(rows, trail.at, 3 * i);
        write(text, x, y, false, colours.ink);
      }
    }
    axes.forEach((end, k) => { const [x, y] = spot(rows, end, 0); write(scene.axes[k], x, y, false, colours.soft); });
    if (near) { pen.beginPath(); pen.arc(near[0], near[1], 9, 0, 7); pen.lineWidth = 2; pen.strokeStyle = colours.ink; pen.stroke(); }
  }

  function hover(event) {
    const box = flat.getBoundingClientRect(), rows = turned(), [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let best = null, least = 14;
    for (const part of [...clouds, ...trails]) {
      for (let i = 0; 3 * i < part.at.length; i++) {
        const [x, y, z] = spot(rows, part.at, 3 * i), far = Math.hypot(x - px, y - py) - (part.steps ? 3 : 0) - z;
        if (far < least) { least = far; best = [x, y, part, i]; }
      }
    }
    near = best;
    const said = best && [best[2].steps ? `${scene.order} ${best[2].steps[best[3]]}` : best[2].name, best[2].labels[best[3]] || ""];
    tip(event, best && { [said[0]]: said[1] });
    draw();
  }

  const held = new Map();
  let apart = 0;
  flat.addEventListener("pointerdown", event => { held.set(event.pointerId, event); flat.setPointerCapture(event.pointerId); });
  for (const end of ["pointerup", "pointercancel"]) flat.addEventListener(end, event => { held.delete(event.pointerId); apart = 0; });
  flat.addEventListener("pointermove", event => {
    const before = held.get(event.pointerId);
    if (!before) return hover(event);
    held.set(event.pointerId, event);
    if (held.size === 2) {
      const [a, b] = [...held.values()], now = Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
      if (apart) zoom = Math.min(20, Math.max(0.5, zoom * now / apart));
      apart = now;
    } else {
      azimuth -= (event.clientX - before.clientX) / 150;
      elevation = Math.min(1.55, Math.max(-1.55, elevation + (event.clientY - before.clientY) / 150));
    }
    near = null; draw();
  });
  flat.addEventListener("pointerleave", event => { near = null; tip(event, null); draw(); });
  flat.addEventListener("wheel", event => {
    if (!event.shiftKey && !event.ctrlKey) return;
    event.preventDefault();
    zoom = Math.min(20, Math.max(0.5, zoom * Math.exp(-(event.deltaY || event.deltaX) / 300)));
    draw();
  }, { passive: false });
  host.addEventListener("keydown", event => {
    const moves = {
      ArrowLeft: () => azimuth += 0.1, ArrowRight: () => azimuth -= 0.1,
      ArrowUp: () => elevation = Math.min(1.55, elevation + 0.1), ArrowDown: () => elevation = Math.max(-1.55, elevation - 0.1),
      "+": () => zoom = Math.min(20, 1.2 * zoom), "=": () => zoom = Math.min(20, 1.2 * zoom), "-": () => zoom = Math.max(0.5, zoom / 1.2),
      "0": () => { [elevation, azimuth] = start; zoom = 1; },
    };
    if (!moves[event.key]) return;
    event.preventDefault(); moves[event.key](); draw();
  });
  draw();
  return { draw, canvases: [glCanvas, flat] };
}
