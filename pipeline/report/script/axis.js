// An axis that several charts share: what is shown of it, and how its places are written.

const TIME_STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];
const CLOSEST = 1e-5; // share of the whole that can still be looked at

class Axis {
  constructor(kind, low, high) {
    this.kind = kind;
    this.low = low;
    this.high = high > low ? high : low + 1;
    this.from = this.low;
    this.to = this.high;
    this.charts = [];
    this.whenShown = () => {};
  }

  show(from, to) {
    const least = (this.high - this.low) * CLOSEST;
    const width = Math.min(Math.max(to - from, least), this.high - this.low);
    this.from = Math.min(Math.max((from + to - width) / 2, this.low), this.high - width);
    this.to = this.from + width;
    this.charts.forEach((chart) => chart.ask());
    this.whenShown();
  }

  showAll() {
    this.show(this.low, this.high);
  }

  zoom(factor, around) {
    const at = around === undefined ? (this.from + this.to) / 2 : around;
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  move(share) {
    const by = Math.min(Math.max(share * (this.to - this.from), this.low - this.from), this.high - this.to);
    this.show(this.from + by, this.to + by);
  }

  point(at) {
    this.charts.forEach((chart) => chart.point(at));
  }

  ticks(most) {
    return this.kind === "time" ? timeTicks(this.from, this.to, most) : evenTicks(this.from, this.to, most);
  }

  text(at) {
    return this.kind === "time" ? timeText(at, this.to - this.from) : numberText(at);
  }
}

function evenTicks(from, to, most) {
  const rough = (to - from) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= rough);
  return multiples(from, to, step);
}

function timeTicks(from, to, most) {
  const rough = (to - from) / Math.max(1, most);
  const step = TIME_STEPS.find((one) => one >= rough) || Math.ceil(rough / 86400) * 86400;
  return multiples(from, to, step);
}

function multiples(from, to, step) {
  const found = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i++) found.push(i * step);
  return found;
}

function timeText(at, width) {
  if (width < 20) return `${at.toFixed(width < 0.5 ? 2 : 1)} s`;
  const whole = Math.round(at);
  const two = (value) => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

function numberText(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(size >= 1000 ? 5 : 4)));
}

// The first index of an ascending list whose value is greater than x.
function after(list, x) {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low;
}
