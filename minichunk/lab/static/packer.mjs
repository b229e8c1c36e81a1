// The packer: a batch built by hand, its integers in two forms, its mask. kit.mjs and this file are the anywidget's module.
// Part 1 computes (pure, tested against packer_batch.py), part 2 is the widget. Only Run asks the kernel.

// ---- 1. the batch and its integers -----------------------------------------------------------------------------------

const FORMS = { flash_attention: "FlashAttention", flashinfer: "FlashInfer" };
const ROW_LISTS = ["positions", "slot_mapping"];
const FORM_LISTS = { flash_attention: ["cu_seqlens_q", "seq_lens_k", "block_tables"], flashinfer: ["qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"] };
const endOf = (c) => c.start + c.length;
const sum = (values) => values.reduce((a, b) => a + b, 0);

/** packer_batch.with_blocks: the blocks that a chunk has, as many as it needs, then the next free ones. */
export function withBlocks(chunks, setup) {
  const kept = chunks.map((c) => (c.blocks ?? []).slice(0, Math.ceil(endOf(c) / setup.block_size)));
  const taken = new Set(kept.flat());
  let k = 0;
  const next = () => {
    for (;; k++) {
      const b = Math.floor(k / 10) * 10 + setup.scatter[k % 10];
      if (!taken.has(b)) { taken.add(b); return b; }
    }
  };
  return chunks.map((c, n) => {
    while (kept[n].length < Math.ceil(endOf(c) / setup.block_size)) kept[n].push(next());
    return { ...c, blocks: kept[n] };
  });
}

/** packer_batch.integers: all lists of the batch. */
export function integers(chunks, B) {
  const out = { positions: [], slot_mapping: [], logits_rows: [], cu_seqlens_q: [0], seq_lens_k: [], block_tables: [], qo_indptr: [0], kv_indptr: [0], kv_indices: [], kv_last_page_len: [] };
  for (const c of chunks) {
    for (let p = c.start; p < endOf(c); p++) {
      out.positions.push(p);
      out.slot_mapping.push(c.blocks[Math.floor(p / B)] * B + (p % B));
    }
    const blocks = c.blocks.slice(0, Math.ceil(endOf(c) / B));
    out.cu_seqlens_q.push(out.positions.length);
    out.qo_indptr.push(out.positions.length);
    out.seq_lens_k.push(endOf(c));
    out.block_tables.push(blocks);
    out.kv_indices.push(...blocks);
    out.kv_indptr.push(out.kv_indices.length);
    out.kv_last_page_len.push(((endOf(c) - 1) % B) + 1);
    if (c.is_last) out.logits_rows.push(out.positions.length - 1);
  }
  return out;
}

/** packer_batch.edited: the same with the learner's own integers, {"seq_lens_k[1]": 12, "block_tables[0][1]": 3}. */
export function edited(right, edits) {
  const out = JSON.parse(JSON.stringify(right));
  for (const [key, value] of Object.entries(edits)) {
    const [name, ...at] = key.split(/[[\]]+/).filter(Boolean), last = at.pop();
    at.reduce((list, k) => list[k], out[name])[last] = value;
  }
  return out;
}

/** [cu_seqlens_q, seq_lens_k] as a form says them. */
export function shape(ints, form, B) {
  if (form === "flash_attention") return [ints.cu_seqlens_q, ints.seq_lens_k];
  return [ints.qo_indptr, ints.kv_last_page_len.map((n, i) => (ints.kv_indptr[i + 1] - ints.kv_indptr[i] - 1) * B + n)];
}

/** What each of `rows` packed rows sees: [its sequence or -1, how many of that sequence's keys]. */
export function sees(cu, lens, align, rows) {
  return Array.from({ length: rows }, (_, row) => {
    const n = lens.findIndex((_, i) => cu[i] <= row && row < cu[i + 1]);
    if (n < 0) return [-1, 0];
    const i = row - cu[n], shift = align === "bottom-right" ? lens[n] - (cu[n + 1] - cu[n]) : 0;
    return [n, clamp(i + 1 + shift, 0, Math.max(lens[n], 0))];
  });
}

/** Python that builds the same batch, edits included. */
export function code(chunks, edits, B) {
  const request = (c) => {
    const total = endOf(c) + (c.is_last ? 0 : 1);
    return `    Chunk.of(Request("${c.id}", list(range(${total})), num_prompt_tokens=${c.is_decode ? c.start : total}, num_computed=${c.start}), ${c.length}),`;
  };
  const changed = Object.entries(edits).map(([key, value]) => `${key} = ${value}  # my own`);
  return [
    "from minichunk.packing import PackedBatch, pack_tokens, place", "from minichunk.request import Chunk, Request", "",
    "chunks = [", ...chunks.map(request), "]", `tables = ${JSON.stringify(chunks.map((c) => c.blocks)).replaceAll(",", ", ")}`,
    "token_ids, positions, cu_seqlens_q, seq_lens_k, logits_rows = pack_tokens(chunks)", `block_tables, slot_mapping = place(chunks, tables, block_size=${B})`,
    `batch = PackedBatch.build(chunks, tables, ${B})`, "qo_indptr, kv_indptr = batch.cu_seqlens_q.tolist(), batch.kv_indptr.tolist()",
    "kv_indices, kv_last_page_len = batch.kv_indices.tolist(), batch.kv_last_page_len.tolist()", ...changed,
  ].join("\n");
}

// ---- 2. the widget ---------------------------------------------------------------------------------------------------

const KEYS = "d decode · c chunk · ↑ ↓ change a number · ← → the next one · Tab the next list · Esc the right one again · x remove · r run";
const size = (error) => (error === null ? "NaN" : error < 0.01 ? error.toExponential(0) : error.toPrecision(2));
const normal = (s) => JSON.stringify([s.chunks, s.edits, s.align, s.errors]);

/** store: kit's, and {report() → text, run(state) → number?, done(callback)?} */
class PackerApp extends Widget {
  constructor(root, setup, store) {
    super(root, store, setup, "packer", "Packer: build a mixed batch and read its integers", KEYS);
    Object.assign(this, { setup, B: setup.block_size, row: -1, shown: "all", form: "flash_attention", stops: {}, busy: 0 });
    this.state = { ...this.start(), ...store.get() };
    const pane = (title, side, ...body) => h("section.pane", { "aria-label": title }, h("h4.title", {}, title, side), ...body);
    const part = (name, attributes) => (this[name] = h(`div.${name}`, attributes));
    this.left = h("span.side");
    this.canvas = h("canvas", { role: "img", tabindex: "0", "aria-label": "mask: packed rows by keys; arrow keys choose a row" });
    this.copied = h("pre.code", { hidden: "", tabindex: "0", "aria-label": "this batch as Python" });
    root.replaceChildren(this.bar(), part("head"), this.line,
      h("div.panes", {},
        h("div.col", {}, pane("Requests", this.left, part("requests")), pane("Check", "", part("check", { role: "status" }))),
        pane("Integers per request", "", part("forms"))),
      pane("Packed rows", h("span.side", {}, "an integer is a field: type, or ↑ ↓"), part("strip"), part("sampled")),
      pane("Mask: who sees what", part("tools"), h("div.scroll", {}, this.canvas), part("caption", { role: "status" }), part("legend")),
      this.copied);
    root.addEventListener("focusin", (e) => { if (e.target.matches("input.mc-int")) e.target.select(); });
    root.addEventListener("focusout", this.guard((e) => { if (!this.drawing && e.target.matches("input.mc-int")) this.take(e.target); }));
    this.strip.addEventListener("pointerover", (e) => this.point(Number(e.target.closest("[data-row]")?.dataset.row ?? -1)));
    this.strip.addEventListener("pointerleave", () => this.point(-1));
    this.canvas.addEventListener("pointermove", this.guard((e) => this.point(this.rowAt(e.offsetY))));
    this.canvas.addEventListener("pointerleave", () => this.point(-1));
    store.done?.(this.guard((n) => this.done(n)));
    this.live();
  }

  start() { return { chunks: this.setup.example, edits: {}, align: "bottom-right", errors: null }; }

  bar() {
    this.runner = this.button("run the real attention on these integers (r)", "Run", () => this.run(), "run", ".run");
    return h("div.bar", {},
      this.button("add a decode (d)", "+1 decode", () => this.add(true), "decode"), this.button("add a prompt chunk (c)", "+ chunk", () => this.add(false), "chunk"),
      this.button("remove all requests", "Clear", () => this.change([]), "clear"), h("span.gap"), this.runner,
      this.button("all integers right again", "Undo edits", () => this.set({ edits: {}, errors: null }), "undo"), h("span.gap"),
      this.button("Reset: the running example", "Reset", () => this.reset(), "reset"), this.button("copy this batch as Python", "Copy as code", () => this.copyCode(), "copy"));
  }

  // -- state

  /** A new state, from Python. */
  hear(state) {
    if (this.sending || normal(state) === normal(this.state)) return;
    this.state = { ...this.start(), ...state };
    this.draw();
  }

  /** Other chunks: edits and errors belong to the old batch. */
  change(chunks, focus) {
    if (Object.keys(this.state.edits).length) this.say("another batch: the integers that you had changed are the right ones again");
    this.copied.hidden = true;
    this.focus = focus;
    this.set({ chunks: withBlocks(chunks, this.setup), edits: {}, errors: null });
  }

  reset() {
    Object.assign(this, { row: -1, shown: "all", form: "flash_attention" });
    this.copied.hidden = true;
    this.set(this.start());
    this.say(KEYS);
  }

  room() { return this.setup.budget - sum(this.state.chunks.map((c) => c.length)); }

  add(is_decode) {
    const { chunks } = this.state, room = this.room();
    if (room < 1) return this.say(`the budget is full, ${this.setup.budget} of ${this.setup.budget} tokens: make a chunk shorter or remove a request`, true);
    if (chunks.length >= this.setup.most_requests) return this.say(`the packer holds ${this.setup.most_requests} requests`, true);
    const id = [..."ABCDEFGH"].find((letter) => chunks.every((c) => c.id !== letter));
    const chunk = is_decode ? { id, start: 7, length: 1, is_last: true, is_decode } : { id, start: 0, length: Math.min(4, room), is_last: true, is_decode };
    this.say(KEYS);
    this.change([...chunks, { ...chunk, blocks: [] }], `${id}.start`);
  }

  remove(id) {
    const { chunks } = this.state, n = chunks.findIndex((c) => c.id === id), rest = chunks.filter((c) => c.id !== id);
    this.change(rest, rest.length ? `${rest[Math.min(n, rest.length - 1)].id}.start` : undefined);
  }

  /** One number of a request, kept within what is possible; says what kept it. */
  setChunk(id, what, value) {
    const { chunks } = this.state, c = chunks.find((c) => c.id === id), most = this.setup.most_keys;
    const bounds = what === "start" ? [c.is_decode ? 1 : 0, most - c.length] : [1, Math.min(c.length + this.room(), most - c.start)];
    const kept = clamp(value, ...bounds);
    if (kept !== value) {
      const full = what === "length" && value > c.length + this.room();
      this.say(full ? `the budget leaves ${id} ${plural(c.length + this.room(), "token")}` : `${id}: ${what === "start" ? "history" : "new"} must lie in ${bounds[0]}…${bounds[1]}`, true);
    }
    if (kept !== c[what]) this.change(chunks.map((o) => (o === c ? { ...c, [what]: kept } : o)), this.focus);
    else this.draw();
  }

  setInteger(key, value) {
    const edits = { ...this.state.edits };
    if (value === this.valueOf(this.right, key)) delete edits[key];
    else edits[key] = value;
    this.set({ edits, errors: null });
  }

  valueOf(ints, key) {
    const [name, ...at] = key.split(/[[\]]+/).filter(Boolean);
    return at.reduce((list, k) => list[k], ints[name]);
  }

  /** What stands in a field becomes its value. */
  take(input, by = 0) {
    const { key } = input.dataset, before = Number(input.dataset.value);
    if (!/^-?\d{1,4}$/.test(input.value.trim())) {
      this.say(`${key}: “${input.value}” is not a whole number of at most four digits`, true);
      input.value = before;
      return;
    }
    const value = clamp(Number(input.value) + by, -9999, 9999);
    if (value === before) return;
    input.value = input.dataset.value = value; // a second key may come before the next drawing
    const [id, what] = key.split(".");
    what ? this.setChunk(id, what, value) : this.setInteger(key, value);
  }

  // -- run

  run() {
    if (this.busy) return;
    if (!this.store.run) return this.say("Run needs Python: open the notebook and run the cell. Everything else works here.", true);
    clearTimeout(this.sending);
    this.sending = 0;
    this.say("running the attention …");
    this.busy = this.store.run(this.state);
    this.timer = setTimeout(() => this.say(`no answer yet: ${this.setup.where === "GPU" ? "a first run compiles for the GPU, or " : ""}the kernel is busy with a cell, or gone. All but Run goes on.`), 8000);
    this.draw();
  }

  done(n) {
    if (n !== this.busy) return;
    clearTimeout(this.timer);
    this.busy = 0;
    const text = this.store.said?.() ?? "";
    this.say(text, text.startsWith("error"));
    this.draw();
  }

  // -- keys

  key(e) {
    const field = e.target.matches("input.mc-int") ? e.target : null, canvas = e.target === this.canvas;
    const letter = { d: () => this.add(true), c: () => this.add(false), r: () => this.run(), x: () => { const id = e.target.closest("[data-request]")?.dataset.request; if (id) this.remove(id); } }[e.key];
    let does = letter && (() => { if (field) this.take(field); letter(); });
    if (field) {
      const list = [...field.closest("[data-list]").querySelectorAll("input.mc-int")], move = (by) => { const to = list[clamp(list.indexOf(field) + by, 0, list.length - 1)]; to.focus(); to.select(); };
      does ??= {
        ArrowUp: () => this.take(field, 1), ArrowDown: () => this.take(field, -1), ArrowLeft: () => move(-1), ArrowRight: () => move(1),
        Home: () => move(-999), End: () => move(999), Enter: () => { this.take(field); },
        Escape: () => { if (field.value !== field.dataset.value) field.value = field.dataset.value; else if (!field.dataset.key.includes(".")) this.setInteger(field.dataset.key, this.valueOf(this.right, field.dataset.key)); },
      }[e.key];
    } else if (canvas) {
      const go = (to) => () => this.point(clamp(to, 0, this.right.positions.length - 1));
      does ??= { ArrowUp: go(this.row - 1), ArrowLeft: go(this.row - 1), ArrowDown: go(this.row + 1), ArrowRight: go(this.row + 1), Home: go(0), End: go(9999), Escape: () => this.point(-1) }[e.key];
    }
    return does;
  }

  // -- copy

  async copyCode() {
    const text = code(this.state.chunks, this.state.edits, this.B);
    this.copied.textContent = text;
    this.copied.hidden = false;
    try { await navigator.clipboard.writeText(text); this.say("copied, and shown below"); } catch { this.say("the browser did not let it be copied; it is shown below"); }
  }

  // -- drawing

  render() {
    const { chunks, edits, errors } = this.state, active = document.activeElement, inside = this.root.contains(active);
    this.right = integers(chunks, this.B);
    this.ints = edited(this.right, edits);
    const key = this.focus ?? (inside ? active.dataset.key : undefined), draft = !this.focus && inside && active.value !== active.dataset.value ? active.value : undefined;
    this.focus = undefined;
    if (inside && active.dataset.list === undefined && active.dataset.key?.includes("[")) this.stops[active.closest("[data-list]").dataset.list] = active.dataset.key;
    this.drawing = true; // fields that go away lose the focus, and must not be taken for that
    this.drawHead();
    this.requests.replaceChildren(this.requestTable());
    this.forms.replaceChildren(...Object.keys(FORMS).map((form) => this.formLists(form)));
    const scrolled = this.strip.scrollLeft;
    this.strip.replaceChildren(this.rowTable());
    this.strip.scrollLeft = scrolled;
    this.sampled.replaceChildren(...this.list("logits_rows"), this.largest());
    const again = key && this.root.querySelector(`[data-key="${key}"]`);
    if (again) { again.focus(); if (draft !== undefined) again.value = draft; else again.select?.(); } else if (inside && !this.root.contains(document.activeElement)) this.root.focus();
    this.drawing = false;
    this.drawTools();
    this.drawCheck();
    this.drawMask();
    this.runner.textContent = this.busy ? "Running …" : "Run";
    this.runner.setAttribute("aria-busy", String(Boolean(this.busy)));
    this.runner.disabled = Boolean(this.busy) || !chunks.length;
    this.root.dataset.busy = this.busy;
    this.root.dataset.state = JSON.stringify(this.state);
    this.root.dataset.ran = String(errors !== null);
  }

  index(id) { return id.charCodeAt(0) - 65; }

  tint(el, id) {
    const r = this.index(id);
    el.style.background = `${this.paint.tile(r).url} ${this.paint.fill(r)}`;
    el.style.color = this.paint.text(r);
    return el;
  }

  chip(id) {
    const r = this.index(id), letter = h("b", {}, id);
    letter.style.background = this.paint.fill(r);
    return this.tint(h("span.chip", {}, letter), id);
  }

  drawHead() {
    const { chunks } = this.state, decodes = chunks.filter((c) => c.is_decode).length, prompts = chunks.length - decodes;
    const kind = !chunks.length ? "empty" : decodes && prompts ? "mixed" : decodes ? "decodes" : "prompts";
    const parts = [decodes && plural(decodes, "decode"), prompts && plural(prompts, "prompt chunk")].filter(Boolean).join(" + ");
    const used = this.setup.budget - this.room();
    this.head.replaceChildren(h(`span.kind.${kind}`, {}, kind), h("span", {}, parts), h("b.now", {}, `${used} of ${this.setup.budget} tokens`), h("span.badge", {}, `blocks of ${this.B} · live, float32 on the ${this.setup.where}`));
    this.left.textContent = this.room() ? `the budget leaves ${plural(this.room(), "token")}` : "the budget is full";
  }

  /** A field for an integer. */
  field(key, value, label, wanted = value) {
    const own = value !== wanted, wrong = own && this.state.errors !== null;
    return h(`input.int${own ? ".own" : ""}${wrong ? ".wrong" : ""}`, {
      type: "text", inputmode: "numeric", autocomplete: "off", value, "data-value": value, "data-key": key, title: own ? `${label}, changed by you` : label, "aria-label": own ? `${label}, changed by you` : label,
      "aria-invalid": wrong ? "true" : undefined, style: `width:${Math.max(2, String(value).length) + 1.6}ch`,
    });
  }

  stepper(c, what, label) {
    const step = (by, sign) => h("button.step", { type: "button", tabindex: "-1", "aria-label": `${c.id}: ${label} ${by > 0 ? "plus" : "minus"} 1`, onclick: this.guard(() => { this.focus = `${c.id}.${what}`; this.setChunk(c.id, what, c[what] + by); }) }, sign);
    return h("span.stepper", { "data-list": `${c.id}.${what}` }, step(-1, "−"), this.field(`${c.id}.${what}`, c[what], `${c.id}: ${label} tokens`), step(1, "+"));
  }

  requestTable() {
    const { chunks } = this.state, cell = (...body) => h("td", {}, ...body);
    if (!chunks.length) return h("p.none", {}, "Nobody is here. Add a decode or a chunk.");
    const rows = chunks.map((c) => {
      const last = h("input", { type: "checkbox", "data-key": `${c.id}.last`, "aria-label": `${c.id}: this chunk is the last of its prompt`, onchange: this.guard((e) => this.change(chunks.map((o) => (o === c ? { ...c, is_last: e.target.checked } : o)), `${c.id}.last`)) });
      last.checked = c.is_last;
      return h("tr", { "data-request": c.id }, cell(this.chip(c.id)), cell(c.is_decode ? "decode" : "chunk"), cell(this.stepper(c, "start", "history")), cell(c.is_decode ? h("span.fixed", {}, "1") : this.stepper(c, "length", "new")),
        cell(c.is_decode ? h("span.none", {}, "▲") : h("label.last", {}, last, " last")), cell(h("button.step", { type: "button", "data-key": `${c.id}.remove`, "aria-label": `remove ${c.id} (x)`, title: `remove ${c.id} (x)`, onclick: this.guard(() => this.remove(c.id)) }, "×")));
    });
    return h("table.who", {}, h("thead", {}, h("tr", {}, ...["", "", "history", "new", "samples", ""].map((t) => h("th", { scope: "col" }, t)))), h("tbody", {}, ...rows));
  }

  /** Label and fields of one list. */
  list(name) {
    const { chunks } = this.state, ids = chunks.map((c) => c.id), S = ids.length;
    const whose = (i) => (name === "logits_rows" ? chunks.filter((c) => c.is_last)[i].id : name === "kv_indices" ? ids[this.right.kv_indptr.findIndex((end) => end > i) - 1] : this.right[name].length === S ? ids[i] : i < S ? `where ${ids[i]} begins` : "the end");
    const one = (key, value, wanted, label) => this.stop(name, this.field(key, value, `${key}, ${label}`, wanted));
    let fields;
    if (name === "block_tables")
      fields = this.ints[name].map((row, n) => h("span.table", {}, this.chip(ids[n]), ...row.map((v, k) => one(`${name}[${n}][${k}]`, v, this.right[name][n][k], `${ids[n]}'s block ${k}`))));
    else fields = this.ints[name].map((v, i) => one(`${name}[${i}]`, v, this.right[name][i], whose(i)));
    const errors = name === "logits_rows" && this.state.errors?.sampled;
    if (errors) fields = fields.flatMap((field, i) => [field, this.verdict(errors[i], `sampled for ${whose(i)}`, "span")]);
    return [h("span.label", {}, name), h("span.list", { "data-list": name, role: "group", "aria-label": name }, ...(fields.length ? fields : ["–"]))];
  }

  /** Of each list only one field is a stop of the Tab key. */
  stop(name, field) {
    const stop = this.stops[name] ?? `${name}[0]${name === "block_tables" ? "[0]" : ""}`;
    field.tabIndex = field.dataset.key === stop || (this.valueAt(stop) === undefined && /^\w+(\[0\])+$/.test(field.dataset.key)) ? 0 : -1;
    return field;
  }

  valueAt(key) { try { return this.valueOf(this.ints, key); } catch { return undefined; } }

  formLists(form) {
    return h("div.form", {}, h("h5.library", {}, FORMS[form]), h("div.lists", {}, ...FORM_LISTS[form].flatMap((name) => this.list(name))));
  }

  verdict(error, label, tag = "td") {
    const wrong = error === null || error > this.setup.tolerance, text = size(error);
    const el = h(`${tag}.verdict${wrong ? ".bad" : ".good"}`, { title: `${label}: error ${text}`, "aria-label": `${label}: ${wrong ? "wrong" : "right"}, error ${text}` }, wrong ? "✕" : "✓");
    // the larger the error, the fuller the colour: 1e-4 … 1
    const much = error === null ? 1 : clamp((Math.log10(error) + 4) / 4, 0.15, 1);
    if (wrong) el.style.setProperty("--much", `${Math.round(100 * much)}%`);
    if (wrong && much > 0.4) el.style.color = this.paint.paper;
    return el;
  }

  rowTable() {
    const { chunks, errors } = this.state, T = this.right.positions.length, whose = chunks.flatMap((c) => Array(c.length).fill(c)), sampled = new Set(this.ints.logits_rows);
    const head = (text) => h("th", { scope: "row" }, text), columns = Array.from({ length: T }, (_, row) => row);
    const spare = Array.from({ length: Math.max(0, this.setup.budget - T) }, () => h("td.spare", {}));
    const rows = [
      h("tr.number", {}, head("row"), ...columns.map((row) => h("td", { "data-row": row }, String(row)))),
      h("tr.request", {}, head("request"), ...columns.map((row) => {
        const c = whose[row], first = row === this.right.cu_seqlens_q[chunks.indexOf(c)], letter = h("b", {}, c.id);
        letter.style.background = this.paint.fill(this.index(c.id));
        const td = this.tint(h(`td.token${first ? ".first" : ""}`, { "data-row": row, title: `row ${row}: ${c.id}'s token ${this.right.positions[row]}${sampled.has(row) ? ", sampled" : ""}` }, letter), c.id);
        if (sampled.has(row)) td.append(h("i.corner", { "aria-label": "sampled" }));
        return td;
      }), ...spare),
      ...ROW_LISTS.map((name) => h("tr", { "data-list": name, "aria-label": name }, head(name), ...columns.map((row) => h("td", { "data-row": row }, this.stop(name, this.field(`${name}[${row}]`, this.ints[name][row], `${name}[${row}], ${whose[row].id}'s token ${this.right.positions[row]}`, this.right[name][row])))))),
    ];
    if (errors) for (const [form, title] of Object.entries(FORMS))
      rows.push(h("tr", {}, head(title), ...(errors[form] ? errors[form].map((e, row) => { const td = this.verdict(e, `row ${row} in ${title}'s form`); td.dataset.row = row; return td; }) : [h("td.refused", { colspan: T }, "refused: an integer reaches outside")])));
    return h("table.strip", { style: `max-width:${140 + 60 * Math.max(T, this.setup.budget)}px` }, h("tbody", {}, ...rows));
  }

  /** The largest error of each request, in words. */
  largest() {
    const { chunks, errors } = this.state, cu = this.right.cu_seqlens_q;
    if (!errors) return h("span.side", {}, "▲ corner: a row that is sampled");
    const text = Object.entries(FORMS).filter(([form]) => errors[form]).map(([form, title]) => `${title}: ${chunks.map((c, n) => { const mine = errors[form].slice(cu[n], cu[n + 1]); return `${c.id} ${size(mine.includes(null) ? null : Math.max(...mine))}`; }).join(" · ")}`);
    return h("span.side", {}, text.length ? `largest error, ${text.join(" | ")}` : "nothing was run");
  }

  drawTools() {
    const { chunks, align } = this.state, select = (label, options, value, does) => {
      const el = h("select.select", { "aria-label": label, title: label, onchange: this.guard((e) => does(e.target.value)) }, ...options.map(([text, v]) => h("option", { value: v }, text)));
      el.value = value;
      return el;
    };
    if (this.shown !== "all" && chunks.every((c) => c.id !== this.shown)) this.shown = "all";
    const made = JSON.stringify([chunks.map((c) => c.id), align, this.shown, this.form]);
    if (made === this.made) return; // or a select that is open would close
    this.made = made;
    const focused = [...this.tools.children].indexOf(document.activeElement);
    this.tools.replaceChildren(
      select("whose integers", Object.entries(FORMS).map(([form, title]) => [title, form]), this.form, (v) => { this.form = v; this.draw(); }),
      select("which request", [["all", "all"], ...chunks.map((c) => [c.id, c.id])], this.shown, (v) => { this.shown = v; this.draw(); }),
      select("alignment of the mask", [["bottom-right", "bottom-right"], ["top-left", "top-left"]], align, (v) => this.set({ align: v })));
    if (focused >= 0) this.tools.children[focused].focus();
  }

  drawCheck() {
    const { errors, edits, chunks } = this.state;
    if (errors) {
      const lines = this.store.report().split("\n");
      return this.check.replaceChildren(...lines.map((line) => h(`p${Object.keys(edits).length ? ".found" : ".good"}`, {}, line)));
    }
    const many = Object.keys(edits).length;
    this.check.replaceChildren(h("p.none", {}, !chunks.length ? "Build a batch first." : many ? `${plural(many, "integer")} changed. Which rows go wrong, and how? Guess, then Run.` : "Change an integer and Run: the real attention computes with exactly what stands here, and each row is compared with a dense one in float64."));
  }

  // -- the mask

  geometry() {
    const { chunks } = this.state, [cu, lens] = shape(this.ints, this.form, this.B), T = this.right.positions.length;
    const got = sees(cu, lens, this.state.align, T), wanted = sees(this.right.cu_seqlens_q, this.right.seq_lens_k, "bottom-right", T);
    const only = this.shown === "all" ? -1 : chunks.findIndex((c) => c.id === this.shown);
    const keys = chunks.map((c, n) => clamp(Math.max(endOf(c), lens[n], 0), 0, 2 * this.setup.most_keys));
    const rows = only < 0 ? [0, T] : [this.right.cu_seqlens_q[only], this.right.cu_seqlens_q[only + 1]];
    const left = []; // where each sequence's keys begin, in cells; one cell between two
    let cols = 0;
    chunks.forEach((_, n) => { if (only < 0 || n === only) { left[n] = cols; cols += keys[n] + 1; } });
    return { got, wanted, keys, rows, left, cols: Math.max(cols - 1, 1), lens, cu };
  }

  rowAt(y) {
    const { rows, cell, top } = this.geo ?? {}, row = rows ? rows[0] + Math.floor((y - top) / cell) : -1;
    return rows && row >= rows[0] && row < rows[1] && y >= top ? row : -1;
  }

  point(row) {
    if (row === this.row) return;
    this.row = row;
    this.drawMask();
    for (const td of this.strip.querySelectorAll("tr.mc-number td")) td.classList.toggle("mc-on", Number(td.dataset.row) === row);
  }

  drawMask() {
    if (!this.paint) return;
    const { chunks } = this.state, { paint } = this, geo = (this.geo = this.geometry()), { got, wanted, keys, rows, left, cols } = geo, count = rows[1] - rows[0];
    const width = this.canvas.parentElement.clientWidth, gutter = 68, top = 24;
    const cell = (geo.cell = clamp(Math.min(Math.floor((width - gutter - 4) / cols), Math.floor(400 / Math.max(count, 1))), 5, 22));
    geo.top = top;
    const c = sheet(this.canvas, Math.max(gutter + cols * cell + 4, 80), top + Math.max(count, 1) * cell + 4), gap = cell >= 9 ? 1 : 0.5;
    let missing = 0, extra = 0, pairs = 0;
    chunks.forEach((q, n) => {
      if (left[n] === undefined) return;
      const x0 = gutter + left[n] * cell, r = this.index(q.id);
      mark(c, `${q.id}: ${plural(geo.lens[n], "key")}`.slice(0, keys[n] * cell < 64 ? 1 : 99), x0 + (keys[n] * cell) / 2, 12, paint, paint.ink);
      for (let row = rows[0]; row < rows[1]; row++) for (let k = 0; k < keys[n]; k++) {
        const is = got[row][0] === n && k < got[row][1], must = wanted[row][0] === n && k < wanted[row][1];
        const x = x0 + k * cell + gap, y = top + (row - rows[0]) * cell + gap, s = cell - 2 * gap;
        pairs += is;
        if (is && must) {
          c.globalAlpha = k < q.start ? 0.5 : 1;
          c.fillStyle = k < q.start ? paint.fill(r) : paint.pattern(c, r);
          c.fillRect(x, y, s, s);
          c.globalAlpha = 1;
        } else if (is || must) {
          is ? extra++ : missing++;
          c.strokeStyle = c.fillStyle = paint.alarm;
          c.lineWidth = 1.5;
          if (is) c.fillRect(x, y, s, s);
          else { c.strokeRect(x + 0.75, y + 0.75, s - 1.5, s - 1.5); c.beginPath(); c.moveTo(x + s * 0.25, y + s * 0.25); c.lineTo(x + s * 0.75, y + s * 0.75); c.moveTo(x + s * 0.75, y + s * 0.25); c.lineTo(x + s * 0.25, y + s * 0.75); c.stroke(); }
        } else if (wanted[row][0] === n || got[row][0] === n) { c.fillStyle = paint.line; c.fillRect(x + s / 2 - 1, y + s / 2 - 1, 2, 2); }
      }
    });
    for (let row = rows[0]; row < rows[1]; row++) {
      const n = wanted[row][0], first = row === this.right.cu_seqlens_q[n], y = top + (row - rows[0] + 0.5) * cell;
      if (cell >= 15 || (first && (n === 0 || (row - this.right.cu_seqlens_q[n - 1]) * cell >= 14))) {
        c.textAlign = "right";
        c.textBaseline = "middle";
        c.font = `14px ${paint.ui}`;
        c.fillStyle = row === this.row ? paint.ink : paint.soft;
        c.fillText(`${row}  ${chunks[n].id}${this.right.positions[row]}`, gutter - 8, y + 1);
      }
    }
    if (this.row >= rows[0] && this.row < rows[1]) ring(c, gutter - 2, top + (this.row - rows[0]) * cell - 1, cols * cell + 4, cell + 2, paint, 1.5);
    const refused = this.state.errors !== null && this.state.errors[this.form] === null;
    this.caption.textContent = this.row >= 0 && this.row < got.length ? this.words(this.row) : refused ? `${FORMS[this.form]}'s form was refused: nothing was computed. The picture shows what its integers ask for.` : chunks.length ? `${pairs} pairs of a row and a key are computed${missing ? `, ${missing} missing` : ""}${extra ? `, ${extra} too many` : ""}. A line is a packed row, a column a key.` : "";
    const swatch = (name, text) => [this.swatch(name), h("span", {}, text)];
    this.legend.replaceChildren(...swatch("cache", "key from the cache"), ...swatch("new", "key of this batch"), ...(missing ? swatch("missing", "missing") : []), ...(extra ? swatch("extra", "must not be seen") : []));
    this.canvas.dataset.counts = JSON.stringify({ pairs, missing, extra });
  }

  swatch(name) {
    const el = h(`span.key.${name}`, { "aria-hidden": "true" }), id = this.state.chunks.find((c) => !c.is_decode && c.start)?.id ?? this.state.chunks[0]?.id ?? "A";
    if (name === "cache") el.style.background = `color-mix(in srgb, ${this.paint.fill(this.index(id))} 50%, transparent)`;
    if (name === "new") this.tint(el, id);
    if (name === "missing") el.append("✕");
    return el;
  }

  words(row) {
    const { chunks } = this.state, { got, wanted } = this.geo, [n, count] = got[row], [m, right] = wanted[row];
    const seen = n < 0 ? "belongs to nobody" : `sees ${count ? `${n === m ? "" : `${chunks[n].id}'s `}keys 0…${count - 1}` : "no key"}`;
    return `row ${row} = ${chunks[m].id}'s token ${this.right.positions[row]} ${seen}${n !== m || count !== right ? `; it should see ${n === m ? "" : `${chunks[m].id}'s `}keys 0…${right - 1}` : ` of ${this.right.seq_lens_k[m]}`}`;
  }
}

/** Puts a packer into `root`, in the place of the text twin. */
export function mount(root, setup, store) {
  try {
    return (root.mcApp = new PackerApp(root, setup, store));
  } catch (error) {
    root.append(`The packer does not work in this browser (${error.message}). print(w) shows the same as text.`);
    throw error;
  }
}

/** A page without a kernel: the state lives here. */
export function mountPage(root, setup, state = {}, report = "") {
  return mount(root, setup, { get: () => state, set: (s) => (state = s), listen: () => {}, report: () => report });
}

/** The anywidget. */
export default {
  render({ model, el }) {
    const { root, store, hear, gone } = connect({ model, el });
    const app = mount(root, model.get("setup"), {
      ...store,
      report: () => model.get("report"),
      said: () => model.get("status"),
      run: (state) => { // in one message, or an older state that still waits would come after the answer and wipe it out
        model.set({ state, asked: model.get("asked") + 1 });
        model.save_changes();
        return model.get("asked");
      },
      done: (does) => hear("msg:custom", (message) => message.done && does(message.done)),
    });
    return () => { gone(); app.close(); };
  },
};
