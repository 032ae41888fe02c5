// The data of a map in the order in which it is drawn: columns with their places, sections, modules, spans.

const SPAN_NUMBERS = 6; // numbers of a span: row, count, start, share, stop, box
const SEVERAL_FILES = -2;

class MapModel {
  constructor(data) {
    this.data = data;
    this.rows = data.rows;
    this.parameters = data.parameters;
    this.slots = data.slots;
    this.colours = data.slots.map((_, i) => slotColour(data.slots, i));
    this.owners = new Map(data.parameters.map((p, i) => [p.name, i]));
    this.modules = data.parameters.map((p) => p.name.split("."));
    this.grouped = data.padding.length > 0 || data.parameters.some((p) => p.group > 0);
    this.arrange(this.grouped ? "groups" : "model");
  }

  /** Put the columns in an order: param group by group with each group's padding behind it, or as the model has them. */
  arrange(order) {
    this.order = order;
    const plain = this.parameters.map((p, i) => ({ p, i })).filter(({ p }) => p.kind !== "tied");
    const groups = [...new Set(this.data.padding.map((one) => one[0]).concat(plain.map(({ p }) => p.group ?? -1)))]
      .filter((g) => g >= 0)
      .sort((a, b) => a - b);
    this.columns = [];
    this.sections = [];
    this.width = 0;
    const of = (test) => plain.filter(({ p }) => test(p)).map(({ i }) => i);
    if (order === "groups") {
      for (const g of groups) this.section(`group ${g}`, of((p) => p.group === g && p.kind !== "buffer"), [g]);
      this.section("no group", of((p) => p.group === null && p.kind === "parameter"), []);
      this.section("frozen", of((p) => p.group === null && p.kind === "frozen"), []);
    } else this.section("model", of((p) => p.kind === "parameter" || p.kind === "frozen"), groups);
    this.section("buffers", of((p) => p.kind === "buffer"), []);
    this.section("unnamed", of((p) => p.kind === "unnamed"), []);
    this.columnOf = new Map(this.columns.map((column, i) => [column.index, i]));
  }

  section(label, indices, groups) {
    const start = this.width;
    for (const index of indices) this.column(index, this.parameters[index].numel, null);
    for (const g of groups) {
      const spans = [];
      let at = 0;
      for (const [group, row, numel, nbytes] of this.data.padding) {
        if (group !== g) continue;
        spans.push({ row, start: at, numel, nbytes });
        at += numel;
      }
      if (at) this.column(-1 - g, at, spans);
    }
    if (this.width > start || indices.length) this.sections.push({ label, start, stop: this.width });
  }

  column(index, numel, padding) {
    this.columns.push({ index, start: this.width, numel, padding });
    this.width += numel;
  }

  /** Number of the column at a place on the axis. */
  at(x) {
    let low = 0;
    let high = this.columns.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.columns[middle].start <= x) low = middle;
      else high = middle - 1;
    }
    while (low > 0 && !this.columns[low].numel) low -= 1;
    return low;
  }

  /** What a row holds of a parameter: [{ slot, dtype, start, stop, numel, box, scale }]. */
  held(index, row) {
    const found = [];
    for (const [slots, dtypes, numel, spans] of this.parameters[index].cuts) {
      for (let r = 0; r < spans.length; r += SPAN_NUMBERS) {
        const i = row - spans[r];
        if (i < 0 || i >= spans[r + 1]) continue;
        const start = spans[r + 2] + i * spans[r + 3];
        const stop = Math.min(start + spans[r + 3], spans[r + 4]);
        slots.forEach((slot, s) => found.push({ slot, dtype: this.data.dtypes[dtypes[s]], start, stop, numel, box: spans[r + 5] }));
      }
    }
    return found;
  }

  /** All spans of a parameter, a row at a time, for its table. */
  spans(index) {
    const found = [];
    for (const [slots, dtypes, numel, spans] of this.parameters[index].cuts) {
      for (let r = 0; r < spans.length; r += SPAN_NUMBERS) {
        for (let i = 0; i < spans[r + 1]; i += 1) {
          const start = spans[r + 2] + i * spans[r + 3];
          const stop = Math.min(start + spans[r + 3], spans[r + 4]);
          found.push({ row: spans[r] + i, slots, dtypes, start, stop, numel, box: spans[r + 5] });
        }
      }
    }
    return found;
  }

  /** First and last row of [from, until) on which any part of a parameter lies; [from, from - 1] where there is none. */
  rowsOf(index, from = 0, until = this.rows.length) {
    let [first, last] = [Infinity, -1];
    for (const [, , , spans] of this.parameters[index].cuts) {
      for (let r = 0; r < spans.length; r += SPAN_NUMBERS) {
        const [low, high] = [Math.max(from, spans[r]), Math.min(until, spans[r] + spans[r + 1]) - 1];
        if (low > high) continue;
        first = Math.min(first, low);
        last = Math.max(last, high);
      }
    }
    return last < 0 ? [from, from - 1] : [first, last];
  }

  /** Number of parameters each row holds something of, and the first and last of them. */
  rowContents() {
    const found = this.rows.map(() => ({ count: 0, first: -1, last: -1 }));
    const seen = new Int32Array(this.rows.length).fill(-1);
    this.parameters.forEach((parameter, index) => {
      for (const [, , , spans] of parameter.cuts) {
        for (let r = 0; r < spans.length; r += SPAN_NUMBERS) {
          for (let row = spans[r]; row < spans[r] + spans[r + 1]; row += 1) {
            if (seen[row] === index) continue;
            seen[row] = index;
            found[row].count += 1;
            if (found[row].first < 0) found[row].first = index;
            found[row].last = index;
          }
        }
      }
    });
    return found;
  }

  nbytes(index) {
    let total = 0;
    for (const [, dtypes, numel] of this.parameters[index].cuts) {
      for (const dtype of dtypes) total += numel * this.data.dtypes[dtype][1];
    }
    return total;
  }

  slotNames(index) {
    return this.parameters[index].cuts.flatMap(([slots]) => slots).sort((a, b) => a - b).map((slot) => this.slots[slot]);
  }

  /** "elements [0, 128)", or the box that they are a part of. */
  range({ start, stop, box }) {
    if (box < 0) return `[${whole(start)}, ${whole(stop)})`;
    const [offsets, sizes, base] = this.data.boxes[box];
    const text = offsets.map((offset, d) => `${offset}:${offset + sizes[d]}`).join(", ");
    const all = sizes.reduce((a, b) => a * b, 1);
    return start === base && stop - start === all ? `box [${text}]` : `[${whole(start - base)}, ${whole(stop - base)}) of box [${text}]`;
  }

  file(row, slot) {
    const path = this.rows[row].paths[slot];
    return path >= 0 ? this.data.paths[path] : path === SEVERAL_FILES ? "several files" : "–";
  }

  /** Name of the module that a column belongs to, with at most `depth` parts. */
  module(column, depth) {
    const { index } = this.columns[column];
    if (index < 0) return "";
    const parts = this.modules[index];
    return parts.slice(0, Math.min(depth, Math.max(1, parts.length - 1))).join(".");
  }
}
