// Bands of the map: rows as they are drawn, one each or several ranks together, and the lanes of slots in them.

const LANES_FROM = 2.5; // pixels a slot needs for a lane of its own in a row; below, the first slot stands for all
const BAND_LEAST = 9; // pixels; where rows would be lower, neighbouring ranks are drawn as one band
const ROW_GAP_FROM = 9; // pixels of a row from which on rows are set apart

/** Bands of the rows in view, from top to bottom: one row each, or some ranks where there are too many. */
function layBands(model, view, frame) {
  const rows = [];
  for (let row = Math.floor(view.y0); row < view.y1; row += 1) rows.push(row);
  const single = rows.filter((row) => model.rows[row].dp === null).length;
  const ranks = rows.length - single;
  let together = 1;
  while (ranks / together + single > frame.height / BAND_LEAST && together < ranks) together *= 2;
  const list = [];
  for (const row of rows) {
    const last = list[list.length - 1];
    const { dp, mp } = model.rows[row];
    const joined = last && dp !== null && last.mp === mp && !last.single && row - last.first < together;
    if (joined) last.end = row + 1;
    else list.push({ first: row, end: row + 1, single: dp === null, mp });
  }
  const height = frame.height / Math.max(1, list.length);
  const of = new Map();
  list.forEach((band, i) => {
    const gap = height >= ROW_GAP_FROM ? 1.5 : 0;
    band.top = frame.top + i * height;
    band.height = height;
    band.inner = [band.top + gap, height - 2 * gap];
    for (let row = band.first; row < band.end; row += 1) of.set(row, band);
  });
  return { list, of, together };
}

/** Slots that are drawn in each band, in their order. */
function layLanes(model, bands, shown) {
  for (const band of bands.list) {
    const held = model.slots.map(() => false);
    for (let row = band.first; row < band.end; row += 1) {
      model.rows[row].held.forEach((nbytes, slot) => {
        if (nbytes && shown[slot]) held[slot] = true;
      });
    }
    band.lanes = held.map((is, slot) => (is ? slot : -1)).filter((slot) => slot >= 0);
  }
}

/** Top and height of a slot's lane in a band; null: it is not drawn. */
function lane(band, slot) {
  const place = band.lanes.indexOf(slot);
  if (place < 0) return null;
  const [top, height] = band.inner;
  if (height < LANES_FROM * band.lanes.length) return place === 0 ? [top, height] : null;
  const each = height / band.lanes.length;
  return [top + each * place, each - (height > 24 ? 1 : 0)];
}
