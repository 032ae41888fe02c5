// The page of figures: norms and more by layer, those of each tensor, and the histogram of the chosen ones.

/** Columns of a table of figures. */
function figureColumns(title) {
  const measured = (name, key) => ({ title: name, text: (one) => quantity(one[key]), value: (one) => number(one[key]), right: true });
  const counted = (name, key) => ({ title: name, text: (one) => whole(one[key]), value: (one) => one[key], right: true });
  return [
    { title, text: (one) => one.name, most: 46, least: 14 },
    { title: "Slot", text: (one) => one.slot },
    { title: "Type", text: (one) => one.dtype },
    counted("Elements", "numel"),
    measured("Norm", "norm"),
    measured("Mean", "mean"),
    measured("Deviation", "std"),
    measured("Least", "min"),
    measured("Most", "max"),
    counted("Zeros", "zeros"),
    counted("NaN", "nan"),
    counted("Infinite", "inf"),
  ];
}

/** Elements of some tensors by power of two, and those that have none. */
function drawMagnitudes(host, some, title) {
  const counts = new Map();
  const left = { zero: 0, NaN: 0, infinite: 0 };
  for (const one of some) {
    for (const [power, count] of Object.entries(one.magnitudes || {})) counts.set(Number(power), (counts.get(Number(power)) || 0) + count);
    left.zero += one.zeros || 0;
    left.NaN += one.nan || 0;
    left.infinite += one.inf || 0;
  }
  const ordered = [...counts].sort((a, b) => a[0] - b[0]);
  const more = Object.entries(left).filter(([, count]) => count);
  drawCounts(host, ordered, { title, heading: "Magnitude from", base: "2^", none: "There are no elements to count here.", more });
}

function startFigures({ slots, layers }) {
  const show = (some, title) => drawMagnitudes(host("histogram"), some, title);
  const inLayer = (row) => slots.filter((one) => one.slot === row.slot && (one.name === row.name || one.name.startsWith(`${row.name}.`)));
  new RowTable(host("layers"), {
    caption: "Figures by layer and slot",
    columns: figureColumns("Layer"),
    rows: layers,
    choose: (row) => show(inLayer(row), `${row.slot} of ${row.name}`),
  });
  const table = new RowTable(host("tensors"), {
    caption: "Figures of tensors",
    columns: figureColumns("Name"),
    rows: slots,
    choose: (row) => tell("choose", { index: slots.indexOf(row) }),
  });
  const all = () => show(slots, "All tensors");
  host("histogram-all").addEventListener("click", all);
  when("search", ({ matches }) => table.show(matches ? slots.filter((_, i) => matches[i]) : slots));
  when("choose", ({ index }) => show([slots[index]], `${slots[index].slot} of ${slots[index].name}`));
  all();
  startSearch(slots.map((one) => `${one.name} ${one.slot}`), "tensor");
}
