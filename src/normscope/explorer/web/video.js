// A run as a WebM video: pictures side by side with titles, every frame at its exact time, however long it takes to draw.

const SIDE = 720, TITLE = 40, CAPTION = 36, GAP = 16;  // pixels
const WAITING = 4;  // frames before the encoder
const CODEC = "vp8";  // keeps up without a graphics card

/** Why this browser cannot make a video, in a plain sentence; "" where it can. */
export function videoProblem() {
  if (typeof VideoEncoder === "function" && typeof VideoFrame === "function") return "";
  const instead = "Pictures can be saved as PNG or SVG.";
  if (!isSecureContext) return `Browsers make videos only of pages from this computer or over HTTPS. ${instead}`;
  return `This browser cannot make WebM videos; Chromium, Chrome, Edge and Firefox can. ${instead}`;
}

/**
 * Record `frames` frames and resolve to a blob. `panels`: {title, layers()} with the canvases of a picture, painted now,
 * lowest first; `show(frame)` brings a frame onto them and may be asynchronous; `caption(frame)` is a text below; `colours`
 * {paper, ink}; `rate` in frames a second; `onProgress(share)`; an aborted `signal` rejects with AbortError.
 */
export async function record({ panels, frames, show, colours, caption, rate = 30, onProgress, signal }) {
  const problem = videoProblem();
  if (problem) throw new Error(problem);
  await show(0);
  const sheet = createSheet(panels, colours), { width, height } = sheet.canvas, blocks = [];
  let failure = null;
  const encoder = new VideoEncoder({
    output: piece => {
      const data = new Uint8Array(piece.byteLength);
      piece.copyTo(data);
      blocks.push({ data, time: Math.round(piece.timestamp / 1000), key: piece.type === "key" });
    },
    error: error => { failure = error; },
  });
  try {
    encoder.configure({ codec: CODEC, width, height, bitrate: 8e6, framerate: rate });
    for (let frame = 0; frame < frames; frame++) {
      signal?.throwIfAborted();
      await show(frame);
      sheet.paint(caption?.(frame) ?? "");
      const picture = new VideoFrame(sheet.canvas, { timestamp: 1e6 * frame / rate, duration: 1e6 / rate });
      encoder.encode(picture, { keyFrame: frame % Math.ceil(2 * rate) === 0 });
      picture.close();
      do await new Promise(done => setTimeout(done)); while (encoder.encodeQueueSize > WAITING && !failure);
      if (failure) throw failure;
      onProgress?.((frame + 1) / frames);
    }
    await encoder.flush();
  } catch (error) {
    throw failure ? new Error(`The browser's video encoder failed: ${failure.message}`) : error;
  } finally {
    if (encoder.state !== "closed") encoder.close();
  }
  signal?.throwIfAborted();
  return new Blob(webm(blocks, { width, height, duration: 1000 * frames / rate }), { type: "video/webm" });
}

/** A canvas with all panels side by side, below their titles. */
function createSheet(panels, colours) {
  const sizes = panels.map(({ layers }) => { const { width, height } = layers().at(-1); return { width, height }; });
  const scale = Math.min(1, ...sizes.map(({ width, height }) => SIDE / Math.max(width, height)));
  const even = value => 2 * Math.ceil(value / 2);  // as encoders want it
  const lefts = [GAP];
  for (const { width } of sizes) lefts.push(lefts.at(-1) + width * scale + GAP);
  const canvas = document.createElement("canvas"), bottom = TITLE + scale * Math.max(...sizes.map(({ height }) => height));
  canvas.width = even(lefts.at(-1));
  canvas.height = even(bottom + CAPTION);
  const pen = canvas.getContext("2d");
  return {
    canvas,
    paint(caption) {
      pen.fillStyle = colours.paper;
      pen.fillRect(0, 0, canvas.width, canvas.height);
      pen.fillStyle = colours.ink;
      pen.textBaseline = "middle";
      panels.forEach(({ title, layers }, k) => {
        const { width, height } = sizes[k];
        for (const layer of layers()) pen.drawImage(layer, lefts[k], TITLE, width * scale, height * scale);
        pen.font = "bold 18px system-ui, sans-serif";
        pen.fillText(title, lefts[k], TITLE / 2, width * scale);
      });
      pen.font = "16px system-ui, sans-serif";
      pen.fillText(caption, GAP, bottom + CAPTION / 2, canvas.width - 2 * GAP);
    },
  };
}

// The WebM container (Matroska, RFC 9559): elements are an id, a size and their contents; times are in milliseconds.
const bytes = text => new TextEncoder().encode(text);
const sizeOf = parts => parts.reduce((sum, part) => sum + part.length, 0);

/** A whole number in `count` bytes, the highest first. */
function whole(value, count = 8) {
  const made = new Uint8Array(count);
  for (let k = count - 1, left = value; k >= 0; k--, left = Math.floor(left / 256)) made[k] = left % 256;
  return made;
}

function float(value) {
  const made = new DataView(new ArrayBuffer(8));
  made.setFloat64(0, value);
  return new Uint8Array(made.buffer);
}

/** An element as a list of byte arrays; its size always takes eight bytes, of which the first says so. */
function box(id, ...contents) {
  const parts = contents.flat(), size = whole(sizeOf(parts));
  size[0] = 1;
  return [whole(id, Math.ceil(id.toString(16).length / 2)), size, ...parts];
}

/** The parts of a file with these frames ({data, time, key}, in order, the first of them a key frame). */
function webm(blocks, { width, height, duration }) {
  const groups = [];
  for (const block of blocks) (block.key ? groups[groups.push([]) - 1] : groups.at(-1)).push(block);
  const clusters = groups.map(group => box(0x1F43B675, box(0xE7, whole(group[0].time)), group.map(({ data, time, key }) =>
    box(0xA3, [Uint8Array.of(0x81), whole(time - group[0].time, 2), Uint8Array.of(key ? 0x80 : 0), data])).flat()));
  const program = bytes("normscope"), picture = box(0xE0, box(0xB0, whole(width)), box(0xBA, whole(height)));
  const info = box(0x1549A966, box(0x2AD7B1, whole(1e6)), box(0x4489, float(duration)), box(0x4D80, program), box(0x5741, program));
  const kind = [box(0x9C, whole(0)), box(0x83, whole(1)), box(0x86, bytes("V_VP8"))].flat();
  const tracks = box(0x1654AE6B, box(0xAE, box(0xD7, whole(1)), box(0x73C5, whole(1)), kind, picture));
  // Where key frames are, so that players can jump: as long with the true places as without any.
  const cues = places => box(0x1C53BB6B, groups.flatMap(([{ time }], k) =>
    box(0xBB, box(0xB3, whole(time)), box(0xB7, box(0xF7, whole(1)), box(0xF1, whole(places[k] ?? 0))))));
  const places = [sizeOf(info) + sizeOf(tracks) + sizeOf(cues([]))];
  for (const cluster of clusters) places.push(places.at(-1) + sizeOf(cluster));
  const head = box(0x1A45DFA3, box(0x4286, whole(1)), box(0x42F7, whole(1)), box(0x42F2, whole(4)), box(0x42F3, whole(8)),
    box(0x4282, bytes("webm")), box(0x4287, whole(4)), box(0x4285, whole(2)));
  return [...head, ...box(0x18538067, info, tracks, cues(places), clusters.flat())];
}
