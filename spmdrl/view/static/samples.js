// The samples of a step: the answers to a prompt side by side, with filters, search and colours.

import { debounced, fill, h, notice, number, segments, select } from "view/dom";
import { MEASURES, legend, scaleOf } from "view/colours";
import { answerView, further, invalidView, promptView, tokensView, truthView, verdict } from "view/conversation";
import { FILTERS, lowered } from "view/source";

const KINDS = { step: "training", eval: "held out", answers: "spmdrl.evaluate" };
export const NO_SAMPLES = "This run has no samples: it keeps none (log_samples=0), has made none yet, or is one of spmdrl.sft, spmdrl.preference or spmdrl.reward_model.";
const SNIPPET = 160; // characters of a finding

export function kindOptions(run) {
  return Object.keys(run.samples).map((kind) => [kind, KINDS[kind] ?? kind]);
}

export function runOptions(page, of = () => true) {
  return page.overview.runs.map((run, i) => [i, run.name]).filter(([i]) => of(page.overview.runs[i]));
}

export async function show(root, page, params) {
  const runs = page.overview.runs;
  const state = {
    run: Number(params.run ?? Math.max(runs.findIndex((r) => Object.keys(r.samples).length), 0)),
    kind: params.kind, step: params.step, wanted: params.wanted ?? "all", above: Number(params.above ?? 0),
    text: params.text ?? "", everywhere: params.everywhere === "1", measure: params.measure ?? "none", start: 0,
  };
  if (!runs[state.run]) state.run = 0;
  const controls = h("div", { class: "controls" }), list = h("div", { class: "groups", id: "groups" });
  let asked = 0;
  fill(root, controls, list);

  function steps() {
    const { samples } = runs[state.run];
    if (!(state.kind in samples)) state.kind = "step" in samples ? "step" : Object.keys(samples)[0];
    return samples[state.kind] ?? [];
  }

  function settle() {
    const known = steps();
    state.follows = state.step === undefined || state.step === "newest";
    return state.follows ? known.at(-1) : nearest(known, Number(state.step));
  }

  function set(changes) {
    Object.assign(state, { start: 0 }, changes);
    draw();
  }

  function remember() {
    page.remember({ run: state.run, kind: state.kind, step: state.step, wanted: state.wanted === "all" ? undefined : state.wanted,
      above: state.above || undefined, text: state.text || undefined, everywhere: state.everywhere ? "1" : undefined,
      measure: state.measure === "none" ? undefined : state.measure });
  }

  const typed = debounced((text) => { Object.assign(state, { text, start: 0 }); load(); });
  const search = h("input", { type: "search", id: "search", placeholder: "search prompts and answers", value: state.text, "aria-label": "search", oninput: (e) => typed(e.target.value) });
  const everywhere = h("input", { type: "checkbox", id: "everywhere", checked: state.everywhere, onchange: (e) => set({ everywhere: e.target.checked }) });
  const filters = h("span"), legendBox = h("span"), stepRow = h("div", { class: "row" });

  // Apart from the other controls: new steps change it while somebody types into those.
  function drawSteps() {
    const known = steps(), step = settle(), at = known.indexOf(step);
    const to = (place) => set({ step: known[Math.min(Math.max(place, 0), known.length - 1)] });
    fill(stepRow,
      runs.length > 1 ? select("run", runOptions(page), state.run, (v) => set({ run: Number(v), step: state.step }), "run") : null,
      kindOptions(runs[state.run]).length > 1 ? select("samples", kindOptions(runs[state.run]), state.kind, (v) => set({ kind: v, step: undefined }), "kind") : null,
      known.length ? h("div", { class: "stepper" },
        h("button", { type: "button", id: "previous", "aria-label": "previous step", disabled: at <= 0, onclick: () => to(at - 1) }, "‹"),
        h("label", { class: "field" }, h("span", {}, "step"), h("input", { type: "number", id: "step", value: String(step), min: String(known[0]), max: String(known.at(-1)), onchange: (e) => set({ step: nearest(known, Number(e.target.value)) }) })),
        h("button", { type: "button", id: "next", "aria-label": "next step", disabled: at >= known.length - 1, onclick: () => to(at + 1) }, "›"),
        h("input", { type: "range", id: "slide", min: "0", max: String(known.length - 1), value: String(at), "aria-label": "step", onchange: (e) => to(Number(e.target.value)) }),
        h("button", { type: "button", id: "newest", class: state.follows ? "on" : "", onclick: () => set({ step: "newest" }) }, page.source.follows ? "newest" : "last")) : null);
  }

  function draw() {
    drawSteps();
    fill(controls, stepRow,
      h("div", { class: "row" }, filters,
        h("label", { class: "field", title: "An answer is right where its reward is above this number" }, h("span", {}, "right above"),
          h("input", { type: "number", id: "above", step: "0.1", value: String(state.above), onchange: (e) => set({ above: Number(e.target.value) }) })),
        h("div", { class: "find" }, search, h("label", { class: "check" }, everywhere, "all steps"))),
      h("div", { class: "row" }, h("span", { class: "small" }, "colour tokens by"),
        segments("colour", Object.entries(MEASURES).map(([name, m]) => [name, m.text]), state.measure, (measure) => set({ measure }), "measure"), legendBox));
    drawFilters({});
    return load();
  }

  function drawFilters(counts) {
    fill(filters, segments("filter", FILTERS.map((name) => [name, counts[name] === undefined ? name : `${name} ${counts[name]}`]), state.wanted, (wanted) => set({ wanted }), "filter"));
  }

  async function load(more = false) {
    remember();
    const known = steps(), step = settle(), mine = ++asked;
    if (step === undefined) {
      fill(list, notice(NO_SAMPLES, "none"));
      return;
    }
    const find = state.everywhere && (state.text || state.wanted !== "all");
    const asks = { run: state.run, kind: state.kind, wanted: state.wanted, above: state.above, text: state.text, start: String(state.start) };
    let found;
    try {
      found = await page.source.ask(find ? "search" : "rows", find ? asks : { ...asks, step });
    } catch (error) {
      fill(list, notice(String(error.message), "error"));
      return;
    }
    if (mine !== asked) return; // another question was asked meanwhile
    if (!more) fill(list);
    list.querySelector(".more")?.remove();
    if (find) drawFindings(found, known);
    else drawGroups(found, step);
    if (found.next !== null) {
      const text = find ? `search on: ${number(found.searched)} of ${number(found.files)} steps are searched` : "more samples of this step";
      list.append(h("button", { type: "button", class: "more", onclick: () => { state.start = found.next; load(true); } }, text));
    }
  }

  function drawGroups(found, step) {
    drawFilters(found.counts);
    const scale = state.measure === "none" ? 1 : scaleOf(state.measure, found.rows);
    fill(legendBox, state.measure === "none" ? null : legend(state.measure, scale));
    if (!found.rows.length && !list.children.length) list.append(notice("No sample of this step passes the filter and the search.", "none"));
    if (found.damaged) list.append(notice(`${found.damaged} lines of this file are damaged and are left out.`));
    const groups = new Map();
    for (const row of found.rows) {
      const key = `${row.group}/${row.prompt_id}`;
      groups.set(key, [...(groups.get(key) ?? []), row]);
    }
    for (const rows of groups.values()) list.append(groupView(rows, step, scale));
  }

  function groupView(rows, step, scale) {
    const [first] = rows, imageUrl = (name) => page.source.imageUrl(state.run, name);
    const open = () => page.go("history", { run: state.run, kind: state.kind, prompt: first.prompt_id });
    return h("article", { class: "group", dataset: { prompt: first.prompt_id } },
      h("header", {}, h("strong", {}, `prompt ${first.prompt_id}`),
        h("span", { class: "small" }, [first.data_source, `${rows.length} ${rows.length === 1 ? "answer" : "answers"}`].filter(Boolean).join(" · ")),
        h("button", { type: "button", class: "quiet through", onclick: open }, "through the steps →")),
      promptView(first, imageUrl),
      truthView(first),
      h("div", { class: "answers" }, rows.map((row) => sampleView(row, state.above, imageUrl, state.measure, scale))));
  }

  function drawFindings(found) {
    fill(legendBox);
    if (!found.rows.length && !list.children.length) list.append(notice(found.next === null ? "No sample of any step has this." : "Nothing yet.", "none"));
    list.append(...found.rows.map((row) => h("article", { class: "finding", dataset: { step: row.step } },
      h("header", {}, h("button", { type: "button", class: "quiet", onclick: () => { everywhere.checked = false; set({ everywhere: false, step: row.step }); } }, `step ${row.step}`),
        h("span", { class: "small" }, `prompt ${row.prompt_id}`), verdict(row, state.above)),
      h("p", {}, snippet(row, state.text)))));
  }

  await draw();
  return {
    update: () => {
      if (!state.follows) return undefined;
      state.start = 0;
      drawSteps();
      return load();
    },
    redraw: () => {},
    close: () => document.getElementById("tip")?.classList.remove("shown"),
  };
}

function nearest(known, wanted) {
  return known.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), known[0]);
}

export function sampleView(row, above, imageUrl, measure = "none", scale = 1, body = null) {
  return h("section", { class: "sample", dataset: { sample: row.sample } },
    h("header", {}, verdict(row, above)), invalidView(row),
    body ?? (measure === "none" ? answerView(row, imageUrl) : tokensView(row, measure, scale)), further(row));
}

function snippet(row, text) {
  const whole = [row.prompt, row.response, JSON.stringify(row.messages ?? ""), row.invalid ?? ""].join("  ⏵ ");
  const at = Math.max(lowered(whole).indexOf(lowered(text)), 0);
  const start = Math.max(at - SNIPPET / 2, 0);
  return [start ? "… " : "", whole.slice(start, at), h("mark", {}, whole.slice(at, at + text.length)), whole.slice(at + text.length, at + text.length + SNIPPET), " …"];
}
