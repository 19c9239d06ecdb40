// State of the page, its controls, its address, and its start.

const facts = JSON.parse($("facts-data").textContent);
// The branches of a composition, with the array that exists if the model has it.
const BRANCHES = { static: "static", "query projection": "q1", "query gate": "qg", "key projection": "k1", "key gate": "kg" };
const NUMBERS = ["sample", "layer", "query", "key", "head", "stage", "other"];
const defaults = () => ({
  sample: 0, layer: 0, query: 0, key: 0, head: 0, stage: 3, scale: "view", other: -1, off: new Set(), ablated: new Set(),
});
const state = defaults();
const layers = new Map();
let shown = null; // what the sections show: the layer, the row of the query, and of a text the matrices with their limits
let turn = 0, latest = null; // the number and the promise of the newest drawing

const sampleOf = (index) => facts.samples[index];
const clamp = (value, most) => Math.max(0, Math.min(Math.trunc(Number(value) || 0), most));

// The promise of a layer of a sample; the last few are kept.
function loadLayer(index, position) {
  const id = `${index}/${position}`, sample = sampleOf(index), spec = sample.layers[position];
  if (!layers.has(id)) layers.set(id, unpack(spec.block, spec.arrays).then((arrays) => new Layer(sample, spec, arrays)));
  if (layers.size > 8) layers.delete(layers.keys().next().value);
  return layers.get(id);
}

// The number of possible values of each part of the state that depends on the sample.
const countsOf = ({ layers: all, tokens, heads }) => Object.entries({ layer: all.length, query: tokens, key: tokens, head: heads });

// Change the state and show it; resolves when the page shows it, or a later state.
function set(change) {
  Object.assign(state, change);
  state.sample = clamp(state.sample, facts.samples.length - 1);
  for (const [name, count] of countsOf(sampleOf(state.sample))) state[name] = clamp(state[name], count - 1);
  state.stage = clamp(state.stage, STAGES.length - 1);
  state.other = clamp(Number(state.other) + 1, facts.samples.length) - 1;
  writeHash();
  latest = render(++turn);
  return latest;
}

// Every change of the state is a new turn. A turn that has waited for data draws only if it is still the newest.
async function render(mine) {
  const sample = sampleOf(state.sample), other = sampleOf(state.other);
  const [layer, otherLayer] = await Promise.all([loadLayer(state.sample, state.layer),
    other && loadLayer(state.other, Math.min(state.layer, other.layers.length - 1))]);
  if (mine !== turn) return latest;
  const row = layer.row(state.query, state.off, state.ablated), plain = layer.row(state.query, new Set(), new Set());
  const drawn = JSON.stringify([state.sample, state.layer, [...state.off], [...state.ablated]]);
  const isNew = shown?.drawn !== drawn;
  shown = { ...shown, layer, row, drawn };
  showControls(sample, layer);
  if (isNew) {
    shown.matrices = sample.text && layer.matrices(state.off, state.ablated);
    shown.limits = shown.matrices?.map(robustLimit);
    showTables(layer);
  }
  showInput(sample, row);
  showHeads(sample, layer, row);
  showEffects(row, plain);
  showPair(sample, layer, row);
  showComparison(sample, other, otherLayer);
}

function showControls(sample, layer) {
  const run = facts.runs[sample.run], off = [...state.off, ...[...state.ablated].map((h) => `head ${h}`)];
  for (const [id, count] of countsOf(sample)) $(id).max = count - 1;
  for (const id of [...NUMBERS, "scale"]) $(id).value = String(state[id]);
  $("layer-number").value = `layer ${layer.facts.number}`;
  $("title").textContent = run.name;
  $("facts").textContent = run.facts;
  $("switched").textContent = off.length ? `(${off.length} off)` : "";
  $("status").textContent = `Layer ${layer.facts.number}, query ${labelOf(sample, state.query)}, key ${labelOf(sample, state.key)}, ` +
    `head ${state.head}` + (off.length ? `; off: ${off.join(", ")}` : "");
  showSwitches("branches", "off", branchesOf(layer.facts), (name) => name.replace(".", ": "));
  showSwitches("ablated", "ablated", [...Array(sample.heads).keys()], (head) => `head ${head}`);
}

// The branches of a layer, such as "pre.key gate".
function branchesOf(spec) {
  return ["pre", "post"].flatMap((where) => Object.entries(BRANCHES)
    .filter(([, array]) => `${where}.${array}` in spec.arrays).map(([branch]) => `${where}.${branch}`));
}

// A box for each switch, which removes its value from, or adds it to, a set of the state.
function showSwitches(holder, members, values, nameOf) {
  if ($(holder).dataset.values !== String(values)) {
    $(holder).dataset.values = values;
    $(holder).querySelectorAll("label").forEach((label) => label.remove());
    $(holder).append(...values.map((value) => element("label", { class: "check" }, element("input", {
      type: "checkbox", onchange: () => {
        const changed = new Set(state[members]);
        if (!changed.delete(value)) changed.add(value);
        set({ [members]: changed });
      },
    }), ` ${nameOf(value)}`)));
  }
  $(holder).hidden = !values.length;
  $(holder).querySelectorAll("input").forEach((input, i) => { input.checked = !state[members].has(values[i]); });
}

// The numbers of the current query: head, key, and the four stages.
function table() {
  const { layer, row } = shown, [first, last] = layer.range(state.query), lines = [];
  for (let h = 0; h < layer.H; h++) {
    for (let s = first; s <= last; s++) {
      lines.push([layer.facts.number, state.query, h, s, ...row.stages.map((stage) => stage[h * layer.T + s])]);
    }
  }
  return lines;
}

// The address: #sample=0&layer=3&query=57&key=12&head=2&off=pre.key-projection&ablated=1,4
function writeHash() {
  const words = new URLSearchParams([...NUMBERS, "scale"].map((name) => [name, state[name]]));
  words.set("layer", sampleOf(state.sample).layers[state.layer].number);
  if (state.off.size) words.set("off", [...state.off].join(",").replaceAll(" ", "-"));
  if (state.ablated.size) words.set("ablated", [...state.ablated].join(","));
  if (document.documentElement.dataset.theme) words.set("theme", document.documentElement.dataset.theme);
  history.replaceState(null, "", `#${words}`);
}

// The view of a link: what it omits has its default, and words and values that do not fit the page are ignored.
function readHash() {
  const words = new URLSearchParams(location.hash.slice(1)), list = (name) => (words.get(name) ?? "").split(",");
  Object.assign(state, defaults());
  for (const name of NUMBERS) if (/^-?\d+$/.test(words.get(name))) state[name] = Number(words.get(name));
  const sample = sampleOf(clamp(state.sample, facts.samples.length - 1));
  state.layer = sample.layers.findIndex(({ number }) => number === state.layer);
  if (words.get("scale") === "head") state.scale = "head";
  state.off = new Set(sample.layers.flatMap(branchesOf).filter((name) => list("off").includes(name.replaceAll(" ", "-"))));
  state.ablated = new Set([...Array(sample.heads).keys()].filter((head) => list("ablated").includes(String(head))));
  setTheme(words.get("theme"));
}

// Show light or dark colors; anything else follows the browser.
const setTheme = (theme) => { document.documentElement.dataset.theme = ["light", "dark"].includes(theme) ? theme : ""; };

function toggleTheme() {
  setTheme(isDark() ? "light" : "dark");
  set({}); // draws everything again
}

const KEYS = {
  ArrowLeft: () => set({ query: state.query - 1 }), ArrowRight: () => set({ query: state.query + 1 }),
  ArrowUp: () => set({ layer: state.layer + 1 }), ArrowDown: () => set({ layer: state.layer - 1 }),
  "[": () => set({ head: state.head - 1 }), "]": () => set({ head: state.head + 1 }),
  ",": () => set({ key: state.key - 1 }), ".": () => set({ key: state.key + 1 }),
  r: () => set({ off: new Set(), ablated: new Set() }), t: toggleTheme,
};

function start() {
  for (const id of NUMBERS) $(id).addEventListener("change", () => set({ [id]: Number($(id).value) }));
  $("layer").addEventListener("input", () => set({ layer: Number($("layer").value) }));
  $("scale").addEventListener("input", () => set({ scale: $("scale").value }));
  $("reset").addEventListener("click", KEYS.r);
  $("theme").addEventListener("click", toggleTheme);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || /INPUT|SELECT/.test(event.target.tagName) || !KEYS[event.key]) return;
    if (event.key.startsWith("Arrow") && event.target.matches(".scroll")) return; // scrolls
    event.preventDefault();
    KEYS[event.key]();
  });
  addEventListener("hashchange", () => { readHash(); set({}); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => set({}));
  readHash();
  for (const button of document.querySelectorAll("button[data-view]")) button.addEventListener("click", () => set(viewOf(button)));
  const first = document.querySelector("[data-sample='0'] [data-first]");
  if (first && !location.hash) Object.assign(state, viewOf(first));
  return set({});
}

// For the console: `await explorer.set({query: 5})`, then `explorer.table()`, or the maps of the pair.
window.explorer = {
  state, set, table, STAGES, ready: start(),
  terms: (where) => shown.layer.terms(where, state.query, state.key, state.off),
  output: () => [...shown.row.out],
};
