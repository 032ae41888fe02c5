// What of the map is in view, and where its cursor is: zooming, going back, moving.

class MapZoom {
  constructor(model) {
    this.model = model;
    this.past = [];
    this.focus = null;
  }

  whole() {
    this.view = { x0: 0, x1: Math.max(1, this.model.width), y0: 0, y1: Math.max(1, this.model.rows.length) };
  }

  /** Change what is in view so that Escape comes back to what was. */
  push(change) {
    const before = { ...this.view };
    change();
    const same = Object.keys(before).every((key) => before[key] === this.view[key]);
    if (!same) this.past.push(before);
    this.changed({});
  }

  pop() {
    const before = this.past.pop();
    if (before) this.changed({ view: before });
    return Boolean(before);
  }

  zoom(factor) {
    this.push(() => {
      const { x0, x1 } = this.view;
      const column = this.focus && this.model.columns[this.focus.column];
      const seen = column && column.start < x1 && column.start + column.numel > x0;
      const middle = seen ? column.start + column.numel / 2 : (x0 + x1) / 2;
      const width = Math.max(2, Math.min(this.model.width, (x1 - x0) * factor));
      const start = Math.max(0, Math.min(this.model.width - width, middle - width / 2));
      this.view = { ...this.view, x0: start, x1: start + width };
      if (factor > 1 && width >= this.model.width) this.whole();
    });
  }

  /** Zoom to the module of the focused parameter, then to the parameter, and to the rows that hold it. */
  enter() {
    if (!this.focus) return;
    const { model } = this;
    const column = model.columns[this.focus.column];
    this.push(() => {
      const steps = [this.moduleRange(1), this.moduleRange(3), this.moduleRange(9), [column.start, column.start + column.numel]];
      const seen = this.view.x1 - this.view.x0;
      const [x0, x1] = steps.find(([a, b]) => b > a && (b - a) * 1.25 < seen) || [this.view.x0, this.view.x1];
      let { y0, y1 } = this.view;
      if (this.bands.together > 1) [y0, y1] = this.rowRange(x0, x1);
      this.view = { x0, x1, y0, y1 };
      if (this.focus.row < y0 || this.focus.row >= y1) {
        const [first, last] = model.rowsOf(column.index, Math.max(y0, this.firstRank()), y1);
        this.focus = { ...this.focus, row: first <= last ? first : y0 };
      }
    });
    this.say();
  }

  moduleRange(depth) {
    const { model, focus } = this;
    const name = model.module(focus.column, depth);
    let [low, high] = [focus.column, focus.column];
    while (low > 0 && model.module(low - 1, depth) === name) low -= 1;
    while (high < model.columns.length - 1 && model.module(high + 1, depth) === name) high += 1;
    return [model.columns[low].start, model.columns[high].start + model.columns[high].numel];
  }

  /** Rows to show for a part of the axis: the focused band's ranks, or those that hold the part if they are few. */
  rowRange(x0, x1) {
    const { model, focus, bands } = this;
    let [low, high] = [Infinity, -1];
    for (let c = model.at(x0); c < model.columns.length && model.columns[c].start < x1; c += 1) {
      const { index, numel } = model.columns[c];
      if (index < 0 || !numel) continue;
      const [first, last] = model.rowsOf(index, this.firstRank(), model.rows.length);
      [low, high] = [Math.min(low, first), Math.max(high, last)];
    }
    const { y0, y1 } = this.view;
    if (high >= low && high - low + 1 < (y1 - y0) / 2) {
      const room = Math.max(2, Math.ceil((high - low) / 10));
      return [Math.max(0, low - room), Math.min(model.rows.length, high + 1 + room)];
    }
    const band = bands.of.get(focus.row);
    return band.end - band.first > 1 ? [band.first, band.end] : [y0, y1];
  }

  firstRank() {
    const first = this.model.rows.findIndex((row) => row.dp !== null);
    return Math.max(first, 0);
  }

  /** Move by a column, or to the next module; where a search is on, by matches. */
  step(module, by) {
    const { model } = this;
    let column = this.focus.column;
    const wanted = (c) => !this.matches || (model.columns[c].index >= 0 && this.matches[model.columns[c].index]);
    const from = this.moduleOf(column);
    do column += by;
    while (column >= 0 && column < model.columns.length && (module ? this.moduleOf(column) === from : !wanted(column)));
    if (column >= 0 && column < model.columns.length) this.moveTo(column, this.focus.row);
  }

  /** Move by rows, or by bands where ranks are drawn together. */
  stepRow(by) {
    const { list, of } = this.bands;
    const band = of.get(this.focus.row);
    if (!band || this.bands.together === 1) {
      this.moveTo(this.focus.column, this.focus.row + by);
      return;
    }
    const next = list.indexOf(band) + Math.sign(by);
    if (list[next]) this.moveTo(this.focus.column, this.rowInBand(this.focus.column, list[next]));
    else this.moveTo(this.focus.column, by > 0 ? band.end : band.first - 1);
  }

  /** A row of a band that holds a part of the column, or its first. */
  rowInBand(column, band) {
    const { index } = this.model.columns[column];
    const [first, last] = index < 0 ? [band.first, band.first] : this.model.rowsOf(index, band.first, band.end);
    return first <= last ? first : band.first;
  }

  moduleOf(column) {
    return this.model.module(column, 3);
  }

  moveTo(column, row) {
    const { model, view } = this;
    if (!model.columns.length) return;
    const to = {
      column: Math.max(0, Math.min(model.columns.length - 1, column)),
      row: Math.max(0, Math.min(model.rows.length - 1, row)),
    };
    const { start, numel } = model.columns[to.column];
    const [width, height] = [view.x1 - view.x0, view.y1 - view.y0];
    if (start + numel / 2 < view.x0 || start + numel / 2 > view.x1) {
      const x0 = Math.max(0, Math.min(model.width - width, start + numel / 2 - width / 2));
      this.view = { ...this.view, x0, x1: x0 + width };
    }
    if (to.row < view.y0 || to.row >= view.y1) {
      const y0 = Math.max(0, Math.min(model.rows.length - height, Math.round(to.row - height / 2)));
      this.view = { ...this.view, y0, y1: y0 + height };
    }
    this.changed({ focus: to });
    this.say();
    if (model.columns[to.column].index >= 0) tell("focus", { index: model.columns[to.column].index });
  }
}
