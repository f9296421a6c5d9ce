// Points and lines as typed arrays, painted by WebGL or by a pen. Nothing is allocated for a frame.

const FAR = 0.45;  // how much of its opacity a mark keeps at the back of the sphere

/** Points or lines: `places` (3 numbers each), `shades` (4 bytes each), `sizes` of points in pixels, `pairs` of ends of lines. */
export class Batch {
  constructor(lines) {
    this.lines = lines;
    this.grow = 1;  // a factor on all places
    this.places = new Float32Array(0);
    this.shades = new Uint8Array(0);
    this.sizes = lines ? null : new Float32Array(0);
    this.pairs = null;
    this.changed = { places: true, shades: true, sizes: true, pairs: true };
  }

  get count() {
    return this.places.length / 3;
  }

  /** New contents of some arrays; an array that was changed in place is given again. */
  set(arrays) {
    for (const name in arrays) {
      this[name] = arrays[name];
      this.changed[name] = true;
    }
  }
}

/** Where place k of an array falls: x and y in pixels and the depth, at most 1 towards the camera, go to `out`. */
export function project(view, places, k, grow, out) {
  const { rows, scale } = view, x = grow * places[3 * k], y = grow * places[3 * k + 1], z = grow * places[3 * k + 2];
  out[0] = view.width / 2 + scale * (rows[0] * x + rows[1] * y + rows[2] * z);
  out[1] = view.height / 2 - scale * (rows[3] * x + rows[4] * y + rows[5] * z);
  out[2] = rows[6] * x + rows[7] * y + rows[8] * z;
  return out;
}

/** The share of opacity at a depth, in 64 steps, so that neighbouring lines have one style. */
function opacityAt(alpha, depth) {
  const near = 0.5 + 0.5 * Math.min(1, Math.max(-1, depth));
  return Math.round(64 * alpha / 255 * (FAR + (1 - FAR) * near)) / 64;
}

const hex = Array.from({ length: 256 }, (_, k) => k.toString(16).padStart(2, "0"));
const from = new Float64Array(3), to = new Float64Array(3);

/** Paints batches without WebGL: lines first, then points, far ones before near ones. */
export function paintBatches(pen, view, batches) {
  for (const batch of batches) if (batch.grow) (batch.lines ? penLines : penPoints)(pen, view, batch);
}

function shadeOf({ shades }, k) {
  return `#${hex[shades[4 * k]]}${hex[shades[4 * k + 1]]}${hex[shades[4 * k + 2]]}`;
}

function penLines(pen, view, batch) {
  const ends = batch.pairs?.length ?? batch.count;
  for (let k = 0; k < ends; k += 2) {
    const [a, b] = batch.pairs ? [batch.pairs[k], batch.pairs[k + 1]] : [k, k + 1];
    project(view, batch.places, a, batch.grow, from);
    project(view, batch.places, b, batch.grow, to);
    if (!Number.isFinite(from[0] + to[0])) continue;
    const opacity = opacityAt((batch.shades[4 * a + 3] + batch.shades[4 * b + 3]) / 2, (from[2] + to[2]) / 2);
    pen.line(from[0], from[1], to[0], to[1], shadeOf(batch, b), opacity, 1);
  }
}

function penPoints(pen, view, batch) {
  const depths = Float32Array.from({ length: batch.count }, (_, k) => project(view, batch.places, k, batch.grow, to)[2]);
  for (const k of Uint32Array.from(depths.keys()).sort((a, b) => depths[a] - depths[b])) {
    project(view, batch.places, k, batch.grow, to);
    if (!Number.isFinite(to[0] + to[1])) continue;
    const radius = batch.sizes[k] * Math.sqrt(view.zoom) / 2, opacity = opacityAt(batch.shades[4 * k + 3], to[2]);
    pen.disc(to[0], to[1], radius, shadeOf(batch, k), opacity, "", 0, k);
  }
}

const VERTEX = `
  attribute vec3 place; attribute vec4 shade; attribute float size;
  uniform mat3 turn; uniform vec2 zoom; uniform float ratio; uniform float grow;
  varying vec4 colour; varying float edge;
  void main() {
    vec3 seen = turn * (grow * place);
    gl_Position = vec4(seen.xy * zoom, -0.3 * clamp(seen.z, -3.0, 3.0), 1.0);
    gl_PointSize = size * ratio;
    edge = 1.0 / max(size * ratio, 1.0);
    float opacity = shade.a * mix(${FAR}, 1.0, 0.5 + 0.5 * clamp(seen.z, -1.0, 1.0));
    colour = vec4(shade.rgb * opacity, opacity);
  }`;
const FRAGMENT = `
  precision mediump float; varying vec4 colour; varying float edge; uniform bool round;
  void main() {
    float far = round ? length(gl_PointCoord - 0.5) : 0.0;
    if (far > 0.5) discard;
    gl_FragColor = colour * (round ? 1.0 - smoothstep(0.5 - edge, 0.5, far) : 1.0);
  }`;

/** A painter of batches on a canvas by WebGL, or null where there is none. */
export function createPainter(canvas, batches) {
  const gl = canvas.getContext("webgl", { antialias: true, failIfMajorPerformanceCaveat: true })
    ?? canvas.getContext("webgl", { antialias: false });  // without a graphics card, smooth lines take most of the time
  if (!gl || gl.isContextLost()) return null;
  const { ARRAY_BUFFER, ELEMENT_ARRAY_BUFFER } = gl;
  gl.getExtension("OES_element_index_uint");
  const program = gl.createProgram();
  for (const [kind, text] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
    const shader = gl.createShader(kind);
    gl.shaderSource(shader, text);
    gl.compileShader(shader);
    gl.attachShader(program, shader);
  }
  gl.linkProgram(program);
  gl.useProgram(program);
  gl.enable(gl.BLEND);
  gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  gl.depthFunc(gl.LEQUAL);
  gl.clearColor(0, 0, 0, 0);
  const [place, shade, size] = ["place", "shade", "size"].map(name => gl.getAttribLocation(program, name));
  const uniforms = ["turn", "zoom", "ratio", "grow", "round"].map(name => gl.getUniformLocation(program, name));
  const [turn, zoom, ratio, grow, round] = uniforms;
  gl.enableVertexAttribArray(place);
  gl.enableVertexAttribArray(shade);
  const stored = batches.map(() => ({ places: null, shades: null, sizes: null, pairs: null }));
  const lengths = batches.map(() => ({ places: -1, shades: -1, sizes: -1, pairs: -1 }));
  for (const batch of batches) for (const name in batch.changed) batch.changed[name] = true;

  function upload(k, name, target) {
    const batch = batches[k], array = batch[name];
    if (!array) return;
    gl.bindBuffer(target, stored[k][name] ??= gl.createBuffer());
    if (!batch.changed[name]) return;
    if (lengths[k][name] === array.length) gl.bufferSubData(target, 0, array);
    else gl.bufferData(target, array, gl.DYNAMIC_DRAW);
    lengths[k][name] = array.length;
    batch.changed[name] = false;
  }

  function paintBatch(k) {
    const batch = batches[k];
    upload(k, "places", ARRAY_BUFFER);
    gl.vertexAttribPointer(place, 3, gl.FLOAT, false, 0, 0);
    upload(k, "shades", ARRAY_BUFFER);
    gl.vertexAttribPointer(shade, 4, gl.UNSIGNED_BYTE, true, 0, 0);
    if (batch.sizes) {
      upload(k, "sizes", ARRAY_BUFFER);
      gl.enableVertexAttribArray(size);
      gl.vertexAttribPointer(size, 1, gl.FLOAT, false, 0, 0);
    } else gl.disableVertexAttribArray(size);
    gl.uniform1f(grow, batch.grow);
    gl.uniform1i(round, batch.lines ? 0 : 1);
    if (batch.pairs) {
      upload(k, "pairs", ELEMENT_ARRAY_BUFFER);
      gl.drawElements(gl.LINES, batch.pairs.length, gl.UNSIGNED_INT, 0);
    } else gl.drawArrays(batch.lines ? gl.LINES : gl.POINTS, 0, batch.count);
  }

  return {
    paint(view) {
      gl.viewport(0, 0, canvas.width, canvas.height);
      gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
      gl.uniformMatrix3fv(turn, false, view.columns);
      gl.uniform2f(zoom, 2 * view.scale / view.width, 2 * view.scale / view.height);
      gl.uniform1f(ratio, view.ratio * Math.sqrt(view.zoom));
      for (let k = 0; k < batches.length; k++) {
        if (!batches[k].count || !batches[k].grow) continue;
        (batches[k].lines ? gl.disable : gl.enable).call(gl, gl.DEPTH_TEST);
        paintBatch(k);
      }
    },
    dispose() {
      gl.getExtension("WEBGL_lose_context")?.loseContext();
    },
  };
}
