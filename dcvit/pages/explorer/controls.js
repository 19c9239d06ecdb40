// Averages over data, files, keyboard, address and start of the page.

function showDataset() {
  const parts = [];
  for (const run of facts.runs.filter((r) => r.averages)) {
    const { averages } = run, heads = averages.entropy[0].length, wheres = Object.keys(averages.share);
    parts.push(element("h3", {}, `${run.name}: ${averages.examples} inputs of ${averages.data}`));
    const rows = averages.entropy.map((entropy, layer) => {
      const cells = [`layer ${layer}`, number(entropy.reduce((a, b) => a + b, 0) / heads, 3)];
      for (const where of wheres) {
        const own = averages.share[where][layer].reduce((sum, shares, h) => sum + shares[h], 0) / heads;
        cells.push(percent(1 - own), percent(averages.dynamic[where][layer]));
      }
      return cells;
    });
    const table = element("table", {});
    const columns = wheres.flatMap((where) => [`${where}: from other heads`, `${where}: dynamic part`]);
    fillTable(table, ["layer", "entropy of weights (nats)", ...columns], rows);
    parts.push(element("div", { class: "scroll" }, table));
    for (const where of wheres) {
      parts.push(element("p", { class: "note" }, `Share of each head (columns) that comes from each head (rows), ${where}-compose; ` +
        "a head's own share is left out of the colors."));
      const maps = averages.share[where].map((share) => share.flatMap((shares, g) => shares.map((x, h) => (g === h ? 0 : x))));
      const limit = Math.max(...maps.map((map) => limitOf(map)), 1e-9);
      parts.push(element("div", { class: "maps" }, ...maps.map((map, layer) => headMap(`layer ${layer}`, map, heads, limit))));
    }
  }
  $("dataset-section").hidden = !parts.length;
  $("dataset").replaceChildren(...parts);
}

function showDiversity() {
  const runs = facts.runs.filter((run) => run.diversity), figures = ["qk", "ov"].map((kind) => {
    const curves = runs.map((run, i) => ({ name: run.name, values: run.diversity[kind], color: SERIES[i % SERIES.length], dash: i ? "6 4" : "none" }));
    const half = curves.map(({ name, values }) => `${name} ${number(values[Math.floor(values.length / 4)], 3)}`).join(", ");
    const label = `${kind.toUpperCase()} circuits; captured by the first quarter of the components: ${half}`;
    return element("figure", {}, element("figcaption", {}, label), lineChart(curves, label, "share of principal components"));
  });
  const legend = runs.map((run, i) => element("span", { style: `--series: ${SERIES[i % SERIES.length]}` }, run.name));
  $("diversity-section").hidden = !runs.length;
  $("diversity").replaceChildren(element("p", { class: "series" }, ...legend), element("div", { class: "columns" }, ...figures));
}

// The numbers of the current query: head, key, and the four stages.
function table() {
  const { layer, query, row } = shown, [first, last] = layer.range(query), lines = [];
  for (let h = 0; h < layer.H; h++) {
    for (let s = first; s <= last; s++) {
      lines.push([layer.facts.number, query, h, s, ...row.stages.map((stage) => stage[h * layer.T + s])]);
    }
  }
  return lines;
}

const fileName = () => `layer${shown.layer.facts.number}-query${shown.query}`;

function saveCsv() {
  const header = ["layer", "query", "head", "key", ...STAGES.map((stage) => stage.replace(" ", "_"))];
  const lines = [header, ...table()].map((line) => line.join(","));
  save(`${fileName()}.csv`, new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
}

function savePng() {
  const { sample } = shown.layer, canvases = [...$("heads").querySelectorAll("canvas")], gap = 8, left = 64, top = 24;
  const scale = Math.ceil(160 / canvases[0].width), width = canvases[0].width * scale, height = canvases[0].height * scale;
  const picture = element("canvas", {}), context = picture.getContext("2d"), style = getComputedStyle(document.body);
  picture.width = left + STAGES.length * (width + gap);
  picture.height = top + (canvases.length / STAGES.length) * (height + gap);
  Object.assign(context, { fillStyle: style.backgroundColor, font: "13px sans-serif", imageSmoothingEnabled: false });
  context.fillRect(0, 0, picture.width, picture.height);
  context.fillStyle = style.color;
  canvases.forEach((canvas, i) => {
    const x = left + (i % STAGES.length) * (width + gap), y = top + Math.floor(i / STAGES.length) * (height + gap);
    if (i < STAGES.length) context.fillText(STAGES[i], x, 16);
    if (i % STAGES.length === 0) context.fillText(`head ${i / STAGES.length}`, 6, y + 16);
    const below = canvas.parentElement.querySelector("img");
    if (below) {
      const share = sample.rows / canvas.height;
      Object.assign(context, { filter: "grayscale(1)", globalAlpha: 0.55 });
      context.drawImage(below, x, y + height * (1 - share), width, height * share);
      Object.assign(context, { filter: "none", globalAlpha: 1 });
    }
    context.drawImage(canvas, x, y, width, height);
  });
  const name = `${fileName()}.png`;
  picture.toBlob((blob) => save(name, blob));
}

// The address: #sample=0&layer=3&query=57&key=12&head=2&off=pre.key-projection&ablated=1,4
function writeHash() {
  const words = new URLSearchParams();
  for (const name of ["sample", "layer", "query", "key", "head", "stage", "scale", "follow", "other"]) words.set(name, state[name]);
  words.set("layer", sampleOf(state.sample).layers[state.layer].number);
  if (state.off.size) words.set("off", [...state.off].join(",").replaceAll(" ", "-"));
  if (state.ablated.size) words.set("ablated", [...state.ablated].join(","));
  if (document.documentElement.dataset.theme) words.set("theme", document.documentElement.dataset.theme);
  history.replaceState(null, "", `#${words}`);
}

// The view of a link: what it omits has its default, and unknown words and values are ignored.
function readHash() {
  const words = new URLSearchParams(location.hash.slice(1)), list = (name) => (words.get(name) ?? "").split(",");
  const integer = (text, from, to) => /^-?\d+$/.test(text) && Number(text) >= from && Number(text) < to;
  const read = (name, to, from = 0) => { if (integer(words.get(name), from, to)) state[name] = Number(words.get(name)); };
  const choose = (name, values) => (values.includes(words.get(name)) ? words.get(name) : null);
  Object.assign(state, defaults());
  read("sample", facts.samples.length);
  const sample = sampleOf(state.sample), branches = new Set(facts.samples.flatMap(({ layers: all }) => all.flatMap(branchesOf)));
  const layer = sample.layers.findIndex(({ number: at }) => String(at) === words.get("layer"));
  if (layer >= 0) state.layer = layer;
  for (const [name, count] of countsOf(sample)) if (name !== "layer") read(name, count);
  read("stage", STAGES.length);
  read("follow", 2);
  read("other", facts.samples.length, -1);
  state.scale = choose("scale", ["view", "head"]) ?? state.scale;
  state.off = new Set(list("off").map((name) => name.replaceAll("-", " ")).filter((name) => branches.has(name)));
  state.ablated = new Set(list("ablated").filter((head) => integer(head, 0, sample.heads)).map(Number));
  setTheme(choose("theme", ["light", "dark"]));
}

// Show light or dark colors; null follows the browser.
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

const KEYS = {
  ArrowLeft: () => ({ query: state.query - 1 }), ArrowRight: () => ({ query: state.query + 1 }),
  ArrowUp: () => ({ layer: state.layer + 1 }), ArrowDown: () => ({ layer: state.layer - 1 }),
  "[": () => ({ head: state.head - 1 }), "]": () => ({ head: state.head + 1 }),
  ",": () => ({ key: state.key - 1 }), ".": () => ({ key: state.key + 1 }),
  r: () => ({ off: new Set(), ablated: new Set() }),
};

// Draw everything again, in the colors of the theme.
function showAll() {
  showDataset();
  showDiversity();
  return set({});
}

function toggleTheme() {
  setTheme(isDark() ? "light" : "dark");
  showAll();
}

async function start() {
  const options = (id, names) => $(id).replaceChildren(...names.map(([value, text]) => element("option", { value }, text)));
  const names = facts.samples.map((sample, i) => [i, facts.runs.length > 1 ? `${sample.name} (${facts.runs[sample.run].name})` : sample.name]);
  options("sample", names);
  options("other", [[-1, "none"], ...names]);
  options("stage", STAGES.map((stage, i) => [i, stage]));
  for (const id of ["sample", "query", "key", "head", "stage", "other"]) {
    $(id).addEventListener("change", () => set({ [id]: Number($(id).value) }));
  }
  $("layer").addEventListener("input", () => set({ layer: Number($("layer").value) }));
  $("scale").addEventListener("change", () => set({ scale: $("scale").value }));
  $("follow").addEventListener("change", () => set({ follow: Number($("follow").checked) }));
  $("reset").addEventListener("click", () => set(KEYS.r()));
  $("png").addEventListener("click", () => shown && savePng());
  $("csv").addEventListener("click", () => shown && saveCsv());
  $("theme").addEventListener("click", toggleTheme);
  const choosePatch = (event) => {
    const sample = sampleOf(state.sample), { rows, token } = grid(sample), box = $("picture").getBoundingClientRect();
    const row = clamp(((event.clientY - box.top) / box.height) * rows, rows - 1);
    const query = token(row, clamp(((event.clientX - box.left) / box.width) * sample.columns, sample.columns - 1));
    if (query >= 0 && query !== state.query) set({ query });
  };
  $("picture").addEventListener("pointermove", (event) => { if (state.follow) choosePatch(event); });
  $("picture").addEventListener("click", choosePatch);
  $("picture").addEventListener("keydown", (event) => move(event, sampleOf(state.sample), {}, "query"));
  document.addEventListener("keydown", (event) => {
    if (isShortcut(event) || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
    if (event.key.startsWith("Arrow") && event.target.matches(".scroll")) return; // scrolls
    if (event.key === "t") toggleTheme();
    if (!KEYS[event.key]) return;
    event.preventDefault();
    set(KEYS[event.key]());
  });
  addEventListener("hashchange", () => { readHash(); showAll(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showAll);
  readHash();
  if (!location.hash) Object.assign(state, firstView(sampleOf(0)));
  const { run } = sampleOf(state.sample);
  $("title").textContent = facts.runs[run].name;
  $("facts").textContent = facts.runs[run].facts;
  await new Promise((resolve) => setTimeout(resolve, 20)); // the browser paints this before the layer is unpacked
  await set({});
  showDataset();
  showDiversity();
}

// For the console: `await explorer.set({query: 5})`, then `explorer.table()`, or the maps of the pair.
window.explorer = {
  state, set, table, STAGES, ready: start(),
  terms: (where) => shown.layer.terms(where, state.query, state.key, state.off),
  output: () => [...shown.row.out],
};
