// The heat map of a diff: layers by slots, coloured by the decade of the largest relative change; and its histogram.

const FEW_LAYERS = 48; // rows up to which the heat map is drawn as fine as may be
const MOST_LAYERS = 400;
const LEAST_DECADE = -9;
const HEAT_STEPS = 9; // colours of the style sheet, --heat-0 to --heat-8

/** Ways to put parameters together, from fine to coarse: by module, by numbered layer, by the first parts of the name. */
const LAYER_LEVELS = [
  (parts) => parts.length - 1,
  (parts, numbered) => (numbered < 0 ? parts.length - 1 : numbered + 2),
  (parts, numbered) => (numbered < 0 ? 3 : numbered + 1),
  (parts, numbered) => (numbered < 0 ? 2 : numbered + 1),
  () => 1,
];

/** The layer of a parameter at a level: the first parts of its name, never all of them unless it has one only. */
function layerOf(name, level) {
  const parts = name.split(".");
  const numbered = parts.slice(0, -1).findIndex((part) => /^\d+$/.test(part));
  const length = LAYER_LEVELS[level](parts, numbered);
  return parts.slice(0, Math.max(1, Math.min(length, parts.length - 1))).join(".");
}

/** The finest level with few layers, or else the finest that can be shown at all. */
function layerLevel(names) {
  const counts = LAYER_LEVELS.map((_, level) => new Set(names.map((name) => layerOf(name, level))).size);
  const few = counts.findIndex((count) => count <= FEW_LAYERS);
  if (few >= 0 && few < 3) return few;
  const possible = counts.findIndex((count, level) => level >= 2 && count <= MOST_LAYERS);
  return possible < 0 ? LAYER_LEVELS.length - 1 : possible;
}

/** Colour step of a relative change: none for equal, then one for each decade from 1e-9 on. */
function heatStep(value) {
  if (!Number.isFinite(value)) return HEAT_STEPS - 1;
  if (value <= 0) return -1;
  const decade = Math.floor(Math.log10(value));
  return Math.max(0, Math.min(HEAT_STEPS - 1, decade - LEAST_DECADE));
}

/** By layer and slot, how many parameters changed and the worst change. */
function heatRows(different, equal, level) {
  const layers = new Map();
  const cell = (one) => {
    const layer = layerOf(one.name, level);
    if (!layers.has(layer)) layers.set(layer, new Map());
    const slots = layers.get(layer);
    if (!slots.has(one.slot)) slots.set(one.slot, { count: 0, changed: 0, worst: 0, unknown: 0 });
    return slots.get(one.slot);
  };
  for (const one of equal) cell(one).count += 1;
  for (const one of different) {
    const found = cell(one);
    found.count += 1;
    found.changed += 1;
    const value = number(one.rel_l2);
    if (value === null) found.unknown += 1;
    else if (Number.isNaN(value) || Number.isNaN(found.worst)) found.worst = NaN;
    else found.worst = Math.max(found.worst, value);
  }
  return layers;
}

function drawHeat(host, different, equal) {
  const level = layerLevel([...equal, ...different].map((one) => one.name));
  const layers = heatRows(different, equal, level);
  const slots = orderedSlots([...equal, ...different].map((one) => one.slot));
  const names = [...layers.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const head = element("tr", {}, element("th", { scope: "col" }, "Layer"), ...slots.map((slot) => element("th", { scope: "col" }, slot)));
  const shared = sharedParts(names);
  const rows = names.map((layer) =>
    element("tr", {}, element("th", { scope: "row", title: layer }, layer.split(".").slice(shared).join(".")), ...slots.map((slot) => heatCell(level, layer, slot, layers.get(layer).get(slot)))),
  );
  const table = element("table", { class: "heat" }, element("caption", {}, "Largest relative L2 change of a parameter, by layer and slot"), element("thead", {}, head), element("tbody", {}, ...rows));
  host.replaceChildren(element("div", { class: "scroll heat-scroll", tabindex: 0, role: "region", "aria-label": "Heat map" }, table), heatScale());
}

function heatCell(level, layer, slot, cell) {
  if (!cell) return element("td", { class: "none" }, element("span", { class: "unseen" }, "not there"));
  if (!cell.changed) return element("td", { class: "same" }, "equal");
  const text = cell.worst === 0 && cell.unknown ? "other shape" : quantity(cell.worst);
  const step = cell.worst === 0 && cell.unknown ? HEAT_STEPS - 1 : heatStep(cell.worst);
  const label = `${layer}, ${slot}: ${cell.changed} of ${plural(cell.count, "parameter")} changed, at most ${text}`;
  const button = element("button", { type: "button", "aria-label": label, title: label }, text);
  button.addEventListener("click", () => tell("layer", { level, layer, slot }));
  return element("td", { "data-heat": Math.max(step, 0) }, button);
}

function heatScale() {
  const steps = Array.from({ length: HEAT_STEPS }, (_, i) => {
    const text = i === 0 ? "≤ 1e−9" : i === HEAT_STEPS - 1 ? "≥ 0.1" : `1e−${-(LEAST_DECADE + i)}`;
    return element("li", { "data-heat": i }, text);
  });
  return element("ol", { class: "scale", "aria-label": "Colours by relative change" }, ...steps);
}

/** Slots in the usual order: weight, master, then the optimizer's own. */
function orderedSlots(names) {
  const found = [...new Set(names)];
  const rank = (name) => ({ weight: 0, master: 1 })[name] ?? 2;
  return found.sort((a, b) => rank(a) - rank(b) || String(a).localeCompare(String(b)));
}

/** Elements by decade of relative difference, added up over rows of the diff. */
function addedHistogram(different) {
  const counts = new Map();
  for (const { histogram } of different) {
    if (!histogram) continue;
    histogram.decades.forEach((decade, i) => counts.set(decade, (counts.get(decade) || 0) + histogram.counts[i]));
  }
  return [...counts].sort((a, b) => a[0] - b[0]);
}

function drawHistogram(host, different, title) {
  drawCounts(host, addedHistogram(different), { title, heading: "Decade", base: "1e", none: "There are no relative differences to count here." });
}

/** Counts of elements by power of a base, as bars: [power, count], and after them counts by name. */
function drawCounts(host, counts, { title, heading, base, none, more = [] }) {
  const total = [...counts, ...more].reduce((sum, [, count]) => sum + count, 0);
  if (!total) {
    host.replaceChildren(element("p", { class: "quiet" }, none));
    return;
  }
  const named = [...counts.map(([power, count]) => [`${base}${String(power).replace("-", "−")}`, count]), ...more];
  const most = Math.max(...named.map(([, count]) => count));
  const rows = named.map(([name, count]) => {
    const bar = element("span", { class: "bar" });
    bar.style.width = `${(100 * count) / most}%`;
    bar.hidden = !count;
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, name),
      element("td", { class: "bars", "aria-hidden": "true" }, bar),
      element("td", { class: "right" }, whole(count)),
      element("td", { class: "right quiet" }, share(count, total)),
    );
  });
  const head = [heading, "", "Elements", "Share"].map((text, i) =>
    element("th", { scope: "col", class: i > 1 ? "right" : null, "aria-hidden": text ? null : "true" }, text),
  );
  host.replaceChildren(
    element("table", { class: "histogram" }, element("caption", {}, title), element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)),
  );
}
