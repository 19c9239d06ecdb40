// Attention of one layer of one input, recomputed from queries, keys, values and compose factors, as in
// dcvit.dcmha.backends.xla.reference. Arrays are flat: scores and weights H x S for one query, maps H x H with the
// contributing heads as rows.

const TERMS = ["skip", "static", "query projection", "query gate", "key projection", "key gate"];
const STAGES = ["scores", "composed scores", "weights", "composed weights"];

// The arrays of a packed element: base64, deflated, for each array the low bytes of all numbers first. An array with
// scales has integers of 16 bits with a scale for each column, others have the first 24 bits of float32.
async function unpack(id, header) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer()), arrays = {};
  let start = 0;
  for (const [name, shape, scales] of header) {
    const size = shape.reduce((a, b) => a * b, 1), values = new Float32Array(size), bits = new Uint32Array(values.buffer);
    const byte = (i, plane) => bytes[start + plane * size + i];
    for (let i = 0; i < size; i++) {
      if (scales) values[i] = ((((byte(i, 1) << 8) | byte(i, 0)) << 16) >> 16) * scales[i % scales.length];
      else bits[i] = (byte(i, 2) << 24) | (byte(i, 1) << 16) | (byte(i, 0) << 8);
    }
    arrays[name] = { shape, values };
    start += (scales ? 2 : 3) * size;
  }
  return arrays;
}

class Layer {
  constructor(sample, facts, arrays) {
    Object.assign(this, { sample, facts, arrays, T: sample.tokens, H: sample.heads, D: sample.width });
    this.perGroup = this.H / sample.groups;
  }

  // The factors of a composition that are switched on, or null if there are none.
  factors(where, off) {
    const get = (name) => this.arrays[`${where}.${name}`]?.values;
    const on = (branch) => !off.has(`${where}.${branch}`);
    const projection = this.arrays[`${where}.q1`] ?? this.arrays[`${where}.k1`];
    const found = {
      rank: projection ? projection.shape[1] : 0,
      static: on("static") ? get("static") : undefined,
      q1: on("query projection") ? get("q1") : undefined, q2: get("q2"), qg: on("query gate") ? get("qg") : undefined,
      k1: on("key projection") ? get("k1") : undefined, k2: get("k2"), kg: on("key gate") ? get("kg") : undefined,
    };
    return found.static || found.q1 || found.k1 || found.qg || found.kg ? found : null;
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
    const w = this.factors(where, off);
    if (!w) return a.slice();
    const { H, T: S, perGroup: J } = this, { rank: R } = w, out = new Float32Array(H * S), [first, last] = this.range(t);
    for (let s = first; s <= last; s++) {
      for (let h = 0; h < H; h++) {
        let gate = 1;
        if (w.qg) gate += w.qg[t * H + h];
        if (w.kg) gate += w.kg[s * H + h];
        out[h * S + s] += a[h * S + s] * gate;
        if (w.static) {
          const start = Math.floor(h / J) * J;
          for (let g = 0; g < J; g++) out[h * S + s] += a[(start + g) * S + s] * w.static[(start + g) * J + h - start];
        }
      }
      for (const [down, up, at] of [[w.q1, w.q2, t], [w.k1, w.k2, s]]) {
        if (!down) continue;
        for (let r = 0; r < R; r++) {
          const base = (at * R + r) * H;
          for (let start = 0; start < H; start += J) {
            let hidden = 0;
            for (let h = start; h < start + J; h++) hidden += a[h * S + s] * down[base + h];
            for (let h = start; h < start + J; h++) out[h * S + s] += hidden * up[base + h];
          }
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
    const { H, perGroup: J } = this, w = this.factors(where, off), found = {};
    const fill = (value) => Float32Array.from({ length: H * H }, (_, i) => value(Math.floor(i / H), i % H));
    const grouped = (g, h) => Math.floor(g / J) === Math.floor(h / J);
    found.skip = fill((g, h) => (g === h ? 1 : 0));
    if (!w) return found;
    if (w.static) found.static = fill((g, h) => (grouped(g, h) ? w.static[g * J + (h % J)] : 0));
    for (const [side, at, down, up, gate] of [["query", t, w.q1, w.q2, w.qg], ["key", s, w.k1, w.k2, w.kg]]) {
      if (down) {
        found[`${side} projection`] = fill((g, h) => {
          let sum = 0;
          for (let r = 0; grouped(g, h) && r < w.rank; r++) {
            sum += down[(at * w.rank + r) * H + g] * up[(at * w.rank + r) * H + h];
          }
          return sum;
        });
      }
      if (gate) found[`${side} gate`] = fill((g, h) => (g === h ? gate[at * H + h] : 0));
    }
    return found;
  }
}
