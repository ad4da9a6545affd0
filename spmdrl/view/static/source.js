// Answers to the page's questions: from the server, or from the data that the page itself holds.

export function openSource() {
  const held = document.getElementById("data");
  return held ? new Held(JSON.parse(held.textContent)) : new Served();
}

class Served {
  follows = true;

  async ask(question, params = {}) {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(params)) {
      for (const one of Array.isArray(value) ? value : [value]) query.append(name, one);
    }
    const response = await fetch(`/api/${question}?${query}`);
    if (!response.ok) throw new Error(await response.text());
    return response.json();
  }

  imageUrl(run, name) {
    return name ? `/api/image?run=${run}&name=${name}` : "";
  }
}

class Held {
  follows = false;

  constructor(data) {
    this.data = data;
  }

  imageUrl(run, name) {
    return this.data.images[run][name] ?? "";
  }

  async ask(question, params = {}) {
    const { data } = this;
    switch (question) {
      case "overview": return data.overview;
      case "state": return { state: [] };
      case "curves": return Object.fromEntries(
        params.name.filter((n) => n in data.curves[params.run]).map((n) => [n, data.curves[params.run][n]]));
      case "timeline": return data.timeline[params.run];
      case "config": return data.config[params.run];
      case "rows": return this.rows(params);
      case "search": return this.search(params);
      case "history": return this.history(params);
    }
    throw new Error(`no answer to ${question}`);
  }

  steps({ run, kind = "step" }) {
    return Object.entries(data_of(this.data.rows[run], kind)).map(([step, answer]) => [Number(step), answer]);
  }

  rows({ run, kind, step, wanted = "all", above = 0, text = "" }) {
    const answer = data_of(this.data.rows[run], kind)[step];
    if (!answer) return { rows: [], counts: {}, next: null, damaged: 0 };
    const counts = {};
    for (const name of FILTERS) counts[name] = answer.rows.filter((r) => passes(r, name, above)).length;
    return { ...answer, counts, rows: answer.rows.filter((r) => passes(r, wanted, above) && holds(r, text)) };
  }

  search({ run, kind, wanted = "all", above = 0, text = "" }) {
    const steps = this.steps({ run, kind }).reverse();
    const rows = steps.flatMap(([, answer]) => answer.rows.filter((r) => passes(r, wanted, above) && holds(r, text)));
    return { rows, searched: steps.length, files: steps.length, next: null };
  }

  history({ run, kind, prompt = "" }) {
    const steps = this.steps({ run, kind });
    const id = prompt === "" ? steps.at(-1)?.[1].rows[0]?.prompt_id : Number(prompt);
    const found = steps.map(([, answer]) => answer.rows.filter((r) => r.prompt_id === id));
    return { prompt: id ?? null, rows: found.flat(), steps: found.filter((rows) => rows.length).length, complete: true };
  }
}

function data_of(rows, kind) {
  return rows[kind] ?? {};
}

export const FILTERS = ["all", "right", "wrong", "cut", "invalid"];

// As RowInfo.passes in sample_index.py.
export function passes(row, wanted, above) {
  if (wanted === "all") return true;
  if (wanted === "invalid") return row.invalid !== null && row.invalid !== undefined;
  if (wanted === "cut") return row.finish_reason === "length";
  if (row.reward === null || row.reward === undefined) return false;
  return (row.reward > Number(above)) === (wanted === "right");
}

const SEARCHED = ["prompt", "response", "ground_truth", "pred", "invalid", "data_source", "messages"];

// As holds_text in sample_rows.py.
function holds(row, text) {
  return !text || SEARCHED.some((name) => textsIn(row[name]).some((said) => lowered(said).includes(lowered(text))));
}

export function lowered(text) {
  return text.toLowerCase().replaceAll("ς", "σ");
}

function textsIn(value) {
  if (typeof value === "string") return [value];
  if (value === null || value === undefined) return [];
  return typeof value === "object" ? Object.values(value).flatMap(textsIn) : [String(value)];
}
