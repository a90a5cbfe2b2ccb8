// How each kind of chart is drawn, and what it says of a place.

const HATCHED = 10; // pixels from which on a hatch is seen
const BELOW = { colour: "#9cc6e0", hatch: "" }; // of bars, on which the others are lines
const NEAR = 6; // pixels

const seriesKeys = (spec) => spec.series.map(({ name, look }) => ({ name, look }));
const shown = (chart) => chart.spec.series.filter(({ name }) => !chart.hidden.has(name));

const lines = {
  height: (spec) => spec.height,
  keys: (spec) => seriesKeys(spec).map((key) => ({ ...key, isLine: true })),

  draw(chart, context) {
    const [y0, y1] = [MARGIN.top, MARGIN.top + chart.spec.height];
    const parts = shown(chart).map((series) => ({ series, ...inView(series, chart.axis) }));
    const values = parts.flatMap(({ series, first, last }) => series.y.slice(first, last));
    const [low, high] = range(values, chart.spec.low);
    const y = chart.scale(context, low, high, y0, y1);
    chart.frame(context, y0, y1);
    chart.clip(context, y0, y1);
    parts.forEach(({ series, first, last }) => {
      const form = chart.spec.series.indexOf(series);
      context.strokeStyle = context.fillStyle = series.look.colour;
      context.lineWidth = 1.8;
      context.setLineDash(dashes(series.look));
      context.beginPath();
      for (let i = first; i < last; i++) {
        const x = chart.x(series.x[i]);
        if (i === first) context.moveTo(x, y(series.y[i]));
        else if (series.holds) context.lineTo(x, y(series.y[i - 1]));
        context.lineTo(x, y(series.y[i]));
      }
      context.stroke();
      context.setLineDash([]);
      if (last - first < chart.plotWidth / 24 && !series.holds) {
        for (let i = first; i < last; i++) dot(context, form, chart.x(series.x[i]), y(series.y[i]));
      }
    });
    context.restore();
    chart.figure.dataset.drawn = parts.reduce((sum, { first, last }) => sum + last - first, 0);
  },

  tell(chart, x) {
    const at = chart.at(x);
    const found = shown(chart).filter((series) => series.x.length).map((series) => {
      let i = after(series.x, at) - 1;
      if (!series.holds && (i < 0 || series.x[i + 1] - at < at - series.x[i])) i += 1;
      return i < 0 || i >= series.x.length ? "" : `\n${series.name}: ${numberText(series.y[i])} ${chart.spec.unit}`;
    });
    return chart.where(at) + found.join("");
  },
};

// The points that are seen, and their neighbours, to which the curve leads.
function inView({ x }, axis) {
  return { first: Math.max(0, after(x, axis.from) - 1), last: Math.min(x.length, after(x, axis.to) + 1) };
}

function range(values, low) {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  if (least > most) return [0, 1];
  if (low !== null) least = Math.min(low, least);
  const room = (most - least) * 0.06 || Math.abs(most) * 0.1 || 1;
  return [low !== null ? least : least - room, most + room];
}

const stack = {
  height: (spec) => spec.height,
  keys: seriesKeys,

  draw(chart, context) {
    const { edges } = chart.spec;
    const [y0, y1] = [MARGIN.top, MARGIN.top + chart.spec.height];
    const parts = shown(chart);
    const sums = edges.slice(1).map((_, i) => parts.reduce((sum, { y }) => sum + y[i], 0));
    const y = chart.scale(context, 0, Math.max(...sums, 1e-9) * 1.02, y0, y1);
    chart.frame(context, y0, y1);
    chart.clip(context, y0, y1);
    const [first, last] = [Math.max(0, after(edges, chart.axis.from) - 1), after(edges, chart.axis.to)];
    for (let i = first; i < Math.min(last, edges.length - 1); i++) {
      const [left, right] = [chart.x(edges[i]), chart.x(edges[i + 1])];
      let low = 0;
      for (const { look, y: values } of parts) {
        if (!values[i]) continue;
        context.fillStyle = fill(context, look, right - left > HATCHED);
        context.fillRect(left, y(low + values[i]), right - left, y(low) - y(low + values[i]));
        low += values[i];
      }
    }
    context.restore();
    chart.figure.dataset.drawn = Math.max(0, Math.min(last, edges.length - 1) - first);
  },

  tell(chart, x) {
    const { edges, titles, unit } = chart.spec;
    const i = after(edges, chart.at(x)) - 1;
    if (i < 0 || i >= edges.length - 1) return "";
    const length = edges[i + 1] - edges[i];
    const parts = shown(chart).filter(({ y }) => y[i]);
    const whole = parts.reduce((sum, { y }) => sum + y[i], 0);
    const told = parts.sort((a, b) => b.y[i] - a.y[i]).map(
      ({ name, y }) => `\n${name}: ${numberText(y[i])} ${unit}, ${((100 * y[i]) / whole).toFixed(1)} %`
    );
    return `${titles[i] || chart.where(edges[i])}, ${numberText(length)} s${told.join("")}`;
  },
};

const bars = {
  isStill: true,
  height: (spec) => spec.height,
  keys: (spec) => spec.series.map(({ name, look }, i) => ({ name, look: i ? look : BELOW, isLine: i > 0 })),

  draw(chart, context) {
    const { edges, marks } = chart.spec;
    const [y0, y1] = [MARGIN.top, MARGIN.top + chart.spec.height];
    const parts = shown(chart);
    const most = Math.max(...parts.flatMap(({ y }) => y), 1e-9);
    const y = chart.scale(context, 0, most * 1.08, y0, y1);
    const width = chart.plotWidth / (edges.length - 1);
    const place = (i) => MARGIN.left + i * width;
    parts.forEach((series) => {
      if (series === chart.spec.series[0]) {
        series.y.forEach((value, i) => {
          context.fillStyle = BELOW.colour;
          context.fillRect(place(i) + 0.5, y(value), Math.max(1, width - 1), y1 - y(value));
        });
        return;
      }
      context.strokeStyle = series.look.colour;
      context.lineWidth = 2;
      context.setLineDash(dashes(series.look));
      context.beginPath();
      series.y.forEach((value, i) => {
        context.lineTo(place(i), y(value));
        context.lineTo(place(i + 1), y(value));
      });
      context.stroke();
      context.setLineDash([]);
    });
    this.ticks(chart, context, place, y1);
    for (const [name, value] of marks) {
      const x = place(this.index(edges, value));
      context.fillStyle = INK;
      context.fillRect(x - 0.5, y0, 1, y1 - y0);
      context.textAlign = "left";
      context.textBaseline = "top";
      context.fillText(`${name}: ${numberText(Math.round(value))}`, x + 3, y0 + 14 * marks.findIndex(([other]) => other === name));
    }
    chart.figure.dataset.drawn = parts.length;
  },

  ticks(chart, context, place, y1) {
    const { edges, x_unit } = chart.spec;
    const every = Math.ceil(edges.length / (chart.plotWidth / 60));
    context.fillStyle = "#444";
    context.textAlign = "center";
    context.textBaseline = "top";
    let last = "";
    edges.forEach((edge, i) => {
      const text = numberText(Math.ceil(edge - 1e-6));
      if (i % every || text === last) return;
      context.fillText(text, place(i), y1 + 6);
      last = text;
    });
    context.textAlign = "right";
    context.fillText(x_unit, MARGIN.left + chart.plotWidth, MARGIN.top - 14);
  },

  // Of a value between edges that grow by a constant factor, as a fraction.
  index(edges, value) {
    const i = Math.min(Math.max(after(edges, value) - 1, 0), edges.length - 2);
    return i + Math.min(1, Math.log(value / edges[i]) / Math.log(edges[i + 1] / edges[i]));
  },

  tell(chart, x) {
    const { edges, unit, x_unit } = chart.spec;
    const i = Math.floor(((x - MARGIN.left) / chart.plotWidth) * (edges.length - 1));
    if (i < 0 || i >= edges.length - 1) return "";
    const told = shown(chart).map(({ name, y }) => `\n${name}: ${numberText(y[i])} ${unit}`);
    return `${numberText(Math.ceil(edges[i] - 1e-6))} to ${numberText(Math.ceil(edges[i + 1]) - 1)} ${x_unit}${told.join("")}`;
  },
};

const stretches = {
  height: (spec) => spec.rows.length * spec.row_height,

  keys(spec) {
    const first = Object.entries(spec.groups).map(([name, codes]) => ({ name, look: spec.looks[codes[0]] }));
    const told = new Set(Object.values(spec.groups).map((codes) => codes[0]));
    const used = new Set(spec.rows.flatMap(({ codes }) => [...new Set(codes)]));
    const rest = Object.entries(spec.looks).filter(([code]) => used.has(code) && !told.has(code));
    return [...first, ...rest.map(([code, look]) => ({ name: spec.words[code], look, isFixed: true }))];
  },

  draw(chart, context) {
    const { rows, looks, groups, marks, row_height: height } = chart.spec;
    const [y0, y1] = [MARGIN.top, MARGIN.top + rows.length * height];
    const isHidden = new Set([...chart.hidden].flatMap((name) => [...groups[name]]));
    let drawn = 0;
    chart.clip(context, y0, y1);
    rows.forEach((row, number) => {
      const top = y0 + number * height;
      const begin = Math.max(0, after(row.times, chart.axis.from) - 1);
      for (let i = begin; i < row.times.length && row.times[i] < chart.axis.to; i++) {
        const look = looks[row.codes[i]];
        if (!look || isHidden.has(row.codes[i])) continue;
        const left = chart.x(row.times[i]);
        const width = chart.x(i + 1 < row.times.length ? row.times[i + 1] : row.end) - left;
        context.fillStyle = fill(context, look, width > HATCHED && height > 5);
        context.fillRect(left, top, width, height - 1);
        drawn += 1;
      }
    });
    if (!chart.hidden.has("shift")) drawn += this.mark(chart, context, marks, y0, height);
    context.restore();
    chart.frame(context, y0, y1);
    this.names(context, rows, y0, height);
    chart.figure.dataset.drawn = drawn;
  },

  mark(chart, context, marks, y0, height) {
    const seen = marks.filter(([at]) => at >= chart.axis.from && at <= chart.axis.to);
    context.fillStyle = INK;
    if (seen.length > chart.plotWidth * 2) return 0; // a line beside the other
    for (const [at, , rows] of seen) {
      for (const row of rows) context.fillRect(chart.x(at) - 0.75, y0 + row * height, 1.5, height - 1);
    }
    return seen.length;
  },

  names(context, rows, y0, height) {
    const every = Math.ceil(11 / height);
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillStyle = "#444";
    rows.forEach(({ name }, i) => {
      if (i % every === 0) context.fillText(name, MARGIN.left - 6, y0 + (i + 0.5) * height, MARGIN.left - 8);
    });
  },

  tell(chart, x, y) {
    const { rows, words, marks, notes, row_height: height } = chart.spec;
    const number = Math.floor((y - MARGIN.top) / height);
    if (number < 0 || number >= rows.length) return "";
    const [at, row] = [chart.at(x), rows[number]];
    const near = ((chart.axis.to - chart.axis.from) / chart.plotWidth) * NEAR;
    const i = after(row.times, at) - 1;
    const end = i + 1 < row.times.length ? row.times[i + 1] : row.end;
    const word = i < 0 || at > row.end ? undefined : words[row.codes[i]];
    const told = word ? `\n${word}, ${numberText(end - row.times[i])} s` : "";
    const distance = ([start, until]) => Math.max(0, start - at, at - until);
    let best = null;
    for (const mark of marks) {
      if (mark[2].includes(number) && distance(mark) <= near && (!best || distance(mark) < distance(best))) best = mark;
    }
    const shift = best ? `\n${best[3]}${best[4] >= 0 ? `\n${notes[best[4]]}` : ""}` : "";
    return `${row.name}: ${chart.where(at)}${told}${shift}`;
  },
};

const KINDS = { lines, stack, bars, stretches };
