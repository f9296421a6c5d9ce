// A run of normscope simulate, with whose settings the sphere lab opens.

const SAME = ["tokens", "dim", "start", "delta", "radius", "seed", "beta", "weights", "heads", "causal", "norm", "step", "time"];
const SOLVERS = ["rk4", "midpoint", "euler"];
const MOST_SCHEMES = 4;

/** The lab's state, as texts, of the first simulation among the runs; nothing if there is none. `named`: all named schemes. */
export function simulatedState(runs, named) {
  const about = runs.find(run => run.kind === "simulate")?.configuration;
  if (!about) return {};
  const state = Object.fromEntries(SAME.map(key => [key, about[key]]));
  state.solver = about.layers ? "layers" : SOLVERS.includes(about.solver) ? about.solver : SOLVERS[0];
  state.feedforward = about.feedforward > 0;
  const schemes = about.scheme.slice(0, MOST_SCHEMES).map(values => {
    const known = named.find(scheme => scheme.name === values.name);
    return known && JSON.stringify(known) === JSON.stringify(values) ? values.name : [named[0].name, values];
  });
  state.schemes = schemes.every(scheme => typeof scheme === "string") ? schemes.join(",") : JSON.stringify(schemes);
  const given = Object.entries(state).filter(([, value]) => value !== null && value !== undefined && value !== false);
  return Object.fromEntries(given.map(([key, value]) => [key, String(value)]));
}
