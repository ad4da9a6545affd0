// One sample: its turns, thoughts, tool calls and images, or its tokens with colours.

import { fill, h, number, signed } from "view/dom";
import { MEASURES, advantage, gap, logRatio, tokenColour } from "view/colours";

export function promptView(row, imageUrl) {
  const images = (row.images ?? []).map((name) => imageUrl(name));
  const turns = row.chat ?? [{ role: "prompt", content: row.prompt }];
  const shown = turns.map((message) => turnView(message, images, imageUrl));
  const left = images.splice(0).map(imageView); // of a prompt that does not say where they stand
  return h("div", { class: "conversation prompt" }, shown, left);
}

export function truthView({ ground_truth: truth }) {
  if (truth === null || truth === undefined) return null;
  return h("p", { class: "truth" }, h("span", { class: "role" }, "ground truth"), typeof truth === "string" ? truth : JSON.stringify(truth));
}

export function answerView(row, imageUrl) {
  const turns = row.messages?.length ? row.messages : [{ role: "assistant", content: row.response }];
  return h("div", { class: "conversation answer" }, turns.map((message) => turnView(message, [], imageUrl)));
}

function turnView(message, images, imageUrl) {
  const role = String(message.role ?? "assistant");
  const failed = message.is_error ? " failed" : "";
  const thought = message.reasoning_content ?? message.thinking;
  return h("div", { class: `turn ${role}${failed}`, dataset: { role } },
    h("span", { class: "role" }, role + (message.name ? ` ${message.name}` : "") + (failed && " – failed")),
    thought ? thoughtView(asText(thought)) : null,
    contentView(message.content, images, role, imageUrl),
    asList(message.tool_calls).map((call) => callView(JSON.stringify(call?.function ?? call))));
}

// The fields of a message are of the environment, which may give them other types.
function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1);
}

function asList(value) {
  return Array.isArray(value) ? value : [];
}

// An image of a reply is named in its part; one of the prompt is the next of `images`.
function contentView(content, images, role, imageUrl) {
  if (content === null || content === undefined) return [];
  if (Array.isArray(content)) {
    return content.map((part) => {
      if (part?.type === "image") return imageView(part.image ? imageUrl(String(part.image).replace("images/", "")) : images.shift());
      return textView(typeof part?.text === "string" ? part.text : asText(part), images, role);
    });
  }
  return textView(asText(content), images, role);
}

const PARTS = /<think>([\s\S]*?)(?:<\/think>|$)|<tool_call>([\s\S]*?)(?:<\/tool_call>|$)|(<image>)/g;

function textView(text, images, role) {
  const parts = [];
  let at = 0;
  if (role === "assistant" && !text.includes("<think>") && text.includes("</think>")) {
    at = text.indexOf("</think>") + "</think>".length; // the template has opened it
    parts.push(thoughtView(text.slice(0, at - "</think>".length)));
  }
  PARTS.lastIndex = at;
  for (let m = PARTS.exec(text); m; m = PARTS.exec(text)) {
    parts.push(plain(text.slice(at, m.index)));
    if (m[1] !== undefined) parts.push(thoughtView(m[1]));
    else if (m[2] !== undefined) parts.push(callView(m[2]));
    else parts.push(images.length ? imageView(images.shift()) : plain("<image>"));
    at = m.index + m[0].length;
    if (m[0] === "") break;
  }
  parts.push(plain(text.slice(at)));
  return parts.length === 1 && !parts[0] ? [plain(" ")] : parts;
}

function plain(text) {
  return text ? h("div", { class: "text" }, text) : null;
}

function thoughtView(text) {
  const words = text.trim().split(/\s+/).length;
  return h("details", { class: "thought" }, h("summary", {}, `thought, ${number(words)} words`), h("div", { class: "text" }, text.trim()));
}

function callView(text) {
  let name = "tool call", body = text.trim();
  try {
    const call = JSON.parse(body);
    name = `calls ${call.name ?? "?"}`;
    const given = call.arguments ?? call.parameters ?? {};
    body = typeof given === "string" ? given : JSON.stringify(given, null, 2);
  } catch { /* it is shown as the policy wrote it */ }
  return h("div", { class: "call" }, h("span", { class: "role" }, name), h("div", { class: "text" }, body));
}

function imageView(url) {
  return url ? h("img", { class: "picture", src: url, alt: "image of the prompt", loading: "lazy" }) : h("span", { class: "missing" }, "an image that is not kept");
}

// ---- tokens

export function tokensView(row, measure, scale) {
  if (!row.tokens) return h("p", { class: "missing" }, "The run keeps no tokens of this sample (log_sample_tokens).");
  const { of } = MEASURES[measure];
  const known = row.tokens.some((_, i) => typeof of(row, i) === "number");
  const shown = row.tokens.map((text, i) => {
    const value = of(row, i);
    const chosen = row.logprobs?.[i] !== null;
    const style = typeof value === "number" ? { background: tokenColour(measure, value, scale) } : {};
    return h("span", { class: chosen ? "token" : "token reply", style, dataset: { i } }, visible(text));
  });
  const hidden = row.response_tokens - row.tokens.length;
  const rest = hidden > 0 ? h("p", { class: "missing" }, `${number(hidden)} more tokens are not kept (log_sample_tokens).`) : null;
  const none = known ? null : h("p", { class: "missing" }, "The run did not write this number for this sample.");
  const view = h("div", { class: "tokens" }, none, shown, rest);
  view.addEventListener("pointerover", (event) => tell(row, event.target));
  view.addEventListener("click", (event) => tell(row, event.target));
  view.addEventListener("pointerleave", () => tip().classList.remove("shown"));
  return view;
}

function visible(text) {
  return text.replaceAll("\n", "↵\n");
}

function tip() {
  return document.getElementById("tip") ?? document.body.appendChild(h("div", { id: "tip", role: "status" }));
}

function tell(row, target) {
  if (!target.classList.contains("token")) return;
  const i = Number(target.dataset.i);
  const box = target.getBoundingClientRect();
  const view = tip();
  view.textContent = tokenLines(row, i).join("\n");
  view.classList.add("shown");
  const left = Math.min(box.left, innerWidth - view.offsetWidth - 8);
  const below = box.bottom + 6 + view.offsetHeight < innerHeight;
  view.style.left = `${Math.max(left, 8)}px`;
  view.style.top = `${below ? box.bottom + 6 : box.top - view.offsetHeight - 6}px`;
}

export function tokenLines(row, i) {
  const lines = [`token ${i}: ${JSON.stringify(row.tokens[i])}`];
  if (row.logprobs?.[i] === null) return [...lines, "not chosen by the policy"];
  const add = (name, value, text = number) => typeof value === "number" && lines.push(`${name} ${text(value)}`);
  add("engine log-probability", row.logprobs?.[i]);
  add("trainer log-probability", row.trainer_logprobs?.[i]);
  add("trainer − engine", gap(row, i), signed);
  const ratio = logRatio(row, i);
  if (typeof ratio === "number") lines.push(`ratio ${number(Math.exp(ratio))}`);
  add("advantage", advantage(row, i), signed);
  return lines;
}

// ---- what stands above an answer

export function verdict(row, above) {
  const badges = [];
  if (row.invalid !== null && row.invalid !== undefined) badges.push(h("span", { class: "badge invalid" }, "invalid"));
  else if (row.reward === null || row.reward === undefined) badges.push(h("span", { class: "badge" }, "no reward"));
  else badges.push(h("span", { class: `badge ${row.reward > above ? "right" : "wrong"}` }, `reward ${number(row.reward)}`));
  if (typeof row.advantage === "number") badges.push(h("span", { class: "badge advantage" }, `advantage ${signed(row.advantage)}`));
  if (row.finish_reason === "length") badges.push(h("span", { class: "badge cut" }, "cut"));
  else if (row.finish_reason && row.finish_reason !== "stop") badges.push(h("span", { class: "badge cut" }, row.finish_reason));
  if (row.response_tokens !== undefined) badges.push(h("span", { class: "small" }, `${number(row.response_tokens)} tokens`));
  return badges;
}

const OWN = new Set(["prompt_id", "group", "sample", "data_source", "prompt", "response", "ground_truth", "reward",
  "invalid", "finish_reason", "response_tokens", "pred", "chat", "messages", "turn_rewards", "images", "tokens",
  "logprobs", "advantage", "advantages", "trainer_logprobs", "update_logprobs", "step"]);

export function further(row) {
  const pairs = Object.entries(row).filter(([name]) => !OWN.has(name)).map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : JSON.stringify(value)}`);
  if (row.turn_rewards?.length) pairs.push(`rewards of turns ${row.turn_rewards.map((v) => number(v)).join(", ")}`);
  if (row.pred !== undefined) pairs.push(`read as ${JSON.stringify(row.pred)}`);
  return pairs.length ? h("p", { class: "small" }, pairs.join(" · ")) : null;
}

export function invalidView(row) {
  if (row.invalid === null || row.invalid === undefined) return null;
  const lines = String(row.invalid).trim().split("\n");
  return h("details", { class: "reason", open: lines.length < 4 }, h("summary", {}, lines.at(-1) || "no reason given"), h("pre", {}, row.invalid));
}

// ---- two texts

export function textOf(row) {
  return row.messages?.length ? row.messages.map((m) => (typeof m.content === "string" ? m.content : JSON.stringify(m.content))).join("\n") : row.response ?? "";
}

const MOST_CHARS = 20000; // of two texts whose difference is looked for

// Marks what changed once it is near the window: texts that differ altogether take long to compare.
export function changesView(before, after) {
  const view = h("div", { class: "text changes" }, after);
  if (before.length + after.length <= MOST_CHARS) {
    waiting.set(view, [before, after]);
    nearby.observe(view);
  }
  return view;
}

const waiting = new WeakMap();
const nearby = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    nearby.unobserve(target);
    const parts = Diff.diffWordsWithSpace(...waiting.get(target), { timeout: 100 });
    if (parts) fill(target, parts.map((part) => h(part.added ? "ins" : part.removed ? "del" : "span", {}, part.value)));
  }
}, { rootMargin: "300px" });
