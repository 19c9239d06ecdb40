// State of the page, its controls, and the sections that show it.

const facts = JSON.parse(document.getElementById("facts-data").textContent);
const $ = (id) => document.getElementById(id);
// The branches of a composition, with the array that exists if the model has it.
const BRANCHES = { static: "static", "query projection": "q1", "query gate": "qg", "key projection": "k1", "key gate": "kg" };
const defaults = () => ({
  sample: 0, layer: 0, query: 0, key: 0, head: 0, stage: 3, scale: "view", follow: 0, other: -1, off: new Set(),
  ablated: new Set(),
});
const state = defaults();
const layers = new Map(), rollouts = new Map();
let shown = null; // what the sections show: the layer, the query, its row, and the row without switches
let turn = 0, latest = null; // the number and the promise of the newest drawing

const sampleOf = (index) => facts.samples[index];
const labelOf = (sample, token) =>
  sample.text ? `${token} \u201c${visible(sample.text[token])}\u201d`
    : token < sample.extra ? `${token} (token before the patches)`
    : `${token} (row ${Math.floor((token - sample.extra) / sample.columns)}, column ${(token - sample.extra) % sample.columns})`;

// Promises of a layer and of the rollouts of a sample.
function loadLayer(index, position) {
  const id = `${index}/${position}`, sample = sampleOf(index), spec = sample.layers[position];
  if (!layers.has(id)) layers.set(id, unpack(spec.block, spec.arrays).then((arrays) => new Layer(sample, spec, arrays)));
  if (layers.size > 8) layers.delete(layers.keys().next().value);
  return layers.get(id);
}

function loadRollout(index) {
  const { block, arrays } = sampleOf(index).rollout;
  if (!rollouts.has(index)) rollouts.set(index, unpack(block, arrays));
  return rollouts.get(index);
}

const clamp = (value, most) => Math.max(0, Math.min(Math.trunc(Number(value) || 0), most));

// The number of possible values of each part of the state that depends on the sample.
const countsOf = ({ layers: all, tokens, heads }) => Object.entries({ layer: all.length, query: tokens, key: tokens, head: heads });

function normalize() {
  state.sample = clamp(state.sample, facts.samples.length - 1);
  for (const [name, count] of countsOf(sampleOf(state.sample))) state[name] = clamp(state[name], count - 1);
  state.stage = clamp(state.stage, STAGES.length - 1);
  state.other = clamp(Number(state.other) + 1, facts.samples.length) - 1;
}

// Change the state and show it; resolves when the page shows it, or a later state.
function set(change) {
  Object.assign(state, change);
  normalize();
  writeHash();
  latest = render(++turn);
  return latest;
}

// Every change of the state is a new turn. A turn that has waited for data draws only if it is still the newest.
async function render(mine) {
  const sample = sampleOf(state.sample), id = JSON.stringify([state.sample, state.layer]);
  const layer = await loadLayer(state.sample, state.layer);
  if (mine !== turn) return latest;
  const row = layer.row(state.query, state.off, state.ablated);
  const changed = state.off.size || state.ablated.size;
  const plain = changed ? layer.row(state.query, new Set(), new Set()) : row;
  const switches = JSON.stringify([id, [...state.off], [...state.ablated], state.scale, isDark()]);
  const isNew = shown?.switches !== switches;
  shown = { layer, query: state.query, row, plain, switches };
  const focused = document.activeElement, stage = focused.closest("#heads") && focused.dataset.stage;
  showControls(sample);
  if (isNew) showOnce(sample, layer);
  showInput(sample, row);
  showHeads(sample, layer, row);
  showEffects(sample, row, plain);
  showPair(sample, layer, row);
  if (focused.closest("#tokens")) $("tokens").querySelector(".query")?.focus();
  if (focused.id) $(focused.id)?.focus(); // it may be a new one
  if (stage) $("heads").querySelector(`[data-head="${state.head}"][data-stage="${stage}"]`).focus();
  const other = sampleOf(state.other), position = other && Math.min(state.layer, other.layers.length - 1);
  const [found, otherLayer] = await Promise.all([loadRollout(state.sample), other && loadLayer(state.other, position)]);
  if (mine !== turn) return latest;
  showRollout(sample, found);
  showComparison(sample, other, otherLayer);
}

// Sections that do not depend on query, key and head.
function showOnce(sample, layer) {
  buildHeads(sample, layer);
  showContributions(sample);
  showPredictions(sample);
  showAblations(sample, layer);
}

function showControls(sample) {
  const layer = sample.layers[state.layer], run = facts.runs[sample.run];
  for (const [id, count] of countsOf(sample)) {
    $(id).max = count - 1;
    $(id).value = state[id];
  }
  for (const id of ["sample", "stage", "scale", "other"]) $(id).value = String(state[id]);
  $("follow").checked = Boolean(state.follow);
  $("layer-number").value = `layer ${layer.number}`;
  $("title").textContent = run.name;
  $("facts").textContent = run.facts;
  buildSwitches(sample);
  const off = state.off.size + state.ablated.size;
  $("switched").textContent = off ? `(${off} off)` : "";
  $("status").textContent = `Layer ${layer.number}, query ${labelOf(sample, state.query)}, key ${labelOf(sample, state.key)}, ` +
    `head ${state.head}` + (off ? `; off: ${[...state.off, ...[...state.ablated].map((h) => `head ${h}`)].join(", ")}` : "");
}

// The branches of a layer, such as "pre.key gate".
function branchesOf(spec) {
  const names = spec.arrays.map(([name]) => name);
  return ["pre", "post"].flatMap((where) => Object.entries(BRANCHES)
    .filter(([, array]) => names.includes(`${where}.${array}`)).map(([branch]) => `${where}.${branch}`));
}

function buildSwitches(sample) {
  const branches = branchesOf(shown.layer.facts);
  const box = (holder, name, text, members, value) => {
    const id = `${holder}-${name}`.replaceAll(/[ .]/g, "-");
    if (!$(id)) {
      const input = element("input", { type: "checkbox", id, onchange: () => {
        const changed = new Set(state[members]);
        input.checked ? changed.delete(value) : changed.add(value);
        set({ [members]: changed });
      } });
      $(holder).append(element("label", { class: "check" }, input, ` ${text}`));
    }
    $(id).checked = !state[members].has(value);
  };
  const key = JSON.stringify([branches, sample.heads]);
  if ($("switches").dataset.key !== key) {
    for (const holder of ["branches", "ablated"]) $(holder).querySelectorAll("label").forEach((label) => label.remove());
    $("switches").dataset.key = key;
  }
  for (const name of branches) box("branches", name, name.replace(".", ": "), "off", name);
  for (let h = 0; h < sample.heads; h++) box("ablated", String(h), `head ${h}`, "ablated", h);
  $("branches").hidden = !branches.length;
}

// The grid of an image: rows of cells, with one more row above for tokens before the patches.
function grid(sample) {
  const above = sample.extra ? Math.ceil(sample.extra / sample.columns) : 0;
  const cell = (token) => token < sample.extra
    ? { row: Math.floor(token / sample.columns), column: token % sample.columns }
    : { row: above + Math.floor((token - sample.extra) / sample.columns), column: (token - sample.extra) % sample.columns };
  const token = (row, column) => {
    const index = row < above ? row * sample.columns + column : sample.extra + (row - above) * sample.columns + column;
    return row < above && index >= sample.extra ? -1 : index;
  };
  return { rows: above + sample.rows, above, cell, token };
}

// A canvas over the picture of an image, with marks for query and key.
function overlay(sample, canvas) {
  const { rows } = grid(sample), image = element("img", { src: sample.picture, alt: "" });
  image.style.height = `${(100 * sample.rows) / rows}%`;
  if (sample.picture.startsWith("data:image/png")) image.style.imageRendering = "pixelated"; // a picture of few pixels
  return element("div", { class: "holder" }, image, canvas, element("i", { class: "mark query" }), element("i", { class: "mark key" }));
}

// Draw the numbers of S keys over the patches of an image.
function drawPatches(canvas, sample, values, limit, signed) {
  const { rows, token, cell } = grid(sample), columns = sample.columns, cells = new Float32Array(rows * columns);
  const at = (i) => token(Math.floor(i / columns), i % columns);
  for (let i = 0; i < cells.length; i++) cells[i] = at(i) < 0 ? 0 : values[at(i)];
  heat(canvas, cells, rows, columns, { limit, signed, isOverlay: true, hidden: (i) => at(i) < 0 });
  for (const name of ["query", "key"]) {
    const { row, column } = cell(Math.min(state[name], sample.tokens - 1)), mark = canvas.parentElement.querySelector(`.mark.${name}`);
    Object.assign(mark.style, {
      left: `${(100 * column) / columns}%`, top: `${(100 * row) / rows}%`, width: `${100 / columns}%`, height: `${100 / rows}%`,
    });
  }
}

const isSigned = (stage) => stage !== 2;

function showInput(sample, row) {
  const { T } = shown.layer, values = row.stages[state.stage].subarray(state.head * T, state.head * T + T);
  const limit = limitOf(values), name = `${STAGES[state.stage]} of head ${state.head} for query ${state.query}`;
  $("picture-holder").hidden = Boolean(sample.text);
  $("tokens").hidden = !sample.text;
  $("input-note").textContent = `${name}; largest ${number(limit)}. White: query, pink: key.` +
    (state.stage === 3 ? " Composed weights are no probabilities." : "");
  if (!sample.text) {
    if ($("picture-holder").dataset.sample !== String(state.sample)) {
      $("picture-holder").dataset.sample = state.sample;
      $("picture-holder").replaceChildren(overlay(sample, $("picture")));
    }
    drawPatches($("picture"), sample, values, limit, isSigned(state.stage));
    $("picture").setAttribute("aria-label", `${sample.name}: ${name}`);
    return;
  }
  if ($("tokens").dataset.sample !== String(state.sample)) {
    $("tokens").dataset.sample = state.sample;
    $("tokens").replaceChildren(...sample.text.map((text, i) => element("button", {
      type: "button", onclick: () => set({ query: i }), onpointerenter: () => state.follow && set({ query: i }),
    }, visible(text))));
  }
  const [first, last] = shown.layer.range(state.query);
  [...$("tokens").children].forEach((button, i) => {
    const seen = i >= first && i <= last, background = color(values[i], limit, isSigned(state.stage));
    button.className = `${seen ? "" : "unseen"}${i === state.query ? " query" : ""}${i === state.key ? " key" : ""}`;
    button.style.background = seen ? css(background) : "";
    button.style.color = seen ? (0.3 * background[0] + 0.59 * background[1] + 0.11 * background[2] > 140 ? "#000" : "#fff") : "";
    button.setAttribute("aria-label", `token ${i}, ${sample.text[i]}: ${seen ? number(values[i]) : "not seen"}`);
    button.setAttribute("aria-pressed", i === state.query);
    button.tabIndex = i === state.query ? 0 : -1;
  });
}

// The grid of canvases: for images one per head and stage for the query, for text the matrix of all queries.
function buildHeads(sample, layer) {
  const { H, T } = layer, matrices = sample.text ? layer.matrices(state.off, state.ablated) : null;
  $("heads-note").textContent = sample.text
    ? "Rows are queries, columns are keys. Click a cell to choose query and key; the lines mark them."
    : "Each map shows the keys of one query. Click a patch to choose the key.";
  const limits = matrices?.map(robustLimit), seen = new Uint8Array(matrices ? T * T : 0);
  for (let t = 0; matrices && t < T; t++) {
    const [first, last] = layer.range(t);
    seen.fill(1, t * T + first, t * T + last + 1);
  }
  const cells = STAGES.map((stage, i) => element("div", { class: "stage", "data-limit": limits?.[i] ?? "" }, stage,
    element("div", { class: "bar" }), ...(sample.text ? [axis(sample, "keys")] : [])));
  if (sample.text) cells.unshift(element("div", { class: "axis" }));
  $("heads").className = sample.text ? "text" : "";
  for (let h = 0; h < H; h++) {
    if (sample.text) cells.push(axis(sample, "queries"));
    STAGES.forEach((stage, i) => {
      const canvas = element("canvas", { role: "application", "data-head": h, "data-stage": i });
      const holder = sample.text
        ? element("div", { class: "holder" }, canvas, element("i", { class: "across" }), element("i", { class: "down" }))
        : overlay(sample, canvas);
      if (matrices) {
        const values = matrices[i].subarray(h * T * T, (h + 1) * T * T);
        const limit = state.scale === "head" ? robustLimit(values) : limits[i];
        heat(canvas, values, T, T, { limit, signed: isSigned(i), hidden: (c) => !seen[c] });
      }
      canvas.addEventListener("click", (event) => choose(event, sample, h));
      canvas.addEventListener("keydown", (event) => move(event, sample, sample.text ? { ArrowUp: "query", ArrowDown: "query" } : {}, "key"));
      cells.push(element("div", { class: "cell" }, element("span", {}, i ? "" : `head ${h}`), holder));
    });
  }
  $("heads").replaceChildren(...cells);
}

function choose(event, sample, head) {
  const box = event.currentTarget.getBoundingClientRect(), rows = sample.text ? sample.tokens : grid(sample).rows;
  const columns = sample.text ? sample.tokens : sample.columns;
  const row = clamp(((event.clientY - box.top) / box.height) * rows, rows - 1);
  const column = clamp(((event.clientX - box.left) / box.width) * columns, columns - 1);
  if (sample.text) return set({ query: row, key: column, head });
  const token = grid(sample).token(row, column);
  return token < 0 ? undefined : set({ key: token, head });
}

// Move the query or the key in a map by an arrow key: that of the arrow in `names`, or else `name`.
function move(event, sample, names, name) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!step || isShortcut(event)) return;
  event.preventDefault();
  event.stopPropagation(); // these arrows change query and layer elsewhere
  if (sample.text) return set({ [names[event.key] ?? name]: state[names[event.key] ?? name] + step[0] + step[1] });
  const { rows, cell, token } = grid(sample), at = cell(state[name]), row = at.row + step[0], column = at.column + step[1];
  if (row < 0 || row >= rows || column < 0 || column >= sample.columns || token(row, column) < 0) return;
  set({ [name]: token(row, column) });
}

const isShortcut = (event) => event.ctrlKey || event.altKey || event.metaKey;

function showHeads(sample, layer, row) {
  const { H, T } = layer, limits = row.stages.map((stage) => limitOf(stage));
  for (const canvas of $("heads").querySelectorAll("canvas")) {
    const h = Number(canvas.dataset.head), i = Number(canvas.dataset.stage);
    const values = row.stages[i].subarray(h * T, h * T + T), largest = limitOf(values);
    if (!sample.text) drawPatches(canvas, sample, values, state.scale === "head" ? largest : limits[i], isSigned(i));
    for (const [name, at] of [["across", "query"], ["down", "key"]]) {
      const mark = canvas.parentElement.querySelector(`.${name}`);
      mark?.style.setProperty("--at", `${(100 * (state[at] + 0.5)) / T}%`);
    }
    canvas.tabIndex = h === state.head ? 0 : -1;
    const best = values.findIndex((v) => Math.abs(v) === largest);
    canvas.setAttribute("aria-label",
      `${STAGES[i]} of head ${h}, query ${state.query}: largest ${number(values[best] ?? 0)} at key ${best}; key ${state.key}: ${number(values[state.key])}`);
  }
  $("heads").querySelectorAll(".stage").forEach((stage, i) => {
    const limit = Number(stage.dataset.limit || limits[i]);
    stage.querySelector(".bar").replaceWith(colorBar(state.scale === "head" ? undefined : limit, isSigned(i)));
  });
  $("legend").textContent = `Largest absolute numbers of this query: ${STAGES.map((s, i) => `${s} ${number(limits[i])}`).join(", ")}. ` +
    "Blue is negative, orange positive; weights go from violet, 0, to yellow. Composed weights are sums of weights of several " +
    "heads and no probabilities: they may be negative or above 1, and need not add up to 1.";
}

function showEffects(sample, row, plain) {
  const { H, D, T } = shown.layer, norm = (x) => Math.hypot(...x), rows = [];
  for (let h = 0; h < H; h++) {
    const now = row.out.subarray(h * D, h * D + D), before = plain.out.subarray(h * D, h * D + D);
    const change = norm(now.map((x, i) => x - before[i])) / (norm(before) || 1);
    let entropy = 0;
    for (const p of row.stages[2].subarray(h * T, h * T + T)) entropy -= p > 0 ? p * Math.log(p) : 0;
    rows.push([`head ${h}`, number(norm(now)), percent(change), number(entropy, 3)]);
  }
  const change = norm(row.out.map((x, i) => x - plain.out[i])) / (norm(plain.out) || 1);
  rows.push(["all", number(norm(row.out)), percent(change), ""]);
  fillTable($("effects"), ["head", "norm", "change", "entropy of weights (nats)"], rows);
}

function showPredictions(sample) {
  $("predictions").closest("div").hidden = !sample.predictions;
  if (!sample.predictions) return;
  fillTable($("predictions"), [sample.text ? "next token" : "class", "probability"],
    sample.predictions.map(([label, p]) => [labelled(sample, label), percent(p)]));
}

const labelled = (sample, label) => (sample.text ? visible(label) : label);

function showAblations(sample, layer) {
  const found = (sample.ablations ?? []).filter((a) => a.layer === undefined || a.layer === layer.facts.number);
  $("ablation-section").hidden = !found.length;
  const name = (a) => `${a.layer === undefined ? "all layers" : `layer ${a.layer}`}, ` +
    (a.head !== undefined ? `head ${a.head}` : a.branch === "all" ? "all branches" : `${a.where}: ${a.branch}`);
  const rows = found.sort((a, b) => Math.abs(b.change) - Math.abs(a.change)).map((a) => [
    name(a), `${a.change > 0 ? "+" : ""}${percent(a.change)}`, a.predictions.map(([label, p]) => `${labelled(sample, label)} ${percent(p)}`).join(", "),
  ]);
  fillTable($("ablations"), ["off", "change", "first five predictions"], rows);
}

const viewOf = (sample, { layer: number, query, key, to_head: head }) => ({
  layer: sample.layers.findIndex((layer) => layer.number === number), query, key, head,
});

// The first view: the largest contribution between a query and another key, of weights if they are composed.
function firstView(sample) {
  const apart = sample.contributions.filter(({ query, key }) => query !== key);
  const largest = apart.find(({ where }) => where === "post") ?? apart[0];
  return largest ? viewOf(sample, largest) : {};
}

function showContributions(sample) {
  const rows = sample.contributions.map((one) => {
    const go = () => set(viewOf(sample, one));
    return [element("button", { type: "button", onclick: go }, `layer ${one.layer}`), one.where, one.branch,
      `head ${one.from_head}`, `head ${one.to_head}`, labelOf(sample, one.query), labelOf(sample, one.key), number(one.amount)];
  });
  $("contributions").closest("section").hidden = !rows.length;
  if ($("contributions").dataset.sample === String(state.sample)) return; // keeps the focus
  $("contributions").dataset.sample = state.sample;
  fillTable($("contributions"), ["layer", "composition", "branch", "from", "to", "query", "key", "amount"], rows);
}

// The vector of the pair before and after each composition by term, the maps of the terms, and the rank graph.
function showPair(sample, layer, row) {
  const { H, T } = layer, parts = [], at = (stage, h) => row.stages[stage][h * T + state.key];
  for (const [where, stage] of [["pre", 0], ["post", 2]]) {
    const terms = layer.terms(where, state.query, state.key, state.off), names = Object.keys(terms);
    const before = Array.from({ length: H }, (_, h) => at(stage, h)), total = new Float32Array(H * H);
    for (const term of Object.values(terms)) term.forEach((x, i) => { total[i] += x; });
    const added = (term, h) => before.reduce((sum, a, g) => sum + a * term[g * H + h], 0);
    const table = element("table", { id: `${where}-terms` });
    fillTable(table, ["head", STAGES[stage], ...names.slice(1), STAGES[stage + 1]], before.map((a, h) =>
      [`head ${h}`, number(a), ...names.slice(1).map((name) => number(added(terms[name], h))), number(at(stage + 1, h))]));
    const limit = Math.max(...names.slice(1).map((name) => limitOf(terms[name])), 1e-6);
    const all = Math.max(limitOf(total), 1e-6);
    const maps = element("div", { class: "maps" }, headMap("sum of all terms", total, H, all),
      ...names.slice(1).map((name) => headMap(name, terms[name], H, limit)));
    const graph = rankFlows(layer, where, before);
    parts.push(element("h3", {}, `${where === "pre" ? "Pre" : "Post"}-compose: ${STAGES[stage]} to ${STAGES[stage + 1]}`),
      element("div", { id: `${where}-region`, class: "scroll", tabindex: 0, role: "region", "aria-label": `${where}-compose by term` }, table));
    if (names.length > 1) parts.push(maps);
    if (graph.length) {
      const label = `Flow through the ranks of ${where}-compose: ${graph.map(({ name }) => name).join(", ")}`;
      parts.push(element("div", { class: "graph" }, rankGraph(graph, H, label)));
    }
  }
  $("pair-title").textContent = `Query ${labelOf(sample, state.query)}, key ${labelOf(sample, state.key)}`;
  $("pair").replaceChildren(...parts);
}

function rankFlows(layer, where, before) {
  const w = layer.factors(where, state.off), { H, perGroup: J } = layer, flows = [];
  if (!w) return flows;
  for (const [side, at, down, up] of [["query", state.query, w.q1, w.q2], ["key", state.key, w.k1, w.k2]]) {
    for (let r = 0; down && r < w.rank; r++) {
      const base = (at * w.rank + r) * H, into = before.map((a, h) => a * down[base + h]);
      const hidden = (h) => into.slice(h - (h % J), h - (h % J) + J).reduce((a, b) => a + b, 0);
      flows.push({ name: `${side} ${r}`, into, out: before.map((_, h) => hidden(h) * up[base + h]) });
    }
  }
  return flows;
}

function showRollout(sample, found) {
  const T = sample.tokens;
  const kinds = [["composed_weights", "with composed weights"], ["weights", "with weights before post-compose"]];
  if ($("rollout").dataset.sample !== String(state.sample)) {
    $("rollout").dataset.sample = state.sample;
    $("rollout").replaceChildren(...kinds.map(([, title]) => canvasFigure(sample, title, "large")));
  }
  kinds.forEach(([name, title], i) => {
    const values = found[name].values.slice(state.query * T, state.query * T + T);
    values[state.query] = 0; // the skip connections keep most of a token's own share
    const canvas = $("rollout").querySelectorAll("canvas")[i];
    drawTokens(canvas, sample, values, limitOf(values), false);
    canvas.setAttribute("aria-label", `rollout ${title}: largest ${number(limitOf(values))} at token ${values.indexOf(Math.max(...values))}`);
  });
}

// A figure for one number of each token: over the picture, or in a row for a text.
function canvasFigure(sample, title, size) {
  const canvas = element("canvas", { role: "img" });
  return element("figure", { class: sample.text ? "map wide" : `map ${size}` }, element("figcaption", {}, title),
    sample.text ? canvas : overlay(sample, canvas));
}

function drawTokens(canvas, sample, values, limit, signed) {
  if (sample.text) heat(canvas, values, 1, values.length, { limit, signed });
  else drawPatches(canvas, sample, values, limit, signed);
}

function showComparison(sample, other, layer) {
  $("comparison-section").hidden = facts.samples.length < 2;
  const parts = [];
  if (other) {
    const query = Math.min(state.query, other.tokens - 1), head = Math.min(state.head, other.heads - 1);
    const row = layer.row(query, state.off, state.ablated), T = shown.layer.T;
    for (const [i, stage] of STAGES.entries()) {
      const a = shown.row.stages[i].subarray(state.head * T, state.head * T + T);
      const b = row.stages[i].subarray(head * layer.T, (head + 1) * layer.T), limit = Math.max(limitOf(a), limitOf(b));
      const figures = [[sample, a, sample.name], [other, b, other.name]];
      if (a.length === b.length) figures.push([other, b.map((x, j) => x - a[j]), "difference"]);
      parts.push(element("h3", {}, `${stage}, head ${head}, layer ${layer.facts.number}`), element("div", { class: "maps" },
        ...figures.map(([of, values, title]) => {
          const figure = canvasFigure(of, title, ""), canvas = figure.querySelector("canvas");
          drawTokens(canvas, of, values, limit, isSigned(i) || title === "difference");
          canvas.setAttribute("aria-label", `${stage} of ${title}: largest ${number(limitOf(values))}`);
          return figure;
        })));
    }
    if (other.predictions) {
      const table = element("table", { id: "other-predictions" });
      fillTable(table, ["prediction", "probability"], other.predictions.map(([label, p]) => [labelled(other, label), percent(p)]));
      parts.push(element("h3", {}, `Prediction for ${other.name}`), table);
    }
  }
  $("comparison").replaceChildren(...parts);
}
