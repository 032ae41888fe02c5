// Sizes by module as nested rectangles. Each is a button: arrow keys move, Enter opens a module, Escape goes back up.

const TREEMAP_HEIGHT = 360;
const LEAST_SIDE = 4; // pixels; smaller tiles of a module are left to its own colour
const LEAST_INNER = 9; // the same for tiles inside the modules shown
const MOST_TILES = 700; // a page with thousands of buttons is slow to search and to tab through
const MANY_NUMBERED = 48; // numbered modules beside each other that are not put into ranges
const LABEL_ROOM = 34; // pixels in which the beginning of a name says something
const [MARGIN, LETTER] = [16, 7]; // pixels beside a name, and of each letter
const DEEPEST = 2; // levels of modules drawn inside those of the level shown
const HEAD = 20; // pixels of a module's heading above what is in it

/** The tree of modules below `names`; a module with a single child is one with it. */
function moduleTree(names, sizes) {
  const root = { name: "", label: "All", children: new Map(), value: 0, leaf: -1, count: 0 };
  names.forEach((name, index) => {
    if (!sizes[index]) return;
    let node = root;
    const parts = name.split(".");
    parts.forEach((part, depth) => {
      if (!node.children.has(part)) {
        const path = parts.slice(0, depth + 1).join(".");
        node.children.set(part, { name: path, label: part, children: new Map(), value: 0, leaf: -1, parent: node });
      }
      node = node.children.get(part);
    });
    node.leaf = index;
    node.own = (node.own || 0) + sizes[index];
  });
  return summed(root);
}

function summed(node) {
  let children = [...node.children.values()].map(summed);
  if (children.length === 1 && node.leaf < 0 && node.parent) {
    const only = children[0];
    only.label = `${node.label}.${only.label}`;
    only.parent = node.parent;
    return only;
  }
  if (node.leaf >= 0 && children.length) {
    children = [...children, { name: node.name, label: node.label, children: [], value: node.own, leaf: node.leaf, count: 1, parent: node }];
  }
  children = ranged(children, node);
  children.forEach((child) => {
    child.parent = node;
  });
  children.sort((a, b) => b.value - a.value);
  node.children = children;
  node.value = children.length ? children.reduce((sum, child) => sum + child.value, 0) : node.own;
  node.count = children.length ? children.reduce((sum, child) => sum + child.count, 0) : 1;
  return node;
}

/** Many numbered modules as ranges of them, 0–19, 20–39, so that there is room for their names. */
function ranged(children, parent) {
  const number = (node) => Number.parseInt(node.label, 10);
  const numbered = children.filter((node) => number(node) >= 0).sort((a, b) => number(a) - number(b));
  if (numbered.length <= MANY_NUMBERED) return children;
  const length = 5 * Math.ceil(Math.sqrt(numbered.length) / 5);
  const ranges = [];
  for (let at = 0; at < numbered.length; at += length) {
    const inside = numbered.slice(at, at + length);
    const range = { label: `${number(inside[0])}–${number(inside[inside.length - 1])}`, children: inside, leaf: -1, parent };
    for (const child of inside) child.parent = range;
    range.name = parent.name ? `${parent.name}.${range.label}` : range.label;
    range.value = inside.reduce((sum, child) => sum + child.value, 0);
    range.count = inside.reduce((sum, child) => sum + child.count, 0);
    ranges.push(range);
  }
  return [...children.filter((node) => !numbered.includes(node)), ...ranges];
}

/** Squarified layout (Bruls, Huizing, van Wijk 2000): rectangles of the nodes' sizes, as square as may be. */
function squarify(nodes, x, y, width, height) {
  const found = [];
  const total = nodes.reduce((sum, node) => sum + node.value, 0);
  let scale = total ? (width * height) / total : 0;
  let at = 0;
  while (at < nodes.length && width > 0 && height > 0) {
    const side = Math.min(width, height);
    let end = at;
    let sum = 0;
    let worst = Infinity;
    while (end < nodes.length) {
      const next = sum + nodes[end].value * scale;
      const [most, least] = [nodes[at].value * scale, nodes[end].value * scale];
      const ratio = Math.max((side * side * most) / (next * next), (next * next) / (side * side * least));
      if (ratio > worst) break;
      worst = ratio;
      sum = next;
      end += 1;
    }
    const depth = sum / side;
    let offset = 0;
    for (; at < end; at += 1) {
      const length = (nodes[at].value * scale) / depth;
      found.push(
        width >= height
          ? { node: nodes[at], x, y: y + offset, width: depth, height: length }
          : { node: nodes[at], x: x + offset, y, width: length, height: depth },
      );
      offset += length;
    }
    if (width >= height) [x, width] = [x + depth, width - depth];
    else [y, height] = [y + depth, height - depth];
  }
  return found;
}

class Treemap {
  constructor(host, model) {
    this.model = model;
    this.sizes = model.parameters.map((_, i) => model.nbytes(i));
    this.root = moduleTree(model.parameters.map((p) => p.name), this.sizes);
    while (this.root.children.length === 1 && this.root.children[0].children.length) {
      this.root = this.root.children[0];
      delete this.root.parent;
    }
    this.node = this.root;
    this.matches = null;
    this.path = element("nav", { class: "path", "aria-label": "Module shown" });
    this.field = element("div", { class: "treemap", role: "group", "aria-label": "Sizes by module", "aria-describedby": "treemap-keys" });
    this.detail = element("p", { class: "detail small", "aria-live": "polite" });
    const keys = element("p", { id: "treemap-keys", class: "quiet keys" }, "Arrow keys move, Enter opens a module or chooses a parameter, Escape goes back up.");
    host.replaceChildren(this.path, this.field, this.detail, keys);
    this.field.addEventListener("keydown", (event) => this.key(event));
    when("search", ({ matches }) => {
      this.matches = matches;
      this.mark();
    });
    new ResizeObserver(() => {
      if (this.field.clientWidth !== this.drawnWidth) this.draw();
    }).observe(this.field);
    this.draw();
    this.say(this.root);
    restored("module", (name) => {
      const named = (node) => (node.name === name && node.children.length ? node : node.children.map(named).find(Boolean));
      const found = named(this.root);
      if (found) this.open(found, false);
    });
  }

  open(node, focused = true) {
    this.node = node;
    remember("module", node === this.root ? null : node.name);
    this.draw();
    const first = this.field.querySelector("button");
    if (focused && first) first.focus();
  }

  draw() {
    const width = this.field.clientWidth;
    this.drawnWidth = width;
    if (!width) return;
    this.field.style.height = `${TREEMAP_HEIGHT}px`;
    this.tiles = [];
    this.deepest = this.roomFor();
    const found = [];
    for (const box of squarify(this.node.children, 0, 0, width, TREEMAP_HEIGHT)) found.push(...this.tile(box, 0));
    this.field.replaceChildren(...found);
    if (this.tiles.length) this.tiles[0].tabIndex = 0;
    this.mark();
    this.trail();
  }

  /** Levels of modules that can be drawn inside those shown without too many tiles. */
  roomFor() {
    let nodes = this.node.children;
    let tiles = nodes.length;
    for (let depth = 0; depth < DEEPEST; depth += 1) {
      nodes = nodes.flatMap((node) => node.children);
      tiles += nodes.length;
      if (tiles > MOST_TILES) return depth;
    }
    return DEEPEST;
  }

  /** Show which tiles hold something that is searched for. */
  mark() {
    const found = this.matches && new Set();
    if (found) {
      const walk = (node) => {
        const inside = node.children.filter(walk).length > 0;
        const is = inside || (node.children.length === 0 && Boolean(this.matches[node.leaf]));
        if (is) found.add(node);
        return is;
      };
      walk(this.node);
    }
    for (const tile of this.tiles) {
      tile.classList.toggle("match", Boolean(found) && found.has(tile.node));
      tile.classList.toggle("faint", Boolean(found) && !found.has(tile.node));
    }
  }

  tile({ node, x, y, width, height }, depth) {
    const least = depth ? LEAST_INNER : LEAST_SIDE;
    if (width < least || height < least) return [];
    const module = node.children.length > 0;
    const parameter = module ? null : this.model.parameters[node.leaf];
    const classes = ["tile", `depth-${depth}`, module ? "module" : "leaf"];
    if (parameter && parameter.kind === "frozen") classes.push("frozen");
    const label = `${node.name}, ${size(node.value)}${module ? `, ${plural(node.count, "parameter")}` : ""}`;
    const open = module && depth < this.deepest && width > 56 && height > HEAD + 24;
    const [numbered] = node.label.match(/^\d+/) || [""];
    const fits = (word) => word && width > MARGIN + LETTER * word.length;
    const word = numbered && !fits(node.label) ? numbered : node.label;
    const roomy = height > 16 && (fits(word) || (!numbered && width > LABEL_ROOM));
    const button = element(
      "button",
      { type: "button", class: classes.join(" "), "aria-label": label, tabindex: -1 },
      roomy ? element("span", { class: "name" }, word) : null,
      roomy && (open ? width > 130 : height > 34) ? element("span", { class: "size" }, size(node.value)) : null,
    );
    const part = (pixels) => `${(100 * pixels) / this.drawnWidth}%`; // so that paper, which is narrower, shows all of it
    Object.assign(button.style, { left: part(x), top: `${y}px`, width: part(width), height: `${height}px` });
    button.addEventListener("click", () => this.enter(node));
    button.addEventListener("focus", () => this.reached(button, node));
    button.addEventListener("pointerenter", () => this.say(node));
    button.node = node;
    this.tiles.push(button);
    const found = [button];
    if (open) {
      for (const box of squarify(node.children, x + 3, y + HEAD, width - 6, height - HEAD - 3)) found.push(...this.tile(box, depth + 1));
    }
    return found;
  }

  enter(node) {
    if (node.children.length) this.open(node);
    else tell("choose", { index: node.leaf });
  }

  reached(button, node) {
    for (const other of this.tiles) other.tabIndex = -1;
    button.tabIndex = 0;
    this.say(node);
  }

  say(node) {
    const slots = node.children.length ? plural(node.count, "parameter") : this.model.slotNames(node.leaf).join(", ");
    this.detail.replaceChildren(
      element("strong", {}, node.name || "All"),
      ` ${size(node.value)}, ${share(node.value, this.root.value)} of all; ${slots}`,
    );
  }

  key(event) {
    const current = document.activeElement;
    if (!current.node) return;
    if (event.key === "Escape") {
      if (this.node.parent) {
        event.preventDefault();
        this.open(this.node.parent);
      }
      return;
    }
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!(event.key in ways)) return;
    event.preventDefault();
    const next = this.nearest(current, ways[event.key]);
    if (next) next.focus();
  }

  /** The tile whose middle is nearest in a direction; inside a module first, when it goes down or right. */
  nearest(current, [dx, dy]) {
    const middle = (tile) => [tile.offsetLeft + Math.min(tile.offsetWidth, 24) / 2, tile.offsetTop + Math.min(tile.offsetHeight, HEAD) / 2];
    const [x, y] = middle(current);
    let best = null;
    let least = Infinity;
    for (const tile of this.tiles) {
      if (tile === current) continue;
      const [a, b] = middle(tile);
      const along = (a - x) * dx + (b - y) * dy;
      const across = Math.abs((a - x) * dy) + Math.abs((b - y) * dx);
      if (along <= 1) continue;
      const distance = along + 3 * across;
      if (distance < least) [best, least] = [tile, distance];
    }
    return best;
  }

  trail() {
    const steps = [];
    for (let node = this.node; node; node = node.parent) steps.unshift(node);
    this.path.replaceChildren(
      element(
        "ol",
        {},
        ...steps.map((node) => {
          const last = node === this.node;
          const text = `${node.label}`;
          return element(
            "li",
            {},
            last
              ? element("span", { "aria-current": "location" }, text)
              : element("button", { type: "button", on: { click: () => this.open(node) } }, text),
            last ? element("span", { class: "quiet" }, ` ${size(node.value)}`) : null,
          );
        }),
      ),
    );
  }
}
