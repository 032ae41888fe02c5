// Curves of a series: one quantity of the chosen parameters, checkpoint by checkpoint.

const CHART_HEIGHT = 250;
const CHART_LEFT = 62;
const CHART_BOTTOM = 28;
const CHART_TOP = 10;
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "5 2", "1 2", "12 4"]; // so that lines differ without colour too

class Chart {
  /** host: element. title: what is drawn. key: which list of each series. labels: of the checkpoints. */
  constructor(host, { title, key, labels, logarithmic }) {
    Object.assign(this, { host, title, key, labels, logarithmic, lines: [], at: labels.length - 1 });
    this.stage = element("div", { class: "chart", tabindex: 0, role: "group", "aria-label": `${title}. Left and right arrow read the values of each checkpoint.` });
    this.detail = element("p", { class: "detail small", "aria-live": "polite" });
    host.replaceChildren(element("h3", {}, title), this.stage, this.detail);
    this.stage.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      this.read(this.at + by);
    });
    this.stage.addEventListener("focus", () => this.read(this.at));
    this.stage.addEventListener("pointermove", (event) => {
      const box = this.stage.getBoundingClientRect();
      const share = (event.clientX - box.left - CHART_LEFT) / Math.max(1, box.width - CHART_LEFT - 12);
      this.read(Math.round(share * (this.labels.length - 1)));
    });
    new ResizeObserver(() => this.draw()).observe(this.stage);
  }

  show(lines) {
    this.lines = lines;
    this.read(this.at);
  }

  read(at) {
    this.at = Math.max(0, Math.min(this.labels.length - 1, at));
    const values = this.lines.map((line) => `${line.label} ${quantity(line.series[this.key][this.at])}`);
    this.detail.replaceChildren(element("strong", {}, this.labels[this.at]), ` ${values.join("; ")}`);
    this.draw();
  }

  draw() {
    const width = this.stage.clientWidth;
    if (!width) return;
    const usable = (value) => value !== null && Number.isFinite(value) && (!this.logarithmic || value > 0);
    const all = this.lines.flatMap((line) => line.series[this.key].map(number).filter(usable));
    const picture = svg("svg", { width, height: CHART_HEIGHT, viewBox: `0 0 ${width} ${CHART_HEIGHT}`, "aria-hidden": "true" });
    if (all.length) this.fill(picture, width, all, usable);
    else picture.append(svg("text", { x: CHART_LEFT, y: 40 }, "Nothing to draw"));
    this.stage.replaceChildren(picture);
  }

  fill(picture, width, all, usable) {
    const along = (value) => (this.logarithmic ? Math.log10(value) : value);
    let [low, high] = [Math.min(...all.map(along)), Math.max(...all.map(along))];
    if (high - low < 1e-12) [low, high] = [low - 0.5, high + 0.5];
    const room = (high - low) * 0.05;
    [low, high] = [low - room, high + room];
    const x = (i) => CHART_LEFT + (i * (width - CHART_LEFT - 12)) / Math.max(1, this.labels.length - 1);
    const y = (value) => CHART_TOP + ((high - along(value)) / (high - low)) * (CHART_HEIGHT - CHART_TOP - CHART_BOTTOM);
    for (let i = 0; i <= 4; i += 1) {
      const value = low + ((high - low) * i) / 4;
      const shown = this.logarithmic ? 10 ** value : value;
      picture.append(
        svg("line", { class: "rule", x1: CHART_LEFT, x2: width - 12, y1: y(shown), y2: y(shown) }),
        svg("text", { class: "tick", x: CHART_LEFT - 6, y: y(shown) + 4, "text-anchor": "end" }, quantity(shown)),
      );
    }
    const every = Math.max(1, Math.ceil((this.labels.length * 84) / (width - CHART_LEFT)));
    this.labels.forEach((label, i) => {
      const last = this.labels.length - 1;
      if (i !== last && (i % every || i > last - every)) return;
      const anchor = i === last ? "end" : i ? "middle" : "start";
      picture.append(svg("text", { class: "tick", x: x(i), y: CHART_HEIGHT - 8, "text-anchor": anchor }, label));
    });
    picture.append(svg("line", { class: "cursor", x1: x(this.at), x2: x(this.at), y1: CHART_TOP, y2: CHART_HEIGHT - CHART_BOTTOM }));
    for (const line of this.lines) this.line(picture, line, x, y, usable);
  }

  line(picture, line, x, y, usable) {
    const values = line.series[this.key].map(number);
    let path = "";
    values.forEach((value, i) => {
      if (!usable(value)) return;
      path += `${path && usable(values[i - 1]) ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    });
    picture.append(svg("path", { class: "line", "data-line": line.place, d: path, "stroke-dasharray": DASHES[line.place % DASHES.length] }));
    values.forEach((value, i) => {
      if (usable(value)) picture.append(svg("circle", { class: "point", "data-line": line.place, cx: x(i), cy: y(value), r: i === this.at ? 4 : 2.5 }));
    });
  }
}
