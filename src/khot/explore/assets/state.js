// The state of the page: what is asked and what is shown side by side. It lives in the address, so that a reload or a link shows the same.

export const FIRST = {
  x: [1.2, -0.4, 2.1, 0.3, 1.7, -1.1, 0.8, 1.0],
  k: 3,
  tau: 0.5,
  methods: ["sigmoid", "euclidean", "softrank"],
  designs: ["systematic"],
  pi: "sigmoid",
  draws: 1000,
};

export const DRAWS = [200, 1000, 5000];

const numbers = (text) => text.split(",").map(Number).filter(Number.isFinite);
const bound = (value, low, high) => Math.min(Math.max(value, low), high);

// What an address holds; whatever is missing or no number is as at first.
export function fromAddress(search, table) {
  const given = new URLSearchParams(search);
  const one = (name) => (Number.isFinite(parseFloat(given.get(name))) ? parseFloat(given.get(name)) : FIRST[name]);
  const among = (name, rows) => {
    const known = new Set(rows.map((row) => row.name));
    return given.has(name) ? given.get(name).split(",").filter((word) => known.has(word)) : FIRST[name];
  };
  const listed = given.has("x") ? numbers(given.get("x")).slice(0, table.limits.items) : [];
  const x = listed.length ? listed.map((value) => bound(value, -table.limits.score, table.limits.score)) : [...FIRST.x];
  const pi = table.methods.find((row) => row.probabilities && row.name === given.get("pi"));
  return {
    x,
    k: bound(one("k"), 0, x.length),
    tau: bound(one("tau"), ...table.limits.tau),
    methods: among("methods", table.methods),
    designs: among("designs", table.designs),
    pi: pi ? pi.name : FIRST.pi,
    draws: DRAWS.includes(one("draws")) ? one("draws") : FIRST.draws,
  };
}

export function toAddress(state) {
  const parts = {
    x: state.x.join(","), k: state.k, tau: state.tau, methods: state.methods.join(","), designs: state.designs.join(","),
    pi: state.pi, draws: state.draws,
  };
  return "?" + Object.entries(parts).map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%2C", ",")}`).join("&");
}

// Scores as the page keeps them: four digits after the point.
export const rounded = (value) => Math.round(value * 1e4) / 1e4;

export function evenly(n) {
  return Array.from({ length: n }, (_, i) => rounded(n > 1 ? 2 - (4 * i) / (n - 1) : 0));
}

export function normal(n) {
  const draw = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
  return Array.from({ length: n }, () => Math.round(draw() * 100) / 100);
}

export function resized(x, n) {
  return n <= x.length ? x.slice(0, n) : [...x, ...normal(n - x.length)];
}
