// What each rank did when: a row for each rank, a bar for each phase.

import { fill, h, notice, number, select } from "view/dom";
import { runOptions } from "view/samples";

const ROW = 26, TOP = 22, MOST_RANKS = 128;

export async function show(root, page, params) {
  const runs = page.overview.runs;
  const state = { run: Number(params.run ?? Math.max(runs.findIndex((r) => r.has_timeline), 0)), steps: params.steps ?? "" };
  const controls = h("div", { class: "controls" }), body = h("div", { id: "timeline" });
  fill(root, controls, body);

  function set(changes) {
    Object.assign(state, changes);
    return draw();
  }

  async function draw() {
    page.remember({ run: state.run, steps: state.steps || undefined });
    fill(controls, h("div", { class: "row" },
      runs.length > 1 ? select("run", runOptions(page), state.run, (v) => set({ run: Number(v) }), "run") : null,
      page.source.follows ? h("label", { class: "field" }, h("span", {}, "steps"), h("input", { id: "steps", placeholder: "newest; or 3:6", value: state.steps, onchange: (e) => set({ steps: e.target.value.trim() }) })) : null));
    await load();
  }

  async function load() {
    if (!runs[state.run].has_timeline) {
      fill(body, notice("This run has no trace folder, so there is no timeline.", "none"));
      return;
    }
    const found = await page.source.ask("timeline", { run: state.run, steps: state.steps });
    if (found.error) fill(body, notice(found.error, "error"));
    else fill(body, found.notes.map((text) => notice(text)), picture(found), key(found), busyTable(found));
  }

  await draw();
  return { update: () => (state.steps ? undefined : load()), redraw: () => {}, close: () => {} };
}

const SVG = "http://www.w3.org/2000/svg";

function s(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function picture({ hosts, steps, spans, total_s, colours, idle }) {
  const ranks = Object.keys(hosts).map(Number).sort((a, b) => a - b).slice(0, MOST_RANKS);
  const rows = new Map(ranks.map((rank, i) => [rank, i]));
  const width = 1000, height = TOP + ROW * ranks.length + 4;
  const x = (t) => (t / total_s) * width;
  const bars = spans.filter(([rank]) => rows.has(rank)).map(([rank, step, phase, start, end, waiting]) =>
    s("rect", { x: x(start), y: TOP + ROW * rows.get(rank) + 2, width: Math.max(x(end - start), 0.4), height: ROW - 6, rx: 1.5,
      fill: waiting ? "var(--waiting)" : colours[phase], "data-phase": waiting ? "waiting" : phase },
      s("title", {}, `rank ${rank}, step ${step}: ${phase}${waiting ? " (waiting)" : ""}, ${number(end - start)} s`)));
  const marks = Object.entries(steps).map(([step, start]) => [
    s("line", { x1: x(start), x2: x(start), y1: 14, y2: height, class: "mark" }),
    s("text", { x: x(start) + 3, y: 12 }, `step ${step}`)]);
  const drawing = s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", style: `height:${height}px`, role: "img", "aria-label": "timeline" }, ...bars, ...marks.map(([line]) => line));
  const names = h("div", { class: "ranks", style: { paddingTop: `${TOP}px` } }, ranks.map((rank) =>
    h("div", { title: hosts[rank], style: { height: `${ROW}px` } }, `rank ${rank}`, h("span", { class: "small" }, ` ${Math.round(idle[rank] * 100)}% idle`))));
  const labels = h("div", { class: "step-labels" }, Object.entries(steps).map(([step, start]) => h("span", { style: { left: `${(start / total_s) * 100}%` } }, `step ${step}`)));
  const axis = h("div", { class: "axis small" }, [0, 0.25, 0.5, 0.75, 1].map((share) => h("span", {}, `${number(share * total_s, 3)} s`)));
  const most = Object.keys(hosts).length > MOST_RANKS ? notice(`The first ${MOST_RANKS} of ${Object.keys(hosts).length} ranks are shown.`) : null;
  return [most, h("div", { class: "timeline" }, names, h("div", { class: "bars" }, labels, drawing, axis))];
}

function key({ colours }) {
  const entries = [...Object.entries(colours), ["waiting", "var(--waiting)"]];
  return h("p", { class: "key" }, entries.map(([phase, colour]) => h("span", {}, h("span", { class: "dot", style: { background: colour } }), phase)));
}

function busyTable({ spans, colours }) {
  const seconds = new Map(Object.keys(colours).map((phase) => [phase, new Map()]));
  for (const [rank, , phase, start, end, waiting] of spans) {
    if (!waiting) seconds.get(phase)?.set(rank, (seconds.get(phase).get(rank) ?? 0) + end - start);
  }
  const row = ([phase, byRank]) => {
    const values = [...byRank.values()];
    return h("tr", {}, h("td", {}, phase), h("td", {}, number(values.length)), [Math.min(...values), values.reduce((a, b) => a + b, 0) / values.length, Math.max(...values)].map((v) => h("td", {}, number(v, 3))));
  };
  return h("div", { class: "scroll" }, h("table", { class: "results" },
    h("thead", {}, h("tr", {}, ["phase", "ranks", "min s", "mean s", "max s"].map((text) => h("th", {}, text)))),
    h("tbody", {}, [...seconds].filter(([, byRank]) => byRank.size).map(row))));
}
