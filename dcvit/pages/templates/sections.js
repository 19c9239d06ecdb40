// The sections of the page, which show the state of explorer.js.

const labelOf = (sample, token) =>
  sample.text ? `${token} \u201c${visible(sample.text[token])}\u201d`
    : token < sample.extra ? `${token} (token before the patches)`
    : `${token} (row ${Math.floor((token - sample.extra) / sample.columns)}, column ${(token - sample.extra) % sample.columns})`;

// The grid of an image: rows of cells, with one more row above for tokens before the patches.
function grid({ rows, columns, extra }) {
  const above = Math.ceil(extra / columns);
  const cell = (token) => {
    const index = token < extra ? token : token - extra + above * columns;
    return { row: Math.floor(index / columns), column: index % columns };
  };
  const token = (row, column) => {
    const index = row * columns + column;
    return row >= above ? index - above * columns + extra : index < extra ? index : -1;
  };
  return { rows: above + rows, cell, token };
}

// A canvas over the picture of an image, with marks for query and key.
function overlay(sample, canvas) {
  const image = element("img", { src: sample.picture, alt: "" });
  image.style.height = `${(100 * sample.rows) / grid(sample).rows}%`;
  return element("div", { class: "holder" }, image, canvas, element("i", { class: "mark query" }), element("i", { class: "mark key" }));
}

// Draw the numbers of S keys over the patches of an image.
function drawPatches(canvas, sample, values, limit, signed) {
  const { rows, token, cell } = grid(sample), columns = sample.columns;
  const at = (i) => token(Math.floor(i / columns), i % columns);
  const cells = Array.from({ length: rows * columns }, (_, i) => values[at(i)] ?? 0);
  heat(canvas, cells, rows, columns, { limit, signed, isOverlay: true, hidden: (i) => at(i) < 0 });
  for (const name of ["query", "key"]) {
    const { row, column } = cell(Math.min(state[name], sample.tokens - 1));
    Object.assign(canvas.parentElement.querySelector(`.mark.${name}`).style, {
      left: `${(100 * column) / columns}%`, top: `${(100 * row) / rows}%`, width: `${100 / columns}%`, height: `${100 / rows}%`,
    });
  }
}

// The token of an image, or the cell of a text's map, at which a canvas was clicked.
function clicked(event, sample) {
  const rows = sample.text ? sample.tokens : grid(sample).rows, columns = sample.text ? sample.tokens : sample.columns;
  const row = clamp((event.offsetY / event.target.clientHeight) * rows, rows - 1);
  const column = clamp((event.offsetX / event.target.clientWidth) * columns, columns - 1);
  return { row, column, token: sample.text ? -1 : grid(sample).token(row, column) };
}

// A canvas with lines at the query and the key.
function matrixHolder(canvas, T) {
  const at = (name) => `--at: ${(100 * (state[name] + 0.5)) / T}%`;
  return element("div", { class: "holder" }, canvas, element("i", { class: "across", style: at("query") }),
    element("i", { class: "down", style: at("key") }));
}

function drawMatrix(canvas, layer, values, stage) {
  const { T } = layer, limit = state.scale === "head" ? robustLimit(values) : shown.limits[stage];
  const hidden = (cell) => cell % T < layer.range(Math.floor(cell / T))[0] || cell % T > layer.range(Math.floor(cell / T))[1];
  heat(canvas, values, T, T, { limit, signed: isSigned(stage), hidden });
}

const isSigned = (stage) => stage !== 2;

function showInput(sample, row) {
  const { T } = shown.layer, values = row.stages[state.stage].subarray(state.head * T, state.head * T + T);
  const limit = limitOf(values), name = `${STAGES[state.stage]} of head ${state.head} for query ${state.query}`;
  $("picture-holder").hidden = Boolean(sample.text);
  $("tokens").hidden = !sample.text;
  $("input-note").textContent = `${name}; largest ${number(limit)}. White: query, pink: key.` +
    (state.stage === 3 ? " Composed weights are no probabilities." : "");
  if (sample.text) return showTokens(sample, values, limit);
  const canvas = element("canvas", { role: "img", "aria-label": `${sample.name}: ${name}` });
  canvas.addEventListener("click", (event) => {
    const { token } = clicked(event, sample);
    if (token >= 0) set({ query: token });
  });
  $("picture-holder").replaceChildren(overlay(sample, canvas));
  drawPatches(canvas, sample, values, limit, isSigned(state.stage));
}

function showTokens(sample, values, limit) {
  const [first, last] = shown.layer.range(state.query), focused = document.activeElement.closest("#tokens");
  $("tokens").replaceChildren(...sample.text.map((text, i) => {
    const seen = i >= first && i <= last, background = color(values[i], limit, isSigned(state.stage));
    const button = element("button", {
      type: "button", class: `${seen ? "" : "unseen"}${i === state.query ? " query" : ""}${i === state.key ? " key" : ""}`,
      "aria-label": `token ${i}, ${text}: ${seen ? number(values[i]) : "not seen"}`, "aria-pressed": i === state.query,
      onclick: () => set({ query: i }),
    }, visible(text));
    if (seen) {
      const isLight = 0.3 * background[0] + 0.59 * background[1] + 0.11 * background[2] > 140;
      Object.assign(button.style, { background: css(background), color: isLight ? "#000" : "#fff" });
    }
    return button;
  }));
  if (focused) $("tokens").querySelector(".query").focus();
}

// The stages of all heads: of an image the numbers of the query, of a text the matrices of all queries.
function showHeads(sample, layer, row) {
  const { H, T } = layer, { matrices } = shown, largest = row.stages.map(limitOf), ofEachHead = state.scale === "head";
  const limits = matrices ? shown.limits : largest, cells = matrices ? [element("div", { class: "axis" })] : [];
  STAGES.forEach((stage, i) => cells.push(element("div", { class: "stage" }, stage, colorBar(limits[i], isSigned(i), ofEachHead),
    matrices ? axis(sample, "keys") : "")));
  for (let h = 0; h < H; h++) {
    if (matrices) cells.push(axis(sample, "queries"));
    STAGES.forEach((stage, i) => {
      const values = row.stages[i].subarray(h * T, h * T + T), most = limitOf(values), best = values.findIndex((v) => Math.abs(v) === most);
      const canvas = element("canvas", { role: "img", "aria-label": `${stage} of head ${h}, query ${state.query}: ` +
        `largest ${number(values[best] ?? 0)} at key ${best}; key ${state.key}: ${number(values[state.key])}` });
      canvas.addEventListener("click", (event) => {
        const { row: query, column, token } = clicked(event, sample);
        if (matrices) set({ query, key: column, head: h });
        else if (token >= 0) set({ key: token, head: h });
      });
      const holder = matrices ? matrixHolder(canvas, T) : overlay(sample, canvas);
      if (matrices) drawMatrix(canvas, layer, matrices[i].subarray(h * T * T, (h + 1) * T * T), i);
      else drawPatches(canvas, sample, values, ofEachHead ? most : limits[i], isSigned(i));
      cells.push(element("div", { class: "cell" }, element("span", {}, i ? "" : `head ${h}`), holder));
    });
  }
  $("heads-note").textContent = matrices
    ? "Rows are queries, columns are keys. Click a cell to choose query and key; the lines mark them."
    : "Each map shows the keys of one query. Click a patch to choose the key.";
  $("heads").className = matrices ? "text" : "";
  $("heads").replaceChildren(...cells);
  $("legend").textContent = `Largest absolute numbers of this query: ${STAGES.map((s, i) => `${s} ${number(largest[i])}`).join(", ")}. ` +
    "Blue is negative, orange positive; weights go from violet, 0, to yellow. Composed weights are sums of weights of several " +
    "heads and no probabilities: they may be negative or above 1, and need not add up to 1.";
}

function showEffects(row, plain) {
  const { H, D, T } = shown.layer, norm = (x) => Math.hypot(...x);
  const change = (now, before) => percent(norm(now.map((x, i) => x - before[i])) / (norm(before) || 1));
  const rows = Array.from({ length: H }, (_, h) => {
    const now = row.out.subarray(h * D, h * D + D), weights = row.stages[2].subarray(h * T, h * T + T);
    const entropy = weights.reduce((sum, p) => sum - (p > 0 ? p * Math.log(p) : 0), 0);
    return [`head ${h}`, number(norm(now)), change(now, plain.out.subarray(h * D, h * D + D)), number(entropy, 3)];
  });
  rows.push(["all", number(norm(row.out)), change(row.out, plain.out), ""]);
  fillTable($("effects"), ["head", "norm", "change", "entropy of weights (nats)"], rows);
}

// Show the tables of the input, and of those of ablations the rows of the layer.
function showTables(layer) {
  for (const part of document.querySelectorAll("[data-sample]")) part.hidden = part.dataset.sample !== String(state.sample);
  for (const row of document.querySelectorAll("tr[data-layer]")) row.hidden = row.dataset.layer !== String(layer.facts.number);
}

// The view of a row of the table of contributions.
function viewOf(button) {
  const { layer: number, query, key, head } = JSON.parse(button.dataset.view);
  return { layer: sampleOf(state.sample).layers.findIndex((layer) => layer.number === number), query, key, head };
}

// The vector of the pair before and after each composition by term, the maps of the terms, and the rank graph.
function showPair(sample, layer, row) {
  const { H, T } = layer, parts = [], at = (stage, h) => row.stages[stage][h * T + state.key];
  for (const [where, stage] of [["pre", 0], ["post", 2]]) {
    const { skip, ...terms } = layer.terms(where, state.query, state.key, state.off), names = Object.keys(terms);
    const before = Array.from({ length: H }, (_, h) => at(stage, h));
    const added = (term, h) => before.reduce((sum, a, g) => sum + a * term[g * H + h], 0);
    const table = element("table", { id: `${where}-terms` });
    fillTable(table, ["head", STAGES[stage], ...names, STAGES[stage + 1]], before.map((a, h) =>
      [`head ${h}`, number(a), ...names.map((name) => number(added(terms[name], h))), number(at(stage + 1, h))]));
    parts.push(element("h3", {}, `${where === "pre" ? "Pre" : "Post"}-compose: ${STAGES[stage]} to ${STAGES[stage + 1]}`),
      element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${where}-compose by term` }, table));
    if (!names.length) continue;
    const total = skip.map((x, i) => names.reduce((sum, name) => sum + terms[name][i], x));
    const limit = Math.max(...names.map((name) => limitOf(terms[name])), 1e-6);
    parts.push(element("div", { class: "maps" }, headMap("sum of all terms", total, H, Math.max(limitOf(total), 1e-6)),
      ...names.map((name) => headMap(name, terms[name], H, limit))));
    const flows = layer.flows(where, state.query, state.key, state.off, before);
    const label = `Flow through the ranks of ${where}-compose: ${flows.map(({ name }) => name).join(", ")}`;
    if (flows.length) parts.push(element("div", { class: "graph" }, rankGraph(flows, H, label)));
  }
  $("pair-title").textContent = `Query ${labelOf(sample, state.query)}, key ${labelOf(sample, state.key)}`;
  $("pair").replaceChildren(...parts);
}

// A figure for one number of each token: over the picture, or in a row for a text.
function tokenFigure(sample, title, values, limit, signed) {
  const canvas = element("canvas", { role: "img", "aria-label": `${title}: largest ${number(limitOf(values))}` });
  const figure = element("figure", { class: sample.text ? "map wide" : "map" }, element("figcaption", {}, title),
    sample.text ? canvas : overlay(sample, canvas));
  if (sample.text) heat(canvas, values, 1, values.length, { limit, signed });
  else drawPatches(canvas, sample, values, limit, signed);
  return figure;
}

function showComparison(sample, other, layer) {
  $("comparison-section").hidden = facts.samples.length < 2;
  $("comparison").replaceChildren();
  if (!other) return;
  const query = Math.min(state.query, other.tokens - 1), head = Math.min(state.head, other.heads - 1);
  const row = layer.row(query, state.off, state.ablated), T = shown.layer.T;
  STAGES.forEach((stage, i) => {
    const a = shown.row.stages[i].subarray(state.head * T, state.head * T + T);
    const b = row.stages[i].subarray(head * layer.T, (head + 1) * layer.T), limit = Math.max(limitOf(a), limitOf(b));
    const figures = [tokenFigure(sample, sample.name, a, limit, isSigned(i)), tokenFigure(other, other.name, b, limit, isSigned(i))];
    if (a.length === b.length) figures.push(tokenFigure(other, "difference", b.map((x, j) => x - a[j]), limit, true));
    $("comparison").append(element("h3", {}, `${stage}, head ${head}, layer ${layer.facts.number}`), element("div", { class: "maps" }, ...figures));
  });
}
