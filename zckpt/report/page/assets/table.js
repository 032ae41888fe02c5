// A table of any number of rows of which only those in sight are in the page. A grid to assistive technology:
// the arrow keys move a row cursor, Enter chooses, and the headings sort.

const ROW_HEIGHT = 30; // pixels; the style sheet's .rows tr says the same
const SHORT_TABLE = 14; // rows that are shown without a scroll bar
const SPARE_ROWS = 12; // rows kept ready above and below
const PRINTED_ROWS = 2000;

class RowTable {
  /**
   * host: element to fill. caption: text. rows: any values.
   * columns: { title, text(row), value(row)?, right?, hover(row)?, cell(row)?, most? (width in characters), least? }
   */
  constructor(host, { caption, columns, rows, choose = null, sorted = null }) {
    this.columns = columns;
    this.all = rows;
    this.rows = rows;
    this.choose = choose;
    this.sorted = null;
    this.active = -1;
    this.chosen = null;
    this.id = RowTable.count = (RowTable.count || 0) + 1;
    this.name = host.id;
    this.build(host, caption);
    if (sorted) this.sort(sorted.column, sorted.down);
    else this.draw(true);
    restored(`sort-${this.name}`, (text) => {
      const column = columns.findIndex(({ title }) => text.slice(1) === title);
      if (column >= 0) this.sort(column, text[0] === "-");
    });
  }

  build(host, caption) {
    this.head = element("tr", { "aria-rowindex": 1 }, ...this.columns.map((column, i) => this.heading(column, i)));
    this.body = element("tbody");
    const widths = element("colgroup");
    for (const column of this.columns) {
      const one = element("col");
      one.style.width = `${this.width(column)}ch`;
      widths.append(one);
    }
    this.table = element(
      "table",
      { class: "rows", role: this.choose ? "grid" : "table", tabindex: 0, "aria-rowcount": this.rows.length + 1 },
      element("caption", { class: "unseen" }, caption),
      widths,
      element("thead", {}, this.head),
      this.body,
    );
    this.note = element("p", { class: "quiet printed" });
    this.scroll = element("div", { class: "scroll" }, this.table);
    const save = element("button", { type: "button", class: "plain-button save-table", "aria-label": `Save as CSV: ${caption}` }, "Save as CSV");
    save.addEventListener("click", () => this.save(caption));
    host.replaceChildren(this.scroll, element("div", { class: "table-foot" }, this.note, save));
    this.scroll.addEventListener("scroll", () => this.draw(false), { passive: true });
    this.table.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-index]");
      if (row) this.activate(Number(row.dataset.index), true);
    });
    this.printing = false;
    const print = (printing) => {
      this.printing = printing;
      this.draw(true);
    };
    window.addEventListener("beforeprint", () => print(true));
    window.addEventListener("afterprint", () => print(false));
    if ("ResizeObserver" in window) new ResizeObserver(() => this.draw(true)).observe(this.scroll);
  }

  /** All rows as comma-separated values: numbers as they are, other cells as they are shown. */
  csv() {
    const quoted = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
    const plain = (column, row) => {
      const value = column.value ? column.value(row) : null;
      return quoted(typeof value === "number" ? String(value) : column.text(row));
    };
    const lines = [this.columns.map((column) => quoted(column.title)), ...this.rows.map((row) => this.columns.map((column) => plain(column, row)))];
    return `${lines.map((line) => line.join(",")).join("\n")}\n`;
  }

  save(name) {
    const link = element("a", { href: URL.createObjectURL(new Blob([this.csv()], { type: "text/csv" })), download: `${name}.csv` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  heading(column, index) {
    const button = element("button", { type: "button", class: "sort" }, column.title);
    button.addEventListener("click", () => {
      this.sort(index, this.sorted?.column === index ? !this.sorted.down : !!column.right);
      remember(`sort-${this.name}`, `${this.sorted.down ? "-" : "+"}${column.title}`);
    });
    return element("th", { scope: "col", class: column.right ? "right" : null, "aria-sort": "none" }, button);
  }

  width(column) {
    let longest = column.title.length + 2;
    for (let i = 0; i < this.all.length && i < 3000; i += 1) {
      const length = column.text(this.all[i]).length;
      if (length > longest) longest = length;
    }
    return Math.max(column.least || 0, Math.min(longest, column.most || 40)) + 3;
  }

  /** Show other rows, in the order chosen before. */
  show(rows) {
    this.all = rows;
    this.active = -1;
    this.table.setAttribute("aria-rowcount", rows.length + 1);
    this.table.removeAttribute("aria-activedescendant");
    this.scroll.scrollTop = 0;
    if (this.sorted) this.sort(this.sorted.column, this.sorted.down);
    else {
      this.rows = rows;
      this.draw(true);
    }
  }

  sort(index, down) {
    const column = this.columns[index];
    const value = column.value || column.text;
    const sign = down ? -1 : 1;
    const rank = (one) => (one === null || one === undefined ? -Infinity : Number.isNaN(one) ? Infinity : one);
    const order = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (typeof x === "string" && typeof y === "string") return sign * x.localeCompare(y, "en", { numeric: true });
      return sign * (rank(x) < rank(y) ? -1 : rank(x) > rank(y) ? 1 : 0);
    };
    this.sorted = { column: index, down };
    this.rows = [...this.all].sort(order);
    [...this.head.children].forEach((th, i) => {
      th.setAttribute("aria-sort", i === index ? (down ? "descending" : "ascending") : "none");
    });
    this.draw(true);
  }

  draw(anew) {
    const { printing } = this;
    const all = printing || this.rows.length <= SHORT_TABLE;
    this.scroll.classList.toggle("whole", all);
    const top = all ? 0 : Math.max(0, Math.floor(this.scroll.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
    const seen = all ? PRINTED_ROWS : Math.ceil((this.scroll.clientHeight || 450) / ROW_HEIGHT) + 2 * SPARE_ROWS;
    const end = Math.min(this.rows.length, top + seen);
    if (!anew && this.drawn && this.drawn[0] === top && this.drawn[1] === end) return;
    this.drawn = [top, end];
    const found = [this.spacer(top)];
    if (!this.rows.length) found.push(element("tr", {}, element("td", { class: "empty", colspan: this.columns.length }, "None")));
    for (let i = top; i < end; i += 1) found.push(this.row(i));
    found.push(this.spacer(all ? 0 : this.rows.length - end));
    this.body.replaceChildren(...found);
    const left = this.rows.length - end;
    this.note.textContent = printing && left > 0 ? `${whole(left)} more rows are not printed.` : "";
  }

  spacer(rows) {
    const cell = element("td", { colspan: this.columns.length });
    cell.style.height = `${rows * ROW_HEIGHT}px`;
    return element("tr", { class: "spacer", "aria-hidden": "true" }, cell);
  }

  row(index) {
    const row = this.rows[index];
    const cells = this.columns.map((column, i) => {
      const text = column.text(row);
      const hover = column.hover ? column.hover(row) : text.length > 24 ? text : null;
      const attributes = { class: column.right ? "right" : null, title: hover, scope: i === 0 ? "row" : null };
      return element(i === 0 ? "th" : "td", attributes, column.cell ? column.cell(row) : text);
    });
    const attributes = { "data-index": index, "aria-rowindex": index + 2, id: `row-${this.id}-${index}` };
    if (this.choose) attributes["aria-selected"] = String(row === this.chosen);
    if (index === this.active) attributes.class = "active";
    return element("tr", attributes, ...cells);
  }

  key(event) {
    if (event.target !== this.table) return;
    const page = Math.max(1, Math.floor(this.scroll.clientHeight / ROW_HEIGHT) - 2);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key === "Enter" && this.active >= 0) this.activate(this.active, true);
    else if (event.key in steps && this.rows.length) {
      const next = Math.max(0, Math.min(this.rows.length - 1, this.active + steps[event.key]));
      this.activate(next, false);
    } else return;
    event.preventDefault();
  }

  activate(index, choose) {
    this.active = index;
    if (choose && this.choose) {
      this.chosen = this.rows[index];
      this.choose(this.chosen);
    }
    const head = this.head.offsetHeight || ROW_HEIGHT;
    const top = index * ROW_HEIGHT;
    const seen = this.scroll.clientHeight - head - ROW_HEIGHT;
    if (top < this.scroll.scrollTop) this.scroll.scrollTop = top;
    else if (top > this.scroll.scrollTop + seen) this.scroll.scrollTop = top - seen;
    this.draw(true);
    if (this.choose) this.table.setAttribute("aria-activedescendant", `row-${this.id}-${index}`);
  }
}
