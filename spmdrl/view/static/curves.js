// Curves of any metric, of all runs that are switched on, and a row of results for each run.

import { fill, h, notice, number } from "view/dom";
import { cssValue, runColour } from "view/colours";

const FIRST = ["reward/mean", "eval/reward", "sft/loss", "reward_model/loss", "eval/loss", "reward_model/accuracy", "eval/accuracy",
  "response/mean_tokens", "response/truncated", "actor/entropy", "actor/grad_norm", "actor/logprob_diff_mean", "actor/ppo_kl",
  "reward/invalid", "sft/grad_norm", "reward_model/grad_norm"];
const MOST_FIRST = 8;
const SYNC = "spmdrl";

export async function show(root, page, params) {
  const runs = page.overview.runs;
  const names = [...new Set(runs.flatMap((run) => run.metrics))].sort();
  let chosen = params.m ? params.m.split(",").filter((n) => names.includes(n)) : FIRST.filter((n) => names.includes(n)).slice(0, MOST_FIRST);
  if (!chosen.length) chosen = names.slice(0, MOST_FIRST);
  let smooth = Number(params.smooth ?? 0), needle = "";
  const grid = h("div", { class: "charts", id: "charts" });
  const list = h("div", { class: "metric-list" });
  const charts = new Map(); // metric -> { box, plot }

  const find = h("input", { type: "search", id: "find-metric", placeholder: `find one of ${names.length} metrics`, "aria-label": "find a metric",
    oninput: (e) => { needle = e.target.value.toLowerCase(); drawList(); } });
  const slider = h("input", { type: "range", id: "smooth", min: "0", max: "0.98", step: "0.02", value: String(smooth), "aria-label": "smoothing",
    oninput: (e) => { smooth = Number(e.target.value); draw(); remember(); } });

  function remember() {
    page.remember({ m: chosen.join(","), smooth: smooth || undefined });
  }

  function toggle(name) {
    chosen = chosen.includes(name) ? chosen.filter((n) => n !== name) : [...chosen, name];
    remember();
    drawList();
    draw();
  }

  function drawList() {
    const shown = names.filter((n) => n.toLowerCase().includes(needle));
    const groups = Map.groupBy ? Map.groupBy(shown, groupOf) : grouped(shown);
    fill(list, [...groups].map(([group, members]) =>
      h("details", { open: needle !== "" || members.some((n) => chosen.includes(n)) },
        h("summary", {}, group, h("span", { class: "small" }, ` ${members.length}`)),
        members.map((n) => h("label", { class: "check" },
          h("input", { type: "checkbox", checked: chosen.includes(n), dataset: { metric: n }, onchange: () => toggle(n) }), n)))));
    if (!shown.length) fill(list, notice("No metric has this in its name."));
  }

  // keeps: of charts that are there the zoom is kept, and data alone is new
  async function draw(keeps = false) {
    for (const [name, chart] of charts) {
      if (chosen.includes(name)) continue;
      chart.plot?.destroy();
      chart.box.remove();
      charts.delete(name);
    }
    const found = await Promise.all(runs.map((_, run) => (page.isOn(run) ? page.source.ask("curves", { run, name: chosen }) : {})));
    for (const name of chosen) {
      const tables = tablesOf(name, found, smooth), there = charts.get(name)?.plot;
      if (keeps && there && there.series.length === tables.length + 1) {
        there.setData(uPlot.join(tables.map(({ table }) => table)), !isZoomed(there));
        continue;
      }
      const box = charts.get(name)?.box ?? grid.appendChild(h("figure", { class: "chart", dataset: { metric: name } }));
      charts.get(name)?.plot?.destroy();
      charts.set(name, { box, plot: drawChart(box, name, tables, runs, page) });
    }
    if (!chosen.length) fill(grid, notice(names.length ? "Choose a metric in the list." : "There are no metrics yet."));
  }

  const results = h("div");
  const drawResults = () => fill(results, resultsTable(page));
  drawResults();
  fill(root,
    results,
    h("div", { class: "with-side" },
      h("aside", {}, find, h("label", { class: "field wide" }, h("span", {}, "smoothing"), slider), list),
      h("section", {}, grid, h("p", { class: "small hint" }, "Drag to zoom, double-click to zoom out, click to read the samples of a step."))));
  drawList();
  await draw();
  const resize = new ResizeObserver(() => charts.forEach(({ box, plot }) => plot?.setSize({ width: box.clientWidth - 2, height: HEIGHT })));
  resize.observe(grid);
  const update = () => { drawResults(); return draw(true); };
  return { update, redraw: () => draw(), close: () => { resize.disconnect(); charts.forEach(({ plot }) => plot?.destroy()); } };
}

const HEIGHT = 210;

function groupOf(name) {
  const at = name.indexOf("/");
  return at < 0 ? "general" : name.slice(0, at);
}

function grouped(names) {
  const groups = new Map();
  for (const name of names) groups.set(groupOf(name), [...(groups.get(groupOf(name)) ?? []), name]);
  return groups;
}

function tablesOf(name, found, smooth) {
  return found.map((curves, run) => ({ run, curve: curves[name] })).filter(({ curve }) => curve?.steps.length)
    .map(({ run, curve }) => ({ run, table: [curve.steps, smooth ? smoothed(curve.values, smooth) : curve.values] }));
}

function isZoomed(plot) {
  const [steps] = plot.data, { min, max } = plot.scales.x;
  return min > steps[0] || max < steps.at(-1);
}

function drawChart(box, name, tables, runs, page) {
  const series = [{ label: "step" }, ...tables.map(({ run, table }) => ({
    label: runs[run].name, stroke: runColour(run), width: 1.6, spanGaps: true,
    points: { show: table[0].length < 40, size: 5 }, value: (_, v) => (v === null || v === undefined ? "–" : number(v)) }))];
  fill(box, h("figcaption", {}, name));
  if (!tables.length) {
    box.append(notice("No run that is switched on has this metric."));
    return null;
  }
  const axis = { stroke: cssValue("--muted"), grid: { stroke: cssValue("--line"), width: 1 }, ticks: { stroke: cssValue("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
  const options = {
    width: Math.max(box.clientWidth - 2, 200), height: HEIGHT, series,
    scales: { x: { time: false } },
    axes: [{ ...axis, size: 28 }, { ...axis, size: 56, values: (_, ticks, __, ___, step) => ticks.map((v) => tickText(v, step)) }],
    cursor: { sync: { key: SYNC }, drag: { x: true, y: false } },
  };
  const plot = new uPlot(options, uPlot.join(tables.map(({ table }) => table)), box);
  let from = 0;
  plot.over.addEventListener("mousedown", (e) => { from = e.clientX; });
  plot.over.addEventListener("click", (e) => {
    const at = plot.cursor.idx;
    if (Math.abs(e.clientX - from) > 4 || at === null || at === undefined) return;
    const run = runs.findIndex((one, number_) => page.isOn(number_) && one.samples.step?.length);
    if (run >= 0) page.go("samples", { run, kind: "step", step: plot.data[0][at] });
  });
  return plot;
}

function tickText(value, step) {
  if (value === null) return "";
  if (value !== 0 && (step < 1e-4 || Math.abs(value) >= 1e5)) return value.toExponential(1);
  return value.toFixed(Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));
}

// Exponential moving average that starts without a bias; no value is taken for one that is missing.
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// ---- results

const RESULTS = [["reward/mean", "reward"], ["eval/reward", "held out"], ["sft/loss", "loss"], ["eval/loss", "held-out loss"],
  ["reward_model/accuracy", "accuracy"], ["eval/accuracy", "held-out accuracy"], ["response/mean_tokens", "length"]];

export function resultsTable(page) {
  const runs = page.overview.runs;
  const shown = RESULTS.filter(([name]) => runs.some((run) => run.metrics.includes(name)));
  const body = h("tbody");
  const table = h("div", { class: "scroll" }, h("table", { class: "results", id: "results" },
    h("thead", {}, h("tr", {}, h("th", {}, "run"), h("th", {}, "steps"), shown.map(([, text]) => h("th", {}, text, h("span", { class: "small" }, " first → last"))))), body));
  runs.forEach(async (run, number_) => {
    const row = body.appendChild(h("tr", {}, h("td", {}, h("span", { class: "dot", style: { background: runColour(number_) } }), run.name),
      h("td", {}, number(run.last_step))));
    const found = await page.source.ask("curves", { run: number_, name: shown.map(([name]) => name) });
    for (const [name] of shown) {
      const values = found[name]?.values ?? [];
      row.append(h("td", { dataset: { metric: name } }, values.length ? `${number(values[0], 3)} → ${number(values.at(-1), 3)}` : "–"));
    }
  });
  return table;
}
