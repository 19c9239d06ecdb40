// Drawing: color scales, heat maps on canvas, graphs in SVG, and tables.

// Anchors of viridis for values from 0 up; blue and orange for signed values. Both are safe for color blindness.
const VIRIDIS = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137],
  [53, 183, 121], [109, 205, 89], [180, 222, 44], [253, 231, 37]];
const NEGATIVE = [33, 102, 196], POSITIVE = [214, 96, 10];
const SERIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function mix(a, b, share) {
  return a.map((x, i) => x + (b[i] - x) * share);
}

// The color of a value between -limit or 0 and limit.
function color(value, limit, signed) {
  const share = limit ? Math.min(1, Math.abs(value) / limit) : 0;
  if (signed) return mix(isDark() ? [30, 34, 40] : [247, 247, 247], value < 0 ? NEGATIVE : POSITIVE, share);
  const at = share * (VIRIDIS.length - 1), low = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return mix(VIRIDIS[low], VIRIDIS[low + 1], at - low);
}

// 511 colors as red, green, blue, for values from -limit to limit.
const palettes = new Map();

function palette(signed) {
  const id = `${signed} ${isDark()}`;
  if (!palettes.has(id)) {
    palettes.set(id, Uint8ClampedArray.from(Array.from({ length: 511 }, (_, i) => color(i - 255, 255, signed)).flat()));
  }
  return palettes.get(id);
}

const css = ([r, g, b]) => `rgb(${Math.round(r)},${Math.round(g)},${Math.round(b)})`;

// Draw rows x columns values as one pixel each; the style of the page enlarges them. Where `isOverlay`, small values are
// nearly transparent, so that a picture below shows through.
function heat(canvas, values, rows, columns, { limit, signed, isOverlay, hidden }) {
  if (canvas.width !== columns || canvas.height !== rows) Object.assign(canvas, { width: columns, height: rows });
  const context = canvas.getContext("2d"), pixels = context.createImageData(columns, rows), colors = palette(signed);
  for (let i = 0; i < rows * columns; i++) {
    const share = limit ? Math.max(-1, Math.min(1, values[i] / limit)) : 0, at = 3 * Math.round(255 * (1 + share));
    for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = colors[at + c];
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

// The colors of the values from -limit or 0 to limit, between these numbers; without a limit, it is that of each head.
function colorBar(limit, signed) {
  const at = (share) => css(color(share, 1, signed)), ends = [signed ? -1 : 0, 1];
  const steps = Array.from({ length: 9 }, (_, i) => at(ends[0] + ((ends[1] - ends[0]) * i) / 8)), bar = element("i");
  bar.style.background = `linear-gradient(90deg, ${steps.join(", ")})`;
  const [low, high] = ends.map((end) => (!end ? "0" : limit === undefined ? (end < 0 ? "min" : "max") : number(end * limit, 2)));
  return element("div", { class: "bar" }, low, bar, high);
}

// The tokens of a text along an axis of its maps, if there is room for them.
function axis(sample, name) {
  const tokens = sample.text.length <= 32 ? sample.text : [];
  const kind = tokens.some((token) => token.length > 2) ? "long" : "";
  return element("div", { class: `axis ${name} ${kind}`, "aria-hidden": true }, ...tokens.map((token) => element("span", {}, visible(token))));
}

// A heat map from heads (rows) to heads (columns), with their numbers.
function headMap(title, map, heads, limit) {
  const canvas = element("canvas", { role: "img", "aria-label": describeMap(title, map, heads) });
  heat(canvas, map, heads, heads, { limit, signed: true });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const at = (x, size) => Math.max(0, Math.min(heads - 1, Math.floor((x / size) * heads)));
    const from = at(event.clientY - box.top, box.height), to = at(event.clientX - box.left, box.width);
    canvas.title = `from head ${from} to head ${to}: ${number(map[from * heads + to])}`;
  });
  return element("figure", { class: "map" }, element("figcaption", {}, title), canvas);
}

function describeMap(title, map, heads) {
  let best = -1;
  for (let i = 0; i < map.length; i++) {
    if (Math.floor(i / heads) !== i % heads && (best < 0 || Math.abs(map[i]) > Math.abs(map[best]))) best = i;
  }
  if (best < 0 || !map[best]) return `${title}: no head contributes to another`;
  return `${title}: head ${Math.floor(best / heads)} contributes most, ${number(map[best], 3)}, to head ${best % heads}`;
}

// Flow from heads through the ranks of the dynamic projections to heads, for one pair of tokens.
function rankGraph(flows, heads, label) {
  const height = Math.max(140, 22 * heads + 20), root = svg("svg", { viewBox: `0 0 360 ${height}`, role: "img", "aria-label": label });
  const most = Math.max(1e-9, ...flows.flatMap(({ into, out }) => [...into, ...out].map(Math.abs)));
  const at = (i, count) => (height * (i + 0.5)) / count;
  const line = (x1, y1, x2, y2, value, text) => {
    if (Math.abs(value) < 0.02 * most) return;
    const path = svg("path", {
      d: `M${x1} ${y1}C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`, fill: "none", opacity: 0.8,
      stroke: css(value < 0 ? NEGATIVE : POSITIVE), "stroke-width": Math.max(0.6, (7 * Math.abs(value)) / most),
      "stroke-dasharray": value < 0 ? "5 3" : "none",
    });
    path.append(svg("title", {}, `${text}: ${number(value)}`));
    root.append(path);
  };
  flows.forEach(({ name, into, out }, i) => {
    for (let h = 0; h < heads; h++) {
      line(46, at(h, heads), 152, at(i, flows.length), into[h], `head ${h} to ${name}`);
      line(208, at(i, flows.length), 314, at(h, heads), out[h], `${name} to head ${h}`);
    }
  });
  const text = (x, y, anchor, content) => root.append(svg("text", { x, y: y + 4, "text-anchor": anchor }, content));
  for (let h = 0; h < heads; h++) {
    text(40, at(h, heads), "end", `head ${h}`);
    text(320, at(h, heads), "start", `head ${h}`);
  }
  flows.forEach(({ name }, i) => text(180, at(i, flows.length), "middle", name));
  return root;
}

// Line chart of curves [{name, values, color, dash}] with values in [0, 1].
function lineChart(curves, label, xLabel) {
  const root = svg("svg", { viewBox: "0 0 420 250", role: "img", class: "chart", "aria-label": label });
  const x = (i, n) => 40 + (370 * i) / Math.max(1, n - 1), y = (v) => 215 - 200 * v;
  for (const v of [0, 0.25, 0.5, 0.75, 1]) {
    root.append(svg("line", { x1: 40, x2: 410, y1: y(v), y2: y(v), class: "grid" }));
    root.append(svg("text", { x: 34, y: y(v) + 4, "text-anchor": "end" }, v.toFixed(2)));
  }
  root.append(svg("text", { x: 225, y: 240, "text-anchor": "middle" }, xLabel));
  for (const { name, values, color: stroke, dash } of curves) {
    const points = values.map((v, i) => `${x(i, values.length)},${y(v)}`).join(" ");
    const line = svg("polyline", { points, fill: "none", stroke, "stroke-width": 2, "stroke-dasharray": dash });
    line.append(svg("title", {}, name));
    root.append(line);
  }
  return root;
}

// Save a file that the page has made.
function save(name, blob) {
  const url = URL.createObjectURL(blob), link = element("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
