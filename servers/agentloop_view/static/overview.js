// The overview: findings and curves of a service, and of all records so far their ends and rewards by weight version.

import { html } from "./preact-htm.js";
import { Reading, link } from "./api.js";
import { Bars, Histograms } from "./bars.js";
import { Chart, rates, summed, updatesOf, useHistory } from "./charts.js";
import { NONE, count, plural, reward, seconds, share } from "./format.js";
import { Grid, NUMBER } from "./grid.js";
import { Findings } from "./live.js";
import { columnsOf } from "./table.js";

const OF_REPLICAS = ["replica_sampled_tokens_total", "replica_requests", "replica_kv_tokens"];
const CURVES = [...OF_REPLICAS, "samples", "calls_waiting", "trajectories_total", "weight_version"];

export function Overview({ isLive, seesAll }) {
  const every_s = isLive ? 5 : 0;
  const phases = seesAll && html`<${Reading} path="/phases" every_s=${every_s} draw=${phasesOf} />`;
  const draw = (page) => html`<${Totals} page=${page} phases=${phases} />`;
  return html`
    ${isLive && seesAll && html`<${Findings} /><${Curves} />`}
    <${Reading} path="/trajectories?limit=1" every_s=${every_s} draw=${draw} />
    <${Reading} path="/trajectories/notable" draw=${(found) => found.length > 0 && html`<${Notable} found=${found} />`} />
  `;
}

function Notable({ found }) {
  const rows = found.map(({ record, reasons }) => ({ ...record, reasons }));
  const facts = columnsOf("task", "answer", "reward", "end", "time", "turns", "sampled", "weights", "group");
  const columns = [...columnsOf("#"), ["why", (one) => one.reasons.join(", ")], ...facts];
  return html`<section>
    <h2>Worth a look</h2>
    <${Grid} id="notable" isWalked columns=${columns} rows=${rows} keyOf=${({ seq }) => seq} />
  </section>`;
}

function Curves() {
  const rows = useHistory(CURVES);
  if (rows === null) return html`<p class="quiet">no history yet</p>`;
  const shared = { times: rows.times, marks: updatesOf(rows) };
  const curve = (label, name, labels, transform) => ({ label, values: summed(rows, name, labels, transform) });
  const charts = [
    ["Sampled", "tokens/s", [curve("sampled", "replica_sampled_tokens_total", [], rates)]],
    ["In engines", "requests", ["running", "waiting"].map((phase) => curve(phase, "replica_requests", [phase]))],
    ["Samples", "samples", ["running", "queued", "held"].map((state) => curve(state, "samples", [state]))],
    ["KV cache", "tokens", ["used", "promised", "limit"].map((kind) => curve(kind, "replica_kv_tokens", [kind]))],
    ["Ended", "trajectories/s", [curve("ended", "trajectories_total", [], rates)]],
    ["Calls without a place", "calls", [curve("waiting", "calls_waiting")]],
  ];
  return html`<section class="charts">
    ${charts.map(([title, unit, curves]) => html`<${Chart} key=${title} ...${{ ...shared, title, unit, curves }} />`)}
  </section>`;
}

const SUMS = ["num_records", "num_failed", "num_rewarded", "reward", "total_s", "num_sampled_tokens"];

/** Totals that are alike in `keyOf`, added up, in the order of their keys. */
function grouped(totals, keyOf) {
  const found = new Map();
  for (const total of totals) {
    const key = keyOf(total);
    const sums = found.get(key) ?? { key };
    const added = { ...total, num_failed: total.failure === null ? 0 : total.num_records };
    for (const name of SUMS) sums[name] = (sums[name] ?? 0) + added[name];
    found.set(key, sums);
  }
  return [...found.values()].sort((one, other) => (one.key > other.key ? 1 : -1));
}

/** The seconds of each phase, in the colors of a trajectory's course; nothing before any were reported. */
function phasesOf(page) {
  const spent = Object.entries(page);
  const most_s = Math.max(...spent.map(([, spent_s]) => spent_s));
  if (!most_s) return null;
  const bar = ([name, spent_s]) => html`<svg width="140" height="10" aria-hidden="true">
    <rect class=${name} width=${(140 * spent_s) / most_s} height="10" />
  </svg>`;
  const columns = [["phase", ([name]) => name], ["", bar], ["seconds so far", ([, spent_s]) => seconds(spent_s), NUMBER]];
  return html`<${Grid} id="phases" columns=${columns} rows=${spent} keyOf=${([name]) => name} />`;
}

const DISTANCES = { "mean |diff|": "mean_abs_diff", "k3-KL": "k3_kl", ESS: "ess", clipped: "share_outside" };
const ageOf = ({ age }) => age ?? NONE;
const AGES = [
  ["age of weights", ageOf, NUMBER],
  ["trained tokens", ({ distance }) => count(distance.num_tokens), NUMBER],
  ...Object.entries(DISTANCES).map(([name, key]) => [name, ({ distance }) => distance[key].toPrecision(3), NUMBER]),
];

function Totals({ page, phases }) {
  if (!page.totals.length) return html`<p class="quiet">There are no records yet.</p>`;
  const [all] = grouped(page.totals, () => "all");
  const meanReward = (sums) => reward(sums.num_rewarded ? sums.reward / sums.num_rewarded : null);
  const columns = [
    ["records", (sums) => count(sums.num_records), NUMBER],
    ["share", (sums) => html`<meter value=${sums.num_records} max=${all.num_records}></meter>`],
    ["mean reward", meanReward, NUMBER],
    ["failed", (sums) => share(sums.num_failed / sums.num_records), NUMBER],
    ["mean time", (sums) => seconds(sums.total_s / sums.num_records), NUMBER],
    ["sampled tokens", (sums) => count(sums.num_sampled_tokens), NUMBER],
  ];
  const byVersion = ["newest weights", ({ key }) => (key < 0 ? NONE : key), NUMBER];
  const keyOf = (sums) => sums.key;
  const byEnd = ["end", keyOf];
  const versions = grouped(page.totals, (total) => total.newest_version ?? -1);
  const ends = grouped(page.totals, (total) => total.stop_reason);
  const scored = versions.filter((sums) => sums.key >= 0 && sums.num_rewarded);
  const bars = scored.map((sums) => {
    const words = `weights ${sums.key}: ${meanReward(sums)}, of ${plural(sums.num_rewarded, "record")}`;
    return { value: sums.reward / sums.num_rewarded, words };
  });
  const about = `by newest weights, at most ${reward(Math.max(...bars.map((bar) => bar.value)))}`;
  const axis = { about, from: `weights ${scored[0]?.key}`, to: `weights ${scored.at(-1)?.key}` };
  return html`
    <p id="all-records">
      <a href=${link("table")}>${plural(all.num_records, "record")}</a>, mean reward ${meanReward(all)}, mean time
      ${" "}${seconds(all.total_s / all.num_records)}, ${count(all.num_sampled_tokens)} sampled tokens; also deleted ones
    </p>
    <section class="charts">
      ${bars.length > 0 && html`<${Bars} title="Mean reward" ...${{ bars, ...axis }} />`}
      ${page.curves?.map((curve) => html`<${Bars} key=${curve.title} ...${curve} />`)}
      <${Histograms} page=${page} />
    </section>
    <section class="side-by-side">
      <${Grid} id="by-version" columns=${[byVersion, ...columns]} rows=${versions} keyOf=${keyOf} />
      <${Grid} id="by-end" columns=${[byEnd, ...columns]} rows=${ends} keyOf=${keyOf} />
      ${page.mismatch?.length > 0 && html`<${Grid} id="mismatch" columns=${AGES} rows=${page.mismatch} keyOf=${ageOf} />`}
      ${phases}
    </section>
  `;
}
