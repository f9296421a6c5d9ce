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

/** Draws on a 2D canvas; lines of one style that follow each other are stroked together. */
export class CanvasPen {
  #context;
  #style = "";
  #open = false;

  constructor(canvas) {
    this.#context = canvas.getContext("2d");
  }

  begin(width, height, ratio) {
    this.#context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.#context.clearRect(0, 0, width, height);
    this.#context.lineJoin = "round";
    this.#context.textBaseline = "middle";
    this.#style = "";
  }

  line(x, y, toX, toY, colour, opacity, width) {
    const style = `${colour} ${opacity} ${width}`;
    if (style !== this.#style || !this.#open) {
      this.end();
      this.#style = style;
      this.#context.strokeStyle = colour;
      this.#context.globalAlpha = opacity;
      this.#context.lineWidth = width;
      this.#context.beginPath();
      this.#open = true;
    }
    this.#context.moveTo(x, y);
    this.#context.lineTo(toX, toY);
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

  end() {
    if (this.#open) this.#context.stroke();
    this.#open = false;
  }
}

const escaped = text => text.replace(/[&<>"]/g, letter => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);
const short = number => String(Math.round(100 * number) / 100);

/** Collects the same drawing as SVG; `text` of `finish` is the whole file. */
export class SvgPen {
  #shapes = [];
  #style = "";
  #path = "";
  #measure = document.createElement("canvas").getContext("2d");

  line(x, y, toX, toY, colour, opacity, width) {
    const style = `stroke="${colour}" stroke-opacity="${short(opacity)}" stroke-width="${width}"`;
    if (style !== this.#style) this.end();
    this.#style = style;
    this.#path += `M${short(x)} ${short(y)}L${short(toX)} ${short(toY)}`;
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
    if (this.#path) this.#shapes.push(`<path d="${this.#path}" ${this.#style} fill="none"/>`);
    this.#path = this.#style = "";
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
