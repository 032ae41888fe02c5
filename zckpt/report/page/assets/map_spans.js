// Drawing of what the rows hold: spans of elements by slot, frozen ones hatched, and padding.

const CROWDED = 4; // pixels a column has on average; below, columns that many bands share are filled as a whole
const CROWDED_WIDTH = 12; // pixels up to which that is done for a column, so that neighbours look alike
const HAIR = 0.5; // pixels; columns narrower than this are always filled as a whole
const FAINT = 0.14; // opacity of what does not match a search

function drawColumns(context, scene) {
  const { model, view, matches } = scene;
  const last = model.at(view.x1);
  const pen = new Pen(context, scene);
  const average = scene.frame.width / (last - model.at(view.x0) + 1);
  scene.narrow = average < CROWDED ? CROWDED_WIDTH : HAIR;
  for (let c = model.at(view.x0); c <= last; c += 1) {
    const column = model.columns[c];
    if (!column.numel) continue;
    const x0 = toX(scene, column.start);
    const x1 = toX(scene, column.start + column.numel);
    if (column.padding) {
      pen.flush();
      context.globalAlpha = matches ? FAINT * 2 : 1;
      for (const span of column.padding) drawPadding(context, scene, column, span);
      continue;
    }
    const parameter = model.parameters[column.index];
    pen.start(matches && !matches[column.index] ? FAINT : 1, parameter.kind === "frozen");
    for (const [slots, , numel, spans] of parameter.cuts) {
      const scale = numel ? (x1 - x0) / numel : 0;
      for (let r = 0; r < spans.length; r += SPAN_NUMBERS) drawSpan(pen, scene, spans, r, slots, x0, x1, scale);
    }
  }
  pen.flush();
  context.globalAlpha = 1;
}

/** Fills rectangles; neighbouring columns that fill the same bands alike are put together first. */
class Pen {
  constructor(context, scene) {
    Object.assign(this, { context, scene, alpha: 1, frozen: false, wide: null });
  }

  start(alpha, frozen) {
    if (alpha !== this.alpha || frozen !== this.frozen) this.flush();
    this.alpha = alpha;
    this.frozen = frozen;
    this.context.globalAlpha = alpha;
  }

  fill(slot, x, y, width, height) {
    const { context, scene } = this;
    context.fillStyle = scene.theme.slots[scene.model.colours[slot]];
    context.fillRect(x, y, width, height);
    if (!this.frozen) return;
    context.fillStyle = scene.theme.frozen;
    context.fillRect(x, y, width, height);
  }

  /** Fill a column over many bands. */
  across(slots, low, high, x0, x1) {
    const key = `${slots} ${low} ${high}`;
    if (this.wide && this.wide.key === key && Math.abs(this.wide.x1 - x0) < 0.01) this.wide.x1 = x1;
    else {
      this.flush();
      this.wide = { key, slots, low, high, x0, x1 };
    }
  }

  flush() {
    if (!this.wide) return;
    const { slots, low, high, x0, x1 } = this.wide;
    this.wide = null;
    this.context.globalAlpha = this.alpha;
    for (let i = low; i <= high; i += 1) {
      for (const slot of slots) {
        const place = lane(this.scene.bands.list[i], slot);
        if (place) this.fill(slot, x0, place[0], x1 - x0, place[1]);
      }
    }
  }
}

function drawSpan(pen, scene, spans, r, slots, x0, x1, scale) {
  const [row, count, start, share, stop] = [spans[r], spans[r + 1], spans[r + 2], spans[r + 3], spans[r + 4]];
  const { list, of } = scene.bands;
  const first = Math.max(row, list[0].first);
  const end = Math.min(row + count, list[list.length - 1].end);
  if (first >= end) return;
  const [low, high] = [list.indexOf(of.get(first)), list.indexOf(of.get(end - 1))];
  if (high > low && x1 - x0 < scene.narrow) {
    pen.across(slots, low, high, x0, x1);
    return;
  }
  for (let i = low; i <= high; i += 1) {
    const band = list[i];
    const begin = start + (Math.max(band.first, row) - row) * share;
    const until = Math.min(start + (Math.min(band.end, row + count) - row) * share, stop);
    for (const slot of slots) {
      const place = lane(band, slot);
      if (place) pen.fill(slot, x0 + begin * scale, place[0], Math.max((until - begin) * scale, 0.35), place[1]);
    }
  }
}

function drawPadding(context, scene, column, span) {
  const band = scene.bands.of.get(span.row);
  if (!band) return;
  const [top, height] = band.inner;
  const x = toX(scene, column.start + span.start);
  const width = toX(scene, column.start + span.start + span.numel) - x;
  context.fillStyle = scene.theme.padding;
  context.fillRect(x, top, Math.max(width, 1), height);
  if (width > 5 && height > 5) {
    context.strokeStyle = scene.theme.quiet;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, top + 0.5, width - 1, height - 1);
  }
}
