// A watched run on the page: layers × time as far as it was measured, to which later blocks of probes are appended.

/** Little-endian float32 in base64 as a Float32Array. */
export function decodeFloats(text) {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0)), view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length / 4 }, (_, at) => view.getFloat32(4 * at, true));
}

function joined(before, after) {
  const all = new Float32Array(before.length + after.length);
  all.set(before);
  all.set(after, before.length);
  return all;
}

/**
 * The numbers of a watched run. `about` is its entry in the list of runs. `add(data)` takes what the server sends, or an export
 * holds, from block `data.first` on; `query()` is what to ask next; values of a map are columns × rows, a column being a block.
 */
export class WatchedRun {
  constructor(about) {
    Object.assign(this, { id: about.id, name: about.name, summary: about.summary ?? "", problem: about.problem ?? null });
    Object.assign(this, { state: "", epoch: "", block: 1, probes: 0, steps: [], alarms: [], alarmsBefore: 0 });
    Object.assign(this, { curves: new Map(), maps: new Map(), heads: new Map(), headBlock: 0 });
    if (about.data) this.add(about.data);
  }

  /** The query that asks for what came after the last block, which itself may have grown. */
  query() {
    const alarms = this.alarmsBefore + this.alarms.length;
    return new URLSearchParams({ epoch: this.epoch, after: Math.max(this.steps.length - 1, 0), alarms }).toString();
  }

  add(data) {
    const { first } = data;
    this.steps = [...this.steps.slice(0, first), ...data.steps];
    this.curves = new Map(data.curves.map(curve => {
      const before = first ? this.curves.get(curve.name) : null;
      const numbers = name => [...(before?.[name].slice(0, first) ?? []), ...curve[name].map(value => value ?? NaN)];
      return [curve.name, { ...curve, mean: numbers("mean"), least: numbers("least"), largest: numbers("largest") }];
    }));
    this.maps = new Map(data.maps.map(map => {
      const before = first ? this.maps.get(map.name).values.subarray(0, first * map.rows.length) : new Float32Array(0);
      return [map.name, { ...map, values: joined(before, decodeFloats(map.values)) }];
    }));
    const known = data.epoch === this.epoch ? this.alarms.slice(0, Math.max(data.alarmsBefore - this.alarmsBefore, 0)) : [];
    this.alarmsBefore = data.alarmsBefore - known.length;
    this.alarms = [...known, ...data.alarms];
    Object.assign(this, { state: data.state, epoch: data.epoch, block: data.block, probes: data.probes });
    this.headBlock = data.headBlock ?? data.block;
    for (const [layer, heads] of Object.entries(data.layers ?? {})) this.addHeads(Number(layer), heads);
  }

  /** The heads of a layer over time: `{steps, heads, values: {column: Float32Array of columns × heads}}`. */
  addHeads(layer, { steps, heads, values }) {
    const decoded = Object.fromEntries(Object.entries(values).map(([name, text]) => [name, decodeFloats(text)]));
    this.heads.set(layer, { steps, heads, values: decoded, epoch: this.epoch, probes: this.probes });
  }

  /** The column in which a step lies: the first whose last step is not before it. */
  columnOf(step) {
    const at = this.steps.findIndex(last => last >= step);
    return at < 0 ? this.steps.length - 1 : at;
  }

  /** The values of a map, rows × columns. */
  grid(name) {
    const { rows, values } = this.maps.get(name), columns = this.steps.length;
    const length = rows.length * columns;
    return Float64Array.from({ length }, (_, at) => values[(at % columns) * rows.length + Math.floor(at / columns)]);
  }

  /** The values of a row of a map, one for each column. */
  row(name, row) {
    const { rows, values } = this.maps.get(name);
    return Float64Array.from(this.steps, (_, column) => values[column * rows.length + row]);
  }

  /** The row of a map that has this name, or belongs to the same layer; else the last. */
  rowOf(name, text) {
    const { rows } = this.maps.get(name), exact = rows.indexOf(text);
    const near = rows.findIndex(row => Number.parseInt(row, 10) === Number.parseInt(text, 10));
    return exact >= 0 ? exact : near >= 0 ? near : rows.length - 1;
  }
}
