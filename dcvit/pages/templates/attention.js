// Attention of one layer of one input, recomputed from queries, keys, values and compose factors, as in
// dcvit.dcmha.backends.xla.reference. Arrays are flat: scores and weights H x S for one query, maps H x H with the
// contributing heads as rows.

const STAGES = ["scores", "composed scores", "weights", "composed weights"];

// The arrays of a packed element: base64, deflated, float32. `shapes` has the shape of each array, in their order.
async function unpack(id, shapes) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const content = await new Response(stream).arrayBuffer(), arrays = {};
  let start = 0;
  for (const [name, shape] of Object.entries(shapes)) {
    const size = shape.reduce((a, b) => a * b, 1);
    arrays[name] = { shape, values: new Float32Array(content, start, size) };
    start += 4 * size;
  }
  return arrays;
}

function diagonal(H, value) {
  const map = new Float32Array(H * H);
  for (let h = 0; h < H; h++) map[h * H + h] = value(h);
  return map;
}

class Layer {
  constructor(sample, facts, arrays) {
    Object.assign(this, { sample, facts, arrays, T: sample.tokens, H: sample.heads, D: sample.width });
    this.perGroup = this.H / sample.groups;
  }

  // The factors of a composition whose branches exist and are switched on.
  factors(where, off) {
    const get = (name, branch) => (off.has(`${where}.${branch}`) ? undefined : this.arrays[`${where}.${name}`]?.values);
    const found = { rank: (this.arrays[`${where}.q1`] ?? this.arrays[`${where}.k1`])?.shape[1], static: get("static", "static") };
    for (const [letter, side] of [["q", "query"], ["k", "key"]]) {
      for (const name of [`${letter}1`, `${letter}2`]) found[name] = get(name, `${side} projection`);
      found[`${letter}g`] = get(`${letter}g`, `${side} gate`);
    }
    return found;
  }

  // Positions [first, last] of the keys that a query attends to.
  range(t) {
    const { causal, oldest } = this.sample, window = this.facts.window;
    let first = oldest ? oldest[t] : 0;
    if (window) first = Math.max(first, t - window + 1);
    return [first, causal || window ? t : this.T - 1];
  }

  // Eqn 7 for one query: `a` and the result are H x S.
  compose(where, a, t, off) {
    const { H, T: S } = this, out = new Float32Array(H * S), [first, last] = this.range(t);
    for (let s = first; s <= last; s++) {
      for (const map of Object.values(this.terms(where, t, s, off))) {
        for (let g = 0; g < H; g++) {
          for (let h = 0; h < H; h++) out[h * S + s] += a[g * S + s] * map[g * H + h];
        }
      }
    }
    return out;
  }

  // The four stages for one query, each H x S, and the sums of the values, H x D.
  row(t, off, ablated) {
    const { H, D, T: S, arrays } = this, [first, last] = this.range(t), per = H / this.sample.keyHeads;
    const K = this.sample.keyHeads, q = arrays.q.values, k = arrays.k.values, v = arrays.v.values;
    const scores = new Float32Array(H * S), scale = D ** -0.5;
    for (let h = 0; h < H; h++) {
      if (ablated.has(h)) continue;
      const from = (t * H + h) * D, head = Math.floor(h / per);
      for (let s = first; s <= last; s++) {
        const to = (s * K + head) * D;
        let sum = 0;
        for (let d = 0; d < D; d++) sum += q[from + d] * k[to + d];
        scores[h * S + s] = sum * scale;
      }
    }
    const composed = this.compose("pre", scores, t, off), weights = new Float32Array(H * S);
    for (let h = 0; h < H; h++) {
      if (ablated.has(h)) continue;
      let most = -Infinity, total = 0;
      for (let s = first; s <= last; s++) most = Math.max(most, composed[h * S + s]);
      for (let s = first; s <= last; s++) total += weights[h * S + s] = Math.exp(composed[h * S + s] - most);
      for (let s = first; s <= last; s++) weights[h * S + s] /= total;
    }
    const mixed = this.compose("post", weights, t, off), out = new Float32Array(H * D);
    for (let h = 0; h < H; h++) {
      if (ablated.has(h)) mixed.fill(0, h * S, h * S + S);
      for (let s = first; s <= last; s++) {
        const to = (s * K + Math.floor(h / per)) * D, weight = mixed[h * S + s];
        for (let d = 0; d < D; d++) out[h * D + d] += weight * v[to + d];
      }
    }
    return { stages: [scores, composed, weights, mixed], out };
  }

  // The stages of all queries, each H x T x S.
  matrices(off, ablated) {
    const { H, T } = this, found = STAGES.map(() => new Float32Array(H * T * T));
    for (let t = 0; t < T; t++) {
      const { stages } = this.row(t, off, ablated);
      stages.forEach((stage, i) => {
        for (let h = 0; h < H; h++) found[i].set(stage.subarray(h * T, h * T + T), (h * T + t) * T);
      });
    }
    return found;
  }

  // The map of a query-key pair by term, for the terms that exist and are switched on.
  terms(where, t, s, off) {
    const { H, perGroup: J } = this, w = this.factors(where, off), found = { skip: diagonal(H, () => 1) };
    if (w.static) {
      found.static = new Float32Array(H * H);
      for (let g = 0; g < H; g++) found.static.set(w.static.subarray(g * J, g * J + J), g * H + g - (g % J));
    }
    for (const [side, at, down, up, gate] of [["query", t, w.q1, w.q2, w.qg], ["key", s, w.k1, w.k2, w.kg]]) {
      if (down) {
        const map = found[`${side} projection`] = new Float32Array(H * H);
        for (let base = at * w.rank * H; base < (at + 1) * w.rank * H; base += H) {
          for (let g = 0; g < H; g++) {
            const start = g - (g % J); // of the group of heads
            for (let h = start; h < start + J; h++) map[g * H + h] += down[base + g] * up[base + h];
          }
        }
      }
      if (gate) found[`${side} gate`] = diagonal(H, (h) => gate[at * H + h]);
    }
    return found;
  }

  // For each rank of the dynamic projections, the amounts that a pair's numbers `a` of each head add to it, and back.
  flows(where, t, s, off, a) {
    const w = this.factors(where, off), { H, perGroup: J } = this, found = [];
    for (const [side, at, down, up] of [["query", t, w.q1, w.q2], ["key", s, w.k1, w.k2]]) {
      for (let r = 0; down && r < w.rank; r++) {
        const base = (at * w.rank + r) * H, into = a.map((x, h) => x * down[base + h]);
        const hidden = (h) => into.slice(h - (h % J), h - (h % J) + J).reduce((x, y) => x + y, 0);
        found.push({ name: `${side} ${r}`, into, out: a.map((_, h) => hidden(h) * up[base + h]) });
      }
    }
    return found;
  }
}
