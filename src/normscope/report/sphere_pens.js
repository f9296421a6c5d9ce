// Pens draw lines, discs and texts in pixels: on a 2D canvas, or as SVG text with the same picture.

const FONTS = ["12px system-ui, sans-serif", "bold 12px system-ui, sans-serif"];
const measured = [new Map(), new Map()];  // widths of texts, plain and bold

function textWidth(pen, text, bold) {
  const known = measured[Number(bold)];
  if (!known.has(text)) {
    pen.font = FONTS[Number(bold)];
    known.set(text, pen.measureText(text).width);
  }
  return known.get(text);
}

/** Draws on a 2D canvas; lines of one style are stroked together, since strokes take the time. */
export class CanvasPen {
  #context;
  #lines = new Map();  // style → {colour, opacity, width, path}

  constructor(canvas) {
    this.#context = canvas.getContext("2d");
  }

  begin(width, height, ratio) {
    this.#context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.#context.clearRect(0, 0, width, height);
    this.#context.lineJoin = "round";
    this.#context.textBaseline = "middle";
  }

  line(x, y, toX, toY, colour, opacity, width) {
    const style = `${colour} ${opacity} ${width}`;
    let same = this.#lines.get(style);
    if (!same) this.#lines.set(style, same = { colour, opacity, width, path: new Path2D() });
    same.path.moveTo(x, y);
    same.path.lineTo(toX, toY);
  }

  /** A filled disc, a ring, or both: without a colour there is no filling or no edge. */
  disc(x, y, radius, fill, opacity, edge, width) {
    this.end();
    this.#context.globalAlpha = opacity;
    this.#context.beginPath();
    this.#context.arc(x, y, radius, 0, 2 * Math.PI);
    if (fill) {
      this.#context.fillStyle = fill;
      this.#context.fill();
    }
    if (edge) {
      this.#context.strokeStyle = edge;
      this.#context.lineWidth = width;
      this.#context.stroke();
    }
  }

  text(x, y, text, bold, colour, halo) {
    this.end();
    this.#context.globalAlpha = 1;
    this.#context.font = FONTS[Number(bold)];
    this.#context.strokeStyle = halo;
    this.#context.lineWidth = 3;
    this.#context.strokeText(text, x, y);
    this.#context.fillStyle = colour;
    this.#context.fillText(text, x, y);
  }

  width(text, bold) {
    return textWidth(this.#context, text, bold);
  }

  /** Lines so far: what is drawn later is above them. */
  end() {
    if (!this.#lines.size) return;
    for (const { colour, opacity, width, path } of this.#lines.values()) {
      this.#context.strokeStyle = colour;
      this.#context.globalAlpha = opacity;
      this.#context.lineWidth = width;
      this.#context.stroke(path);
    }
    this.#lines.clear();
  }
}

const escaped = text => text.replace(/[&<>"]/g, letter => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);
const short = number => String(Math.round(100 * number) / 100);

/** Collects the same drawing as SVG. */
export class SvgPen {
  #shapes = [];
  #lines = new Map();  // style → path
  #measure = document.createElement("canvas").getContext("2d");

  line(x, y, toX, toY, colour, opacity, width) {
    const style = `stroke="${colour}" stroke-opacity="${short(opacity)}" stroke-width="${width}"`;
    this.#lines.set(style, `${this.#lines.get(style) ?? ""}M${short(x)} ${short(y)}L${short(toX)} ${short(toY)}`);
  }

  disc(x, y, radius, fill, opacity, edge, width, index) {
    this.end();
    const place = `cx="${short(x)}" cy="${short(y)}" r="${short(radius)}" opacity="${short(opacity)}"`;
    const line = edge ? ` stroke="${edge}" stroke-width="${width}"` : "";
    const point = index === undefined ? "" : ` data-point="${index}"`;
    this.#shapes.push(`<circle${point} ${place} fill="${fill || "none"}"${line}/>`);
  }

  text(x, y, text, bold, colour, halo) {
    this.end();
    const place = `x="${short(x)}" y="${short(y)}"`, weight = bold ? ' font-weight="bold"' : "";
    this.#shapes.push(`<text ${place} fill="${colour}" stroke="${halo}"${weight}>${escaped(text)}</text>`);
  }

  width(text, bold) {
    return textWidth(this.#measure, text, bold);
  }

  end() {
    for (const [style, path] of this.#lines) this.#shapes.push(`<path d="${path}" ${style} fill="none"/>`);
    this.#lines.clear();
  }

  /** The picture as a file: SVG text with a title, on paper of a colour. */
  finish(width, height, title, paper) {
    this.end();
    const isText = shape => shape.startsWith("<text"), letters = 'font-family="system-ui, sans-serif" font-size="12"';
    const halo = 'dominant-baseline="central" paint-order="stroke" stroke-width="3" stroke-linejoin="round"';
    const size = `viewBox="0 0 ${width} ${height}" width="${width}" height="${height}"`;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size} role="img"><title>${escaped(title)}</title>`
      + `<rect width="100%" height="100%" fill="${paper}"/>${this.#shapes.filter(shape => !isText(shape)).join("")}`
      + `<g ${letters} ${halo}>${this.#shapes.filter(isText).join("")}</g></svg>`;
  }
}
