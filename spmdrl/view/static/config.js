// A run's config as it was resolved, and how it differs from another run's.

import { fill, h, notice, select } from "view/dom";
import { runOptions } from "view/samples";

export async function show(root, page, params) {
  const runs = page.overview.runs;
  const state = { run: Number(params.run ?? 0), other: params.other ?? (runs.length > 1 ? "1" : ""), only: params.only !== "0" };
  const controls = h("div", { class: "controls" }), body = h("div", { id: "config" });
  fill(root, controls, body);

  function set(changes) {
    Object.assign(state, changes);
    return draw();
  }

  async function draw() {
    page.remember({ run: state.run, other: state.other, only: state.only ? undefined : "0" });
    const compares = state.other !== "" && Number(state.other) !== state.run;
    fill(controls, h("div", { class: "row" },
      select("run", runOptions(page), state.run, (v) => set({ run: Number(v) }), "run"),
      runs.length > 1 ? select("compared with", [["", "nothing"], ...runOptions(page)], state.other, (v) => set({ other: v }), "other") : null,
      compares ? h("label", { class: "check" }, h("input", { type: "checkbox", id: "only", checked: state.only, onchange: (e) => set({ only: e.target.checked }) }), "differences only") : null));
    const { text } = await page.source.ask("config", { run: state.run });
    if (!text) {
      fill(body, notice("This run has no config.py.", "none"));
    } else if (!compares) {
      fill(body, h("pre", { class: "code" }, text));
    } else {
      const other = (await page.source.ask("config", { run: Number(state.other) })).text;
      fill(body, differences(text, other, state.only, runs[state.run].name, runs[Number(state.other)].name));
    }
  }

  await draw();
  return { update: () => {}, redraw: () => {}, close: () => {} };
}

const AROUND = 2; // lines of both that stand around a difference

function differences(one, other, only, name, otherName) {
  const parts = Diff.diffLines(one, other);
  if (parts.length === 1) return notice("Both configs are the same.", "none");
  const shown = parts.map((part, i) => {
    const lines = part.value.replace(/\n$/, "").split("\n");
    if (part.removed) return h("del", {}, lines.map((line) => `- ${line}\n`).join(""));
    if (part.added) return h("ins", {}, lines.map((line) => `+ ${line}\n`).join(""));
    return h("span", {}, (only ? shortened(lines, i === 0, i === parts.length - 1) : lines).map((line) => `  ${line}\n`).join(""));
  });
  return [h("p", { class: "small" }, h("del", {}, `- ${name}`), "  ", h("ins", {}, `+ ${otherName}`)), h("pre", { class: "code diff" }, shown)];
}

function shortened(lines, first, last) {
  const before = first ? 0 : AROUND, after = last ? 0 : AROUND;
  if (lines.length <= before + after + 1) return lines;
  return [...lines.slice(0, before), "⋮", ...(after ? lines.slice(-after) : [])];
}
