// Colours as bytes.

/** The bytes red, green, blue of a colour "#rrggbb". */
export function rgb(colour) {
  return [1, 3, 5].map(k => parseInt(colour.slice(k, k + 2), 16));
}

/** The bytes of the colour at a share from 0 to 1 of the way along a list of colours. */
export function stepColour(steps, share) {
  const place = Math.min(1, Math.max(0, share)) * (steps.length - 1), low = Math.min(Math.floor(place), steps.length - 2);
  const [start, end] = [rgb(steps[low]), rgb(steps[low + 1])];
  return start.map((byte, k) => Math.round(byte + (place - low) * (end[k] - byte)));
}
