// One card per method and per design: asks the server for its numbers and draws them.

import { Bars, Heat, four, make } from "./draw.js";

async function ask(path, parts) {
  const query = new URLSearchParams(parts).toString().replaceAll("%2C", ",");
  const response = await fetch(`${path}?${query}`);
  const answer = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(answer.error || `the server answered ${response.status}`);
  return answer;
}

const asked = (state) => ({ x: state.x.join(","), k: state.k, tau: state.tau });

class Card {
  constructor(row, kind) {
    this.row = row;
    this.element = make("article", { class: "card", "data-kind": kind, "data-name": row.name });
    const title = make("h3", {}, this.element);
    make("code", {}, title).textContent = row.name;
    make("p", { class: "words" }, this.element).textContent = [...row.words, row.cost, row.note, row.paper].filter(Boolean).join(" · ");
    this.error = make("p", { class: "error", role: "status" }, this.element);
    this.error.hidden = true;
    this.plots = make("div", { class: "plots" }, this.element);
    this.version = 0;
  }

  // The latest state wins: one question at a time, and the next is the newest.
  async show(state) {
    this.state = state;
    this.version += 1;
    this.element.dataset.asked = this.version;
    if (this.busy) return;
    this.busy = true;
    while (this.shown !== this.version) {
      const version = this.version;
      try {
        await this.refresh(this.state, () => version === this.version);
        this.failed(null);
      } catch (error) {
        this.failed(error.message);
      }
      this.shown = version;
      this.element.dataset.settled = version;
    }
    this.busy = false;
  }

  failed(message) {
    this.error.hidden = message === null;
    this.error.textContent = message ?? "";
    this.element.classList.toggle("bad", message !== null);
  }

  details(title) {
    const box = make("details", {}, this.element);
    make("summary", {}, box).textContent = title;
    return box;
  }

  addCode() {
    const box = this.details("code");
    this.code = make("code", {}, make("pre", { tabindex: 0 }, box));
    const button = make("button", { type: "button", class: "copy" }, box);
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      await copy(this.code.textContent);
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 1200);
    });
  }

  fill(head, lines) {
    this.table.replaceChildren();
    const cells = (parent, name, words) => words.forEach((word) => (make(name, {}, parent).textContent = word));
    cells(make("tr", {}, make("thead", {}, this.table)), "th", head);
    const body = make("tbody", {}, this.table);
    lines.forEach((line) => cells(make("tr", {}, body), "td", line));
  }
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", {}, document.body);
  area.value = text;
  area.select();
  document.execCommand("copy");
  area.remove();
}

export class MethodCard extends Card {
  constructor(row) {
    super(row, "method");
    this.bars = new Bars(this.plots, `mask of ${row.name}`);
    this.figures = make("p", { class: "figures" }, this.plots);
    const heat = make("div", { class: "heat" }, this.plots);
    this.probe = make("p", { class: "probe", role: "status" });
    this.probe.textContent = "Row i is the gradient of mask[i]. Point at an entry, or focus the map and press the arrow keys, to read it.";
    this.jacobian = new Heat(heat, "Jacobian", (i, j) => `∂mask[${i}] / ∂score[${j}]`, this.probe);
    if (row.matrix) this.matrix = new Heat(heat, "matrix", (i, j) => `place ${i}, item ${j}`, this.probe);
    (row.matrix ? this.plots : heat).append(this.probe);
    this.table = make("table", { class: "numbers" }, this.details("numbers"));
    this.addCode();
  }

  async refresh(state, current) {
    const answer = await ask("api/soft", { ...asked(state), method: this.row.name });
    if (!current()) return;
    this.answer = answer;
    this.bars.show(answer.mask, { hard: answer.hard });
    this.figures.textContent = `sum ${four(answer.sum)} · distance to the hard mask ${four(answer.distance)}`;
    this.paint();
    this.fill(["item", "score", "mask", "hard"], answer.mask.map((value, i) => [i, state.x[i], four(value), answer.hard[i]]));
    this.code.textContent = answer.code;
  }

  paint() {
    if (!this.answer) return;
    this.jacobian.show(this.answer.jacobian);
    if (this.matrix) this.matrix.show(this.answer.matrix || []);
  }
}

export class DesignCard extends Card {
  constructor(row) {
    super(row, "design");
    this.bars = new Bars(this.plots, `inclusion frequencies of ${row.name} beside the probabilities`);
    this.figures = make("p", { class: "figures" }, this.plots);
    this.table = make("table", { class: "numbers" }, this.details("numbers"));
    this.addCode();
  }

  // The frequencies add up over requests, each with the next seed, until there are enough draws or the state changes.
  async refresh(state, current) {
    let drawn = state.x.map(() => 0), draws = 0;
    const sizes = {};
    for (let seed = 0; draws < state.draws && current(); seed += 1) {
      const answer = await ask("api/sample", { ...asked(state), method: state.pi, design: this.row.name, seed });
      if (!current()) return;
      drawn = drawn.map((count, i) => count + answer.drawn[i]);
      draws += answer.draws;
      for (const [size, count] of Object.entries(answer.sizes)) sizes[size] = (sizes[size] || 0) + count;
      if (seed === 0) this.code.textContent = answer.code;
      this.draw(answer.probs, drawn.map((count) => count / draws), draws, sizes, state);
    }
  }

  draw(probs, shares, draws, sizes, state) {
    const errors = probs.map((p) => 2 * Math.sqrt(Math.max(0, p * (1 - p)) / draws));
    this.bars.show(probs, { dots: shares, errors, kind: "pi" });
    const worst = Math.max(0, ...probs.map((p, i) => Math.abs(p - shares[i])));
    const listed = Object.keys(sizes).length > 4 ? `${Math.min(...Object.keys(sizes))} to ${Math.max(...Object.keys(sizes))}` : Object.keys(sizes).join(", ");
    this.figures.textContent = `${draws} draws of size ${listed} · largest |frequency − π| ${four(worst)}`;
    this.fill(["item", "score", "π", "frequency"], probs.map((p, i) => [i, state.x[i], four(p), four(shares[i])]));
  }

  paint() {}
}
