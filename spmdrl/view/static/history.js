// One prompt through the steps: its answers, and what changed from one step to the next.

import { fill, h, notice, number, select } from "view/dom";
import { changesView, promptView, textOf } from "view/conversation";
import { NO_SAMPLES, kindOptions, runOptions, sampleView } from "view/samples";

export async function show(root, page, params) {
  const runs = page.overview.runs;
  const state = { run: Number(params.run ?? 0), kind: params.kind, prompt: params.prompt, marks: params.marks !== "0" };
  const controls = h("div", { class: "controls" }), list = h("div", { class: "groups", id: "history" });
  fill(root, controls, list);

  function set(changes) {
    Object.assign(state, changes);
    return draw();
  }

  async function draw() {
    const { samples } = runs[state.run];
    if (!(state.kind in samples)) state.kind = "eval" in samples ? "eval" : Object.keys(samples)[0];
    const found = await ask();
    state.prompt ??= found.prompt ?? undefined;
    drawControls();
    drawSteps(found);
  }

  function ask() {
    return page.source.ask("history", { run: state.run, kind: state.kind ?? "", prompt: state.prompt ?? "" });
  }

  function drawControls() {
    page.remember({ run: state.run, kind: state.kind, prompt: state.prompt, marks: state.marks ? undefined : "0" });
    fill(controls, h("div", { class: "row" },
      runs.length > 1 ? select("run", runOptions(page), state.run, (v) => set({ run: Number(v) }), "run") : null,
      kindOptions(runs[state.run]).length > 1 ? select("samples", kindOptions(runs[state.run]), state.kind, (v) => set({ kind: v, prompt: undefined }), "kind") : null,
      h("label", { class: "field" }, h("span", {}, "prompt"), h("input", { type: "number", id: "prompt", value: String(state.prompt ?? ""), onchange: (e) => set({ prompt: Number(e.target.value) }) })),
      h("label", { class: "check" }, h("input", { type: "checkbox", id: "marks", checked: state.marks, onchange: (e) => set({ marks: e.target.checked }) }), "mark what changed since the step before")));
  }

  function drawSteps(found) {
    if (state.prompt === undefined) {
      fill(list, notice(NO_SAMPLES, "none"));
      return;
    }
    if (!found.rows.length) {
      fill(list, notice(`No step of these samples has prompt ${state.prompt}${found.complete ? "" : " so far: the files are being read, ask again"}.`, "none"));
      return;
    }
    const bySteps = new Map();
    for (const row of found.rows) bySteps.set(row.step, [...(bySteps.get(row.step) ?? []), row]);
    let before = new Map();
    const cards = [...bySteps].map(([step, rows]) => {
      const card = h("article", { class: "group", dataset: { step } },
        h("header", {}, h("button", { type: "button", class: "quiet", onclick: () => page.go("samples", { run: state.run, kind: state.kind, step }) }, `step ${step}`),
          h("span", { class: "small" }, `mean reward ${number(mean(rows))}`)),
        h("div", { class: "answers" }, rows.map((row) => sampleView(row, 0, (name) => page.source.imageUrl(state.run, name), "none", 1, state.marks && before.has(row.sample) ? changesView(before.get(row.sample), textOf(row)) : null))));
      before = new Map([...before, ...rows.map((row) => [row.sample, textOf(row)])]);
      return card;
    });
    fill(list, promptView(found.rows[0], (name) => page.source.imageUrl(state.run, name)),
      found.steps > bySteps.size ? notice(`${bySteps.size} of ${found.steps} steps with this prompt are shown.`) : null,
      found.complete ? null : notice("Not all files are read yet; come back for more."),
      bySteps.size < 2 ? notice("Only one step that is kept has this prompt, so there is nothing to compare.") : null, cards);
  }

  await draw();
  return { update: async () => (state.prompt === undefined ? draw() : drawSteps(await ask())), redraw: () => {}, close: () => {} };
}

function mean(rows) {
  const rewards = rows.map((row) => row.reward).filter((reward) => typeof reward === "number");
  return rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null;
}
