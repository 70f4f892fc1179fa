// A path's tokens on a canvas, of which only the rows in sight are drawn: colored by mask, logprob, version,
// constraint or an annotation, walked through by mouse and keys, and copied as the very ids.

import { html, useLayoutEffect, useMemo, useRef, useState } from "./preact-htm.js";
import { color } from "./charts.js";
import { NONE, count } from "./format.js";
import { MAX_CELLS, OBSERVED, endOf, layOut, placeAfter, placeIn, rowOf } from "./token_rows.js";

export const COLORINGS = ["mask", "logprob", "version", "constraint"];

const ROW_PX = 19;
const LEFT_PX = 4;
const ABOUT_PX = { width: 300, row: 20 };
const LOWEST_LOGPROB = -6; // nats, from which on the color is the strongest
const NUM_VERSION_COLORS = 6;
const SAID_MS = 2000;

/** The color behind the token at a place, and the legend that explains it. */
function painter(coloring, tokens) {
  const names = ["--token", "--token-trained", "--token-masked", "--token-marked"];
  const [plain, trained, masked, marked] = names.map(color);
  const others = [plain, "not sampled"];
  const sampledBy = (paint) => (place) => (tokens.kinds[place] === OBSERVED ? plain : paint(place));
  if (coloring === "mask") {
    const paints = [plain, masked, trained];
    const legend = [[trained, "sampled, in the mask"], [masked, "sampled, out of the mask"], others];
    return { paint: (place) => paints[tokens.kinds[place]], legend };
  }
  if (coloring === "constraint") {
    const legend = [[marked, "sampled under a constraint"], [trained, "sampled freely"], others];
    return { paint: sampledBy((place) => (tokens.constrained[place] ? marked : trained)), legend };
  }
  if (coloring === "version") {
    const found = [...new Set(tokens.path.weight_versions.map((span) => span.version))].sort((a, b) => a - b);
    const paints = new Map(found.map((version, at) => [version, color(`--version-${at % NUM_VERSION_COLORS}`)]));
    const legend = [...paints].map(([version, paint]) => [paint, `weights ${version}`]);
    return { paint: sampledBy((place) => paints.get(tokens.versions[place])), legend: [...legend, others] };
  }
  const column = tokens.annotated.get(coloring);
  if (column) {
    const most = column.reduce((found, value) => Math.max(found, Math.abs(value) || 0), 1e-9);
    const [up, down] = [shadesOf("--gain", plain), shadesOf("--heat", plain)];
    const shade = (value) => (value < 0 ? down(-value / most) : up(value / most));
    const legend = [most, most / 2, 0, -most / 2, -most].map((value) => [shade(value), String(+value.toPrecision(3))]);
    return { paint: (place) => shade(column[place]), legend };
  }
  const heat = shadesOf("--heat", plain);
  const shade = (logprob) => heat(logprob / LOWEST_LOGPROB);
  const legend = [0, -1, -3, LOWEST_LOGPROB].map((logprob) => [shade(logprob), `${logprob} nats`]);
  return { paint: sampledBy((place) => shade(tokens.logprobs[place])), legend: [...legend, others] };
}

/** The shades of a color for shares of the strongest one; NaN has none. */
function shadesOf(name, plain) {
  const steps = Array.from({ length: 25 }, (_, step) => `rgb(${color(name)} / ${0.06 + (0.8 * step) / 24})`);
  return (share) => steps[Math.round(24 * Math.min(1, Math.max(0, share)))] ?? plain;
}

/**
 * The tokens; `marked` is a place that is framed and in sight at first, null for none. The token that the keys or the
 * mouse point at is described beside it.
 */
export function Tokens({ tokens, coloring, marked = null, label = "tokens" }) {
  const [box, sizer, canvas] = [useRef(null), useRef(null), useRef(null)];
  const [size, setSize] = useState(null); // of the box and of a cell, in CSS pixels
  const [top, setTop] = useState(0);
  const [at, setAt] = useState(null);
  const num_columns = size && Math.floor((size.width - LEFT_PX) / size.cell);
  const layout = useMemo(() => size && layOut(tokens, num_columns), [tokens, num_columns]);
  const painted = useMemo(() => painter(coloring, tokens), [coloring, tokens]);

  useLayoutEffect(() => {
    const watch = new ResizeObserver(() => {
      const pen = canvas.current.getContext("2d");
      pen.font = fontOf();
      const { clientWidth: width, clientHeight: height } = box.current;
      setSize({ width, height, cell: pen.measureText("0").width });
    });
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (layout === null) return;
    sizer.current.style.height = `${layout.starts.length * ROW_PX}px`;
    if (marked !== null) box.current.scrollTop = (rowOf(layout, marked) - 3) * ROW_PX;
  }, [layout, marked]);
  useLayoutEffect(() => {
    if (layout) drawRows(canvas.current, { tokens, layout, size, top, at, marked, paint: painted.paint });
  }, [tokens, layout, size, top, at, marked, painted]);

  const placeUnder = (event) => {
    const { left, top: above } = canvas.current.getBoundingClientRect();
    const row = Math.floor((event.clientY - above + top) / ROW_PX);
    return placeIn(layout, row, (event.clientX - left - LEFT_PX) / size.cell);
  };
  const go = (place) => {
    const row_px = rowOf(layout, place) * ROW_PX;
    box.current.scrollTop = Math.min(row_px, Math.max(box.current.scrollTop, row_px + ROW_PX - size.height));
    setAt(place);
  };
  const press = (event) => {
    const place = placeAfter(layout, at ?? 0, event.key, Math.floor(size.height / ROW_PX));
    if (place === null || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    go(place);
  };
  return html`
    <div class="token-bar">
      <${Legend} legend=${painted.legend} />
      <${TurnChoice} tokens=${tokens} go=${go} />
      <${CopyIds} ids=${tokens.ids} />
    </div>
    <div class="token-frame">
      <div
        class="tokens"
        ref=${box}
        tabindex="0"
        role="application"
        aria-label=${`${count(tokens.ids.length)} ${label}: arrows go from one to the next`}
        onScroll=${(event) => setTop(event.target.scrollTop)} onKeyDown=${press}
        onMouseMove=${(event) => setAt(placeUnder(event))} onMouseLeave=${() => setAt(null)}
      >
        <div ref=${sizer}><canvas ref=${canvas} data-drawn=${layout && tokens.ids.length}></canvas></div>
      </div>
      ${layout && at !== null && html`<${About} ...${{ tokens, layout, size, top, at }} />`}
    </div>
  `;
}

const fontOf = () => `12px ${color("--mono")}`;

function drawRows(canvas, { tokens, layout, size, top, at, marked, paint }) {
  const [width, height] = [size.width, size.height].map((pixels) => Math.round(pixels * devicePixelRatio));
  if (canvas.width !== width || canvas.height !== height) {
    [canvas.width, canvas.height] = [width, height];
    [canvas.style.width, canvas.style.height] = [`${size.width}px`, `${size.height}px`];
  }
  const pen = canvas.getContext("2d");
  const [text, quiet, mark] = ["--text", "--quiet", "--mark"].map(color);
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.clearRect(0, 0, size.width, size.height);
  pen.font = fontOf();
  pen.textBaseline = "middle";
  const last = Math.min(layout.starts.length, Math.ceil((top + size.height) / ROW_PX));
  for (let row = Math.floor(top / ROW_PX); row < last; row++) {
    const y = row * ROW_PX - top + 1;
    for (let place = layout.starts[row]; place < endOf(layout, row); place++) {
      const x = LEFT_PX + layout.columns[place] * size.cell;
      const space = layout.widths[place] * size.cell;
      pen.fillStyle = paint(place);
      pen.fillRect(x, y, space - 1, ROW_PX - 2);
      pen.fillStyle = tokens.kinds[place] === OBSERVED ? quiet : text;
      pen.fillText(tokens.labelOf(tokens.ids[place]).slice(0, MAX_CELLS), x, y + ROW_PX / 2, space);
      if (tokens.turns[place] !== (tokens.turns[place - 1] ?? -1) && tokens.turns[place] >= 0) {
        pen.fillStyle = mark;
        pen.fillRect(x - 2, y, 2, ROW_PX - 2);
      }
      if (place === at || place === marked) {
        pen.strokeStyle = place === marked ? mark : text;
        pen.lineWidth = place === marked ? 2 : 1;
        pen.strokeRect(x + 0.5, y + 0.5, space - 2, ROW_PX - 3);
      }
    }
  }
}

function About({ tokens, layout, size, top, at }) {
  const [id, turn, response_place] = [tokens.ids[at], tokens.turns[at], at - tokens.num_prompt];
  const isSampled = tokens.kinds[at] !== OBSERVED;
  const kind = ["not sampled", "sampled, out of the mask", "sampled, in the mask"][tokens.kinds[at]];
  const facts = {
    id,
    text: id in tokens.texts ? JSON.stringify(tokens.texts[id].slice(0, 200)) : NONE,
    logprob: isSampled ? `${tokens.logprobs[at].toFixed(4)} nats` : NONE,
    weights: isSampled ? tokens.versions[at] : NONE,
    turn: turn < 0 ? NONE : turn,
    place: response_place < 0 ? `${count(at)} of the prompt` : `${count(response_place)} of the response`,
    mask: kind + (tokens.constrained[at] ? ", under a constraint" : ""),
  };
  for (const [name, values] of tokens.annotated) facts[name] = isNaN(values[at]) ? NONE : +values[at].toPrecision(6);
  const above_px = rowOf(layout, at) * ROW_PX - top;
  const isLow = above_px + ABOUT_PX.row * Object.keys(facts).length > size.height;
  const place = (element) => {
    if (element === null) return;
    const left_px = Math.min(layout.columns[at] * size.cell, size.width - ABOUT_PX.width);
    element.style.left = `${Math.max(0, left_px)}px`;
    element.style.top = isLow ? "auto" : `${above_px + ROW_PX + 2}px`;
    element.style.bottom = isLow ? `${size.height - above_px + 4}px` : "auto";
  };
  return html`<dl class="about" role="status" ref=${place}>
    ${Object.entries(facts).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}
  </dl>`;
}

function Legend({ legend }) {
  const paint = (background) => (swatch) => swatch && (swatch.style.background = background);
  return html`<span class="legend">
    ${legend.map(([background, words]) => html`<span key=${words}><i ref=${paint(background)}></i>${words}</span>`)}
  </span>`;
}

function TurnChoice({ tokens, go }) {
  const turns = tokens.path.turns;
  const words = (turn) => `${tokens.numbers.get(turn.turn_id)}: ${count(turn.end - turn.start)} tokens`;
  return html`<label>
    Turn${" "}
    <select onChange=${(event) => go(tokens.num_prompt + turns[event.target.value].start)}>
      <option value="" disabled selected>of ${turns.length}</option>
      ${turns.map((turn, place) => html`<option value=${place} key=${place}>${words(turn)}</option>`)}
    </select>
  </label>`;
}

function CopyIds({ ids }) {
  const [said, setSaid] = useState("");
  const copy = async () => {
    await copyText(JSON.stringify([...ids]));
    setSaid("copied");
    setTimeout(() => setSaid(""), SAID_MS);
  };
  return html`<button class="copy-ids" onClick=${copy}>${said || `copy ${count(ids.length)} ids`}</button>`;
}

/** Set the clipboard; pages of another machine without TLS have the old way alone. */
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.body.appendChild(document.createElement("textarea"));
  area.value = text;
  area.select();
  document.execCommand("copy");
  area.remove();
}
