// Numbers, sizes and elements of the page as a person reads them. Text from a checkpoint only ever becomes a text node.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
const WHOLE = new Intl.NumberFormat("en-US");

/** A whole number with thousands separated; an en dash where there is none. */
function whole(number) {
  return number === null || number === undefined ? "–" : WHOLE.format(number);
}

/** Bytes with a decimal unit: 4.21 GB. */
function size(nbytes) {
  if (nbytes === null || nbytes === undefined) return "–";
  let value = nbytes;
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return unit ? `${Number(value.toPrecision(3))} ${UNITS[unit]}` : `${nbytes} B`;
}

/** A number from a document, in which those that are not finite are texts; null where there is none. */
function number(value) {
  if (value === null || value === undefined) return null;
  if (typeof value === "number") return value;
  const named = { nan: NaN, inf: Infinity, "-inf": -Infinity };
  return value in named ? named[value] : null;
}

/** A measured quantity with three digits: 0.0123, 4.56e-7. */
function quantity(value) {
  const n = number(value);
  if (n === null) return "–";
  if (Number.isNaN(n)) return "NaN";
  if (!Number.isFinite(n)) return n > 0 ? "∞" : "−∞";
  if (n === 0) return "0";
  const large = Math.abs(n) >= 1e5 || Math.abs(n) < 1e-3;
  return (large ? n.toExponential(2).replace("e+", "e") : String(Number(n.toPrecision(4)))).replace("-", "−").replace("e-", "e−");
}

/** One over many as a percentage that is neither 0 nor 100 unless it is exactly. */
function share(part, total) {
  if (!total || part === null || part === undefined) return "–";
  const percent = (100 * part) / total;
  if (percent > 0 && percent < 0.01) return "< 0.01 %";
  if (percent < 100 && percent > 99.99) return "> 99.99 %";
  return `${Number(percent.toPrecision(3))} %`;
}

function shapeText(shape) {
  return shape === null || shape === undefined ? "–" : shape.length ? shape.join(" × ") : "scalar";
}

function plural(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** Number of leading parts that all dotted names share, of those that are not the last. */
function sharedParts(names) {
  if (names.length < 2) return 0;
  const parts = names.map((name) => name.split("."));
  let common = 0;
  while (parts.every((one) => one.length > common + 1 && one[common] === parts[0][common])) common += 1;
  return common;
}

/** A new element; attributes that are null or false are left out, children are text or elements. */
function element(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") for (const [event, listener] of Object.entries(value)) found.addEventListener(event, listener);
    else if (value === true) found.setAttribute(key, "");
    else if (value !== null && value !== false && value !== undefined) found.setAttribute(key, value);
  }
  found.append(...children.filter((child) => child !== null && child !== undefined));
  return found;
}

function svg(tag, attributes = {}, ...children) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) found.setAttribute(key, value);
  found.append(...children);
  return found;
}

/** Colour number of a slot: the page's style sheet has seven, of which the first two are the weight's and master's. */
const SLOT_COLOURS = 7;

function slotColour(names, index) {
  const fixed = { weight: 0, master: 1 };
  if (names[index] in fixed) return fixed[names[index]];
  const others = names.filter((name) => !(name in fixed));
  return 2 + (others.indexOf(names[index]) % (SLOT_COLOURS - 2));
}

/** The parts of the page tell each other what is searched and chosen through this. */
const bus = new EventTarget();

function tell(event, detail) {
  bus.dispatchEvent(new CustomEvent(event, { detail }));
}

function when(event, listener) {
  bus.addEventListener(event, (one) => listener(one.detail));
}
