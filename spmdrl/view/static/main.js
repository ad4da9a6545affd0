// The page: its tabs, its runs, its address, and that it follows runs that are going on.

import { fill, h, notice } from "view/dom";
import { openSource } from "view/source";
import { runColour, themeSwitch } from "view/colours";
import * as curves from "view/curves";
import * as samples from "view/samples";
import * as compare from "view/compare";
import * as history from "view/history";
import * as timeline from "view/timeline";
import * as config from "view/config";

const VIEWS = { curves, samples, compare, history, timeline, config };
const TITLES = { curves: "Curves", samples: "Samples", compare: "Before / after", history: "One prompt", timeline: "Timeline", config: "Config" };
const EVERY_MS = 3000;

const source = openSource();
const off = new Set(); // runs whose curves are switched off
let shown = null; // { name, view }
let turn = 0;

const page = {
  source,
  overview: null,
  isOn: (run) => !off.has(run),
  go: (name, params) => { location.hash = address(name, params); },
  remember: (params) => {
    if (shown) window.history.replaceState(null, "", `#${address(shown.name, params)}`);
  },
};

const tabs = h("nav", { role: "tablist" });
const chips = h("div", { class: "chips", id: "chips" });
const live = h("span", { class: "live", id: "live" });
const root = h("main", { id: "main" });
const messages = h("div", { id: "messages" });

function address(name, params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== undefined && value !== null));
  return `/${name}?${query}`;
}

function readAddress() {
  const [name, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: name in VIEWS ? name : "curves", params: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

async function open() {
  const { name, params } = readAddress(), mine = ++turn;
  shown?.view?.close();
  shown = { name, view: null };
  fill(tabs, Object.entries(TITLES).map(([view, title]) =>
    h("a", { href: `#/${view}`, role: "tab", "aria-selected": String(view === name), class: view === name ? "on" : "", dataset: { view } }, title)));
  const place = h("div", { class: `view view-${name}` });
  fill(root, place);
  scrollTo(0, 0);
  try {
    const view = await VIEWS[name].show(place, page, params);
    if (mine === turn) shown.view = view;
    else view.close();
  } catch (error) {
    if (mine === turn) fill(place, notice(`This cannot be shown: ${error.message}`, "error"));
  }
}

function drawChips() {
  const { runs } = page.overview;
  fill(chips, runs.map((run, i) => h("button", { type: "button", class: page.isOn(i) ? "chip on" : "chip", title: run.path, "aria-pressed": String(page.isOn(i)), dataset: { run: i },
    onclick: () => { if (off.has(i)) off.delete(i); else off.add(i); drawChips(); shown?.view?.redraw(); } },
    h("span", { class: "dot", style: { background: runColour(i) } }), run.name)));
  const going = runs.some((run) => run.going_on);
  live.textContent = going && source.follows ? "live" : "";
  live.title = "A run wrote something within the last two minutes; the page follows it";
  const notes = runs.flatMap((run) => run.notes.map((text) => (runs.length > 1 ? `${run.name}: ${text}` : text)));
  fill(messages, page.overview.left_out.map((text) => notice(text, "left-out")), notes.map((text) => notice(text, text.includes("failed:") ? "error" : "")));
}

async function follow() {
  let known = JSON.stringify((await source.ask("state")).state), lost = false;
  setInterval(async () => {
    try {
      const now = JSON.stringify((await source.ask("state")).state);
      if (lost) { lost = false; drawChips(); }
      if (now === known) return;
      known = now;
      const fresh = await source.ask("overview");
      fresh.runs.forEach((run, i) => Object.assign(page.overview.runs[i], run)); // the views hold these
      drawChips();
      await shown?.view?.update();
    } catch {
      lost = true;
      live.textContent = "the server does not answer";
    }
  }, EVERY_MS);
}

async function start() {
  document.body.append(
    h("header", { class: "top" }, h("a", { class: "brand", href: "#/curves" }, "spmdrl"), tabs, live, themeSwitch(() => { shown?.view?.redraw(); })),
    h("div", { class: "bar-runs" }, chips), messages, root);
  try {
    page.overview = await source.ask("overview");
  } catch (error) {
    fill(root, notice(`The runs cannot be read: ${error.message}`, "error"));
    return;
  }
  document.title = `${page.overview.runs.map((run) => run.name).join(", ")} – spmdrl`;
  drawChips();
  addEventListener("hashchange", open);
  await open();
  document.body.dataset.ready = "1";
  if (source.follows) await follow();
}

start();
