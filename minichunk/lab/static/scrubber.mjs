// The scrubber: one step of a run in four panes. Plain JavaScript, no network: kit.mjs and this file are the anywidget's
// module, and lie inside the saved page. Part 1 plays the run back (pure, tested against scrubber.py), part 2 draws strips,
// grids and time lines on canvases, part 3 puts them together.

// ---- 1. the run, played back --------------------------------------------------------------------------------------

const LAST = 1, DECODE = 2, EVERY = 64; // flags of a chunk; a checkpoint every so many steps

/** bytes (gzip JSON, or its base64) → what scrubber.pack made */
export async function unpack(data) {
  if (typeof data === "string") data = Uint8Array.from(atob(data.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

/** Plays one encoded run (scrubber.encode) forward from the nearest checkpoint. */
export class Player {
  constructor(run) {
    Object.assign(this, { run, n: run.steps.length, count: run.ids.length, size: run.block_size });
    this.times = run.token_times.map(running);
    this.vocab = new Map(run.vocab);
    this.spans = run.ids.map(() => []); // per request: [step, first position, end]
    const expected = new Int32Array(this.count);
    let clock = 0;
    this.steps = run.steps.map(([gap, duration, budget, coded, change], i) => {
      const chunks = [];
      for (let k = 0; k < coded.length; ) {
        const chunk = coded[k] >= 0
          ? { r: coded[k], start: expected[coded[k++]], length: 1, flags: LAST | DECODE }
          : { r: -1 - coded[k++], start: coded[k++], length: coded[k++], flags: coded[k++] };
        expected[chunk.r] = chunk.end = chunk.start + chunk.length;
        this.spans[chunk.r].push([i, chunk.start, chunk.end]);
        chunks.push(chunk);
      }
      const start = clock + gap;
      clock = start + duration;
      const decodes = chunks.filter((c) => c.flags & DECODE).length;
      const kind = decodes ? (decodes < chunks.length ? "mixed" : "decodes") : chunks.length ? "prompts" : "empty";
      return { start, end: clock, budget, chunks, change, decodes, kind, tokens: chunks.reduce((s, c) => s + c.length, 0) };
    });
    this.late = run.ids.map(() => new Map()); // per request: gap index → the gap
    for (const gap of run.gaps) this.late[gap[0]].set(gap[1], gap);
    this.longest = Math.max(...this.steps.map((s) => s.end - s.start), 1);
    this.marks = [];
    this.reset();
  }

  reset() {
    this.now = {
      i: -1, computed: new Int32Array(this.count), outputs: new Int32Array(this.count), tables: new Map(),
      pool: new Uint8Array(this.run.num_blocks), waiting: [], running: [],
    };
  }

  /** The state while step i ran: from the last checkpoint before it, unless the present state is nearer. */
  seek(i) {
    let m = Math.floor(i / EVERY);
    while (m >= 0 && !this.marks[m]) m--;
    if (this.now.i > i || (m >= 0 && this.now.i < this.marks[m].i)) m >= 0 ? (this.now = copy(this.marks[m])) : this.reset();
    while (this.now.i < i) {
      this.advance();
      if (this.now.i % EVERY === 0) this.marks[this.now.i / EVERY] ||= copy(this.now);
    }
    return this.now;
  }

  advance() {
    const s = this.now;
    if (s.i >= 0) this.leave(s, this.steps[s.i]);
    const { a = [], x = [], i = [], p = [], g = [], h = [], s: given = [] } = this.steps[++s.i].change;
    const hits = new Map(h);
    s.waiting.push(...a);
    for (const r of x) this.gone(s, r);
    for (const r of p) {
      drop(s.running, r);
      s.waiting.unshift(r);
      s.tables.delete(r);
      s.computed[r] = 0;
    }
    for (const r of i) {
      drop(s.waiting, r);
      s.running.push(r);
      s.computed[r] = hits.get(r) ?? 0;
    }
    for (const [r, ...blocks] of g) {
      if (!s.tables.has(r)) s.tables.set(r, []);
      s.tables.get(r).push(...blocks);
      for (const b of blocks) s.pool[b] = 2;
    }
    for (const [b, cached] of given) s.pool[b] = cached;
  }

  gone(s, r) {
    drop(s.waiting, r);
    drop(s.running, r);
    s.tables.delete(r);
  }

  /** What a step leaves behind when it is over. */
  leave(s, { chunks, change: { f = [] } }) {
    for (const { r, end, flags } of chunks) {
      s.computed[r] = end;
      s.outputs[r] += flags & LAST;
    }
    for (const r of f) this.gone(s, r);
  }

  /** scrubber.frame(run, i), with requests by index; pool: -1 empty, -2 cached, else an owner (all of them in `shared`). */
  frame(i) {
    const s = this.seek(i), step = this.steps[i], B = this.size;
    const f = {
      step: i, kind: step.kind, budget: step.budget, tokens: step.tokens, decodes: step.decodes, start: step.start / 1e6,
      end: step.end / 1e6, chunks: step.chunks, times: (step.change.t ?? []).map(([name, t]) => [name, t / 1e6]),
      arrived: step.change.a ?? [], admitted: step.change.i ?? [], preempted: step.change.p ?? [], aborted: step.change.x ?? [],
      finished: step.change.f ?? [], hits: step.change.h ?? [],
      cu: [0], lens: [], positions: [], slots: [], token_ids: [], rows: [], sampled: [],
      tables: s.tables, filled: new Map(), shared: new Map(), pool: new Int32Array(s.pool.length),
    };
    const entry = (r) => [r, this.run.prompts[r] + s.outputs[r], s.computed[r]];
    f.waiting = s.waiting.map(entry);
    f.running = s.running.map(entry);
    for (const r of s.tables.keys()) f.filled.set(r, s.computed[r]);
    for (const { r, start, end, flags } of step.chunks) {
      const table = s.tables.get(r) ?? [], tokens = this.run.tokens[r];
      f.filled.set(r, end);
      for (let p = start; p < end; p++) {
        const block = table[Math.floor(p / B)];
        f.positions.push(p);
        f.token_ids.push(tokens[p]);
        f.slots.push(block === undefined ? -1 : block * B + (p % B));
      }
      f.cu.push(f.positions.length);
      f.lens.push(end);
      if (flags & LAST) {
        f.rows.push(f.positions.length - 1);
        f.sampled.push(tokens[end] ?? null);
      }
    }
    this.picture(f, s);
    return f;
  }

  picture(f, s) {
    let held = 0;
    f.pool.forEach((_, b) => (f.pool[b] = s.pool[b] === 1 ? -2 : -1));
    f.wasted = 0;
    for (const [r, table] of s.tables) {
      f.wasted += table.length * this.size - f.filled.get(r);
      for (const b of table) {
        if (f.pool[b] < 0) { f.pool[b] = r; held++; }
        else f.shared.set(b, [...(f.shared.get(b) ?? [f.pool[b]]), r]);
      }
    }
    f.used = held;
    f.cached = f.pool.reduce((n, x) => n + (x === -2), 0);
    f.empty = f.pool.length - f.used - f.cached;
  }

  /** Index of the chunk of f that computes position p of r, or -1. */
  chunkOf(f, r, p) { return f.chunks.findIndex((c) => c.r === r && c.start <= p && p < c.end); }

  /** The step nearest to i that computed position p of r, or -1. */
  momentOf(r, p, i) {
    let best = -1;
    for (const [step, a, b] of this.spans[r])
      if (a <= p && p < b && (best < 0 || Math.abs(step - i) < Math.abs(best - i))) best = step;
    return best;
  }

  word(id) {
    const text = this.vocab.get(id);
    return text === undefined ? `#${id}` : text.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
  }
}

const running = (values) => { let sum = 0; return values.map((v) => (sum += v)); };
const drop = (list, x) => { const k = list.indexOf(x); if (k >= 0) list.splice(k, 1); };
const copy = (s) => ({
  ...s, computed: s.computed.slice(), outputs: s.outputs.slice(), pool: s.pool.slice(), waiting: [...s.waiting],
  running: [...s.running], tables: new Map([...s.tables].map(([r, t]) => [r, [...t]])),
});

/** The step of each player at every position of the slider (scrubber.positions). */
export function positions(players, sync) {
  const counts = players.map((p) => p.n);
  if (players.length === 1 || sync === "step")
    return Array.from({ length: Math.max(...counts) }, (_, p) => counts.map((n) => Math.min(p, n - 1)));
  const at = counts.map(() => 0);
  const moments = [...new Set(players.flatMap((p) => p.steps.map((s) => s.end)))].sort((x, y) => x - y);
  return moments.map((t) => players.map((p, n) => {
    while (at[n] < p.n - 1 && p.steps[at[n]].end < t) at[n]++;
    return at[n];
  }));
}

// ---- 2. strip, grid, time line ---------------------------------------------------------------------------------

/** Index of the first of the rising values that is at least x. */
const lower = (values, x) => {
  let a = 0, b = values.length;
  while (a < b) { const m = (a + b) >> 1; values[m] < x ? (a = m + 1) : (b = m); }
  return a;
};
const ms = (us) => (us >= 1e4 ? `${Math.round(us / 1e3)} ms` : `${(us / 1e3).toFixed(1)} ms`);

/** The largest square cells that put n of them into w × h; below `least` the height grows instead. */
function cells(n, w, h, least, most) {
  for (let cell = most; ; cell--) {
    const cols = Math.max(1, Math.floor(w / cell)), rows = Math.ceil(n / cols);
    if (rows * cell <= h || cell <= least) {
      return {
        cell, cols, rows, height: rows * cell,
        xy: (k) => [(k % cols) * cell, Math.floor(k / cols) * cell],
        at: (x, y) => { const k = Math.floor(y / cell) * cols + Math.floor(x / cell); return x < cols * cell && k >= 0 && k < n ? k : -1; },
      };
    }
  }
}

/** Is request r one that the selection lights? Without a selection all are. */
const lit = (pick, ...owners) => !pick || owners.some((r) => r === pick.r || r === pick.also);

function fade(c, x, y, w, h, paint) {
  c.globalAlpha = 0.7;
  c.fillStyle = paint.paper;
  c.fillRect(x, y, w, h);
  c.globalAlpha = 1;
}

/** The packed batch, one cell a token, the rest of the budget as empty cells. → its geometry */
function drawStrip(canvas, f, view) {
  const { paint, letters, width, pick, hover } = view;
  const shown = Math.max(f.tokens, Math.min(f.budget, 4096));
  const lay = cells(shown, width, 132, 5, 24), { cell } = lay, gap = cell >= 8 ? 1 : cell >= 6 ? 0.5 : 0;
  const c = sheet(canvas, width, lay.height);
  c.lineWidth = 1;
  c.strokeStyle = paint.line;
  for (let k = f.tokens; k < shown; k++) {
    const [x, y] = lay.xy(k);
    if (cell >= 7) c.strokeRect(x + 1.5, y + 1.5, cell - 3, cell - 3);
    else { c.fillStyle = paint.line; c.fillRect(x + cell / 2 - 0.5, y + cell / 2 - 0.5, 1, 1); }
  }
  const sampled = new Set(f.rows);
  f.chunks.forEach(({ r }, n) => {
    const fill = cell >= 8 ? paint.pattern(c, r) : paint.fill(r);
    for (let k = f.cu[n]; k < f.cu[n + 1]; k++) {
      const [x, y] = lay.xy(k);
      c.fillStyle = fill;
      c.fillRect(x + gap, y + gap, cell - 2 * gap, cell - 2 * gap);
      if (k === f.cu[n] && cell >= 16) mark(c, letters[r], x + cell / 2, y + cell / 2, paint, paint.text(r), paint.fill(r));
      if (sampled.has(k)) triangle(c, x + cell - gap, y + cell - gap, Math.max(4, cell * 0.42), paint);
      if (!lit(pick, r)) fade(c, x, y, cell, cell, paint);
    }
  });
  if (hover >= 0 && hover < f.tokens) { const [x, y] = lay.xy(hover); ring(c, x + 1, y + 1, cell - 2, cell - 2, paint, 1.5); }
  if (pick?.row >= 0) { const [x, y] = lay.xy(pick.row); ring(c, x + 1, y + 1, cell - 2, cell - 2, paint); }
  return lay;
}

/** The block pool by number: owner's colour as far as the block is filled, cached, empty, shared. → its geometry */
function drawGrid(canvas, f, view) {
  const { paint, letters, width, pick, hover, size } = view, n = f.pool.length;
  const lay = cells(n, width, 240, 4, 34), { cell } = lay, gap = cell >= 9 ? 1.5 : cell >= 6 ? 0.5 : 0.25;
  const c = sheet(canvas, width, lay.height), inner = cell - 2 * gap;
  const depth = new Map(); // block → slots filled
  for (const [r, table] of f.tables)
    table.forEach((b, k) => depth.set(b, Math.max(depth.get(b) ?? 0, clamp(f.filled.get(r) - k * size, 0, size))));
  for (let b = 0; b < n; b++) {
    const [x, y] = lay.xy(b), r = f.pool[b], owners = f.shared.get(b) ?? [r];
    if (r === -1) {
      c.strokeStyle = paint.line;
      c.lineWidth = 1;
      if (cell >= 7) c.strokeRect(x + gap + 0.5, y + gap + 0.5, inner - 1, inner - 1);
      else { c.fillStyle = paint.line; c.fillRect(x + cell / 2 - 0.5, y + cell / 2 - 0.5, 1, 1); }
      continue;
    }
    if (r === -2) {
      c.fillStyle = paint.stripes(c);
      c.fillRect(x + gap, y + gap, inner, inner);
      continue;
    }
    c.fillStyle = paint.line;
    c.fillRect(x + gap, y + gap, inner, inner);
    owners.forEach((o, k) => { // a shared block is cut into as many columns
      c.fillStyle = cell >= 9 ? paint.pattern(c, o) : paint.fill(o);
      const full = Math.max(1, (inner * depth.get(b)) / size);
      c.fillRect(x + gap + (inner * k) / owners.length, y + gap + inner - full, inner / owners.length, full);
    });
    if (cell >= 18) {
      const label = owners.length > 1 ? `${owners.length}×` : letters[r];
      mark(c, label, x + cell / 2, y + cell / 2 + 0.5, paint, owners.length > 1 ? paint.ink : paint.text(r), owners.length > 1 ? paint.paper : paint.fill(r));
    }
    if (!lit(pick, ...owners)) fade(c, x, y, cell, cell, paint);
  }
  for (const [b, width] of [[hover, 1.5], [pick?.block ?? -1, 2.5]])
    if (b >= 0) { const [x, y] = lay.xy(b); ring(c, x + 1, y + 1, cell - 2, cell - 2, paint, width); }
  return lay;
}

/** A row of the causal mask: keys in the cache, keys of this step's chunk, keys of later tokens that it must not see. */
function drawMask(canvas, view, chunk, p) {
  const c = sheet(canvas, view.width, 16), { paint, width } = view;
  if (!chunk) return;
  const scale = width / chunk.end, seen = (p + 1) * scale, own = chunk.start * scale;
  c.strokeStyle = paint.line;
  c.strokeRect(0.5, 0.5, width - 1, 15);
  c.fillStyle = paint.fill(chunk.r);
  c.globalAlpha = 0.45;
  c.fillRect(0, 0, Math.min(own, seen), 16);
  c.globalAlpha = 1;
  c.fillStyle = paint.pattern(c, chunk.r);
  c.fillRect(own, 0, Math.max(2, seen - own), 16);
  c.fillStyle = paint.ink;
  c.fillRect(clamp(seen - 2, 0, width - 2), 0, 2, 16);
}

/** The budget as one bar. */
function drawBudget(canvas, f, view) {
  const { paint, width, pick } = view, c = sheet(canvas, width, 26), scale = width / Math.max(f.budget, f.tokens, 1);
  c.strokeStyle = paint.line;
  c.strokeRect(0.5, 0.5, width - 1, 25);
  f.chunks.forEach(({ r, length }, n) => {
    const x = f.cu[n] * scale, w = length * scale;
    c.fillStyle = paint.pattern(c, r);
    c.fillRect(x, 0, Math.max(1, w - (w > 3 ? 1 : 0)), 26);
    if (w > 20) mark(c, view.letters[r], x + w / 2, 13.5, paint, paint.text(r), paint.fill(r));
    if (!lit(pick, r)) fade(c, x, 0, w, 26, paint);
  });
}

/** All steps as columns (height is duration); light: decodes, dark: prompts, both: mixed. → x to step */
function drawOverview(canvas, player, view) {
  const { paint, width, i, span } = view, H = 46, c = sheet(canvas, width, H), n = player.n, w = width / n;
  const most = player.longest, late = new Set(player.run.gaps.filter((g) => g[2]).map((g) => g[2][1]));
  player.steps.forEach((s, k) => {
    const h = Math.max(1.5, ((H - 10) * (s.end - s.start)) / most), x = k * w, bar = Math.max(w - (w > 3 ? 1 : 0), 0.7);
    c.fillStyle = paint.soft;
    c.globalAlpha = s.kind === "decodes" ? 0.35 : 0.95;
    c.fillRect(x, H - h, bar, h);
    if (s.kind === "mixed" && h > 3) { c.globalAlpha = 1; c.fillStyle = paint.paper; c.fillRect(x + bar * 0.3, H - h + 2, Math.max(bar * 0.4, 0.4), h - 2); }
    c.globalAlpha = 1;
    if (late.has(k)) { c.fillStyle = paint.alarm; c.fillRect(x, 0, Math.max(bar, 2), 4); }
  });
  c.fillStyle = paint.ink;
  c.globalAlpha = 0.08;
  c.fillRect(span[0] * w, 0, (span[1] - span[0] + 1) * w, H);
  c.globalAlpha = 1;
  ring(c, i * w - 0.5, 6, Math.max(w, 3), H - 7, paint, 1.5);
  return (x) => clamp(Math.floor(x / w), 0, n - 1);
}

const GUTTER = 34, ROW = 20;

/** The requests alive in the window of steps: queue, chunks, tokens, long gaps. → areas that can be clicked */
function drawLines(canvas, player, f, view) {
  const { paint, width, letters, span, pick, i, range: [t0, t1] } = view, run = player.run;
  const X = (t) => GUTTER + ((width - GUTTER - 8) * (t - t0)) / (t1 - t0 || 1);
  const live = new Set();
  for (let k = span[0]; k <= span[1]; k++) player.steps[k].chunks.forEach((q) => live.add(q.r));
  for (const [r] of f.waiting) live.add(r);
  const rows = [...live].sort((a, b) => a - b), at = new Map(rows.map((r, k) => [r, k * ROW + ROW / 2]));
  const H = Math.max(rows.length, 1) * ROW + 22, c = sheet(canvas, width, H), areas = [];
  const step = player.steps[i];
  c.fillStyle = paint.ink;
  c.globalAlpha = 0.09;
  c.fillRect(X(step.start), 0, Math.max(2, X(step.end) - X(step.start)), H - 20);
  c.globalAlpha = 1;
  c.fillStyle = paint.line;
  for (let k = span[0]; k <= span[1]; k++) c.fillRect(X(player.steps[k].start), 0, 1, H - 20);
  for (const r of rows) {
    const y = at.get(r), first = player.spans[r][0], dim = lit(pick, r) ? 1 : 0.3;
    c.globalAlpha = dim;
    mark(c, letters[r], 14, y + 1, paint, paint.ink);
    c.fillStyle = paint.pattern(c, r);
    c.fillRect(26, y - 6, 4, 12);
    const begin = Math.max(X(run.arrivals[r]), GUTTER), until = first ? Math.min(X(player.steps[first[0]].start), width) : width;
    c.setLineDash([1, 3]);
    c.strokeStyle = paint.soft;
    c.lineWidth = 2;
    if (until > begin) { c.beginPath(); c.moveTo(begin, y); c.lineTo(until, y); c.stroke(); }
    c.setLineDash([]);
  }
  for (let k = span[0]; k <= span[1]; k++) {
    const s = player.steps[k], x = X(s.start), w = Math.max(1.5, X(s.end) - x - 1);
    for (const q of s.chunks) {
      const y = at.get(q.r), prompt = !(q.flags & DECODE);
      c.globalAlpha = lit(pick, q.r) ? 1 : 0.3;
      c.fillStyle = prompt ? paint.pattern(c, q.r) : paint.fill(q.r);
      c.fillRect(x, y - (prompt ? 7 : 2.5), w, prompt ? 14 : 5);
      areas.push({ x, y: y - ROW / 2, w, h: ROW, step: k, r: q.r, chunk: q });
    }
  }
  for (const r of rows) {
    const y = at.get(r);
    c.globalAlpha = lit(pick, r) ? 1 : 0.3;
    const times = player.times[r];
    c.fillStyle = paint.ink;
    c.beginPath();
    let k = lower(times, t0);
    for (; k < times.length && times[k] <= t1; k++) { c.moveTo(X(times[k]), y); c.arc(X(times[k]), y, 3.2, 0, 7); }
    c.fill();
    for (k = Math.min(k, times.length - 1); k > 0 && times[k] > t0; k--) {
      if (player.late[r].has(k - 1)) gapMark(r, k - 1, Math.max(X(times[k - 1]), GUTTER), Math.min(X(times[k]), width - 2), y, times[k] - times[k - 1]);
    }
  }
  c.globalAlpha = 1;
  if (pick?.moment >= 0 && pick.moment >= span[0] && pick.moment <= span[1] && at.has(pick.r)) {
    const s = player.steps[pick.moment];
    ring(c, X(s.start), at.get(pick.r) - 9, Math.max(4, X(s.end) - X(s.start) - 1), 18, paint);
  }
  if (pick?.gap) arrow(pick.gap);
  c.font = `14px ${paint.ui}`;
  c.textBaseline = "alphabetic";
  c.fillStyle = paint.soft;
  c.textAlign = "left";
  const clock = (t) => (t1 - t0 < 1e5 ? `${(t / 1e3).toFixed(1)} ms` : `${(t / 1e6).toFixed(2)} s`);
  c.fillText(clock(t0), GUTTER, H - 3);
  c.textAlign = "right";
  c.fillText(clock(t1), width - 2, H - 3);
  return areas;

  function gapMark(r, k, a, b, y, us) {
    c.strokeStyle = paint.alarm;
    c.lineWidth = 2;
    c.setLineDash([5, 3]);
    c.beginPath();
    c.moveTo(a, y);
    c.lineTo(b, y);
    c.stroke();
    c.setLineDash([]);
    const label = ms(us);
    if (b - a > 70) mark(c, label, (a + b) / 2, y, paint, paint.alarm, paint.paper);
    areas.unshift({ x: a, y: y - ROW / 2, w: b - a, h: ROW, gap: [r, k] });
  }

  /** From a gap to the chunk that caused it. */
  function arrow([r, k]) {
    const who = player.late[r].get(k)?.[2];
    if (!who || !at.has(r) || !at.has(who[0]) || who[1] < span[0] || who[1] > span[1]) return;
    const s = player.steps[who[1]], y1 = at.get(r), y2 = at.get(who[0]), x2 = clamp((X(s.start) + X(s.end)) / 2, GUTTER, width);
    const x1 = clamp(x2, X(player.times[r][k]), X(player.times[r][k + 1]));
    ring(c, X(s.start), y2 - 9, Math.max(4, X(s.end) - X(s.start) - 1), 18, paint);
    c.strokeStyle = c.fillStyle = paint.alarm;
    c.lineWidth = 2.5;
    const down = y2 > y1 ? 1 : -1, tip = y2 - down * 11;
    c.beginPath();
    c.moveTo(x1, y1 + down * 3);
    c.bezierCurveTo(x1, (y1 + tip) / 2, x2, (y1 + tip) / 2, x2, tip - down * 5);
    c.stroke();
    c.beginPath();
    c.moveTo(x2, tip + down * 2);
    c.lineTo(x2 - 6, tip - down * 8);
    c.lineTo(x2 + 6, tip - down * 8);
    c.fill();
  }
}

// ---- 3. the widget -------------------------------------------------------------------------------------------------

/** The four panes of one run. */
class RunView {
  constructor(player, app) {
    Object.assign(this, { player, app, hover: { row: -1, block: -1 } });
    const canvas = (label) => h("canvas", { role: "img", "aria-label": label, "data-shows": label });
    this.c = { budget: canvas("budget"), strip: canvas("packed batch"), mask: canvas("mask row"), grid: canvas("block pool"), slots: canvas("slots of a block"), overview: canvas("all steps"), lines: canvas("time line") };
    const part = (name) => (this[name] = h(`div.${name}`));
    const pane = (title, side, ...body) => h("section.pane", { "aria-label": title }, h("h4.title", {}, title, side), ...body);
    this.blocks = h("details.pane", { "aria-label": "Blocks", ontoggle: app.guard(() => app.fold(this.blocks.open)) }, h("summary.title", {}, "Blocks", (this.pool = h("span.side"))),
      this.c.grid, part("tablerow"), this.c.slots, part("slotline"));
    this.blocks.open = app.players.length === 1; // two runs have to fit on a screen
    const key = (name, text) => h("span.entry", {}, h(`span.key.${name}`, { "aria-hidden": "true" }), text);
    const slo = player.run.slo === null ? "" : ` (over ${ms(player.run.slo * 1e6)})`;
    const legend = [key("chunk", "prompt chunk"), key("thin", "decode"), key("dot", "token"), key("wait", "waiting"), key("late", `long gap${slo}`)];
    const zoom = h("span.side", {}, app.button("fewer steps in the time line", "+", () => app.setZoom(0.5), "in"), app.button("more steps in the time line", "−", () => app.setZoom(2), "out"));
    this.count = h("span.side");
    this.counter = h("span.side");
    this.table = h("table.ints");
    this.el = h("div.run", {},
      part("head"),
      h("div.panes", {},
        h("div.col", {},
          pane("Queues and budget", this.counter, part("waiting"), part("running"), part("share"), this.c.budget, part("events")),
          this.blocks),
        h("div.col", {},
          pane("Packed batch", this.count, this.c.strip, part("word"), this.c.mask, h("div.plan", { hidden: player.run.integers ? undefined : "" }, player.run.integers), h("div.scroll", { tabindex: "-1" }, this.table)),
          pane("Time line", zoom, this.c.overview, h("div.scroll.tall", { tabindex: "-1" }, this.c.lines), h("div.legend", {}, ...legend), part("gapline"))),
      ));
    this.gapline.setAttribute("role", "status");
    this.listen();
  }

  listen() {
    const { c, app } = this, spot = (e) => [e.offsetX, e.offsetY];
    const on = (canvas, move, click) => {
      canvas.addEventListener("pointermove", app.guard((e) => move(...spot(e))));
      canvas.addEventListener("pointerleave", app.guard(() => move(-1, -1)));
      canvas.addEventListener("click", app.guard((e) => click(...spot(e))));
    };
    const hover = (what, k) => { if (this.hover[what] !== k) { this.hover = { row: -1, block: -1, [what]: k }; app.draw(); } };
    on(c.strip, (x, y) => hover("row", this.lay.at(x, y)), (x, y) => this.pickRow(this.lay.at(x, y)));
    on(c.grid, (x, y) => hover("block", this.gridLay.at(x, y)), (x, y) => this.pickBlock(this.gridLay.at(x, y)));
    on(c.overview, () => {}, (x) => app.showStep(this, this.stepAt(x)));
    const area = (x, y) => this.areas.find((a) => x >= a.x - 2 && x <= a.x + a.w + 2 && y >= a.y && y < a.y + a.h);
    on(c.lines, (x, y) => (c.lines.style.cursor = area(x, y) ? "pointer" : ""), (x, y) => {
      const hit = area(x, y);
      if (!hit) return;
      if (hit.gap) app.pickGap(this, hit.gap);
      else { app.showStep(this, hit.step); app.pick(this, hit.r, hit.chunk.end - 1); }
    });
  }

  pickRow(k) {
    if (k < 0 || k >= this.f.tokens) return this.app.clear();
    const n = this.f.cu.findIndex((end) => end > k) - 1;
    this.app.pick(this, this.f.chunks[n].r, this.f.positions[k]);
  }

  /** The first token in a block, if it holds one. */
  pickBlock(b) {
    const owner = this.f.pool[b];
    if (b < 0 || owner < 0) return this.app.clear();
    const p = this.f.tables.get(owner).indexOf(b) * this.player.size;
    if (p < this.f.filled.get(owner)) this.app.pick(this, owner, p);
  }

  /** The room of each canvas: read once after a change of size, since reading makes the browser lay the page out. */
  measure() {
    const pad = (box) => (box.matches(".mc-pane") ? 26 : 18); // padding and border, or a scroll bar
    this.widths = new Map(Object.values(this.c).map((c) => [c, Math.max(120, c.parentElement.clientWidth - pad(c.parentElement))]));
  }

  /** A selection, found in this run's step: request, position, packed row, block, moment. */
  resolve(selection, i) {
    if (!selection) return null;
    const { player, f } = this, r = player.run.ids.indexOf(selection.gap ? selection.gap[0] : selection.request);
    if (r < 0) return null;
    if (selection.gap) {
      if ((selection.run ?? 0) !== this.app.views.indexOf(this)) return { r, p: -1, row: -1, block: -1, moment: -1 };
      const gap = [r, selection.gap[1]], who = player.late[r].get(gap[1])?.[2];
      return { r, also: who?.[0], p: -1, row: -1, block: -1, moment: -1, gap };
    }
    const p = selection.position, n = player.chunkOf(f, r, p), table = f.tables.get(r) ?? [];
    const slot = p < (f.filled.get(r) ?? 0) ? table[Math.floor(p / player.size)] ?? -1 : -1;
    return { r, p, n, row: n < 0 ? -1 : f.cu[n] + p - f.chunks[n].start, block: slot, moment: player.momentOf(r, p, i) };
  }

  draw(i, selection, paint, { span, range }) {
    const { player, hover } = this, run = player.run, f = (this.f = player.frame(i)), pick = this.resolve(selection, i);
    const view = (canvas, more) => ({ paint, letters: run.letters, pick, size: player.size, i, span, range, width: this.widths.get(canvas), ...more });
    this.chip = (r, text = "") => {
      const el = h("button.chip", { type: "button", title: `request ${run.ids[r]}`, tabindex: "-1", onclick: this.app.guard(() => this.pickRequest(r)) }, run.letters[r]);
      el.style.cssText = `background:${paint.fill(r)} ${paint.tile(r).url};color:${paint.text(r)};text-shadow:0 0 3px ${paint.fill(r)},0 0 3px ${paint.fill(r)},0 0 2px ${paint.fill(r)}`;
      const box = h("span.entry", {}, el, text);
      if (!lit(pick, r)) box.classList.add("mc-dim");
      return box;
    };
    // Canvases first, then the page, then scrolling: a font or a size that is read in between would lay the page out anew.
    drawBudget(this.c.budget, f, view(this.c.budget));
    this.lay = drawStrip(this.c.strip, f, view(this.c.strip, { hover: hover.row }));
    if (this.blocks.open) this.gridLay = drawGrid(this.c.grid, f, view(this.c.grid, { hover: hover.block }));
    this.stepAt = drawOverview(this.c.overview, player, view(this.c.overview));
    this.areas = drawLines(this.c.lines, player, f, view(this.c.lines));
    this.drawHead(f);
    this.drawQueues(f, pick);
    this.drawWords(f, pick, paint, view(this.c.mask));
    this.drawTable(f, pick);
    this.drawBlockTable(f, pick, view(this.c.slots));
    this.drawGap(pick, f);
    const say = (canvas, text) => canvas.setAttribute("aria-label", `${canvas.dataset.shows}: ${text}`);
    say(this.c.strip, f.chunks.map((q) => run.letters[q.r] + (q.length > 1 ? ` ${q.start} to ${q.end - 1}` : "")).join(", "));
    say(this.c.grid, this.pool.textContent);
    say(this.c.overview, `step ${i} of 0 to ${player.n - 1}, ${this.summary(f)}`);
    if (pick || hover.block >= 0) this.reveal();
  }

  /** Scrolls the selected sequence and block into sight. */
  reveal() {
    const row = this.table.querySelector(".mc-on"), box = this.table.parentElement, block = this.tablerow.querySelector(".mc-on"), line = this.tablerow;
    if (row) box.scrollTop = clamp(box.scrollTop, row.offsetTop + row.offsetHeight - box.clientHeight, row.offsetTop - 26);
    if (block) line.scrollLeft = clamp(line.scrollLeft, block.offsetLeft + block.offsetWidth - line.clientWidth + 8, block.offsetLeft - 90);
  }

  summary(f) {
    const prompts = f.chunks.length - f.decodes, who = [];
    if (prompts) who.push(plural(prompts, "prompt chunk"));
    if (f.decodes) who.push(plural(f.decodes, "decode"));
    return `${who.join(" + ") || "no chunks"} · ${f.tokens} of ${f.budget} tokens · ${ms((f.end - f.start) * 1e6)}`;
  }

  drawHead(f) {
    this.head.replaceChildren(
      h("span.now", { title: `counted from 0, as in run.steps[${f.step}]` }, h("b", {}, `step ${f.step}`), ` of 0…${this.player.n - 1}`), h(`span.kind.${f.kind}`, {}, f.kind),
      h("span", {}, this.summary(f)), h("span.badge", {}, this.player.run.title));
  }

  drawQueues(f, pick) {
    const { chip } = this, line = (label, items, none) => [h("span.label", {}, label), ...(items.length ? items : [h("span.none", {}, none)])];
    const here = new Set(f.chunks.map((c) => c.r)), ready = f.running.filter(([, total, done]) => total - done === 1);
    const decoding = ready.filter(([r]) => here.has(r)), out = ready.filter(([r]) => !here.has(r)), rest = f.running.filter(([, total, done]) => total - done !== 1);
    const prompt = f.tokens - f.decodes;
    this.share.replaceChildren(h("span.label", {}, "budget"), `${f.tokens} of ${f.budget} tokens`, h("span.none", {}, ` = ${f.decodes} decode + ${prompt} prompt`));
    this.counter.textContent = `${f.waiting.length} waiting · ${f.running.length} running`;
    this.waiting.replaceChildren(...line("waiting", f.waiting.map(([r, total]) => chip(r, ` ${total}`)), "nobody"));
    const bars = rest.map(([r, total, done]) => {
      const now = f.chunks.find((c) => c.r === r)?.end ?? done, bar = h("span.progress");
      bar.style.setProperty("--done", `${(100 * done) / total}%`);
      bar.style.setProperty("--now", `${(100 * now) / total}%`);
      bar.style.setProperty("--fill", this.app.paint.fill(r));
      return h("div.prompt", {}, chip(r), bar, h("span.num", {}, `${done}${now > done ? ` → ${now}` : ""} of ${total}`));
    });
    this.running.replaceChildren(h("div.flow", {}, ...line("decoding", decoding.map(([r]) => chip(r)), "nobody")), ...(out.length ? [h("div.flow.out", {}, ...line("left out of this step", out.map(([r]) => chip(r)), ""))] : []), ...(bars.length ? [h("div.label", {}, "prompts under way"), ...bars] : []));
    const events = { arrived: f.arrived, admitted: f.admitted, preempted: f.preempted, [this.player.run.gone]: f.aborted, finished: f.finished.filter((r) => !f.aborted.includes(r)) };
    const said = Object.entries(events).filter(([, who]) => who.length);
    this.events.replaceChildren(h("span.label", {}, "in this step"), ...(said.length ? said.flatMap(([e, who]) => [h(`span.event.${e}`, {}, e), ...who.map((r) => chip(r))]) : [h("span.none", {}, "no change")]));
  }

  /** Click on a letter: its last token in this step, or the last one it has. */
  pickRequest(r) {
    const chunk = this.f.chunks.find((c) => c.r === r);
    this.app.pick(this, r, chunk ? chunk.end - 1 : Math.max(0, (this.f.filled.get(r) ?? 1) - 1));
  }

  drawWords(f, pick, paint, view) {
    const row = this.hover.row >= 0 && this.hover.row < f.tokens ? this.hover.row : pick?.row ?? -1;
    this.count.textContent = `${f.tokens} rows · ${plural(f.rows.length, "sampled")} ◢`.replace("sampleds", "sampled");
    if (row < 0) {
      const away = pick && pick.p >= 0, longest = f.chunks.reduce((a, b) => (b.length > (a?.length ?? 1) ? b : a), null);
      const said = longest ? this.player.run.tokens[longest.r].slice(longest.start, Math.min(longest.end, longest.start + 40)).map((id) => this.player.word(id)).join("") : "";
      this.word.replaceChildren(h("div.text", {}, longest ? `${this.player.run.letters[longest.r]}: ${said}` : ""), h("div", {}, away ? `${this.player.run.letters[pick.r]}'s token ${pick.p} ${pick.moment < 0 ? "was never computed" : `is not in this step, but was computed in step ${pick.moment}`}` : "Point at a token to read it, click to follow it."));
      return drawMask(this.c.mask, view, null);
    }
    const n = f.cu.findIndex((end) => end > row) - 1, chunk = f.chunks[n], p = f.positions[row], { run } = this.player;
    const tokens = run.tokens[chunk.r], word = (k) => this.player.word(tokens[k]);
    let before = "", after = "";
    for (let k = p - 1; k >= 0 && before.length < 24; k--) before = word(k) + before;
    for (let k = p + 1; k < Math.min(tokens.length, chunk.end) && after.length < 24; k++) after += word(k);
    this.word.replaceChildren(
      h("div.text", {}, before, h("mark", {}, word(p)), after),
      h("div", {}, `row ${row} · ${run.letters[chunk.r]}'s token ${p} (id ${tokens[p]}) · slot ${f.slots[row]}`),
      h("div", {}, `mask row: sees keys 0…${p} of ${chunk.end}`));
    drawMask(this.c.mask, view, chunk, p);
  }

  /** The integers that go to the kernel, a row a sequence. */
  drawTable(f, pick) {
    const cell = (x) => h("td", {}, String(x)), sampled = new Map(f.rows.map((row, k) => [row, f.sampled[k]]));
    const rows = f.chunks.map(({ r, start, end, length, flags }, n) => {
      const last = f.cu[n + 1] - 1, token = sampled.get(last);
      const tr = h("tr", {}, h("td", {}, this.chip(r)), cell(f.cu[n]), cell(length > 1 ? `${start}…${end - 1}` : start), cell(end),
        cell(flags & LAST ? last : "–"), h("td.said", {}, token === undefined || token === null ? "" : `“${this.player.word(token)}”`));
      if (pick?.r === r) tr.className = "mc-on";
      return tr;
    });
    const head = h("thead", {}, h("tr", {}, ...["seq", "cu_seqlens_q", "positions", "seq_lens_k", "logits_rows", "samples"].map((t) => h("th", { scope: "col" }, ...t.split(/(?<=^[a-z]+_)/).flatMap((part) => [part, h("wbr")])))));
    this.table.replaceChildren(head, h("tbody", {}, ...rows, h("tr", {}, cell(""), cell(f.tokens), cell(""), cell(""), cell(""), cell(""))));
  }

  drawBlockTable(f, pick, view) {
    const { player, hover } = this, B = player.size, { letters } = player.run;
    this.pool.textContent = `used ${f.used} cached ${f.cached} empty ${f.empty} · ${plural(f.wasted, "slot")} wasted`;
    let r = pick?.r ?? (f.chunks.find((c) => !(c.flags & DECODE)) ?? f.chunks[0])?.r ?? -1;
    if (hover.block >= 0 && f.pool[hover.block] >= 0) r = f.pool[hover.block];
    const table = f.tables.get(r) ?? [], filled = f.filled.get(r) ?? 0;
    const block = hover.block >= 0 && table.includes(hover.block) ? hover.block : pick?.r === r && pick.block >= 0 ? pick.block : table.at(-1) ?? -1;
    if (r < 0 || !table.length) {
      this.tablerow.replaceChildren(h("span.none", {}, r < 0 ? "no table" : `${letters[r]} holds no blocks now`));
      this.slotline.textContent = "";
      sheet(this.c.slots, view.width, 24);
      return;
    }
    this.tablerow.replaceChildren(h("span.label", {}, "table"), this.chip(r), ...table.map((b, k) =>
      h(b === block ? "span.block.on" : "span.block", { title: `logical block ${k} lies in block ${b}` }, String(b))));
    const k = table.indexOf(block), used = clamp(filled - k * B, 0, B), { paint, width } = view;
    const w = Math.min(24, width / B), c = sheet(this.c.slots, width, 24);
    for (let s = 0; s < B; s++) {
      c.fillStyle = s < used ? paint.pattern(c, r) : paint.paper;
      c.fillRect(s * w + 1, 1, w - 2, 22);
      if (s >= used) { c.strokeStyle = paint.soft; c.setLineDash([2, 2]); c.strokeRect(s * w + 1.5, 1.5, w - 3, 21); c.setLineDash([]); }
    }
    const chosen = pick?.r === r && pick.block === block ? pick.p % B : -1;
    if (chosen >= 0) ring(c, chosen * w + 2, 2, w - 4, 20, paint);
    this.slotline.textContent = `block ${block} is ${letters[r]}'s logical block ${k}: ${used} of ${B} slots filled` +
      (chosen >= 0 ? `; slot ${block * B + chosen} = ${block} · ${B} + ${chosen}` : "");
  }

  drawGap(pick, f) {
    const gap = pick?.gap && this.player.late[pick.gap[0]].get(pick.gap[1]);
    const parts = f.times.filter(([, t]) => t >= 5e-4).map(([name, t]) => `${name} ${ms(t * 1e6)}`).join(" · ");
    const many = this.player.run.gaps.length;
    this.gapline.textContent = gap ? gap[3] : [parts && `this step: ${parts}`, many ? `${plural(many, "long gap")}, n for the next` : "no long gaps"].filter(Boolean).join(" · ");
    this.gapline.classList.toggle("mc-alarm", Boolean(gap));
  }
}

const SPEEDS = [["2 steps/s", 500], ["8 steps/s", 125], ["20 steps/s", 50], ["real time", 1], ["10 × slower", 10]];
const START = { step: 0, selection: null, sync: "time" };
const KEYS = "← → step · Home End · space play · n p long gaps · Shift ← → token · Esc clear";

class App extends Widget {
  constructor(root, body, store) {
    super(root, store, body, "scrubber", "Scrubber: a run of the engine, step by step", KEYS);
    Object.assign(this, { body, zoom: 16 });
    this.players = body.runs.map((run) => new Player(run));
    this.state = { ...START, ...store.get() };
    this.places();
    this.views = this.players.map((p) => new RunView(p, this));
    root.replaceChildren(this.bar(), h(`div.runs${this.players.length > 1 ? ".two" : ""}`, {}, ...this.views.map((v) => v.el)), this.line);
    this.live();
  }

  places() { this.at = positions(this.players, this.state.sync); this.state.step = clamp(this.state.step, 0, this.at.length - 1); }

  bar() {
    const button = (...how) => this.button(...how);
    const select = (label, options, does) => h("select.select", { "aria-label": label, title: label, onchange: this.guard((e) => does(e.target.value)) }, ...options.map(([text, value]) => h("option", { value }, text)));
    this.slider = h("input.slider", { type: "range", min: 0, max: this.at.length - 1, value: 0, "aria-label": "step", oninput: this.guard(() => this.go(Number(this.slider.value))) });
    this.playing = button("play", "Play", () => this.play(), "play");
    this.where = h("span.where", { title: "moments at which a step of either run ends" });
    const two = this.players.length > 1;
    const sync = two ? [select("how the runs go together", [["same moment", "time"], ["same step", "step"]], (v) => this.setSync(v)), button("first step in which the two differ", "first difference", () => this.firstDifference(), "differ")] : [];
    this.sync = sync[0];
    return h("div.bar", {}, button("previous step", "◀", () => this.go(this.state.step - 1), "back"), button("next step", "▶", () => this.go(this.state.step + 1), "next"), this.playing,
      this.slider, this.where, select("speed of play", SPEEDS.map(([t], k) => [t, k]), (k) => (this.speed = Number(k))), ...sync,
      button("Reset: first step, nothing selected", "Reset", () => this.reset(), "reset"), button("copy this state as Python", "Copy as code", () => this.copyCode(), "copy"));
  }

  /** A new state, from Python. */
  hear(state) {
    if (this.sending || JSON.stringify(state) === JSON.stringify(this.state)) return;
    this.state = { ...START, ...state };
    this.places();
    this.draw();
  }

  go(step) {
    const to = clamp(step, 0, this.at.length - 1);
    if (to !== this.state.step) this.set({ step: to });
  }

  /** The position at which `view` shows step i. */
  showStep(view, i) {
    const n = this.views.indexOf(view), k = this.at.findIndex((steps) => steps[n] === i);
    if (k >= 0) this.go(k);
  }

  pick(view, r, position) { this.set({ selection: { request: view.player.run.ids[r], position } }); }
  /** Opens or closes the block pane, of both runs. */
  fold(open) {
    for (const view of this.views) view.blocks.open = open;
    this.draw();
  }

  clear() { if (this.state.selection) this.set({ selection: null }); }
  setSync(sync) { this.state.sync = sync; this.set({}); }
  setZoom(by) { this.zoom = clamp(this.zoom * by, 4, 512); this.draw(); }
  reset() { this.stop(); this.zoom = 16; this.set(START); this.say(KEYS); }

  /** Selects a long gap and goes to the step of its culprit. */
  pickGap(view, [r, k]) {
    const gap = view.player.late[r].get(k);
    const run = this.views.indexOf(view);
    this.set({ selection: { gap: [view.player.run.ids[r], k], ...(run ? { run } : {}) } });
    if (gap?.[2]) this.showStep(view, gap[2][1]);
  }

  /** The long gap after (or before) the one selected, of any run, in order of time. */
  nextGap(way) {
    const all = this.views.flatMap((view) => view.player.run.gaps.map(([r, k]) => ({ view, r, k, t: view.player.times[r][k] })));
    if (!all.length) return this.say("no long gaps");
    all.sort((a, b) => a.t - b.t || a.r - b.r);
    const now = this.state.selection, is = (g) => g.view === this.views[now.run ?? 0] && g.k === now.gap[1] && g.view.player.run.ids[g.r] === now.gap[0];
    const at = now?.gap ? all.findIndex(is) : way > 0 ? -1 : all.length;
    const { view, r, k } = all[clamp(at + way, 0, all.length - 1)];
    this.pickGap(view, [r, k]);
  }

  /** The packed row before or after the selected one. */
  nextToken(way) {
    const view = this.views[0], row = view.resolve(this.state.selection, view.f.step)?.row ?? -1;
    view.pickRow(row < 0 ? 0 : clamp(row + way, 0, view.f.tokens - 1));
  }

  firstDifference() {
    const key = (p, i) => p.steps[i]?.chunks.map((c) => [c.r, c.start, c.length]).join(";");
    const [a, b] = this.players;
    let i = 0;
    while (i < Math.min(a.n, b.n) && key(a, i) === key(b, i)) i++;
    if (i === a.n && i === b.n) return this.say("the two runs made the same decisions in every step");
    this.state.sync = this.sync.value = "step";
    this.set({ step: i });
    this.say(`first different decision: step ${i}`);
  }

  play() {
    if (this.timer) return this.stop();
    if (this.state.step >= this.at.length - 1) this.go(0);
    this.playing.textContent = "Pause";
    this.playing.setAttribute("aria-label", "pause");
    const tick = () => {
      if (this.state.step >= this.at.length - 1) return this.stop();
      const factor = SPEEDS[this.speed ?? 0][1], s = this.players[0].steps[this.at[this.state.step][0]];
      this.timer = setTimeout(this.guard(() => { this.go(this.state.step + 1); tick(); }), factor >= 50 ? factor : ((s.end - s.start) / 1e3) * factor);
    };
    tick();
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.playing.textContent = "Play";
    this.playing.setAttribute("aria-label", "play");
  }

  key(e) {
    const on = e.target.matches("button, summary") && (e.key === " " || e.key === "Enter");
    return on ? null : {
      ArrowLeft: () => (e.shiftKey ? this.nextToken(-1) : this.go(this.state.step - 1)),
      ArrowRight: () => (e.shiftKey ? this.nextToken(1) : this.go(this.state.step + 1)),
      PageUp: () => this.go(this.state.step - 10), PageDown: () => this.go(this.state.step + 10),
      Home: () => this.go(0), End: () => this.go(this.at.length - 1), " ": () => this.play(),
      n: () => this.nextGap(1), p: () => this.nextGap(-1), Escape: () => this.clear(),
    }[e.key];
  }

  code() {
    const python = (x) => x === null ? "None" : Array.isArray(x) ? `[${x.map(python).join(", ")}]` : typeof x === "object" ? `{${Object.entries(x).map(([k, v]) => `"${k}": ${python(v)}`).join(", ")}}` : JSON.stringify(x);
    return `w.state = ${python(this.state)}`;
  }

  async copyCode() {
    const code = this.code();
    try { await navigator.clipboard.writeText(code); this.say(`copied: ${code}`); } catch { this.say(code); }
  }

  /** What each time line shows: {span: steps around the present one, range: from when to when}; by time, the same range. */
  windows(steps) {
    const spans = this.players.map((player, n) => {
      const room = Math.min(2 * this.zoom, player.n - 1), a = clamp(steps[n] - Math.floor(room / 2), 0, player.n - 1 - room);
      return [a, a + room];
    });
    const ranges = this.players.map((player, n) => [player.steps[spans[n][0]].start, player.steps[spans[n][1]].end]);
    if (this.players.length === 1 || this.state.sync === "step") return spans.map((span, n) => ({ span, range: ranges[n] }));
    const range = [Math.min(...ranges.map((r) => r[0])), Math.max(...ranges.map((r) => r[1]))];
    return this.players.map(({ steps: all, n }) => {
      const first = all.findIndex((s) => s.end > range[0]), after = all.findIndex((s) => s.start >= range[1]);
      return { span: [first < 0 ? n - 1 : first, after < 0 ? n - 1 : Math.max(after - 1, 0)], range };
    });
  }

  /** After a change of size or theme. */
  measure() { this.views.forEach((view) => view.measure()); }

  render() {
    const { step, selection, sync } = this.state, steps = this.at[step];
    this.slider.max = this.at.length - 1;
    this.slider.value = step;
    this.slider.setAttribute("aria-valuetext", `step ${steps.join(" and ")}`);
    this.where.textContent = this.sync && sync === "time" ? `${step + 1} of ${this.at.length}` : "";
    if (this.sync) this.sync.value = sync;
    const windows = this.windows(steps);
    this.views.forEach((view, n) => view.draw(steps[n], selection, this.paint, windows[n]));
    this.root.dataset.step = step;
    this.root.dataset.selection = JSON.stringify(selection);
  }
}

/** Puts a scrubber into `root`, in the place of the text twin. */
export async function mount(root, data, store) {
  try {
    return (root.mcApp = new App(root, await unpack(data), store));
  } catch (error) {
    root.append(`The scrubber does not work in this browser (${error.message}). print(w) shows the same as text.`);
    throw error;
  }
}

/** The saved page: no kernel, the state lives here. */
export function mountPage(root, data) {
  let state = {};
  return mount(root, data, { get: () => state, set: (s) => (state = s), listen: () => {} });
}

/** The anywidget. */
export default {
  async render({ model, el }) {
    const { root, store, gone } = connect({ model, el }), data = model.get("data");
    const app = await mount(root, data instanceof DataView ? new Uint8Array(data.buffer, data.byteOffset, data.byteLength) : data, store);
    return () => { gone(); app.close(); };
  },
};
