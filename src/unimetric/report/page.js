"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const COLORS = ["#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#db2777", "#65a30d", "#475569", "#b45309"];

function make(name, attributes = {}, parent = null) {
  const svg = ["svg", "line", "polyline", "circle", "text", "g", "rect"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) key === "text" ? (element.textContent = value) : element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

function showTip(event, text, image) {
  tip.replaceChildren();
  if (image) make("img", { src: data.thumbnails[image], alt: "" }, tip);
  tip.append(text);
  tip.hidden = false;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8), top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8);
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

/* About five round numbers between two values. */
function ticks(low, high) {
  const rough = (high - low) / 5 || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}

const short = (value) => (value !== 0 && (Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3) ? value.toExponential(1) : String(Number(value.toPrecision(4))));

/* Lines or dots with axes. A tooltip shows the point nearest to the pointer. */
function plot(parent, { title, xlabel, ylabel, lines, log }) {
  const figure = make("figure", {}, parent);
  make("figcaption", { text: title }, figure);
  const W = 460, H = 280, L = 56, R = 10, T = 8, B = 36;
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title }, figure);
  const up = (value) => (log ? Math.log10(Math.max(value, 1e-12)) : value);
  const points = [];
  lines.forEach((line, number) =>
    line.x.forEach((x, place) => {
      if (x !== null && line.y[place] !== null) points.push({ x, y: up(line.y[place]), raw: line.y[place], number, label: line.labels ? line.labels[place] : line.name });
    }));
  if (!points.length) return;
  const reach = (key) => {
    const values = points.map((point) => point[key]), low = Math.min(...values), high = Math.max(...values), room = (high - low) * 0.05 || 0.5;
    return [low - room, high + room];
  };
  const [x0, x1] = reach("x"), [y0, y1] = reach("y");
  const px = (x) => L + ((x - x0) / (x1 - x0)) * (W - L - R), py = (y) => H - B - ((y - y0) / (y1 - y0)) * (H - T - B);
  for (const value of ticks(x0, x1)) {
    make("line", { x1: px(value), x2: px(value), y1: T, y2: H - B, class: "axis" }, svg);
    make("text", { x: px(value), y: H - B + 14, "text-anchor": "middle", text: short(value) }, svg);
  }
  for (const value of ticks(y0, y1)) {
    make("line", { x1: L, x2: W - R, y1: py(value), y2: py(value), class: "axis" }, svg);
    make("text", { x: L - 6, y: py(value) + 4, "text-anchor": "end", text: short(log ? 10 ** value : value) }, svg);
  }
  make("text", { x: (L + W - R) / 2, y: H - 4, "text-anchor": "middle", text: xlabel }, svg);
  make("text", { x: 12, y: (T + H - B) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(T + H - B) / 2})`, text: ylabel }, svg);
  const groups = lines.map((line, number) => {
    const group = make("g", {}, svg), color = COLORS[number % COLORS.length], mine = points.filter((point) => point.number === number);
    if (!line.dots) make("polyline", { class: "series", stroke: color, points: mine.map((point) => `${px(point.x).toFixed(1)},${py(point.y).toFixed(1)}`).join(" ") }, group);
    if (line.dots || mine.length < 40) for (const point of mine) make("circle", { cx: px(point.x), cy: py(point.y), r: line.dots ? 4 : 2.2, fill: color, "fill-opacity": line.dots ? 0.7 : 1 }, group);
    return group;
  });
  const mark = make("circle", { r: 5, fill: "none", stroke: "currentColor", "stroke-width": 1.5, visibility: "hidden" }, svg);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = W / box.width, x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    let best = null, least = 900;
    for (const point of points) {
      const distance = (px(point.x) - x) ** 2 + (py(point.y) - y) ** 2;
      if (distance < least && groups[point.number].getAttribute("visibility") !== "hidden") [best, least] = [point, distance];
    }
    if (!best) return leave();
    for (const [key, value] of [["cx", px(best.x)], ["cy", py(best.y)], ["visibility", "visible"]]) mark.setAttribute(key, value);
    showTip(event, `${best.label}: ${xlabel} ${short(best.x)}, ${short(best.raw)}`);
  });
  const leave = () => { tip.hidden = true; mark.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointerleave", leave);
  if (lines.length > 1) {
    const legend = make("div", { class: "legend" }, figure);
    lines.forEach((line, number) => {
      const button = make("button", { type: "button" }, legend);
      make("i", { style: `background:${COLORS[number % COLORS.length]}` }, button);
      button.append(line.name);
      button.addEventListener("click", () => groups[number].setAttribute("visibility", button.classList.toggle("off") ? "hidden" : "visible"));
    });
  }
}

for (const name of ["curves", "shift", "structure", "spectra"]) {
  const section = document.getElementById(name);
  section.hidden = !data[name].length;
  document.querySelector(`nav a[href="#${name}"]`).hidden = section.hidden;
  for (const each of data[name]) plot(section.querySelector(".plots"), each);
}

/* Neighbors of some queries, and a map of all images. */
function gallery(run) {
  const place = document.getElementById("gallery");
  place.replaceChildren();
  const rows = make("div", { class: "neighbors" }, place);
  make("h3", { text: run.value }, rows);
  run.queries.forEach((query, number) => {
    const row = make("div", { class: "row" }, rows);
    [query, ...run.neighbors[number]].forEach((each, order) => {
      const kind = order === 0 ? "query" : run.labels[each] === run.labels[query] ? "same" : "other";
      const score = order && run.scores.length ? `, score ${short(run.scores[number][order - 1])}` : "";
      const item = make("figure", { class: "item" }, row);
      make("img", { src: data.thumbnails[run.images[each]], class: kind, alt: run.names[each], title: run.names[each] + score }, item);
      make("figcaption", { text: run.names[each], title: run.names[each] }, item);
    });
  });
  const figure = make("figure", { class: "map" }, place), W = 560, H = 480;
  make("figcaption", { text: `${run.projection}, one color per class` }, figure);
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}` }, figure);
  const spread = (values, size) => {
    const low = Math.min(...values), high = Math.max(...values);
    return values.map((value) => 12 + ((value - low) / (high - low || 1)) * (size - 24));
  };
  const xs = spread(run.x, W), ys = spread(run.y, H);
  xs.forEach((x, each) => {
    const dot = make("circle", { cx: x.toFixed(1), cy: (H - ys[each]).toFixed(1), r: 5, fill: `hsl(${(run.labels[each] * 137.5) % 360} 65% 50%)`, "fill-opacity": 0.75 }, svg);
    dot.addEventListener("pointerenter", (event) => showTip(event, run.names[each], run.images[each]));
    dot.addEventListener("pointerleave", () => { tip.hidden = true; });
  });
}

/* Recall of each class, hardest first. */
function classes(run) {
  const place = document.getElementById("classes");
  place.replaceChildren();
  if (!run.classes.length) return;
  make("h3", { text: `Hardest classes (${run.classes.length} listed)` }, place);
  const table = make("table", {}, make("div", { class: "tall" }, place));
  const head = make("tr", {}, make("thead", {}, table)), body = make("tbody", {}, table);
  for (const text of ["class", "recall@1 (%)", "queries", "most found instead"]) make("th", { text }, head);
  for (const [name, recall, queries, confused] of run.classes) {
    const row = make("tr", {}, body);
    for (const text of [name, (100 * recall).toFixed(1), queries, confused]) make("td", { text }, row);
  }
  sortable(table);
}

function show(run) {
  gallery(run);
  classes(run);
}

/* A click on a heading sorts the rows. */
function sortable(table) {
  table.querySelectorAll("th").forEach((head, column) => {
    let turn = -1;
    head.addEventListener("click", () => {
      const key = (row) => row.children[column].dataset.value ?? row.children[column].textContent;
      const order = (a, b) => { const x = parseFloat(key(a)), y = parseFloat(key(b)); return Number.isNaN(x) || Number.isNaN(y) ? key(a).localeCompare(key(b)) : x - y; };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort((a, b) => turn * order(a, b)));
      turn = -turn;
    });
  });
}

const select = document.querySelector("#galleries select");
document.getElementById("galleries").hidden = !data.galleries.length;
document.querySelector('nav a[href="#galleries"]').hidden = !data.galleries.length;
data.galleries.forEach((run, number) => make("option", { value: number, text: run.name }, select));
select.addEventListener("change", () => show(data.galleries[Number(select.value)]));
if (data.galleries.length) show(data.galleries[0]);

document.querySelectorAll("#results table.results").forEach(sortable);
