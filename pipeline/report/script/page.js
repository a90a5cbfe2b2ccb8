// The page: charts from its data, the bar that says which steps are looked at, filters of tables and samples.

const data = JSON.parse(document.getElementById("data").textContent);
const charts = [];
const axes = {};

function ends(spec) {
  switch (spec.kind) {
    case "lines":
      return spec.series.flatMap(({ x }) => (x.length ? [x[0], x[x.length - 1]] : []));
    case "stack":
      return [spec.edges[0], spec.edges[spec.edges.length - 1]];
    case "stretches":
      return spec.rows.flatMap(({ times, end }) => (times.length ? [times[0], end] : []));
    default:
      return [0, 1];
  }
}

function makeAxes() {
  const found = {};
  for (const [id, spec] of Object.entries(data.charts)) {
    const name = spec.kind === "bars" ? id : spec.axis;
    (found[name] = found[name] || []).push(...ends(spec));
  }
  for (const [name, places] of Object.entries(found)) {
    const [low, high] = places.reduce(([a, b], c) => [Math.min(a, c), Math.max(b, c)], [Infinity, -Infinity]);
    axes[name] = new Axis(name, name === "time" ? Math.min(0, low) : low, high);
  }
}

function makeCharts() {
  for (const [id, spec] of Object.entries(data.charts)) {
    const figure = document.getElementById(id);
    charts.push(new Chart(figure, spec, axes[spec.kind === "bars" ? id : spec.axis], data.steps));
  }
}

// --- which steps are looked at

function makeBar() {
  const bar = document.getElementById("bar");
  const axis = axes.time || axes.step;
  if (!axis) return;
  bar.hidden = false;
  const [first, last] = ["first", "last"].map((id) => document.getElementById(id));
  const recorded = axis.kind === "time" ? data.steps : [];
  const place = (step) => {
    const found = recorded.filter(([number]) => number <= step).pop();
    return axis.kind === "time" ? (found ? found[1] : axis.low) : step;
  };
  const show = () => axis.show(place(Number(first.value) - (axis.kind === "time" ? 1 : 0)), place(Number(last.value)));
  axis.whenShown = () => {
    const inside = axis.kind === "time" ? recorded.filter(([, at]) => at > axis.from + 1e-6) : [];
    const end = recorded.filter(([, at]) => at <= axis.to + 1e-6).pop();
    first.value = axis.kind === "time" ? (inside.length ? inside[0][0] : 0) : Math.ceil(axis.from);
    last.value = axis.kind === "time" ? (end ? end[0] : 0) : Math.floor(axis.to);
  };
  [first, last].forEach((input) => input.addEventListener("change", show));
  document.getElementById("closer").addEventListener("click", () => axis.zoom(0.5));
  document.getElementById("wider").addEventListener("click", () => axis.zoom(2));
  document.getElementById("whole").addEventListener("click", () => axis.showAll());
  axis.whenShown();
}

// --- lists of which some are shown: rows of tables, samples

function makeList(list, items, most, words) {
  const bar = element("div", "filter");
  list.before(bar);
  const input = bar.appendChild(element("input"));
  input.type = "search";
  input.placeholder = words;
  input.setAttribute("aria-label", words);
  const chosen = [...(list.dataset.choices || "").split(" ").filter(Boolean)];
  const select = chosen.length ? bar.appendChild(element("select")) : null;
  if (select) {
    ["all", ...chosen].forEach((name) => select.append(new Option(name, name)));
    select.setAttribute("aria-label", "which");
  }
  const count = bar.appendChild(element("span", "count"));
  const more = element("button", "more");
  more.type = "button";
  more.textContent = "show more";
  list.after(more);
  const texts = new Map();
  let room = most;
  const update = () => {
    const [wanted, which] = [input.value.toLowerCase(), select ? select.value : "all"];
    let [num, seen] = [0, 0];
    for (const item of items()) {
      if (!texts.has(item)) texts.set(item, item.textContent.toLowerCase());
      const isFound = texts.get(item).includes(wanted) && (which === "all" || item.classList.contains(which));
      num += isFound;
      item.hidden = !isFound || seen >= room;
      seen += !item.hidden;
    }
    count.textContent = `${seen} of ${num}`;
    more.hidden = seen >= num;
  };
  input.addEventListener("input", () => ((room = most), update()));
  if (select) select.addEventListener("change", () => ((room = most), update()));
  more.addEventListener("click", () => ((room += 4 * most), update()));
  update();
  return update;
}

function makeTables() {
  for (const table of document.querySelectorAll("table.listed")) {
    const body = table.tBodies[0];
    const update = makeList(table, () => [...body.rows], 25, "find in this table");
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.tabIndex = 0;
      head.title = "sort";
      let turn = -1;
      const sort = () => {
        turn = -turn;
        const key = (row) => row.cells[column].textContent;
        const order = (a, b) => {
          const [x, y] = [parseFloat(key(a).replace(/,/g, "")), parseFloat(key(b).replace(/,/g, ""))];
          const isNumber = !Number.isNaN(x) && !Number.isNaN(y);
          return turn * (isNumber ? x - y : Number.isNaN(x) - Number.isNaN(y) || key(a).localeCompare(key(b)));
        };
        body.append(...[...body.rows].sort(order));
        update();
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });
  }
}

function makeSamples() {
  const list = document.getElementById("samples");
  if (list) makeList(list, () => [...list.children], 6, "find in prompts, responses, critiques");
}

// --- on paper everything is drawn as sharply as it is printed

addEventListener("beforeprint", () => charts.forEach((chart) => chart.draw(3)));
addEventListener("afterprint", () => charts.forEach((chart) => chart.ask()));

makeAxes();
makeCharts();
makeBar();
makeTables();
makeSamples();
charts.forEach((chart) => chart.draw());
requestAnimationFrame(() => (document.documentElement.dataset.ready = Math.round(performance.now())));
