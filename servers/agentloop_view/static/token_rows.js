// The tokens of a path as columns of numbers, and the rows of cells that they fill.

import { visible } from "./format.js";
import { turnsOf } from "./timeline.js";

export const OBSERVED = 0; // of a prompt, a tool or a user
export const MASKED = 1; // sampled, and out of the mask
export const TRAINED = 2;
export const MAX_CELLS = 48; // of one token

/** The tokens of a path, prompt and response, as columns of one length, and the label that each id is drawn with. */
export function tokensOf({ record, texts, annotations }, place) {
  const path = record.paths[place];
  const num_prompt = path.prompt_ids.length;
  const ids = Int32Array.from([...path.prompt_ids, ...path.response_ids]);
  const [kinds, constrained] = [new Uint8Array(ids.length), new Uint8Array(ids.length)];
  const [versions, turns] = [new Int32Array(ids.length).fill(-1), new Int32Array(ids.length).fill(-1)];
  const logprobs = new Float32Array(ids.length);
  for (const { version, start, end } of path.weight_versions) {
    versions.fill(version, num_prompt + start, num_prompt + end);
    kinds.fill(MASKED, num_prompt + start, num_prompt + end);
  }
  path.response_mask.forEach((isTrained, place) => isTrained && (kinds[num_prompt + place] = TRAINED));
  path.logprobs.forEach((logprob, place) => (logprobs[num_prompt + place] = logprob ?? NaN));
  const numbers = new Map(turnsOf(record.paths).map((turn, index) => [turn.turn_id, index + 1]));
  for (const turn of path.turns) {
    const start = num_prompt + turn.start;
    turns.fill(numbers.get(turn.turn_id), start, num_prompt + turn.end);
    constrained.fill(1, start, start + numConstrained(turn));
  }
  const annotated = new Map(); // columns of what a trainer said of single tokens, NaN where it said nothing
  for (const [name, { scope, values }] of Object.entries(annotations)) {
    if (scope !== "token" || !values[place].length) continue;
    const column = new Float32Array(ids.length).fill(NaN);
    column.set(values[place], num_prompt);
    annotated.set(`annotation ${name}`, column);
  }
  const labels = new Map(Object.entries(texts).map(([id, text]) => [Number(id), visible(text)]));
  const labelOf = (id) => labels.get(id) ?? `${id} `;
  return { path, texts, num_prompt, ids, kinds, versions, turns, numbers, constrained, logprobs, annotated, labelOf };
}

/** As `TurnSampling.num_constrained`. */
function numConstrained({ start, end, sampling }) {
  if (sampling === null) return 0;
  const isBiased = sampling.logit_bias.some(([, bias]) => bias !== 0);
  if (sampling.constraint_kind !== null || isBiased) return end - start;
  return sampling.stop_token_ids.length ? Math.min(sampling.min_tokens, end - start) : 0;
}

/** The first cell and the number of cells of each token in rows of `num_columns`, and the first token of each row. */
export function layOut(tokens, num_columns) {
  const [columns, widths] = [new Uint16Array(tokens.ids.length), new Uint16Array(tokens.ids.length)];
  const starts = [0];
  const sizes = new Map(); // by id: its cells, and whether it ends a row
  let column = 0;
  for (let place = 0; place < tokens.ids.length; place++) {
    const id = tokens.ids[place];
    if (!sizes.has(id)) sizes.set(id, sizeOf(tokens.labelOf(id), num_columns));
    const [num_cells, isEnd] = sizes.get(id);
    if (column + num_cells > num_columns) {
      starts.push(place);
      column = 0;
    }
    columns[place] = column;
    widths[place] = num_cells;
    column = isEnd ? num_columns : column + num_cells;
  }
  return { columns, widths, starts, num_tokens: tokens.ids.length };
}

/** The cells of a label, of which wide characters take two, and whether a line ends with it. */
function sizeOf(label, num_columns) {
  let num_cells = 0;
  for (const one of label) num_cells += one >= "\u1100" && !/[\u2000-\u2bff]/.test(one) ? 2 : 1;
  return [Math.max(1, Math.min(num_cells, MAX_CELLS, num_columns)), label.includes("↵")];
}

export function rowOf({ starts }, place) {
  let [low, high] = [0, starts.length];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (starts[middle] <= place) low = middle;
    else high = middle;
  }
  return low;
}

export function endOf({ starts, num_tokens }, row) {
  return starts[row + 1] ?? num_tokens;
}

/** The token in a cell; null where there is none. */
export function placeIn(layout, row, column) {
  if (row < 0 || row >= layout.starts.length) return null;
  for (let place = layout.starts[row]; place < endOf(layout, row); place++) {
    if (column < layout.columns[place] + layout.widths[place]) return place;
  }
  return null;
}

/** The token that a key leads to from the one at `at`; null if it leads nowhere. */
export function placeAfter(layout, at, key, num_rows) {
  const places = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: layout.num_tokens - 1 };
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: num_rows, PageUp: -num_rows };
  if (key in places) return Math.max(0, Math.min(places[key], layout.num_tokens - 1));
  if (!(key in steps)) return null;
  const row = Math.max(0, Math.min(rowOf(layout, at) + steps[key], layout.starts.length - 1));
  return placeIn(layout, row, layout.columns[at]) ?? endOf(layout, row) - 1;
}
