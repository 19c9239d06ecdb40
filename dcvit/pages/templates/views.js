// Drawing: color scales, heat maps on canvas, a graph in SVG, and tables.

// Anchors of viridis for values from 0 up; blue and orange for signed values. Both are safe for color blindness.
const VIRIDIS = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137],
  [53, 183, 121], [109, 205, 89], [180, 222, 44], [253, 231, 37]];
const NEGATIVE = [33, 102, 196], POSITIVE = [214, 96, 10];

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

const mix = (a, b, share) => a.map((x, i) => x + (b[i] - x) * share);

// The color of a value between -limit or 0 and limit.
function color(value, limit, signed) {
  const share = limit ? Math.min(1, Math.abs(value) / limit) : 0;
  if (signed) return mix(isDark() ? [30, 34, 40] : [247, 247, 247], value < 0 ? NEGATIVE : POSITIVE, share);
  const at = share * (VIRIDIS.length - 1), low = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return mix(VIRIDIS[low], VIRIDIS[low + 1], at - low);
}

const css = ([r, g, b]) => `rgb(${Math.round(r)},${Math.round(g)},${Math.round(b)})`;

// Draw rows x columns values as one pixel each; the style of the page enlarges them. Where `isOverlay`, small values are
// nearly transparent, so that a picture below shows through.
function heat(canvas, values, rows, columns, { limit, signed, isOverlay, hidden }) {
  Object.assign(canvas, { width: columns, height: rows });
  const context = canvas.getContext("2d"), pixels = context.createImageData(columns, rows);
  const palette = Array.from({ length: 511 }, (_, i) => color(i - 255, 255, signed));
  for (let i = 0; i < rows * columns; i++) {
    const share = limit ? Math.max(-1, Math.min(1, values[i] / limit)) : 0;
    const shown = palette[Math.round(255 * (1 + share))];
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = shown[c];
    pixels.data[4 * i + 3] = hidden?.(i) ? 0 : isOverlay ? 255 * (0.35 + 0.65 * Math.abs(share)) : 255;
  }
  context.putImageData(pixels, 0, 0);
}

// The largest absolute value.
const limitOf = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);

// The absolute value that 99.5 % of the numbers other than 0 do not exceed, so that few outliers do not hide the others.
function robustLimit(values) {
  const sizes = values.filter((x) => x).map(Math.abs).sort();
  return sizes[Math.floor(0.995 * (sizes.length - 1))] ?? 0;
}

// A token with visible spaces and line feeds.
const visible = (text) => text.replaceAll("\n", "\u21b5").replaceAll(" ", "\u00b7") || "\u2205";

const number = (x, digits = 4) => x.toFixed(digits).replace(/^-(0\.0*)$/, "$1");
const percent = (x) => `${(100 * x).toFixed(1)} %`;

const $ = (id) => document.getElementById(id);
const element = (name, ...content) => filled(document.createElement(name), ...content);
const svg = (name, ...content) => filled(document.createElementNS("http://www.w3.org/2000/svg", name), ...content);

function filled(found, attributes = {}, ...children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) found.addEventListener(key.slice(2), value);
    else found.setAttribute(key, value);
  }
  found.append(...children);
  return found;
}

// Replace a table's rows; cells may be elements. The first cell of a row is its heading.
function fillTable(table, header, rows) {
  const head = element("tr", {}, ...header.map((text) => element("th", { scope: "col" }, text)));
  const body = rows.map((row) => element("tr", {},
    ...row.map((cell, i) => (i ? element("td", {}, cell) : element("th", { scope: "row" }, cell)))));
  table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
}

// The colors of the values from -limit or 0 to limit, between these numbers, or between words for limits of each head.
function colorBar(limit, signed, ofEachHead) {
  const ends = [signed ? -1 : 0, 1], bar = element("i");
  const steps = Array.from({ length: 9 }, (_, i) => css(color(ends[0] + ((ends[1] - ends[0]) * i) / 8, 1, signed)));
  bar.style.background = `linear-gradient(90deg, ${steps.join(", ")})`;
  const [low, high] = ofEachHead ? ["min", "max"] : [number(-limit, 2), number(limit, 2)];
  return element("div", { class: "bar" }, signed ? low : "0", bar, high);
}

// The tokens of a text along an axis of its maps, if there is room for them.
function axis(sample, name) {
  const tokens = sample.text.length <= 32 ? sample.text : [];
  const kind = tokens.some((token) => token.length > 2) ? "long" : "";
  return element("div", { class: `axis ${name} ${kind}`, "aria-hidden": true }, ...tokens.map((token) => element("span", {}, visible(token))));
}

// Draw a map from heads (rows) to heads (columns), and describe its largest number between different heads.
function drawHeadMap(canvas, title, map, heads, limit) {
  heat(canvas, map, heads, heads, { limit, signed: true });
  const between = map.map((x, i) => (Math.floor(i / heads) === i % heads ? 0 : x)), most = limitOf(between);
  const best = between.findIndex((x) => Math.abs(x) === most), from = Math.floor(best / heads);
  canvas.setAttribute("aria-label", most ? `${title}: head ${from} contributes most, ${number(map[best], 3)}, to head ${best % heads}`
    : `${title}: no head contributes to another`);
  canvas.onpointermove = ({ offsetX, offsetY }) => {
    const [to, row] = [offsetX / canvas.clientWidth, offsetY / canvas.clientHeight].map((x) => clamp(x * heads, heads - 1));
    canvas.title = `from head ${row} to head ${to}: ${number(map[row * heads + to])}`;
  };
}

function headMap(title, map, heads, limit) {
  const canvas = element("canvas", { role: "img" });
  drawHeadMap(canvas, title, map, heads, limit);
  return element("figure", { class: "map" }, element("figcaption", {}, title), canvas);
}

// Flow from heads through the ranks of the dynamic projections to heads, for one pair of tokens.
function rankGraph(flows, heads, label) {
  const height = Math.max(140, 22 * heads + 20), root = svg("svg", { viewBox: `0 0 360 ${height}`, role: "img", "aria-label": label });
  const most = Math.max(1e-9, ...flows.flatMap(({ into, out }) => [...into, ...out].map(Math.abs)));
  const at = (i, count) => (height * (i + 0.5)) / count;
  const text = (x, y, anchor, content) => root.append(svg("text", { x, y: y + 4, "text-anchor": anchor }, content));
  const line = (x1, y1, x2, y2, value, title) => {
    if (Math.abs(value) < 0.02 * most) return;
    root.append(svg("path", {
      d: `M${x1} ${y1}C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`, fill: "none", opacity: 0.8,
      stroke: css(value < 0 ? NEGATIVE : POSITIVE), "stroke-width": Math.max(0.6, (7 * Math.abs(value)) / most),
      "stroke-dasharray": value < 0 ? "5 3" : "none",
    }, svg("title", {}, `${title}: ${number(value)}`)));
  };
  flows.forEach(({ name, into, out }, i) => {
    const middle = at(i, flows.length);
    into.forEach((value, h) => line(46, at(h, heads), 152, middle, value, `head ${h} to ${name}`));
    out.forEach((value, h) => line(208, middle, 314, at(h, heads), value, `${name} to head ${h}`));
    text(180, middle, "middle", name);
  });
  for (let h = 0; h < heads; h++) {
    text(40, at(h, heads), "end", `head ${h}`);
    text(320, at(h, heads), "start", `head ${h}`);
  }
  return root;
}
