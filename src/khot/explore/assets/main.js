// Controls, address and cards around one state.

import { DesignCard, MethodCard } from "./cards.js";
import { make } from "./draw.js";
import { Editor } from "./editor.js";
import { DRAWS, evenly, fromAddress, normal, resized, toAddress } from "./state.js";

const at = (id) => document.getElementById(id);
let state, editor;
const cards = new Map();

function change(part) {
  state = { ...state, ...part };
  state.k = Math.min(state.k, state.x.length);
  history.replaceState(null, "", toAddress(state));
  render();
}

function render() {
  editor.show(state.x);
  write("items", state.x.length);
  at("k").max = at("k-number").max = state.x.length;
  write("k", state.k);
  write("k-number", state.k);
  write("tau", Math.log10(state.tau));
  write("tau-number", state.tau);
  write("pi", state.pi);
  write("draws", state.draws);
  for (const box of document.querySelectorAll(".chips input")) box.checked = state[box.name].includes(box.value);
  arrange();
}

// A field that is being typed into keeps its text.
function write(id, value) {
  if (document.activeElement !== at(id) || at(id).type === "range") at(id).value = value;
}

function arrange() {
  const shown = [...state.methods.map((name) => `methods ${name}`), ...state.designs.map((name) => `designs ${name}`)];
  const elements = shown.filter((key) => cards.has(key)).map((key) => cards.get(key));
  const place = at("cards"), wanted = elements.map((card) => card.element);
  if (wanted.length !== place.children.length || wanted.some((element, i) => element !== place.children[i])) place.replaceChildren(...wanted);
  elements.forEach((card) => card.show(state));
}

function chips(name, rows, Kind) {
  for (const row of rows) {
    const label = make("label", { title: row.paper }, at(name));
    const box = make("input", { type: "checkbox", name, value: row.name }, label);
    make("span", {}, label).textContent = row.name;
    cards.set(`${name} ${row.name}`, new Kind(row));
    box.addEventListener("change", () => {
      const others = state[name].filter((other) => other !== row.name);
      change({ [name]: box.checked ? [...others, row.name] : others });
    });
  }
}

function number(id, make_part, valid) {
  at(id).addEventListener("input", () => {
    const value = at(id).valueAsNumber;
    if (Number.isFinite(value) && valid(value)) change(make_part(value));
  });
}

function theme() {
  const root = document.documentElement, key = "khot-theme";
  if (localStorage.getItem(key)) root.dataset.theme = localStorage.getItem(key);
  at("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem(key, root.dataset.theme);
    for (const card of cards.values()) card.paint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => cards.forEach((card) => card.paint()));
}

async function start() {
  theme();
  const table = await (await fetch("api/table")).json();
  chips("methods", table.methods, MethodCard);
  chips("designs", table.designs, DesignCard);
  for (const row of table.methods.filter((row) => row.probabilities)) make("option", {}, at("pi")).textContent = row.name;
  for (const draws of DRAWS) make("option", {}, at("draws")).textContent = draws;
  at("items").max = table.limits.items;
  editor = new Editor(at("editor"), table.limits.score, (x) => change({ x }));
  number("items", (n) => ({ x: resized(state.x, n) }), (n) => Number.isInteger(n) && n >= 1 && n <= table.limits.items);
  number("k", (k) => ({ k }), () => true);
  number("k-number", (k) => ({ k }), (k) => k >= 0 && k <= state.x.length);
  number("tau", (power) => ({ tau: Number((10 ** power).toPrecision(3)) }), () => true);
  number("tau-number", (tau) => ({ tau }), (tau) => tau >= table.limits.tau[0] && tau <= table.limits.tau[1]);
  at("random").addEventListener("click", () => change({ x: normal(state.x.length) }));
  at("even").addEventListener("click", () => change({ x: evenly(state.x.length) }));
  at("ties").addEventListener("click", () => change({ x: state.x.map((value) => Math.round(value)) }));
  at("pi").addEventListener("change", () => change({ pi: at("pi").value }));
  at("draws").addEventListener("change", () => change({ draws: Number(at("draws").value) }));
  addEventListener("popstate", () => change(fromAddress(location.search, table)));
  change(fromAddress(location.search, table));
}

start().catch((error) => {
  at("fault").hidden = false;
  at("fault").textContent = `The page could not start: ${error.message}. Is khot explore still running?`;
});
