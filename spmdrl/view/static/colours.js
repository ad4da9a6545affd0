// Colours of runs and of tokens, and the choice between light and dark.

import { h } from "view/dom";

const RUNS = ["#3d74e0", "#d9652c", "#1f9d6b", "#a355c9", "#cc4242", "#1590a8", "#a08016", "#d1508f"];

export function runColour(number) {
  return RUNS[number % RUNS.length];
}

export function cssValue(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const THEMES = ["auto", "light", "dark"];
const KEY = "spmdrl-view-theme";

export function themeSwitch(onchange) {
  let theme = remembered();
  const button = h("button", { type: "button", id: "theme", class: "quiet", onclick: next });
  const apply = () => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[theme];
    button.title = "Light or dark; auto follows the system";
  };
  function next() {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try { localStorage.setItem(KEY, theme); } catch { /* a page of a file may have no storage */ }
    apply();
    onchange();
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onchange);
  apply();
  return button;
}

function remembered() {
  try {
    const theme = localStorage.getItem(KEY);
    return THEMES.includes(theme) ? theme : "auto";
  } catch {
    return "auto";
  }
}

// What tokens can be coloured by: the number of a token, and whether it has a middle of 0.
export const MEASURES = {
  none: { text: "text" },
  logprob: { text: "log-probability", of: (row, i) => row.logprobs?.[i], low: "likely", high: "unlikely" },
  gap: { text: "trainer − engine", of: gap, middle: true, low: "trainer lower", high: "trainer higher" },
  ratio: { text: "ratio", of: logRatio, middle: true, low: "ratio < 1", high: "ratio > 1" },
  advantage: { text: "advantage", of: advantage, middle: true, low: "negative", high: "positive" },
};

function difference(a, b) {
  return a === null || a === undefined || b === null || b === undefined ? null : a - b;
}

export function gap(row, i) {
  return difference(row.trainer_logprobs?.[i], row.logprobs?.[i]);
}

// Of the policy in the step's last update to that before it, where a step has several updates; else
// of the trainer to the engine that sampled.
export function logRatio(row, i) {
  return row.update_logprobs ? difference(row.update_logprobs[i], row.trainer_logprobs?.[i]) : gap(row, i);
}

export function advantage(row, i) {
  if (row.logprobs?.[i] === null) return null;
  return row.advantages ? row.advantages[i] : row.advantage;
}

// The number that has the full colour: of what has a middle the largest of these rows.
export function scaleOf(measure, rows) {
  if (!MEASURES[measure].middle) return 5;
  let most = 0;
  for (const row of rows) {
    for (let i = 0; i < (row.tokens?.length ?? 0); i++) {
      most = Math.max(most, Math.abs(MEASURES[measure].of(row, i) ?? 0));
    }
  }
  return most || 1;
}

export function tokenColour(measure, value, scale) {
  const share = Math.min(Math.abs(value) / scale, 1);
  const colour = MEASURES[measure].middle && value > 0 ? "--token-high" : "--token-low";
  return `color-mix(in srgb, var(${colour}) ${Math.round(share * 75)}%, transparent)`;
}

export function legend(measure, scale) {
  const { middle, low, high } = MEASURES[measure];
  const ends = middle ? [-scale, scale] : [0, -scale];
  const at = (value) => tokenColour(measure, value, scale);
  const bar = h("span", { class: "bar", style: { background: `linear-gradient(90deg, ${at(ends[0])}, ${at(middle ? 0 : -scale / 2)}, ${at(ends[1])})` } });
  const show = (value) => (measure === "ratio" ? Math.exp(value).toPrecision(3) : Number(value.toPrecision(2)));
  return h("span", { class: "legend", id: "legend" }, `${low} ${show(ends[0])}`, bar, `${show(ends[1])} ${high}`);
}
