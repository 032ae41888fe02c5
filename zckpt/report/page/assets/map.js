// The map as a person uses it: hover, arrow keys, Enter to zoom in, Escape to go back, slots and order to choose.

const MAP_ROW = 38; // pixels of a row, where there are few
const MAP_LEAST = 96;
const MAP_MOST = 460;

class MapView extends MapZoom {
  constructor(host, model, marks = null) {
    super(model);
    this.shown = model.slots.map(() => true);
    this.matches = null;
    this.marks = null;
    this.findings = marks;
    this.build(host);
    this.whole();
    this.mark();
    when("search", ({ matches }) => this.changed({ matches }));
    when("choose", ({ index }) => this.showParameter(index));
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.restyle());
    window.addEventListener("beforeprint", () => this.restyle(true));
    window.addEventListener("afterprint", () => this.restyle(true));
    new ResizeObserver(() => this.resize()).observe(this.stage);
    this.resize();
    restored("view", (text) => {
      const [x0, x1, y0, y1] = text.split(" ").map(Number);
      const [width, height] = [this.model.width, this.model.rows.length];
      if (x0 >= 0 && x0 < x1 && x1 <= width && y0 >= 0 && y0 < y1 && y1 <= height) this.push(() => (this.view = { x0, x1, y0, y1 }));
    });
  }

  build(host) {
    this.canvas = element("canvas", { "aria-hidden": "true" });
    const rows = plural(this.model.rows.length, "row");
    const columns = plural(this.model.columns.filter((c) => c.index >= 0).length, "parameter");
    this.stage = element(
      "div",
      {
        class: "stage",
        id: "map-stage",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "map",
        "aria-label": `Map of ${rows} and ${columns}`,
        "aria-describedby": "map-keys",
      },
      this.canvas,
    );
    this.detail = element("div", { class: "detail", "aria-live": "polite", "aria-atomic": "true" });
    this.tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    const button = (text, label, act) => element("button", { type: "button", "aria-label": label, title: label, on: { click: act } }, text);
    this.back = button("Back", "Back to the part seen before", () => this.pop());
    const tools = element(
      "div",
      { class: "tools" },
      mapLegend(this),
      element(
        "div",
        { class: "buttons" },
        mapOrder(this),
        button("−", "Zoom out", () => this.zoom(2)),
        button("+", "Zoom in", () => this.zoom(0.5)),
        button("Whole", "Show the whole map", () => this.push(() => this.whole())),
        this.back,
      ),
    );
    const keys = element(
      "p",
      { id: "map-keys", class: "quiet keys" },
      "Arrow keys move by parameter and row, with Shift by module and 16 rows. Enter zooms in, Escape goes back. Drag to zoom with a pointer. " +
        "Where there is no room, ranks are drawn together in bands and narrow columns as filled: zoom in to part them.",
    );
    host.replaceChildren(tools, this.stage, this.tip, this.detail, keys);
    this.listen();
    this.say();
  }

  arrange(order) {
    this.model.arrange(order);
    this.past = [];
    this.focus = null;
    this.whole();
    this.mark();
    this.say();
  }

  /** Mark what findings are about: [{ ranks, parameters, file }]. */
  mark() {
    this.changed({ marks: this.findings && findingMarks(this.model, this.findings) });
  }

  listen() {
    this.stage.addEventListener("keydown", (event) => this.key(event));
    this.stage.addEventListener("focus", () => {
      if (!this.focus) this.moveTo(this.model.at(this.view.x0), Math.floor(this.view.y0));
    });
    this.stage.addEventListener("pointermove", (event) => this.hover(event));
    this.stage.addEventListener("pointerleave", () => {
      this.tip.hidden = true;
    });
    this.stage.addEventListener("pointerdown", (event) => {
      this.drag = event.button === 0 ? { x: event.offsetX, y: event.offsetY } : null;
    });
    window.addEventListener("pointerup", (event) => this.release(event));
    this.stage.addEventListener("dblclick", () => this.enter());
  }

  resize() {
    const width = this.stage.clientWidth;
    if (!width) return;
    const height = 44 + Math.min(MAP_MOST, Math.max(MAP_LEAST, this.model.rows.length * MAP_ROW));
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.context = this.canvas.getContext("2d");
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const longest = Math.max(...this.model.rows.map((row) => row.label.length), 4);
    this.frame = mapFrame(width, height, this.model.rows.length, longest);
    this.restyle();
  }

  restyle(now = false) {
    if (!this.context) return;
    this.theme = mapTheme(this.context);
    if (now) this.draw();
    else this.changed({});
  }

  /** Take new settings and draw once, with the next frame. */
  changed(settings) {
    Object.assign(this, settings);
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  draw() {
    if (!this.frame || !this.model.columns.length) return;
    const { model, shown } = this;
    const scene = {
      model,
      shown,
      frame: this.frame,
      theme: this.theme,
      view: this.view,
      matches: this.matches,
      focus: this.focus,
      marks: this.marks,
      bands: layBands(model, this.view, this.frame),
      total: (row) => row.held.reduce((sum, nbytes, slot) => sum + (shown[slot] ? nbytes : 0), row.padding),
    };
    layLanes(model, scene.bands, shown);
    scene.segments = moduleSegments(scene);
    this.bands = scene.bands;
    drawMap(this.context, scene);
    this.back.disabled = !this.past.length;
    const { x0, x1, y0, y1 } = this.view;
    const whole = x0 === 0 && x1 >= model.width && y0 === 0 && y1 >= model.rows.length;
    remember("view", whole ? null : [x0, x1, y0, y1].map(Math.round).join(" "));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const acts = {
      ArrowRight: () => this.step(event.shiftKey, 1),
      ArrowLeft: () => this.step(event.shiftKey, -1),
      ArrowDown: () => this.stepRow(event.shiftKey ? 16 : 1),
      ArrowUp: () => this.stepRow(event.shiftKey ? -16 : -1),
      Home: () => this.moveTo(0, this.focus.row),
      End: () => this.moveTo(this.model.columns.length - 1, this.focus.row),
      Enter: () => this.enter(),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      Escape: () => this.pop(),
    };
    if (!(event.key in acts) || !this.focus) return;
    event.preventDefault();
    acts[event.key]();
  }

  showParameter(index) {
    const owner = this.model.parameters[index].owner;
    const column = this.model.columnOf.get(owner === undefined ? index : this.model.owners.get(owner));
    if (column === undefined) return;
    const [first, last] = this.model.rowsOf(this.model.columns[column].index, this.firstRank());
    this.moveTo(column, first <= last ? first : 0);
  }

  place(event) {
    const { frame, view } = this;
    const box = this.canvas.getBoundingClientRect();
    const x = view.x0 + ((event.clientX - box.left - frame.left) / frame.width) * (view.x1 - view.x0);
    const top = event.clientY - box.top;
    const band = this.bands && this.bands.list.find((one) => top >= one.top && top < one.top + one.height);
    const inside = Boolean(band) && x >= view.x0 && x < view.x1;
    return { x, row: inside ? this.rowInBand(this.model.at(x), band) : -1, inside };
  }

  hover(event) {
    const { x, row, inside } = this.place(event);
    this.tip.hidden = !inside || Boolean(this.drag && Math.abs(event.offsetX - this.drag.x) > 6);
    if (!inside) return;
    this.tip.replaceChildren(...cellLines(this.model, this.model.at(x), row).map((line, i) => element(i ? "span" : "strong", {}, line)));
    const stage = this.stage.getBoundingClientRect();
    const left = Math.min(event.clientX - stage.left + 14, stage.width - this.tip.offsetWidth - 4);
    this.tip.style.left = `${Math.max(0, left) + this.stage.offsetLeft}px`;
    this.tip.style.top = `${event.clientY - stage.top + 18 + this.stage.offsetTop}px`;
  }

  release(event) {
    const { drag } = this;
    this.drag = null;
    if (!drag || !this.stage.contains(event.target)) return;
    const { x, row, inside } = this.place(event);
    if (Math.abs(event.offsetX - drag.x) > 6) {
      const scale = (this.view.x1 - this.view.x0) / this.frame.width;
      const other = x + (drag.x - event.offsetX) * scale;
      this.push(() => {
        const x0 = Math.max(this.view.x0, Math.min(x, other));
        this.view = { ...this.view, x0, x1: Math.max(x0 + 1, Math.min(this.view.x1, Math.max(x, other))) };
      });
    } else if (inside) {
      this.moveTo(this.model.at(x), row);
    }
  }

  say() {
    if (!this.focus) {
      this.detail.replaceChildren(element("p", { class: "quiet" }, "Point at a part of the map, or move to it with the keyboard, to see what it holds."));
      return;
    }
    const [name, about, ...slots] = cellLines(this.model, this.focus.column, this.focus.row);
    this.detail.replaceChildren(
      element("p", {}, element("strong", {}, name), " ", element("span", { class: "quiet" }, about || "")),
      element("ul", {}, ...slots.map((line) => element("li", {}, line))),
    );
  }
}
