// Held-out prompts before and after: two evaluations of one run, or of two, side by side.

import { fill, h, notice, number, segments, select } from "view/dom";
import { changesView, promptView, textOf, truthView } from "view/conversation";
import { runOptions, sampleView } from "view/samples";

const CHANGES = ["all", "better", "worse", "same"];

export async function show(root, page, params) {
  const runs = page.overview.runs;
  const first = Math.max(runs.findIndex((r) => evaluations(r).length > 1), 0);
  const state = {
    a: Number(params.a ?? params.run ?? first), b: Number(params.b ?? params.run ?? first), from: params.from, to: params.to,
    change: params.change ?? "all", marks: params.marks !== "0",
  };
  const controls = h("div", { class: "controls" }), list = h("div", { class: "groups", id: "pairs" });
  fill(root, controls, list);

  function set(changes) {
    Object.assign(state, changes);
    return draw();
  }

  async function draw() {
    const before = evaluations(runs[state.a]), after = evaluations(runs[state.b]);
    if (!before.length || !after.length) {
      fill(controls);
      fill(list, notice("There are no held-out answers: data.eval is not set, or nothing was evaluated yet.", "none"));
      return;
    }
    const from = before.includes(Number(state.from)) ? Number(state.from) : before[0];
    const to = after.includes(Number(state.to)) ? Number(state.to) : after.at(-1);
    page.remember({ a: state.a, b: state.b, from, to, change: state.change === "all" ? undefined : state.change, marks: state.marks ? undefined : "0" });
    const [left, right] = await Promise.all([answers(page, state.a, from), answers(page, state.b, to)]);
    const { pairs, alone } = paired(left.rows, right.rows);
    const count = (name) => pairs.filter((p) => name === "all" || p.change === name).length;
    const choose = (label, number_, of, value, name, which) => [
      runs.length > 1 ? select(`${label}: run`, runOptions(page, (r) => evaluations(r).length), number_, (v) => set({ [which]: Number(v), [name]: undefined }), which) : null,
      select(label, of.map((s) => [s, `step ${s}`]), value, (v) => set({ [name]: v }), name)];
    fill(controls,
      h("div", { class: "row" }, choose("before", state.a, before, from, "from", "a"), choose("after", state.b, after, to, "to", "b")),
      h("div", { class: "row" },
        segments("change", CHANGES.map((name) => [name, `${name} ${count(name)}`]), state.change, (change) => set({ change }), "change"),
        h("label", { class: "check" }, h("input", { type: "checkbox", id: "marks", checked: state.marks, onchange: (e) => set({ marks: e.target.checked }) }), "mark what changed")));
    const shown = pairs.filter((p) => state.change === "all" || p.change === state.change);
    fill(list,
      alone ? notice(`${number(alone)} answers are left out: only one of both evaluations has their prompt.`, "unpaired") : null,
      left.next !== null || right.next !== null ? notice("The first samples of each evaluation are compared.") : null,
      shown.length ? shown.map((pair) => pairView(page, pair, state, from, to)) : notice("No prompt of both evaluations is so.", "none"));
  }

  await draw();
  return { update: draw, redraw: () => {}, close: () => {} };
}

function evaluations(run) {
  return run.samples.eval ?? run.samples.answers ?? [];
}

function answers(page, run, step) {
  const kind = page.overview.runs[run].samples.eval ? "eval" : "answers";
  return page.source.ask("rows", { run, kind, step });
}

// Pairs by prompt and sample. alone: how many answers have no counterpart.
function paired(left, right) {
  const key = (row) => `${row.prompt_id}/${row.sample}`;
  const later = new Map(right.map((row) => [key(row), row]));
  const pairs = left.filter((row) => later.has(key(row)) && sameQuestion(row, later.get(key(row)))).map((before) => {
    const after = later.get(key(before));
    const gain = (after.reward ?? -Infinity) - (before.reward ?? -Infinity);
    return { before, after, change: gain > 0 ? "better" : gain < 0 ? "worse" : "same" };
  });
  return { pairs, alone: left.length + right.length - 2 * pairs.length };
}

// The id of a prompt is its place in the data, and another run may have other data. The text of a
// prompt is as the model sees it, which differs between models; its chat is as the data has it.
function sameQuestion(one, other) {
  const same = (name) => JSON.stringify(one[name]) === JSON.stringify(other[name]);
  return (one.chat && other.chat ? same("chat") : same("prompt")) && (!one.images || !other.images || same("images"));
}

function pairView(page, { before, after, change }, state, from, to) {
  const changed = state.marks ? changesView(textOf(before), textOf(after)) : null;
  const open = () => page.go("history", { run: state.b, kind: "eval", prompt: before.prompt_id });
  return h("article", { class: `group ${change}`, dataset: { prompt: before.prompt_id, change } },
    h("header", {}, h("strong", {}, `prompt ${before.prompt_id}`), h("span", { class: `badge ${{ better: "right", worse: "wrong" }[change] ?? ""}` }, change),
      h("button", { type: "button", class: "quiet through", onclick: open }, "through the steps →")),
    promptView(before, (name) => page.source.imageUrl(state.a, name)),
    truthView(before),
    h("div", { class: "answers pair" },
      h("div", {}, h("p", { class: "small" }, `before: step ${number(from)}`), sampleView(before, 0, (name) => page.source.imageUrl(state.a, name))),
      h("div", {}, h("p", { class: "small" }, `after: step ${number(to)}`), sampleView(after, 0, (name) => page.source.imageUrl(state.b, name), "none", 1, changed))));
}
