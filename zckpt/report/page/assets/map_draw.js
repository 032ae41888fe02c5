// Drawing of the map on a canvas: pure functions of the model, of what of it is in view, and of the colours.

/** The page's colours, read from its style sheet, and patterns made of them. */
function mapTheme(context) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const slots = Array.from({ length: SLOT_COLOURS }, (_, i) => colour(`--slot-${i}`));
  return {
    slots,
    text: colour("--text"),
    quiet: colour("--quiet"),
    line: colour("--line"),
    ground: colour("--ground"),
    sunken: colour("--sunken"),
    accent: colour("--accent"),
    alarm: colour("--error"),
    match: colour("--match"),
    padding: stripes(context, colour("--quiet"), colour("--sunken"), 5, 1),
    frozen: stripes(context, colour("--ground"), null, 7, 2),
  };
}

/** A pattern of diagonal lines. */
function stripes(context, line, ground, period, width) {
  const tile = document.createElement("canvas");
  tile.width = period;
  tile.height = period;
  const pen = tile.getContext("2d");
  if (ground) {
    pen.fillStyle = ground;
    pen.fillRect(0, 0, period, period);
  }
  pen.strokeStyle = line;
  pen.lineWidth = width;
  pen.beginPath();
  for (const shift of [-period, 0, period]) {
    pen.moveTo(shift - 1, period + 1);
    pen.lineTo(shift + period + 1, -1);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

/** Where things are on the canvas. */
function mapFrame(width, height, rowCount, longestLabel) {
  const wide = width >= 640;
  const longest = rowCount * BAND_LEAST > height ? "ranks 1000–1023".length : longestLabel;
  const left = Math.min(Math.max(46, 7 * longest + 14), wide ? 150 : 84);
  const right = wide ? 120 : 6;
  return { left, top: 40, width: Math.max(40, width - left - right), height: height - 44, right, full: width, rowCount };
}

function drawMap(context, scene) {
  const { frame, theme } = scene;
  context.clearRect(0, 0, frame.full, frame.top + frame.height + 8);
  context.textBaseline = "middle";
  drawGround(context, scene);
  context.save();
  context.beginPath();
  context.rect(frame.left, frame.top, frame.width, frame.height);
  context.clip();
  drawColumns(context, scene);
  drawModuleLines(context, scene);
  drawMarks(context, scene);
  context.restore();
  drawHeadings(context, scene);
  drawRowLabels(context, scene);
  if (frame.right > 60) drawBars(context, scene);
  drawFocus(context, scene);
  context.strokeStyle = theme.line;
  context.lineWidth = 1;
  context.strokeRect(frame.left - 0.5, frame.top - 0.5, frame.width + 1, frame.height + 1);
}

function toX({ frame, view }, x) {
  return frame.left + ((x - view.x0) / (view.x1 - view.x0)) * frame.width;
}

function drawGround(context, scene) {
  const { frame, theme, bands } = scene;
  context.fillStyle = theme.sunken;
  context.fillRect(frame.left, frame.top, frame.width, frame.height);
  context.fillStyle = theme.line;
  for (const band of bands.list) {
    if (band.top > frame.top && band.height > ROW_GAP_FROM) context.fillRect(frame.left, Math.round(band.top) - 0.5, frame.width, 1);
  }
}

/** Neighbouring columns of one module, at the depth whose names still fit. */
function moduleSegments(scene) {
  const { model, view, frame } = scene;
  const [first, last] = [model.at(view.x0), model.at(view.x1)];
  let best = [];
  for (let depth = 1; depth <= 8; depth += 1) {
    const segments = [];
    for (let c = first; c <= last; c += 1) {
      const column = model.columns[c];
      if (!column.numel) continue;
      const name = depth === 8 && column.index >= 0 ? model.parameters[column.index].name : model.module(c, depth);
      const before = segments[segments.length - 1];
      if (before && before.name === name) before.stop = column.start + column.numel;
      else segments.push({ name, start: column.start, stop: column.start + column.numel });
    }
    if (depth > 1 && segments.length > frame.width / 56) break;
    best = segments;
  }
  const names = best.map((one) => one.name).filter(Boolean);
  const common = sharedParts(names);
  for (const one of best) one.label = one.name.split(".").slice(common).join(".") || one.name;
  return best;
}

function drawModuleLines(context, scene) {
  const { frame, theme, model, view } = scene;
  context.fillStyle = theme.line;
  for (const one of scene.segments) {
    if (one.start > view.x0) context.fillRect(Math.round(toX(scene, one.start)) - 0.5, frame.top, 1, frame.height);
  }
  context.fillStyle = theme.quiet;
  for (const one of model.sections) {
    if (one.start > view.x0) context.fillRect(Math.round(toX(scene, one.start)) - 0.5, frame.top, 1, frame.height);
  }
}

function drawHeadings(context, scene) {
  const { frame, theme, model, matches } = scene;
  context.font = "600 11px system-ui, sans-serif";
  drawLabels(context, scene, model.sections, 10, theme.text);
  context.font = "11px system-ui, sans-serif";
  drawLabels(context, scene, scene.segments, 25, theme.quiet);
  if (!matches) return;
  context.fillStyle = theme.match;
  for (const column of model.columns) {
    if (column.index < 0 || !matches[column.index]) continue;
    const x0 = Math.max(frame.left, toX(scene, column.start));
    const x1 = Math.min(frame.left + frame.width, toX(scene, column.start + column.numel));
    if (x1 >= frame.left && x0 <= frame.left + frame.width) context.fillRect(x0, frame.top - 6, Math.max(x1 - x0, 2), 5);
  }
}

/** Labels over the parts of the axis they name, cut where they do not fit; those with no room are left out. */
function drawLabels(context, scene, parts, y, colour) {
  const { frame } = scene;
  for (const { label, start, stop } of parts) {
    const x0 = Math.max(frame.left, toX(scene, start));
    const x1 = Math.min(frame.left + frame.width, toX(scene, stop));
    const room = x1 - x0 - 6;
    if (room < 12) continue;
    const text = fitted(context, label, room);
    if (!text) continue;
    context.fillStyle = colour;
    context.fillText(text, x0 + 3, y);
  }
}

function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let length = Math.min(text.length - 1, Math.floor(room / 4));
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > room) length -= 1;
  return length > 1 ? `${text.slice(0, length)}…` : "";
}

function drawRowLabels(context, scene) {
  const { frame, theme, model, bands, focus, marks } = scene;
  const every = Math.max(1, Math.ceil(14 / bands.list[0].height));
  const ranks = bands.list.filter((band) => !band.single);
  context.font = "12px system-ui, sans-serif";
  for (const band of bands.list) {
    if (!band.single && ranks.indexOf(band) % every) continue;
    const rows = Array.from({ length: band.end - band.first }, (_, i) => band.first + i);
    const marked = marks && rows.some((row) => marks.rows[row]);
    const here = focus && bands.of.get(focus.row) === band;
    context.fillStyle = marked ? theme.alarm : here ? theme.text : theme.quiet;
    context.fillText(fitted(context, bandLabel(model, band), frame.left - 10), 4, band.top + band.height / 2);
  }
}

function bandLabel(model, band) {
  const first = model.rows[band.first];
  if (band.end - band.first === 1) return first.label;
  const last = model.rows[band.end - 1];
  return first.label.startsWith("rank ") ? `ranks ${first.dp}–${last.dp}` : `dp ${first.dp}–${last.dp} mp ${first.mp}`;
}

/** Bytes that each rank holds, slot by slot, with padding hatched; of a band the mean; of other files a number. */
function drawBars(context, scene) {
  const { frame, theme, model, bands } = scene;
  const left = frame.left + frame.width + 12;
  const ranks = model.rows.filter((row) => row.dp !== null);
  const compared = ranks.length ? ranks : model.rows;
  const most = Math.max(...compared.map((row) => scene.total(row)), 1);
  const scale = (frame.right - 22) / most;
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = theme.quiet;
  context.fillText(`bytes, to ${size(most)}`, left, 25);
  for (const band of bands.list) {
    const rows = model.rows.slice(band.first, band.end);
    if (band.single && ranks.length) {
      context.fillStyle = theme.quiet;
      context.fillText(size(scene.total(rows[0])), left, band.top + band.height / 2);
      continue;
    }
    const [top, height] = band.inner;
    const inset = height > 16 ? (height - 10) / 2 : 0;
    let x = left;
    const part = (nbytes, style) => {
      context.fillStyle = style;
      context.fillRect(x, top + inset, (nbytes / rows.length) * scale, height - 2 * inset);
      x += (nbytes / rows.length) * scale;
    };
    model.slots.forEach((_, slot) => {
      if (scene.shown[slot]) part(rows.reduce((sum, row) => sum + row.held[slot], 0), theme.slots[model.colours[slot]]);
    });
    part(rows.reduce((sum, row) => sum + row.padding, 0), theme.padding);
  }
}

function drawMarks(context, scene) {
  const { marks, theme, model, bands } = scene;
  if (!marks) return;
  context.strokeStyle = theme.alarm;
  context.fillStyle = theme.alarm;
  context.lineWidth = 2;
  for (const { rows, columns } of marks.cells) {
    const touched = bands.list.filter((band) => band.end > rows[0] && band.first <= rows[1]);
    if (!touched.length) continue;
    const top = touched[0].top;
    const height = touched[touched.length - 1].top + touched[0].height - top;
    for (const c of columns) {
      const column = model.columns[c];
      const x0 = toX(scene, column.start);
      const width = Math.max(toX(scene, column.start + column.numel) - x0, 4);
      context.globalAlpha = 0.2;
      context.fillRect(x0, top, width, height);
      context.globalAlpha = 1;
      context.strokeRect(x0 + 1, top + 1, Math.max(width - 2, 1), Math.max(height - 2, 1));
    }
  }
}

function drawFocus(context, scene) {
  const { focus, frame, theme, model, bands } = scene;
  const band = focus && bands.of.get(focus.row);
  if (!band) return;
  const column = model.columns[focus.column];
  const clamp = (x) => Math.max(frame.left, Math.min(frame.left + frame.width, x));
  const [x0, x1] = [clamp(toX(scene, column.start)), clamp(toX(scene, column.start + column.numel))];
  const half = Math.max((x1 - x0) / 2, 3);
  for (const [width, colour] of [[4, theme.ground], [2, theme.text]]) {
    context.lineWidth = width;
    context.strokeStyle = colour;
    context.strokeRect((x0 + x1) / 2 - half, band.top + 1, 2 * half, Math.max(band.height - 2, 4));
  }
}
