// The scores as knobs on vertical tracks: dragged with a pointer, moved with the keyboard.

import { make } from "./draw.js";
import { rounded } from "./state.js";

const WIDTH = 360, HEIGHT = 190, TOP = 12, BOTTOM = 22, LEFT = 26;
const STEPS = { ArrowUp: 0.1, ArrowRight: 0.1, ArrowDown: -0.1, ArrowLeft: -0.1, PageUp: 1, PageDown: -1 };

export class Editor {
  constructor(place, limit, changed) {
    Object.assign(this, { limit, changed, x: [], knobs: [] });
    this.svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": "scores" }, place);
  }

  show(x) {
    const reach = Math.max(3, ...x.map((value) => Math.ceil(Math.abs(value))));
    const same = this.dragging !== undefined || (x.length === this.x.length && reach === this.reach);
    this.x = x;
    if (!same) {
      this.reach = reach;
      this.build();
    }
    x.forEach((_, i) => this.move(i));
  }

  build() {
    const focus = this.knobs.indexOf(document.activeElement);
    this.svg.replaceChildren();
    for (const value of [this.reach, 0, -this.reach]) {
      make("line", { x1: LEFT, x2: WIDTH, y1: this.y(value), y2: this.y(value), class: value ? "axis" : "zero" }, this.svg);
      make("text", { x: LEFT - 5, y: this.y(value) + 4, "text-anchor": "end" }, this.svg).textContent = value;
    }
    this.knobs = this.x.map((_, i) => this.knob(i));
    if (focus >= 0 && this.knobs[focus]) this.knobs[focus].focus();
  }

  knob(i) {
    const at = this.at(i), size = Math.min(9, Math.max(3.5, (0.36 * (WIDTH - LEFT)) / this.x.length));
    make("line", { x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM, class: "track" }, this.svg);
    const group = make("g", { class: "knob", tabindex: 0, role: "slider", "aria-orientation": "vertical", "aria-label": `score ${i}`,
      "aria-valuemin": -this.limit, "aria-valuemax": this.limit }, this.svg);
    group.stem = make("line", { x1: at, x2: at, y1: this.y(0), class: "stem", "stroke-width": size }, group);
    group.dots = [make("circle", { cx: at, r: size }, group), make("circle", { cx: at, r: size + 3, class: "ring" }, group),
      make("circle", { cx: at, r: Math.max(size + 5, Math.min(16, 150 / this.x.length)), class: "hit" }, group)];
    if (this.x.length <= 24) make("text", { x: at, y: HEIGHT - 5, "text-anchor": "middle" }, this.svg).textContent = i;
    group.addEventListener("keydown", (event) => this.pressed(event, i));
    group.addEventListener("pointerdown", (event) => this.grab(event, i));
    return group;
  }

  move(i) {
    const y = this.y(Math.max(-this.reach, Math.min(this.reach, this.x[i])));
    this.knobs[i].dots.forEach((dot) => dot.setAttribute("cy", y));
    this.knobs[i].stem.setAttribute("y2", y);
    this.knobs[i].setAttribute("aria-valuenow", this.x[i]);
  }

  pressed(event, i) {
    const ends = { Home: -this.reach, End: this.reach };
    if (!(event.key in STEPS) && !(event.key in ends)) return;
    event.preventDefault();
    this.set(i, event.key in ends ? ends[event.key] : this.x[i] + STEPS[event.key]);
  }

  grab(event, i) {
    event.preventDefault();
    const knob = this.knobs[i];
    knob.focus();
    knob.setPointerCapture(event.pointerId);
    this.dragging = i;
    const drag = (move) => this.set(i, this.value(move.clientY));
    const drop = () => {
      knob.removeEventListener("pointermove", drag);
      this.dragging = undefined;
      this.show(this.x);
    };
    knob.addEventListener("pointermove", drag);
    knob.addEventListener("pointerup", drop, { once: true });
    knob.addEventListener("pointercancel", drop, { once: true });
  }

  set(i, value) {
    const x = [...this.x];
    x[i] = rounded(Math.max(-this.limit, Math.min(this.limit, Math.round(value * 100) / 100)));
    this.changed(x);
  }

  at(i) {
    return LEFT + ((i + 0.5) * (WIDTH - LEFT)) / this.x.length;
  }

  y(value) {
    return TOP + ((this.reach - value) / (2 * this.reach)) * (HEIGHT - TOP - BOTTOM);
  }

  value(clientY) {
    const box = this.svg.getBoundingClientRect();
    const y = ((clientY - box.top) / box.height) * HEIGHT;
    return Math.max(-this.reach, Math.min(this.reach, this.reach - ((y - TOP) / (HEIGHT - TOP - BOTTOM)) * 2 * this.reach));
  }
}
