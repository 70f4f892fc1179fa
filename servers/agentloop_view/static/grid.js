// A table of rows by columns, and the keys that walk through one.

import { html } from "./preact-htm.js";

export const NUMBER = "number";

/**
 * Columns are `[head, cell(row), class]`, `over` a row above their heads. Each row has its key as `data-key`; those of
 * a walked table are reached by the arrow keys, and Enter opens the first link of one.
 */
export function Grid({ id, columns, rows, keyOf, over, isWalked = false }) {
  return html`<div class="wide">
    <table id=${id} class=${isWalked ? "walked" : ""}>
      <thead>
        ${over}
        <tr>${columns.map(([head, , kind]) => html`<th class=${kind ?? ""}>${head}</th>`)}</tr>
      </thead>
      <tbody onKeyDown=${isWalked ? walk : null}>
        ${rows.map(
          (row) => html`<tr key=${keyOf(row)} data-key=${keyOf(row)} tabindex=${isWalked ? 0 : null}>
            ${columns.map(([, cell, kind]) => html`<td class=${kind ?? ""}>${cell(row)}</td>`)}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

function walk(event) {
  const row = event.target.closest("tr");
  const steps = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling };
  if (event.target !== row) return;
  if (event.key === "Enter") row.querySelector("a").click();
  if (!(event.key in steps)) return;
  event.preventDefault();
  steps[event.key]?.focus();
}
