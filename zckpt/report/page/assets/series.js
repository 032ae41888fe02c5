// The page of a series: the curves of the parameters that moved most, or of those a person ticks.

const FIRST_LINES = 6;
const MOST_LINES = 7; // as many as there are colours

function startSeries({ labels, series }) {
  const every = series.map((_, i) => i);
  const moved = series.map((one) => mostOf(one.change));
  const chosen = new Set([...every].sort((a, b) => moved[b] - moved[a]).slice(0, FIRST_LINES));
  const charts = [
    new Chart(host("change"), { title: "Relative L2 change from the checkpoint before", key: "change", labels, logarithmic: true }),
    new Chart(host("norm"), { title: "L2 norm", key: "norm", labels, logarithmic: true }),
  ];
  const names = series.map((one) => `${one.name} ${one.slot}`);
  const update = () => {
    const lines = [...chosen].map((i, place) => ({ place, series: series[i], label: `${series[i].name} ${series[i].slot}` }));
    for (const chart of charts) chart.show(lines);
    host("lines").replaceChildren(...lines.map((line) => element("li", {}, legendLine(line.place), line.label)));
  };
  const tick = (i) => {
    if (chosen.has(i)) chosen.delete(i);
    else if (chosen.size < MOST_LINES) chosen.add(i);
    host("lines-answer").textContent = chosen.size === MOST_LINES ? `${MOST_LINES} lines are the most that can be told apart` : "";
    changed();
  };
  const changed = () => {
    remember("lines", [...chosen].map((i) => names[i]).join(","));
    update();
    table.draw(true);
  };
  const last = (list) => (list.length ? list[list.length - 1] : null);
  const table = new RowTable(host("moved"), {
    caption: "Parameters and slots; choose those that are drawn",
    columns: [
      { title: "Name", text: (i) => series[i].name, most: 46, least: 14, cell: (i) => `${chosen.has(i) ? "✓ " : ""}${series[i].name}` },
      { title: "Slot", text: (i) => series[i].slot },
      { title: "Largest change", text: (i) => quantity(moved[i]), value: (i) => moved[i], right: true },
      { title: "Last change", text: (i) => quantity(last(series[i].change)), value: (i) => number(last(series[i].change)), right: true },
      { title: "First norm", text: (i) => quantity(series[i].norm[0]), value: (i) => number(series[i].norm[0]), right: true },
      { title: "Last norm", text: (i) => quantity(last(series[i].norm)), value: (i) => number(last(series[i].norm)), right: true },
    ],
    rows: every,
    choose: tick,
    sorted: { column: 2, down: true },
  });
  host("lines-none").addEventListener("click", () => {
    chosen.clear();
    changed();
  });
  when("search", ({ matches }) => table.show(matches ? every.filter((i) => matches[i]) : every));
  when("choose", ({ index }) => {
    if (!chosen.has(index)) tick(index);
  });
  restored("lines", (text) => {
    const wanted = text.split(",").map((name) => names.indexOf(name)).filter((i) => i >= 0);
    chosen.clear();
    for (const i of wanted.slice(0, MOST_LINES)) chosen.add(i);
    update();
    table.draw(true);
  });
  update();
  startSearch(names, "line");
}

/** The largest finite of a list of changes. */
function mostOf(changes) {
  return changes.map(number).reduce((most, one) => (one !== null && Number.isFinite(one) && one > most ? one : most), 0);
}

function legendLine(place) {
  const stroke = { class: "line", "data-line": place, d: "M1 5H27", "stroke-dasharray": DASHES[place % DASHES.length] };
  return svg("svg", { width: 28, height: 10, "aria-hidden": "true" }, svg("path", stroke));
}
