// Files that a reader saves: pictures as SVG and PNG, tables as CSV.

const INLINED = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "stroke-opacity",
  "opacity", "font-family", "font-size", "font-style", "font-weight", "text-anchor", "dominant-baseline", "paint-order",
  "display", "visibility",
];

/** Offer a blob as a file of that name. */
export function download(name, blob) {
  const link = document.createElement("a"), url = URL.createObjectURL(blob);
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

/** A blob of CSV (RFC 4180): a line of column names, then rows, an array of values each. Numbers are whole to the last bit;
 * an apostrophe stands before a text that a spreadsheet would run as a formula. */
export function csvBlob(columns, rows) {
  const cell = value => {
    const plain = value === null || value === undefined ? "" : String(value);
    const text = typeof value === "string" && /^[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/.test(value) ? `'${plain}` : plain;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll("\"", "\"\"")}"` : text;
  };
  return new Blob([[columns, ...rows].map(row => Array.from(row, cell).join(",") + "\r\n").join("")], { type: "text/csv" });
}

/** The text of an SVG file that looks like the element on the page does, on paper of that colour. */
export function svgText(node, paper) {
  const { width, height } = node.getBoundingClientRect(), copy = node.cloneNode(true);
  const originals = [node, ...node.querySelectorAll("*")], copies = [copy, ...copy.querySelectorAll("*")];
  originals.forEach((original, k) => {
    const style = getComputedStyle(original);
    for (const name of INLINED) if (style.getPropertyValue(name)) copies[k].setAttribute(name, style.getPropertyValue(name));
    copies[k].removeAttribute("class");
    copies[k].removeAttribute("style");
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  if (!copy.hasAttribute("viewBox")) copy.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const [x, y, w, h] = copy.getAttribute("viewBox").split(/[\s,]+/);
  const sheet = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ x, y, width: w, height: h, fill: paper })) sheet.setAttribute(name, value);
  copy.prepend(sheet);
  return new XMLSerializer().serializeToString(copy);
}

/** A blob of an SVG file from its text. */
export function svgBlob(text) {
  return new Blob([text], { type: "image/svg+xml" });
}

/** A PNG blob of an SVG text, `scale` pixels for each unit. */
export async function pngOfSvg(text, scale = 2) {
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await picture.decode();
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return pngOfCanvas(canvas);
}

function pngOfCanvas(canvas) {
  return new Promise((resolve, reject) => {
    canvas.toBlob(blob => blob ? resolve(blob) : reject(new Error("the picture is too large for this browser")), "image/png");
  });
}
