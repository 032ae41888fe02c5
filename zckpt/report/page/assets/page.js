// What each kind of page puts where; the last script, so that the page is painted before it runs.

const payload = JSON.parse(document.getElementById("data").textContent);

function host(id) {
  return document.getElementById(id);
}

/** Columns of the table of all parameters. */
function parameterColumns(model) {
  const kinds = { parameter: "", frozen: "frozen", buffer: "buffer", unnamed: "no name", tied: "tied" };
  const note = (i) => (model.parameters[i].owner === undefined ? kinds[model.parameters[i].kind] : `tied to ${model.parameters[i].owner}`);
  return [
    { title: "Name", text: (i) => model.parameters[i].name, most: 46, least: 14 },
    { title: "Shape", text: (i) => shapeText(model.parameters[i].shape), value: (i) => model.parameters[i].numel, right: true, most: 18 },
    { title: "Elements", text: (i) => whole(model.parameters[i].numel), value: (i) => model.parameters[i].numel, right: true },
    { title: "Bytes", text: (i) => size(model.nbytes(i)), value: (i) => model.nbytes(i), hover: (i) => `${whole(model.nbytes(i))} bytes in all slots`, right: true },
    { title: "Type", text: (i) => model.parameters[i].dtype },
    { title: "Group", text: (i) => whole(model.parameters[i].group), value: (i) => model.parameters[i].group, right: true },
    { title: "Slots", text: (i) => model.slotNames(i).join(", "), most: 34 },
    { title: "Note", text: note, most: 26 },
  ];
}

function startMap(model, marks = null) {
  new MapView(host("map"), model, marks);
  const every = model.parameters.map((_, i) => i);
  new Treemap(host("treemap"), model);
  const table = new RowTable(host("parameters"), {
    caption: "Parameters and buffers",
    columns: parameterColumns(model),
    rows: every,
    choose: (index) => tell("choose", { index }),
  });
  when("search", ({ matches }) => table.show(matches ? every.filter((i) => matches[i]) : every));
  when("choose", ({ index }) => showChosen(model, index));
  startRowsTable(model);
}

/** Where all of a parameter lies. */
function showChosen(model, chosen) {
  const { owner } = model.parameters[chosen];
  const index = owner === undefined ? chosen : model.owners.get(owner);
  const parameter = model.parameters[index];
  host("chosen").hidden = false;
  host("chosen-name").textContent = owner === undefined ? parameter.name : `${model.parameters[chosen].name} (tied to ${owner})`;
  const spans = model.spans(index);
  const slots = (span) => span.slots.map((slot) => model.slots[slot]).join(", ");
  const nbytes = (span) => (span.stop - span.start) * span.dtypes.reduce((sum, dtype) => sum + model.data.dtypes[dtype][1], 0);
  const files = (span) => [...new Set(span.slots.map((slot) => model.file(span.row, slot)))].join(", ");
  new RowTable(host("chosen-spans"), {
    caption: `Where ${parameter.name} lies`,
    columns: [
      { title: "Where", text: (span) => model.rows[span.row].label, value: (span) => span.row },
      { title: "Slots", text: slots, most: 34 },
      { title: "Elements", text: (span) => model.range(span), value: (span) => span.start, most: 44 },
      { title: "Bytes", text: (span) => size(nbytes(span)), value: nbytes, hover: (span) => `${whole(nbytes(span))} bytes`, right: true },
      { title: "File", text: files, most: 60 },
    ],
    rows: spans,
  });
}

/** The map as a table, made when it is opened. */
function startRowsTable(model) {
  const details = host("rows").closest("details");
  let made = false;
  const make = () => {
    if (made) return;
    made = true;
    const contents = model.rowContents();
    const total = (i) => model.rows[i].held.reduce((sum, nbytes) => sum + nbytes, 0);
    const name = (index) => (index < 0 ? "–" : model.parameters[index].name);
    new RowTable(host("rows"), {
      caption: "What each row of the map holds",
      columns: [
        { title: "Where", text: (i) => model.rows[i].label, value: (i) => i },
        { title: "Parameters", text: (i) => whole(contents[i].count), value: (i) => contents[i].count, right: true },
        ...model.slots.map((slot, s) => ({
          title: slot,
          text: (i) => (model.rows[i].held[s] ? size(model.rows[i].held[s]) : "–"),
          value: (i) => model.rows[i].held[s],
          hover: (i) => `${whole(model.rows[i].held[s])} bytes`,
          right: true,
        })),
        { title: "Padding", text: (i) => (model.rows[i].padding ? size(model.rows[i].padding) : "–"), value: (i) => model.rows[i].padding, right: true },
        { title: "In all", text: (i) => size(total(i)), value: total, hover: (i) => `${whole(total(i))} bytes`, right: true },
        { title: "First", text: (i) => name(contents[i].first), most: 34 },
        { title: "Last", text: (i) => name(contents[i].last), most: 34 },
      ],
      rows: model.rows.map((_, i) => i),
    });
  };
  details.addEventListener("toggle", make);
  window.addEventListener("beforeprint", make);
}

function startFiles(files) {
  if (!files.length) return;
  new RowTable(host("files"), {
    caption: "Files",
    columns: [
      { title: "File", text: (f) => f.path, most: 64, least: 20 },
      { title: "Role", text: (f) => f.role },
      { title: "dp", text: (f) => whole(f.dp_rank), value: (f) => f.dp_rank, right: true },
      { title: "mp", text: (f) => whole(f.mp_rank), value: (f) => f.mp_rank, right: true },
      { title: "Size", text: (f) => size(f.nbytes), value: (f) => f.nbytes, hover: (f) => `${whole(f.nbytes)} bytes`, right: true },
      { title: "Tensors", text: (f) => size(f.tensor_nbytes), value: (f) => f.tensor_nbytes, hover: (f) => `${whole(f.tensor_nbytes)} bytes`, right: true },
      { title: "Unused", text: (f) => size(f.unreferenced_nbytes), value: (f) => f.unreferenced_nbytes, hover: (f) => `${whole(f.unreferenced_nbytes)} bytes`, right: true },
    ],
    rows: files,
  });
}

const pages = {
  inspect() {
    const model = new MapModel(payload.map);
    startMap(model);
    startFiles(payload.files);
    startSearch(model.parameters.map((p) => p.name), "parameter");
  },

  diff() {
    const { different, equal_slots: equal } = payload;
    if (equal.length) startEqual(equal);
    if (!different.length) return;
    drawHeat(host("heat"), different, equal);
    const every = different.map((_, i) => i);
    const figure = (title, key, options = {}) => ({
      title,
      text: (i) => (options.whole ? whole(different[i][key]) : quantity(different[i][key])),
      value: (i) => number(different[i][key]),
      right: true,
      ...options,
    });
    const pair = (title, a, b, text) => ({
      title,
      text: (i) => {
        const [x, y] = [text(different[i][a]), text(different[i][b])];
        return x === y ? x : `${x} → ${y}`;
      },
      most: 34,
    });
    const showOne = (i) => {
      const one = different[i];
      drawHistogram(host("histogram"), [one], `${one.name}, ${one.slot}: elements by decade of relative difference`);
    };
    const table = new RowTable(host("different"), {
      caption: "Tensors that differ",
      columns: [
        { title: "Name", text: (i) => different[i].name, most: 44, least: 14 },
        { title: "Slot", text: (i) => different[i].slot },
        figure("Different", "num_different", { whole: true, hover: (i) => `${whole(different[i].num_different)} of ${whole(different[i].numel)} elements` }),
        { title: "Share", text: (i) => share(different[i].num_different, different[i].numel), value: (i) => different[i].num_different / different[i].numel, right: true },
        figure("Rel. L2", "rel_l2"),
        figure("Max abs.", "max_abs"),
        figure("Max rel.", "max_rel"),
        figure("Cosine", "cosine"),
        figure("Max ULP", "max_ulp", { whole: true }),
        pair("NaN", "nan_a", "nan_b", whole),
        pair("Inf", "inf_a", "inf_b", whole),
        figure("First at", "first", { whole: true }),
        pair("Type", "dtype_a", "dtype_b", (value) => value ?? "–"),
        pair("Shape", "shape_a", "shape_b", shapeText),
      ],
      rows: every,
      choose: (index) => tell("choose", { index }),
    });
    const all = () => drawHistogram(host("histogram"), different, "All tensors: elements by decade of relative difference");
    all();
    host("histogram-all").addEventListener("click", all);
    when("search", ({ matches }) => table.show(matches ? every.filter((i) => matches[i]) : every));
    when("choose", ({ index }) => showOne(index));
    restored("layer", (text) => {
      const [level, layer, slot] = text.split(" ");
      if (level in LAYER_LEVELS) tell("layer", { level, layer, slot });
    });
    when("layer", ({ level, layer, slot }) => {
      remember("layer", [level, layer, slot].join(" "));
      const inside = (i) => different[i].slot === slot && layerOf(different[i].name, level) === layer;
      const found = every.filter(inside);
      table.show(found);
      host("search-answer").textContent = `${plural(found.length, "tensor")} of ${layer}, ${slot}`;
      host("different").closest("section").scrollIntoView({ block: "nearest" });
    });
    startSearch(different.map((one) => `${one.name} ${one.slot}`), "differing tensor");
  },

  series() {
    startSeries(payload);
  },

  history() {},

  stats() {
    startFigures(payload);
  },

  verify() {
    startFindings();
    if (!payload.map) return;
    const model = new MapModel(payload.map);
    startMap(model, payload.findings.filter((one) => one.severity !== "note"));
    startSearch(model.parameters.map((p) => p.name), "parameter");
  },
};

function startEqual(equal) {
  new RowTable(host("equal"), {
    caption: "Tensors that are equal",
    columns: [
      { title: "Name", text: (one) => one.name, most: 60, least: 14 },
      { title: "Slot", text: (one) => one.slot },
      { title: "Elements", text: (one) => whole(one.numel), value: (one) => one.numel, right: true },
    ],
    rows: equal,
  });
}

/** Findings are in the page already; the choices above them hide those of a severity. */
function startFindings() {
  for (const box of document.querySelectorAll("input[data-severity]")) {
    box.addEventListener("change", () => {
      for (const one of document.querySelectorAll(`.finding.${box.dataset.severity}`)) one.hidden = !box.checked;
      const left = document.querySelectorAll(".finding:not([hidden])").length;
      host("findings-answer").textContent = `${plural(left, "finding")} shown`;
      const hidden = [...document.querySelectorAll("input[data-severity]:not(:checked)")];
      remember("without", hidden.map((one) => one.dataset.severity).join(" "));
    });
    restored("without", (severities) => severities.split(" ").includes(box.dataset.severity) && box.click());
  }
}

// Paper is light: what is drawn with colours of the style sheet is drawn anew, after this.
window.addEventListener("beforeprint", () => {
  document.documentElement.classList.add("paper");
  for (const details of document.querySelectorAll("details:not([open])")) {
    details.open = true;
    details.dataset.opened = "";
  }
});
window.addEventListener("afterprint", () => {
  document.documentElement.classList.remove("paper");
  for (const details of document.querySelectorAll("details[data-opened]")) {
    details.open = false;
    delete details.dataset.opened;
  }
});

pages[document.body.dataset.page]();
restoreAll();
