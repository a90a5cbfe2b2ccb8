// A chart in its figure: canvas, keys, tooltip, and what a hand does with them.

const MARGIN = { left: 78, right: 14, top: 20, bottom: 24 };
const SHARPNESS = 2; // pixels of the canvas for one of the page, at least: prints are made of them
const DRAG = 4; // pixels that a hand may tremble

class Chart {
  constructor(figure, spec, axis, steps) {
    Object.assign(this, { figure, spec, axis, steps, hidden: new Set(), isAsked: false });
    this.kind = KINDS[spec.kind];
    this.canvas = figure.querySelector("canvas");
    this.canvas.tabIndex = 0;
    this.cursor = figure.appendChild(element("div", "cursor"));
    this.chosen = figure.appendChild(element("div", "chosen"));
    this.tip = figure.appendChild(element("div", "tip"));
    this.keys = figure.insertBefore(element("div", "keys"), figure.firstChild);
    this.makeKeys();
    this.listen();
    axis.charts.push(this);
    new ResizeObserver(() => this.ask()).observe(figure);
  }

  get height() {
    return this.kind.height(this.spec) + MARGIN.top + MARGIN.bottom;
  }

  get plotWidth() {
    return Math.max(50, this.canvas.clientWidth - MARGIN.left - MARGIN.right);
  }

  x(at) {
    return MARGIN.left + ((at - this.axis.from) / (this.axis.to - this.axis.from)) * this.plotWidth;
  }

  at(x) {
    const share = Math.min(1, Math.max(0, (x - MARGIN.left) / this.plotWidth));
    return this.axis.from + share * (this.axis.to - this.axis.from);
  }

  ask() {
    if (this.isAsked) return;
    this.isAsked = true;
    requestAnimationFrame(() => this.draw());
  }

  draw(sharpness = Math.max(SHARPNESS, window.devicePixelRatio || 1)) {
    this.isAsked = false;
    const [width, height] = [this.canvas.clientWidth, this.height];
    if (!width) return;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * sharpness);
    this.canvas.height = Math.round(height * sharpness);
    const context = this.canvas.getContext("2d");
    context.scale(sharpness, sharpness);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, height);
    this.kind.draw(this, context);
    this.figure.dataset.from = this.axis.from;
    this.figure.dataset.to = this.axis.to;
  }

  // --- around the plot

  frame(context, y0, y1) {
    context.strokeStyle = "#888";
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(MARGIN.left, y0);
    context.lineTo(MARGIN.left, y1);
    context.lineTo(MARGIN.left + this.plotWidth, y1);
    context.stroke();
    context.fillStyle = "#444";
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const at of this.axis.ticks(this.plotWidth / 90)) {
      const x = this.x(at);
      context.fillRect(x - 0.5, y1, 1, 4);
      context.fillText(this.axis.text(at), Math.min(x, MARGIN.left + this.plotWidth - 12), y1 + 7);
    }
    if (this.axis.kind === "time") this.stepLines(context, y0, y1);
  }

  // Where steps were recorded: a line each, and their numbers above, as many as there is room for.
  stepLines(context, y0, y1) {
    const shown = this.steps.filter(([, at]) => at >= this.axis.from && at <= this.axis.to);
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => (shown.length / n) * 36 < this.plotWidth) || 2000;
    context.textBaseline = "bottom";
    context.fillStyle = "#555";
    for (const [step, at] of shown) {
      if (step % every) continue;
      const x = this.x(at);
      context.fillStyle = "rgba(0,0,0,.13)";
      context.fillRect(x - 0.5, y0 - 4, 1, y1 - y0 + 4);
      context.fillStyle = "#555";
      context.fillText(`${step}`, x, y0 - 5);
    }
    context.textAlign = "right";
    context.fillText("step", MARGIN.left - 8, y0 - 5);
  }

  scale(context, low, high, y0, y1) {
    const y = (value) => y1 - ((value - low) / (high - low || 1)) * (y1 - y0);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of evenTicks(low, high, (y1 - y0) / 40)) {
      context.fillStyle = "#e4e4e4";
      context.fillRect(MARGIN.left, y(value) - 0.5, this.plotWidth, 1);
      context.fillStyle = "#444";
      context.fillText(numberText(value), MARGIN.left - 6, y(value));
    }
    context.save();
    context.translate(11, (y0 + y1) / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText(this.spec.unit, 0, 0);
    context.restore();
    return y;
  }

  clip(context, y0, y1) {
    context.save();
    context.beginPath();
    context.rect(MARGIN.left, y0 - 4, this.plotWidth, y1 - y0 + 8);
    context.clip();
  }

  // --- keys: what is shown, and a hand that shows and hides it

  makeKeys() {
    for (const { name, look, isFixed, isLine } of this.kind.keys(this.spec)) {
      const key = this.keys.appendChild(element(isFixed ? "span" : "button", "key"));
      const swatch = key.appendChild(element("canvas"));
      key.append(name);
      drawSwatch(swatch, look, isLine);
      if (isFixed) continue;
      key.type = "button";
      key.setAttribute("aria-pressed", "true");
      key.addEventListener("click", () => {
        if (!this.hidden.delete(name)) this.hidden.add(name);
        key.setAttribute("aria-pressed", String(!this.hidden.has(name)));
        this.ask();
      });
    }
  }

  // --- pointer and keyboard

  listen() {
    const place = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    let began = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      if (this.kind.isStill) return;
      began = place(event);
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (began !== null && Math.abs(place(event) - began) > DRAG) this.choose(began, place(event));
      else this.tell(event);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const [start, end] = [began, place(event)];
      began = null;
      this.chosen.style.width = "0";
      if (start !== null && Math.abs(end - start) > DRAG) {
        this.axis.show(...[this.at(start), this.at(end)].sort((a, b) => a - b));
      }
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.tip.textContent = "";
      this.axis.point(null);
    });
    this.canvas.addEventListener("dblclick", () => this.axis.showAll());
    this.canvas.addEventListener("wheel", (event) => {
      if (this.kind.isStill || !(event.ctrlKey || event.shiftKey)) return;
      event.preventDefault();
      this.axis.zoom(1.3 ** Math.sign(event.deltaY || event.deltaX), this.at(place(event)));
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    const moves = { ArrowLeft: -0.25, ArrowRight: 0.25 };
    if (this.kind.isStill) return;
    if (event.key in moves) this.axis.move(moves[event.key]);
    else if (event.key === "+" || event.key === "=") this.axis.zoom(0.5);
    else if (event.key === "-") this.axis.zoom(2);
    else if (event.key === "0" || event.key === "Escape") this.axis.showAll();
    else return;
    event.preventDefault();
  }

  choose(from, to) {
    const [left, right] = [Math.min(from, to), Math.max(from, to)];
    Object.assign(this.chosen.style, {
      left: `${left}px`,
      width: `${right - left}px`,
      top: `${this.canvas.offsetTop}px`,
      height: `${this.height}px`,
    });
  }

  tell(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const text = this.kind.tell(this, x, y);
    this.tip.textContent = text;
    this.tip.style.left = `${Math.min(x + 14, Math.max(0, box.width - this.tip.offsetWidth - 4))}px`;
    this.tip.style.top = `${this.canvas.offsetTop + y + 16}px`;
    if (!this.kind.isStill) this.axis.point(this.at(x));
  }

  point(at) {
    const isSeen = at !== null && at >= this.axis.from && at <= this.axis.to && !this.kind.isStill;
    this.cursor.style.display = isSeen ? "block" : "none";
    if (!isSeen) return;
    this.cursor.style.left = `${this.x(at)}px`;
    this.cursor.style.top = `${this.canvas.offsetTop + MARGIN.top}px`;
    this.cursor.style.height = `${this.height - MARGIN.top - MARGIN.bottom}px`;
  }

  where(at) {
    if (this.axis.kind !== "time") return `${this.axis.kind} ${numberText(at)}`;
    const next = this.steps.find(([, recorded]) => recorded >= at - 1e-6);
    return `${timeText(at, Math.min(19, this.axis.to - this.axis.from))}${next ? `, step ${next[0]}` : ""}`;
  }
}

function element(kind, name) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  return made;
}

function drawSwatch(canvas, look, isLine) {
  const [width, height] = [26, 12];
  canvas.width = width * SHARPNESS;
  canvas.height = height * SHARPNESS;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(SHARPNESS, SHARPNESS);
  if (isLine) {
    context.strokeStyle = look.colour;
    context.lineWidth = 2;
    context.setLineDash(dashes(look));
    context.beginPath();
    context.moveTo(0, height / 2);
    context.lineTo(width, height / 2);
    context.stroke();
  } else {
    context.fillStyle = fill(context, look, true);
    context.fillRect(0, 0, width, height);
    context.strokeStyle = "#777";
    context.strokeRect(0.5, 0.5, width - 1, height - 1);
  }
}
