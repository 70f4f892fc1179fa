// Weight updates: the steps of each as lanes, a replica a lane, and the version that each replica holds now.

import { html } from "./preact-htm.js";
import { Reading } from "./api.js";
import { count, mebibytes, milliseconds, seconds } from "./format.js";
import { Grid, NUMBER } from "./grid.js";

export function Weights({ isLive }) {
  if (isLive) return html`<${Reading} path="/status" every_s=${2} draw=${updatesOf} />`;
  return html`<${Reading} path="/updates" draw=${(updates) => updatesOf({ updates, replicas: [] })} />`;
}

function updatesOf(status) {
  const longest_ms = Math.max(...status.updates.map(stallOf), 1e-9);
  const stallColumns = [
    ["update to", (update) => update.version, NUMBER],
    ["", (update) => html`<meter value=${stallOf(update)} max=${longest_ms}></meter>`],
    ["longest stall", (update) => milliseconds(stallOf(update)), NUMBER],
    ["whole update", (update) => milliseconds(update.total_ms), NUMBER],
  ];
  return html`
    <section class="side-by-side">
      ${status.replicas.length > 0 &&
      html`<${Grid} id="holders" columns=${holderColumns(status.weight_version)} rows=${status.replicas} keyOf=${nameOf} />`}
      <${Grid} id="stalls" columns=${stallColumns} rows=${status.updates} keyOf=${(update) => update.version} />
    </section>
    ${status.update && html`<${UnderWay} update=${status.update} />`}
    ${!status.updates.length && html`<p class="quiet">No update yet.</p>`}
    ${[...status.updates].reverse().map((update) => html`<${Update} update=${update} key=${update.version} />`)}
  `;
}

const stallOf = (update) => Math.max(0, ...update.replicas.map((replica) => replica.stall_ms));

const nameOf = (replica) => replica.replica_id;

const holderColumns = (newest) => [
  ["replica", nameOf],
  ["weights", ({ weight_version: its }) => html`<span class=${its === newest ? "" : "bad"}>${count(its)}</span>`, NUMBER],
  ["state", ({ state, error }) => html`<span class=${error ? "bad" : ""}>${state} ${error ?? ""}</span>`],
];

function UnderWay({ update }) {
  return html`<p class="finding">
    The update to ${update.version} is ${update.state} since ${seconds(update.age_s)}; it waits for${" "}
    ${update.waits_for.join(", ") || "nothing"}.
    ${update.failures.map((failure) => html`<br /><span class="bad">${failure}</span>`)}
  </p>`;
}

/** Since the update began; in reports of an earlier release, right after its stage. */
const stallBegin = ({ stage_ms, paused_at_ms }) => paused_at_ms || stage_ms;

/** The steps of one replica as `{name, from_ms, ms}`. The update was staged, then the replica stood still. */
function stepsOf(replica) {
  const { stage_ms, transfer_ms, stall_ms, swap_ms, verify_ms, canary_ms } = replica;
  const isOnePhase = replica.staging_device === "nowhere"; // its commit transfers
  const stall_from = stallBegin(replica);
  const swap_from = stall_from + (isOnePhase ? transfer_ms : 0);
  return [
    { name: "stage", from_ms: 0, ms: stage_ms },
    { name: "transfer", from_ms: isOnePhase ? stall_from : stage_ms - transfer_ms, ms: transfer_ms, isInner: true },
    { name: "stall", from_ms: stall_from, ms: stall_ms },
    { name: "swap", from_ms: swap_from, ms: swap_ms, isInner: true },
    { name: "verify", from_ms: swap_from + swap_ms, ms: verify_ms, isInner: true },
    { name: "canary", from_ms: stall_from + stall_ms, ms: canary_ms },
  ];
}

const STEPS = ["stage", "transfer", "stall", "swap", "verify", "canary"];

function Update({ update }) {
  const ends = update.replicas.map((replica) => stallBegin(replica) + replica.stall_ms + replica.canary_ms);
  const percent = (ms) => `${(100 * ms) / Math.max(...ends, 1e-9)}%`;
  const bytes = Math.max(0, ...update.replicas.map((replica) => replica.num_bytes));
  const head = (name) => html`<svg width="10" height="10"><rect class=${`step ${name}`} width="10" height="10" /></svg>${" "}
    ${name}`;
  const drawn = ({ name, from_ms, ms, isInner }) => {
    const [y, height] = isInner ? [9, 7] : [2, 14];
    return html`<rect class=${`step ${name}`} x=${percent(from_ms)} width=${percent(ms)} y=${y} height=${height} />`;
  };
  const columns = [
    ["replica", nameOf],
    ["", (replica) => html`<svg width="100%" height="18">${stepsOf(replica).map(drawn)}</svg>`, "lane"],
    ...STEPS.map((name) => [head(name), (replica) => milliseconds(replica[`${name}_ms`]), NUMBER]),
    ["over", ({ transport, error }) => html`${transport} ${error !== null && html`<span class="bad">${error}</span>`}`],
    ["verified", (replica) => count(replica.num_verified), NUMBER],
  ];
  return html`<section>
    <h2>
      ${count(update.previous_version)} → ${update.version}${" "}
      <span class="quiet">${milliseconds(update.total_ms)}, KV ${update.kv_policy}, ${mebibytes(bytes)} a worker</span>
    </h2>
    <${Grid} columns=${columns} rows=${update.replicas} keyOf=${nameOf} />
  </section>`;
}
