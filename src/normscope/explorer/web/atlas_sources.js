// Where the atlas has its data from: open models, which a server runs, and audits, in the page or from the server.

/** The sources of a page: `[{id, name, kind: "model" | "audit", problem?}]`, models first. */
export function sourcesOf(data) {
  const models = (data.server?.models ?? []).map((name, number) => ({ id: `model:${number}`, number, name, kind: "model" }));
  const audits = data.runs.filter(({ kind }) => kind === "audit").map(({ id, name, data: saved = null, problem = "" }) =>
    ({ id: `run:${id}`, run: id, name, kind: "audit", data: saved, problem }));
  return [...models, ...audits];
}

/**
 * Answers for one side of the atlas from a source. `ask(what, question)` runs a question ("read", "later", "head", "words",
 * "token", "noise") and gives its answer, or null if a newer question of its kind was asked meanwhile.
 */
export function createSource(app, source) {
  const newest = {};
  let audit = source.data ?? null;

  async function askModel(what, question, signal) {
    const { prompt, layer = 0, head = 0, token = -1, noise = null } = question;
    const body = { prompt, layer, head, token, noise };
    return app.request(`/api/models/${source.number}/${what}`, { method: "POST", body, signal });
  }

  async function askAudit(what, { layer, head }) {
    if (source.problem) throw new Error(source.problem);
    audit ??= await app.request(`/api/runs/${source.run}`);
    const { prompt, maps, missing, token } = audit;
    const kept = maps.find((map) => map.layer === layer && map.head === head);
    const answers = {
      read: () => audit,
      head: () => (kept ? { ...kept, tokens: prompt.tokens, noisy: null, queries: [], norms: [] } : { missing: missing.map }),
      words: () => ({ rows: [], missing: missing.words }),
      token: () => (token ? { ...token, position: null, next: [], note: missing.token } : { missing: missing.token }),
      noise: () => null,
    };
    return (answers[what] ?? answers.read)();
  }

  async function ask(what, question) {
    const kind = what === "later" ? "read" : what;
    newest[kind]?.abort();
    const mine = new AbortController();
    newest[kind] = mine;
    try {
      const answer = await (source.kind === "model" ? askModel : askAudit)(what, question, mine.signal);
      return newest[kind] === mine ? answer : null;
    } catch (error) {
      if (newest[kind] !== mine || mine.signal.aborted) return null;
      throw error;
    }
  }

  return { ...source, ask, forget: () => { for (const each of Object.values(newest)) each.abort(); } };
}
