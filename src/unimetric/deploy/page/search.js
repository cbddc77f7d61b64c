"use strict";
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const THUMB = "M7 21V10l4.5-8c1.6 0 2.5 1 2.5 2.6L13.3 9H19a2 2 0 0 1 2 2.3l-1.2 8A2 2 0 0 1 17.8 21H7zM3 10h4v11H3z";
const state = { info: null, query: null, where: null, answer: null, votes: new Map(), number: 0, map: null, cropping: false, page: 24, files: 0 };

function make(name, attributes = {}, parent = null) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) key === "text" ? (element.textContent = value) : element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

/* --- requests ------------------------------------------------------------------------------------------------------------ */

let quiet;
function say(text, seconds = 6) {
  $("message").textContent = text;
  $("message").hidden = !text;
  clearTimeout(quiet);
  if (text) quiet = setTimeout(() => { $("message").hidden = true; }, seconds * 1000);
}

async function ask(path, options = {}) {
  for (;;) {
    let response;
    try {
      response = await fetch(path, options);
    } catch (error) {
      throw error.name === "AbortError" ? error : new Error("the server cannot be reached");
    }
    if (response.ok) return response.json();
    if (response.status === 401) { await signIn(); continue; }
    const problem = await response.json().catch(() => ({}));
    const texts = { 413: "the image is too large" };
    throw new Error(problem.error || texts[response.status] || `the server has answered with status ${response.status}`);
  }
}

let signing = null;
function signIn() {
  signing ??= new Promise((resolve) => {
    $("wrong").hidden = true;
    $("sign-in").showModal();
    $("sign-in").oncancel = (event) => event.preventDefault();
    $("sign-in").onclose = async () => {
      const form = new FormData();
      form.append("token", $("token").value);
      const response = await fetch("/token", { method: "POST", body: form });
      if (response.ok) { signing = null; resolve(); return; }
      $("wrong").hidden = false;
      $("token").value = "";
      $("sign-in").showModal();
    };
  });
  return signing;
}

/* --- query --------------------------------------------------------------------------------------------------------------- */

const LONGEST = 2048;

/* Large photos are made upright and smaller before they are sent; other images are sent as they are. */
async function prepare(file) {
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) return file;
  const scale = LONGEST / Math.max(bitmap.width, bitmap.height);
  if (scale >= 1) return file;
  // The server uses the colors behind transparent pixels, which a canvas does not keep.
  const { upload, pixels } = state.info?.limits ?? {};
  if (/png|webp/.test(file.type) && file.size < 0.99 * upload && bitmap.width * bitmap.height <= pixels) return file;
  return draw(bitmap, 0, 0, bitmap.width, bitmap.height, scale);
}

function draw(image, x, y, width, height, scale = 1) {
  const canvas = make("canvas", { width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, x, y, width, height, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.95));
}

function show(source) {
  const image = $("query");
  if (image.src.startsWith("blob:")) URL.revokeObjectURL(image.src);
  image.src = source;
  image.hidden = false;
  $("invitation").hidden = true;
  $("drop").classList.add("filled");
  $("crop").disabled = false;
}

async function useFile(file) {
  if (!file) return;
  stopCropping();
  const sent = await prepare(file);
  state.query = { file: sent, number: ++state.files };
  show(URL.createObjectURL(sent));
  if (location.hash) history.pushState(null, "", location.pathname);
  await search();
}

function useId(id, remember = true) {
  stopCropping();
  state.query = { id };
  show(`/images/${encodeURIComponent(id)}`);
  if (remember) history.pushState(null, "", `#id=${encodeURIComponent(id)}`);
  scrollTo({ top: 0 });
  return search();
}

function fromAddress() {
  const found = location.hash.match(/^#id=(.*)$/);
  if (!found) return;
  let id = found[1];
  try { id = decodeURIComponent(id); } catch { /* typed by hand, such as 100%.png */ }
  useId(id, false);
}

let running = null;
async function search() {
  if (!state.query) return;
  view("search");
  running?.abort();
  running = new AbortController();
  const number = ++state.number, where = state.where = filter();
  $("drop").classList.add("busy");
  try {
    let answer;
    if (state.query.file) {
      const form = new FormData();
      form.append("k", state.page);
      if (where) form.append("where", where);
      form.append("file", state.query.file, "query");
      answer = await ask("/search", { method: "POST", body: form, signal: running.signal });
    } else {
      answer = await ask(`/search?${new URLSearchParams({ id: state.query.id, k: state.page, where })}`, { signal: running.signal });
    }
    if (number !== state.number) return;
    state.answer = answer;
    results(answer);
    if (answer.version !== state.info.version) open();
  } catch (error) {
    if (error.name === "AbortError") return;
    say(sentence(error.message));
    if (number === state.number) { state.answer = state.where = null; $("grid").replaceChildren(); $("verdict").replaceChildren(); empty("Nothing was searched."); }
  } finally {
    if (number === state.number) $("drop").classList.remove("busy");
  }
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

/* --- results ------------------------------------------------------------------------------------------------------------- */

const titleOf = (hit) => String(hit.columns.label ?? hit.columns.name ?? hit.columns.title ?? hit.id.split("/").pop());
const empty = (text) => make("p", { class: "empty", text }, $("grid"));

function results(answer) {
  const verdict = $("verdict"), grid = $("grid"), hits = answer.hits;
  verdict.replaceChildren();
  grid.replaceChildren();
  if (!hits.length) { empty(filter() ? "No image matches the filter." : "The index has no other images."); return; }
  if (answer.known !== null) {
    make("b", { class: answer.known ? "known" : "unknown", text: answer.known ? `Known: ${titleOf(hits[0])}` : "Unknown" }, verdict);
    const close = hits.filter((hit) => hit.known).length;
    make("span", { text: answer.known ? `${close}${close === hits.length ? " or more" : ""} images above the threshold` : "no image is above the threshold" }, verdict);
  } else make("b", { text: `${hits.length} nearest images` }, verdict);
  make("span", { text: `${answer.milliseconds.toFixed(0)} ms` }, verdict);
  const best = Math.max(...hits.map((hit) => hit.score)), low = Math.min(0, ...hits.map((hit) => hit.score));
  let above = true;
  hits.forEach((hit, number) => {
    if (above && hit.known === false) {
      above = false;
      make("div", { class: "line", text: `below here: probably something else (threshold ${answer.threshold.toFixed(2)})` }, grid);
    }
    grid.append(card(hit, number, (hit.score - low) / (best - low || 1)));
  });
  if (hits.length === state.page && state.page < 192) {
    const more = make("button", { text: "Show more", class: "empty" }, grid);
    more.addEventListener("click", () => { state.page = Math.min(192, state.page * 2); search(); });
  }
}

function card(hit, number, part) {
  const item = make("article", { class: hit.known === false ? "item beyond" : "item", "data-id": hit.id });
  const button = make("button", { "aria-label": `Search with ${titleOf(hit)}, score ${hit.score.toFixed(3)}`, "data-number": number }, item);
  make("img", { src: hit.thumbnail, alt: "", loading: "lazy", decoding: "async" }, button);
  button.addEventListener("click", () => useId(hit.id));
  const text = make("div", { class: "text" }, item);
  make("div", { class: "name", text: titleOf(hit), title: hit.path }, text);
  const rest = Object.entries(hit.columns).filter(([key, value]) => key !== "label" && value !== null).map(([key, value]) => `${key} ${value}`);
  make("div", { class: "more", text: rest.join(" · ") || " ", title: rest.join("\n") }, text);
  const foot = make("div", { class: "foot" }, item), score = make("div", { class: "score", text: hit.score.toFixed(3) }, foot);
  make("i", {}, score).style.width = `${Math.round(88 * part)}%`;
  if (state.info.feedback) for (const side of ["up", "down"]) foot.append(voteButton(hit, side));
  return item;
}

/* --- votes --------------------------------------------------------------------------------------------------------------- */

const keyOf = (hit) => `${state.query.id ?? ""}\n${state.query.number ?? ""}\n${hit.id}`;

function voteButton(hit, side) {
  const button = make("button", { class: `vote ${side}`, "aria-label": side === "up" ? "Right" : "Wrong", title: side === "up" ? "Right" : "Wrong", "aria-pressed": state.votes.get(keyOf(hit)) === side });
  const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  path.setAttribute("d", THUMB);
  svg.append(path);
  button.append(svg);
  button.addEventListener("click", () => vote(hit, side));
  return button;
}

async function vote(hit, side) {
  const key = keyOf(hit), chosen = state.votes.get(key) === side ? "" : side, form = new FormData();
  form.append("id", hit.id);
  form.append("vote", chosen);
  form.append("score", hit.score);
  if (state.query.id !== undefined) form.append("query", state.query.id);
  else form.append("file", state.query.file, "query");
  try {
    await ask("/feedback", { method: "POST", body: form });
  } catch (error) {
    say(sentence(`the vote was not stored: ${error.message}`));
    return;
  }
  state.votes.set(key, chosen);
  const item = [...document.querySelectorAll(".item")].find((each) => each.dataset.id === hit.id); // it may have been drawn again
  for (const each of key === keyOf(hit) && item ? item.querySelectorAll(".vote") : []) each.setAttribute("aria-pressed", chosen !== "" && each.classList.contains(chosen));
}

/* --- filters ------------------------------------------------------------------------------------------------------------- */

function filters(columns) {
  const before = new Map([...$("filters").elements].map((each) => [each.name, each.value]));
  $("filters").replaceChildren();
  for (const column of columns) {
    if (column.type === "int" || column.type === "float") {
      if (column.low === undefined || column.low === column.high) continue;
      const field = make("fieldset", {}, $("filters"));
      make("span", { text: column.name }, field);
      const range = make("div", { class: "range" }, field);
      for (const [side, value] of [["at least", column.low], ["at most", column.high]])
        make("input", { type: "number", step: column.type === "int" ? 1 : "any", placeholder: value, "aria-label": `${column.name} ${side}`, name: `${column.name}\n${side}` }, range);
      continue;
    }
    const label = make("label", { text: column.name }, $("filters"));
    if (!column.values) { make("input", { name: column.name, placeholder: "contains …" }, label); continue; }
    const select = make("select", { name: column.name }, label);
    make("option", { value: "", text: "any" }, select);
    for (const value of column.values) make("option", { value: String(value), text: String(value) }, select);
  }
  $("narrow").hidden = !$("filters").elements.length;
  for (const each of $("filters").elements) if (before.get(each.name)) each.value = before.get(each.name);
}

const quoteName = (name) => `"${name.replaceAll('"', '""')}"`;
const quoteText = (text) => `'${text.replaceAll("'", "''")}'`;

/* The filter as text for the server, which parses it and binds all values. */
function filter() {
  const parts = [];
  for (const column of state.info?.columns ?? []) {
    const field = (name) => $("filters").elements.namedItem(name);
    if (column.type === "int" || column.type === "float") {
      for (const [side, sign] of [["at least", ">="], ["at most", "<="]]) {
        const value = field(`${column.name}\n${side}`)?.value;
        if (value) parts.push(`${quoteName(column.name)} ${sign} ${Number(value)}`);
      }
      continue;
    }
    const value = field(column.name)?.value;
    if (!value) continue;
    if (column.type === "bool") parts.push(`${quoteName(column.name)} = ${value}`);
    else if (column.values) parts.push(`${quoteName(column.name)} = ${quoteText(value)}`);
    else parts.push(`${quoteName(column.name)} like ${quoteText(`%${value.replace(/[%_\\]/g, "_")}%`)}`);
  }
  return parts.join(" and ");
}

/* --- crop ---------------------------------------------------------------------------------------------------------------- */

let corner = null;
function startCropping() {
  state.cropping = true;
  $("drop").classList.add("cropping");
  $("crop").textContent = "Cancel";
  $("hint").hidden = false;
}

function stopCropping() {
  state.cropping = false;
  corner = null;
  $("drop").classList.remove("cropping");
  $("crop").textContent = "Crop";
  $("hint").hidden = $("selection").hidden = true;
}

function spot(event) {
  const box = $("query").getBoundingClientRect(), clamp = (value) => Math.min(1, Math.max(0, value));
  return { x: clamp((event.clientX - box.left) / box.width), y: clamp((event.clientY - box.top) / box.height) };
}

function select(event) {
  const now = spot(event), image = $("query").getBoundingClientRect(), around = $("drop").getBoundingClientRect();
  const area = { x: Math.min(now.x, corner.x), y: Math.min(now.y, corner.y), width: Math.abs(now.x - corner.x), height: Math.abs(now.y - corner.y) };
  const style = $("selection").style, border = $("drop").clientLeft;
  style.left = `${image.left - around.left - border + area.x * image.width}px`;
  style.top = `${image.top - around.top - border + area.y * image.height}px`;
  style.width = `${area.width * image.width}px`;
  style.height = `${area.height * image.height}px`;
  $("selection").hidden = false;
  return area;
}

async function cropTo(area) {
  const image = $("query"), width = area.width * image.naturalWidth, height = area.height * image.naturalHeight;
  if (width < 8 || height < 8) { corner = null; $("selection").hidden = true; return; }
  const file = await draw(image, area.x * image.naturalWidth, area.y * image.naturalHeight, width, height, Math.min(1, LONGEST / Math.max(width, height)));
  await useFile(file);
}

$("drop").addEventListener("pointerdown", (event) => {
  if (!state.cropping) return;
  event.preventDefault();
  $("drop").setPointerCapture(event.pointerId);
  corner = spot(event);
  select(event);
});
$("drop").addEventListener("pointermove", (event) => { if (corner) select(event); });
$("drop").addEventListener("pointerup", (event) => { if (corner) cropTo(select(event)); });
$("crop").addEventListener("click", () => (state.cropping ? stopCropping() : startCropping()));

/* --- map ----------------------------------------------------------------------------------------------------------------- */

const camera = { x: 0.5, y: 0.5, zoom: 1 };
function view(name) {
  const mapped = name === "map";
  $("atlas").hidden = !mapped;
  $("found").hidden = mapped;
  $("show-map").setAttribute("aria-pressed", mapped);
  $("show-search").setAttribute("aria-pressed", !mapped);
  $("tip").hidden = true;
  if (mapped) openMap();
}

async function openMap() {
  if (!state.map) {
    $("atlas-note").textContent = "Computing the map …";
    try {
      state.map = await ask("/map");
    } catch (error) {
      $("atlas-note").textContent = sentence(error.message);
      return;
    }
    const names = [...new Set(state.map.labels)];
    state.map.colors = state.map.labels.map((label) => (label === null ? "" : `hsl(${(names.indexOf(label) * 137.5) % 360} 65% 50%)`));
  }
  const count = state.map.ids.length, all = state.info.images;
  $("atlas-note").textContent = `${count.toLocaleString("en")}${count < all ? ` of ${all.toLocaleString("en")}` : ""} images by ${state.map.projection || "position"}. Similar images are close to each other. Scroll to zoom, drag to move, click to search.`;
  paint();
}

function placeOf(number) {
  const { clientWidth: width, clientHeight: height } = $("map"), size = camera.zoom;
  return [width * (0.5 + (state.map.x[number] - camera.x) * size * 0.94), height * (0.5 + (state.map.y[number] - camera.y) * size * 0.94)];
}

function paint() {
  if (!state.map || $("atlas").hidden) return;
  const canvas = $("map"), ratio = devicePixelRatio || 1, context = canvas.getContext("2d"), style = getComputedStyle(document.body);
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = canvas.clientHeight * ratio;
  context.scale(ratio, ratio);
  const found = new Set((state.answer?.hits ?? []).map((hit) => hit.id)), plain = style.getPropertyValue("--accent"), ink = style.getPropertyValue("--ink");
  const radius = Math.min(9, 4 * camera.zoom ** 0.4);
  state.map.ids.forEach((id, number) => {
    const [x, y] = placeOf(number);
    context.globalAlpha = found.size && !found.has(id) ? 0.45 : 0.85;
    context.fillStyle = state.map.colors[number] || plain;
    context.beginPath();
    context.arc(x, y, found.has(id) ? radius + 2 : radius, 0, 7);
    context.fill();
    if (found.has(id)) { context.strokeStyle = ink; context.lineWidth = 2; context.stroke(); }
  });
}

function nearest(event) {
  const box = $("map").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  let best = -1, least = 24 ** 2;
  state.map.ids.forEach((_, number) => {
    const [px, py] = placeOf(number), far = (px - x) ** 2 + (py - y) ** 2;
    if (far < least) [best, least] = [number, far];
  });
  return best;
}

function showTip(event, number) {
  const tip = $("tip"), id = state.map.ids[number];
  if (tip.dataset.id !== id) {
    tip.replaceChildren();
    make("img", { src: `/thumbnails/${encodeURIComponent(id)}`, alt: "" }, tip);
    tip.append(state.map.labels[number] ?? id.split("/").pop());
    tip.dataset.id = id;
  }
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

let dragged = null;
function zoomBy(factor, x = 0.5, y = 0.5) {
  const zoom = Math.min(60, Math.max(1, camera.zoom * factor));
  const keep = (center, at) => center + (at - 0.5) * (1 / camera.zoom - 1 / zoom) / 0.94;
  if (zoom === 1) Object.assign(camera, { x: 0.5, y: 0.5 });
  else Object.assign(camera, { x: keep(camera.x, x), y: keep(camera.y, y) });
  camera.zoom = zoom;
  paint();
}
const fingers = new Map();
$("map").addEventListener("wheel", (event) => {
  event.preventDefault();
  const box = $("map").getBoundingClientRect();
  zoomBy(Math.exp(-event.deltaY / 400), (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
}, { passive: false });
$("map").addEventListener("pointerdown", (event) => {
  fingers.set(event.pointerId, event);
  dragged = { x: event.clientX, y: event.clientY, moved: false };
  $("map").setPointerCapture(event.pointerId);
});
$("map").addEventListener("pointermove", (event) => {
  if (!state.map) return;
  if (fingers.size === 2 && fingers.has(event.pointerId)) {
    const gap = () => { const [a, b] = [...fingers.values()]; return Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY); };
    const before = gap();
    fingers.set(event.pointerId, event);
    dragged.moved = true;
    zoomBy(gap() / (before || 1));
    return;
  }
  if (dragged && fingers.size) {
    const dx = event.clientX - dragged.x, dy = event.clientY - dragged.y;
    if (!dragged.moved && Math.hypot(dx, dy) < 5) return;
    camera.x -= dx / ($("map").clientWidth * camera.zoom * 0.94);
    camera.y -= dy / ($("map").clientHeight * camera.zoom * 0.94);
    dragged = { x: event.clientX, y: event.clientY, moved: true };
    $("tip").hidden = true;
    paint();
    return;
  }
  const number = nearest(event);
  if (number < 0) $("tip").hidden = true;
  else showTip(event, number);
});
const lift = (event) => {
  const still = fingers.size === 1 && dragged && !dragged.moved;
  fingers.delete(event.pointerId);
  if (!fingers.size) dragged = null;
  return still;
};
$("map").addEventListener("pointerup", (event) => {
  if (!lift(event) || !state.map) return;
  const number = nearest(event);
  if (number < 0) return;
  if (event.pointerType !== "mouse" && ($("tip").hidden || $("tip").dataset.id !== state.map.ids[number])) { showTip(event, number); return; } // the first touch shows, the second searches
  useId(state.map.ids[number]);
});
$("map").addEventListener("pointercancel", lift);
$("map").addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") $("tip").hidden = true; }); // a finger leaves when it is lifted
$("map").addEventListener("keydown", (event) => {
  const step = 0.1 / camera.zoom, moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
  if (event.key === "+" || event.key === "=") zoomBy(1.4);
  else if (event.key === "-") zoomBy(1 / 1.4);
  else if (moves[event.key]) { camera.x += moves[event.key][0]; camera.y += moves[event.key][1]; paint(); }
  else return;
  event.preventDefault();
  event.stopPropagation();
});
addEventListener("resize", paint);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
$("show-map").addEventListener("click", () => view("map"));
$("show-search").addEventListener("click", () => view("search"));

/* --- input --------------------------------------------------------------------------------------------------------------- */

$("choose").addEventListener("click", () => $("file").click());
$("photograph").addEventListener("click", () => $("camera").click());
for (const id of ["file", "camera"]) $(id).addEventListener("change", () => { useFile($(id).files[0]); $(id).value = ""; });
$("drop").addEventListener("click", () => { if (!state.cropping) $("file").click(); });
$("drop").addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); $("file").click(); } });
addEventListener("dragover", (event) => { event.preventDefault(); $("drop").classList.add("over"); });
addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").classList.remove("over"); });
addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  const file = event.dataTransfer.files[0];
  if (file) useFile(file);
  else say("Drop an image file. Images of other pages can be copied and pasted.");
});
addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find((each) => each.type.startsWith("image/"));
  if (file) useFile(file);
});
$("filters").addEventListener("submit", (event) => event.preventDefault());
// A field reports its change when it loses the focus, by a click on a result for example. Drawing the same results again would lose that click.
$("filters").addEventListener("change", () => { if (filter() !== state.where) search(); });
addEventListener("popstate", fromAddress);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
  if (event.key === "Escape") { stopCropping(); return; }
  if (event.key === "m") { view($("atlas").hidden ? "map" : "search"); return; }
  const cards = [...document.querySelectorAll("#grid .item > button")], here = cards.indexOf(document.activeElement);
  if (!cards.length || $("found").hidden) return;
  if (here >= 0 && (event.key === "+" || event.key === "-")) {
    cards[here].parentElement.querySelector(event.key === "+" ? ".vote.up" : ".vote.down")?.click();
    return;
  }
  const wide = getComputedStyle($("grid")).gridTemplateColumns.split(" ").length;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide }[event.key];
  if (step === undefined) return;
  event.preventDefault();
  cards[here < 0 ? 0 : Math.min(cards.length - 1, Math.max(0, here + step))].focus();
});

async function open() {
  try {
    state.info = await ask("/info");
  } catch (error) {
    $("about").textContent = sentence(error.message);
    return;
  }
  state.map = null;
  $("about").textContent = `${state.info.name}, ${state.info.images.toLocaleString("en")} images`;
  $("votes").hidden = !state.info.feedback;
  filters(state.info.columns);
  if (!$("atlas").hidden) openMap();
}

$("narrow").open = innerWidth > 860;
open().then(() => {
  if (!state.info) return;
  if (!state.info.images) empty("The index is empty. Add images with `unimetric index`.");
  else if (!location.hash) empty("Search with an image of yours, or choose one on the map.");
  fromAddress();
});
