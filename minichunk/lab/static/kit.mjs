// What the widgets share: elements, the requests' colours and hatches, canvases, the frame that a widget lives in. Python
// puts this file in front of scrubber.mjs and packer.mjs (kit.py), so that each widget is one module without an import.

/** h("div.name", {attribute: value}, child, …) */
function h(spec, attributes = {}, ...children) {
  const [tag, ...classes] = spec.split("."), el = document.createElement(tag);
  if (classes.length) el.className = classes.map((c) => `mc-${c}`).join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) el.addEventListener(key.slice(2), value);
    else if (value !== undefined) el.setAttribute(key, value);
  }
  el.append(...children);
  return el;
}

const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

const clamp = (x, a, b) => Math.max(a, Math.min(b, x));
const rgb = (css) => {
  const hex = /^#(..)(..)(..)$/.exec(css);
  return hex ? hex.slice(1).map((h) => parseInt(h, 16)) : (css.match(/[\d.]+/g) ?? [255, 255, 255]).slice(0, 3).map(Number);
};
const light = (css) => { const [r, g, b] = rgb(css); return 0.299 * r + 0.587 * g + 0.114 * b; };

/** Colours, hatches and letters of the requests under the theme in force. */
class Paint {
  constructor(root, themes, hatches) {
    const style = getComputedStyle(root);
    const said = document.body.dataset.jpThemeLight; // JupyterLab says it before its new style sheet has come
    this.dark = said ? said === "false" : light(style.backgroundColor) < 128;
    Object.assign(this, themes[this.dark ? "dark" : "light"]);
    this.ui = style.fontFamily;
    this.code = style.getPropertyValue("--mc-code");
    this.hatches = hatches;
    this.tiles = new Map();
  }
  fill(r) { return this.colors[r % this.colors.length]; }
  text(r) { return light(this.fill(r)) > 120 ? "#111418" : "#ffffff"; }
  /** A 8 × 8 tile of the request's colour with its hatch. */
  tile(r) {
    const key = `${r % this.colors.length}/${r % this.hatches.length}`;
    if (!this.tiles.has(key)) {
      const tile = Object.assign(document.createElement("canvas"), { width: 8, height: 8 }), c = tile.getContext("2d");
      c.fillStyle = this.fill(r);
      c.fillRect(0, 0, 8, 8);
      c.strokeStyle = c.fillStyle = light(this.fill(r)) > 120 ? "rgba(0,0,0,.24)" : "rgba(255,255,255,.30)";
      c.lineWidth = 1.4;
      const line = (...p) => { c.beginPath(); c.moveTo(p[0], p[1]); c.lineTo(p[2], p[3]); c.stroke(); };
      const rise = () => { line(-2, 10, 10, -2); line(-2, 2, 2, -2); line(6, 10, 10, 6); };
      const fall = () => { line(-2, -2, 10, 10); line(6, -2, 10, 2); line(-2, 6, 2, 10); };
      const flat = () => line(0, 4, 8, 4), tall = () => line(4, 0, 4, 8);
      const draw = {
        "/": rise, "\\": fall, x: () => { rise(); fall(); }, "-": flat, "|": tall, "+": () => { flat(); tall(); },
        ".": () => { c.beginPath(); c.arc(4, 4, 1.6, 0, 7); c.fill(); },
      }[this.hatches[r % this.hatches.length]];
      draw?.();
      this.tiles.set(key, { tile, url: `url(${tile.toDataURL()})` });
    }
    return this.tiles.get(key);
  }
  pattern(c, r) {
    const entry = this.tile(r);
    return (entry.pattern ??= c.createPattern(entry.tile, "repeat"));
  }
  /** Grey stripes: a cached block. */
  stripes(c) {
    if (!this.grey) {
      const tile = Object.assign(document.createElement("canvas"), { width: 4, height: 4 }), t = tile.getContext("2d");
      t.strokeStyle = this.soft;
      t.globalAlpha = 0.6;
      t.beginPath();
      for (const k of [-4, 0, 4]) { t.moveTo(k - 1, 5); t.lineTo(k + 5, -1); }
      t.stroke();
      this.grey = c.createPattern(tile, "repeat");
    }
    return this.grey;
  }
}

/** A canvas of w × h CSS pixels, sharp on every screen. */
function sheet(canvas, w, h) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(w * ratio) || canvas.height !== Math.round(h * ratio)) {
    canvas.width = Math.round(w * ratio);
    canvas.height = Math.round(h * ratio);
    canvas.style.width = `${w}px`;
    canvas.style.height = `${h}px`;
  }
  const c = canvas.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, w, h);
  return c;
}

function mark(c, text, x, y, paint, ink, halo, font = `600 14px ${paint.ui}`) {
  c.font = font;
  c.textAlign = "center";
  c.textBaseline = "middle";
  if (halo) { c.lineJoin = "round"; c.lineWidth = 4; c.strokeStyle = halo; c.strokeText(text, x, y); }
  c.fillStyle = ink;
  c.fillText(text, x, y);
}

function ring(c, x, y, w, h, paint, width = 2.5) {
  c.lineWidth = width + 2;
  c.strokeStyle = paint.paper;
  c.strokeRect(x, y, w, h);
  c.lineWidth = width;
  c.strokeStyle = paint.ink;
  c.strokeRect(x, y, w, h);
}

/** The mark of a sampled row: a corner. */
function triangle(c, x, y, size, paint) {
  c.beginPath();
  c.moveTo(x, y);
  c.lineTo(x - size, y);
  c.lineTo(x, y - size);
  c.closePath();
  c.fillStyle = paint.ink;
  c.fill();
  if (size > 5) { c.strokeStyle = paint.paper; c.lineWidth = 1; c.stroke(); }
}

/** A widget's frame: status line, buttons, drawing once a frame and when size or theme change, its state's way to Python.
    store: {get() → state, set(state), listen(callback), status(callback)?} · look: {themes, hatches}
    A child has key(event), hear(state from Python), render() with `paint` ready, and may have places() and measure(). */
class Widget {
  constructor(root, store, look, name, label, keys) {
    Object.assign(this, { root, store, look, keys });
    root.classList.add("mc-widget", `mc-${name}`);
    for (const [key, value] of Object.entries({ tabindex: "0", role: "group", "aria-label": label, "data-lm-suppress-shortcuts": "true" })) root.setAttribute(key, value);
    this.line = h("div.status", { role: "status", "aria-live": "polite" }, keys);
  }

  /** Once the child's elements are in the root. */
  live() {
    const { root, store } = this, redraw = () => { this.paint = null; this.draw(); };
    root.addEventListener("keydown", this.guard((e) => {
      if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches("select")) return;
      const does = this.key(e);
      e.stopPropagation();
      if (does) { e.preventDefault(); does(); }
    }));
    store.listen(this.guard((state) => this.hear(state)));
    store.status?.((text) => text && this.say(text, text.startsWith("error")));
    const size = new ResizeObserver(redraw), media = matchMedia("(prefers-color-scheme: dark)");
    const themes = new MutationObserver(() => { // the mark changes before the new style sheet is in force
      redraw();
      clearTimeout(this.late);
      this.late = setTimeout(redraw, 400);
    });
    size.observe(root);
    themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "data-jp-theme-light", "class"] });
    media.addEventListener("change", redraw);
    this.unwatch = () => { size.disconnect(); themes.disconnect(); media.removeEventListener("change", redraw); };
    this.draw();
  }

  close() {
    for (const timer of [this.sending, this.hidden, this.late, this.timer]) clearTimeout(timer);
    this.unwatch();
    this.closed = true;
  }

  button(label, text, does, name, kind = "") {
    return h(`button.button${kind}`, { type: "button", "aria-label": label, title: label, "data-do": name, onclick: this.guard(does) }, text);
  }

  /** An error in a handler is shown, not lost. */
  guard(does) {
    return (...args) => {
      try { return does(...args); } catch (error) { this.say(`error: ${error.message}`, true); throw error; }
    };
  }

  say(text, bad = false) {
    this.line.textContent = text;
    this.line.classList.toggle("mc-alarm", bad);
  }

  /** A new state, from here: drawn at once, told to the kernel a little later, the last one only. */
  set(change) {
    this.state = { ...this.state, ...change };
    this.places?.();
    this.draw();
    this.sending ||= setTimeout(() => { this.sending = 0; this.store.set(this.state); }, 150);
  }

  draw() {
    this.frame ||= requestAnimationFrame(this.guard(() => {
      this.frame = 0;
      if (this.closed) return;
      clearTimeout(this.hidden);
      if (!this.root.clientWidth) { // no observer tells of a moment in the dark, as while JupyterLab changes its theme
        this.hidden = setTimeout(() => this.draw(), 400);
        return;
      }
      if (!this.paint) {
        this.paint = new Paint(this.root, this.look.themes, this.look.hatches);
        this.measure?.();
      }
      this.render();
    }));
  }
}

/** An anywidget's element and store: → {root, store, hear(event, callback), gone()} */
function connect({ model, el }) {
  const root = document.createElement("div"), off = [];
  el.append(root);
  const hear = (event, does) => { model.on(event, does); off.push(() => model.off(event, does)); };
  return {
    root, hear, gone: () => off.forEach((does) => does()),
    store: {
      get: () => model.get("state"),
      set: (state) => { model.set("state", state); model.save_changes(); },
      listen: (does) => hear("change:state", () => does(model.get("state"))),
      status: (does) => hear("change:status", () => does(model.get("status"))),
    },
  };
}
