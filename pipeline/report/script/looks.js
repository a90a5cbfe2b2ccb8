// Colours with hatches and dashes that say the same again.

const INK = "#1a1a1a";
const TILE = 8;
const patterns = new Map();

// What an area is filled with; narrow ones plain, for a hatch would not be seen.
function fill(context, look, isWide) {
  if (!look.hatch || !isWide) return look.colour;
  const key = `${look.colour}${look.hatch}`;
  if (!patterns.has(key)) patterns.set(key, context.createPattern(tile(look), "repeat"));
  return patterns.get(key);
}

function tile(look) {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = TILE;
  const context = canvas.getContext("2d");
  context.fillStyle = look.colour;
  context.fillRect(0, 0, TILE, TILE);
  context.strokeStyle = isLight(look.colour) ? "rgba(0,0,0,.32)" : "rgba(255,255,255,.6)";
  context.lineWidth = 1.4;
  context.beginPath();
  const line = (x1, y1, x2, y2) => (context.moveTo(x1, y1), context.lineTo(x2, y2));
  if ("/x".includes(look.hatch)) [-TILE, 0, TILE].forEach((x) => line(x - 1, TILE + 1, x + TILE + 1, -1));
  if ("\\x".includes(look.hatch)) [-TILE, 0, TILE].forEach((x) => line(x - 1, -1, x + TILE + 1, TILE + 1));
  if (look.hatch === "-") line(0, TILE / 2, TILE, TILE / 2);
  if (look.hatch === "|") line(TILE / 2, 0, TILE / 2, TILE);
  context.stroke();
  return canvas;
}

function isLight(colour) {
  const [red, green, blue] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.3 * red + 0.59 * green + 0.11 * blue > 150;
}

const dashes = (look) => look.dashes.map((length) => 2 * length);

// Marks of points, one form per curve.
function dot(context, form, x, y) {
  const size = 3;
  context.beginPath();
  if (form % 4 === 0) context.arc(x, y, size, 0, 2 * Math.PI);
  else if (form % 4 === 1) context.rect(x - size, y - size, 2 * size, 2 * size);
  else {
    const up = form % 4 === 2 ? 1 : -1;
    context.moveTo(x, y - up * size * 1.3);
    context.lineTo(x + size * 1.2, y + up * size);
    context.lineTo(x - size * 1.2, y + up * size);
    context.closePath();
  }
  context.fill();
}
