// Bars, dots and heat maps.

const SVG = new Set(["svg", "g", "line", "rect", "circle", "text"]);
const WIDTH = 330, HEIGHT = 120, TOP = 8, BOTTOM = 18, LEFT = 26;

export function make(name, attributes = {}, parent = null) {
  const element = SVG.has(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

export const four = (value) => (value === null ? "–" : value.toFixed(4));

// One bar per item between 0 and the top, which is 1 unless a value lies above.
export class Bars {
  constructor(place, label) {
    this.svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label }, place);
  }

  show(values, { hard = null, dots = null, errors = null, kind = "bar" } = {}) {
    this.low = Math.min(0, ...values);
    this.top = Math.max(1, ...values, ...(dots || []));
    this.step = (WIDTH - LEFT) / values.length;
    this.svg.replaceChildren();
    this.axis();
    values.forEach((value, i) => {
      this.box(i, value, kind);
      if (hard && hard[i]) this.box(i, 1, "hard");
      if (dots) this.dot(i, dots[i], errors[i]);
      if (values.length <= 10) this.text(i, HEIGHT - 4, i);
    });
  }

  axis() {
    for (const value of [0, 1]) {
      make("line", { x1: LEFT, x2: WIDTH, y1: this.y(value), y2: this.y(value), class: "axis" }, this.svg);
      make("text", { x: LEFT - 5, y: this.y(value) + 4, "text-anchor": "end" }, this.svg).textContent = value;
    }
  }

  box(i, value, kind) {
    const edges = [this.y(Math.max(0, value)), this.y(Math.min(0, value))];
    const inner = kind === "hard" ? 0.86 : 0.64;
    make("rect", { x: LEFT + (i + (1 - inner) / 2) * this.step, y: edges[0], width: inner * this.step, height: edges[1] - edges[0], class: kind }, this.svg);
  }

  dot(i, value, error) {
    const x = LEFT + (i + 0.5) * this.step;
    make("line", { x1: x, x2: x, y1: this.y(Math.min(this.top, value + error)), y2: this.y(Math.max(0, value - error)), class: "whisker" }, this.svg);
    make("circle", { cx: x, cy: this.y(value), r: Math.min(4, 0.3 * this.step), class: "dot" }, this.svg);
  }

  text(i, y, words) {
    make("text", { x: LEFT + (i + 0.5) * this.step, y, "text-anchor": "middle" }, this.svg).textContent = words;
  }

  y(value) {
    return TOP + ((this.top - value) / (this.top - this.low)) * (HEIGHT - TOP - BOTTOM);
  }
}

// A matrix as colours: red above 0, blue below, the strongest entry full. Pointer or arrow keys read an entry.
export class Heat {
  constructor(place, title, name, probe) {
    Object.assign(this, { name, probe, cell: [0, 0], rows: [] });
    const figure = make("figure", {}, place);
    const caption = make("figcaption", {}, figure);
    make("span", {}, caption).textContent = title;
    this.scale = make("span", {}, caption);
    this.canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": `${title}; arrow keys read the entries` }, figure);
    this.figure = figure;
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => this.pressed(event));
    this.canvas.addEventListener("focus", () => this.read());
  }

  show(rows) {
    this.rows = rows;
    const height = rows.length, width = height ? rows[0].length : 0;
    this.figure.hidden = !height;
    if (!height) return;
    Object.assign(this.canvas, { width, height });
    const largest = Math.max(0, ...rows.flat().map((value) => Math.abs(value ?? 0)));
    this.scale.textContent = largest ? `±${Number(largest.toPrecision(2))}` : "all 0";
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).split(",").map(Number);
    const [zero, plus, minus] = ["--zero", "--plus", "--minus"].map(colour);
    const context = this.canvas.getContext("2d"), image = context.createImageData(width, height);
    rows.flat().forEach((value, i) => {
      const share = largest ? Math.sqrt(Math.abs(value ?? 0) / largest) : 0, end = value > 0 ? plus : minus;
      image.data.set([0, 1, 2].map((c) => zero[c] + share * (end[c] - zero[c])).concat(255), 4 * i);
    });
    context.putImageData(image, 0, 0);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.at(((event.clientY - box.top) / box.height) * this.rows.length, ((event.clientX - box.left) / box.width) * this.rows[0].length);
  }

  pressed(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!steps) return;
    event.preventDefault();
    this.at(this.cell[0] + steps[0], this.cell[1] + steps[1]);
  }

  at(i, j) {
    const inside = (value, count) => Math.min(Math.max(Math.floor(value), 0), count - 1);
    this.cell = [inside(i, this.rows.length), inside(j, this.rows[0].length)];
    this.read();
  }

  read() {
    const [i, j] = this.cell;
    if (this.rows[i]?.[j] !== undefined) this.probe.textContent = `${this.name(i, j)} = ${four(this.rows[i][j])}`;
  }
}
