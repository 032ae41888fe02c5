// What a cell of the map holds in words, and where the findings of a verification are in it.

const FEW_PLACES = 4; // rows that are listed one by one

/** What a cell of the map holds, a line each: the name, then slot by slot. */
function cellLines(model, c, row) {
  const column = model.columns[c];
  const label = model.rows[row].label;
  if (column.padding) {
    const here = column.padding.filter((span) => span.row === row);
    const numel = here.reduce((sum, span) => sum + span.numel, 0);
    const nbytes = here.reduce((sum, span) => sum + span.nbytes, 0);
    return [`Padding of group ${-1 - column.index}`, `${label}: ${numel ? `${plural(numel, "element")} a slot, ${size(nbytes)} in all` : "none"}`];
  }
  const parameter = model.parameters[column.index];
  const kind = parameter.kind === "parameter" ? "" : `, ${parameter.kind}`;
  const found = [`${parameter.name}`, `${shapeText(parameter.shape)}, ${parameter.dtype}${kind}; ${label}`];
  const held = model.held(column.index, row);
  for (const one of held) {
    const numel = one.stop - one.start;
    const of = numel === one.numel ? `all ${plural(numel, "element")}` : `elements ${model.range(one)} of ${whole(one.numel)}`;
    found.push(`${model.slots[one.slot]} ${one.dtype[0]}: ${of}, ${size(numel * one.dtype[1])}, ${model.file(row, one.slot)}`);
  }
  if (!held.length) {
    const rows = [...new Set(model.spans(column.index).map((span) => span.row))].sort((a, b) => a - b);
    const labels = rows.map((one) => model.rows[one].label);
    const where = labels.length > FEW_PLACES ? `${labels[0]} to ${labels[labels.length - 1]}` : labels.join(", ");
    found.push(rows.length ? `Nothing of it is here; it is in ${where}` : "No element of it is stored");
  }
  return found;
}

/** Cells and rows that findings, [{ ranks, parameters, file }], are about. */
function findingMarks(model, findings) {
  const cells = [];
  const rows = {};
  for (const one of findings) {
    const named = (one.parameters || []).map((name) => model.columnOf.get(model.owners.get(name))).filter((c) => c !== undefined);
    const at = rowsOfFinding(model, one);
    if (!at.length && !named.length) continue;
    for (const row of at) rows[row] = true;
    const extents = at.length ? runsOfNumbers(at) : [[0, model.rows.length - 1]];
    for (const extent of extents) cells.push({ rows: extent, columns: named });
  }
  return { cells, rows };
}

function rowsOfFinding(model, finding) {
  const ranks = new Set(finding.ranks || []);
  const found = new Set();
  model.rows.forEach((row, i) => {
    if (row.dp !== null && ranks.has(row.dp)) found.add(i);
    const paths = row.paths.filter((path) => path >= 0).map((path) => model.data.paths[path]);
    if (finding.file && paths.some((path) => `/${finding.file}`.endsWith(`/${path}`))) found.add(i);
  });
  return [...found].sort((a, b) => a - b);
}

/** Neighbours in ascending whole numbers, as [first, last]. */
function runsOfNumbers(numbers) {
  const found = [];
  for (const n of numbers) {
    const last = found[found.length - 1];
    if (last && last[1] === n - 1) last[1] = n;
    else found.push([n, n]);
  }
  return found;
}
