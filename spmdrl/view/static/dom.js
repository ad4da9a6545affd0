// Small helpers for elements and numbers. Text of a run is only ever set as text, never as HTML.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function signed(value, digits = 3) {
  return (value > 0 ? "+" : "") + number(value, digits);
}

export function debounced(call, wait_ms = 250) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...args), wait_ms);
  };
}

export function select(label, options, chosen, onchoose, id) {
  const list = h("select", { id, "aria-label": label, onchange: (e) => onchoose(e.target.value) },
    options.map(([value, text]) => h("option", { value: String(value), selected: String(value) === String(chosen) }, text)));
  return h("label", { class: "field" }, h("span", {}, label), list);
}

export function segments(label, options, chosen, onchoose, id) {
  return h("div", { class: "segments", role: "group", "aria-label": label, id },
    options.map(([value, text]) =>
      h("button", { type: "button", class: value === chosen ? "on" : "", "aria-pressed": String(value === chosen),
        dataset: { value }, onclick: () => onchoose(value) }, text)));
}

export function notice(text, kind = "") {
  return h("p", { class: `notice ${kind}` }, text);
}
