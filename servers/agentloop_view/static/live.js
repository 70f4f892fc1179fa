// What a service does at this moment: its findings, its replicas, and what is in flight.

import { html } from "./preact-htm.js";
import { Reading, link, withQuery } from "./api.js";
import { SmallCurve, rates, summed, useHistory } from "./charts.js";
import { count, seconds, share } from "./format.js";
import { Grid, NUMBER } from "./grid.js";

export function Findings({ trajectory }) {
  const shown = ({ cause, text, since_s, action }) => html`<li class="finding" key=${text}>
    <strong>${cause}</strong> ${text} ${since_s !== null && html`<span class="quiet">since ${seconds(since_s)}</span>`}
    <div class="quiet">→ ${action}</div>
  </li>`;
  const draw = (found) => html`<ul class="findings">${found.map(shown)}</ul>`;
  return html`<${Reading} path=${withQuery("/why", { trajectory })} every_s=${2} draw=${draw} />`;
}

export function Why({ query }) {
  const { trajectory } = query;
  return html`
    <h1>Why ${trajectory ? html`<span class="quiet">${trajectory}</span> waits` : "nothing moves, or is slow"}</h1>
    <${Findings} trajectory=${trajectory} />
  `;
}

export function Live() {
  return html`<${Reading} path="/flight?limit=100" every_s=${1} draw=${inFlight} />`;
}

function inFlight(flight) {
  const doing = flight.doing.map(([name, number]) => `${count(number)} ${name}`).join(", ");
  return html`
    <p>${doing || "Nothing is in flight"}; ${count(flight.num_free)} places of workers are free.</p>
    ${flight.silent.map(([worker, for_s]) => html`<p class="bad">${worker} is silent since ${seconds(for_s)}.</p>`)}
    ${flight.blocked.map((one) => html`<p class="bad">${one.process} was blocked at ${one.place}.</p>`)}
    <${Flights} title="Oldest trajectories" rows=${flight.oldest} />
    <${Flights} title="Sessions that wait or are idle, for longest" rows=${flight.sessions} />
    <${Flights} title="Slowest tools, rewards and loops" rows=${flight.longest_tools} />
  `;
}

const FLIGHTS = [
  ["trajectory", ({ id }) => html`<a href=${link("why", { trajectory: id })}>${id}</a>`],
  ["waits for", ({ flight }) => `${flight.doing} ${flight.what}`],
  ["for", ({ flight }) => seconds(flight.for_s), NUMBER],
  ["age", ({ flight }) => seconds(flight.age_s), NUMBER],
  ["left", ({ flight }) => seconds(flight.left_s), NUMBER],
  ["turn", ({ flight }) => count(flight.turn), NUMBER],
  ["sampled tokens", ({ flight }) => count(flight.num_tokens), NUMBER],
  ["replica", ({ replica }) => replica],
  ["worker", ({ worker }) => worker],
];

function Flights({ title, rows }) {
  if (!rows.length) return null;
  return html`<section>
    <h2>${title}</h2>
    <${Grid} isWalked columns=${FLIGHTS} rows=${rows} keyOf=${(row) => row.id} />
  </section>`;
}

export function Fleet() {
  const rows = useHistory(["replica_sampled_tokens_total", "replica_requests"]);
  return html`<${Reading} path="/status" every_s=${2} draw=${(status) => replicasNow(status, rows)} />`;
}

function replicasNow({ queue, users, degraded, replicas, starting, lost }, rows) {
  return html`
    <p>
      ${count(queue.num_queued)} samples are queued and ${count(queue.num_waiting)} calls
      wait (longest ${seconds(queue.longest_wait_s)}, median ${seconds(queue.median_wait_s)}${waitingUsers(users)}); KV${" "}
      ${count(queue.kv_predicted_tokens)} of ${count(queue.kv_limit_tokens)} tokens promised.
      ${queue.reason && html` <span class="bad">${queue.reason}</span>`}
    </p>
    ${degraded.map((sentence) => html`<p class="bad" key=${sentence}>${sentence}</p>`)}
    <${Grid} id="replicas" columns=${replicaColumns(rows)} rows=${replicas} keyOf=${(one) => one.replica_id} />
    ${starting.map((one) => html`<p>${one.replica_id} starts since ${seconds(one.waiting_s)}. ${one.reason}</p>`)}
    ${lost.map((one) => html`<p>${one.replica_id} was lost ${seconds(one.age_s)} ago: ${one.reason}</p>`)}
  `;
}

function waitingUsers(users) {
  const waiting = users.filter((one) => one.waiting_calls);
  return waiting.map((one) => `; ${one.name} ${count(one.waiting_calls)}`).join("");
}

const replicaColumns = (rows) => [
  ["replica", (one) => html`${one.replica_id} <span class="quiet">${one.engine}</span>`],
  ["state", (one) => html`<span class=${one.error ? "bad" : ""}>${stateOf(one)}</span>`],
  ["weights", (one) => count(one.weight_version), NUMBER],
  ["running", (one) => count(one.load.num_running), NUMBER],
  ["waiting", (one) => count(one.load.num_waiting), NUMBER],
  ["KV: used, promised, limit", (one) => html`<${KvBar} replica=${one} />`],
  ["found cached", (one) => share(one.kv_hit_rate), NUMBER],
  ["leases", (one) => count(one.num_leases), NUMBER],
  ["preempted", (one) => count(one.load.num_preemptions), NUMBER],
  ["heartbeat", (one) => seconds(one.heartbeat_age_s), NUMBER],
  ["sampled", (one) => curve(rows, "replica_sampled_tokens_total", [one.replica_id], "tokens/s", rates)],
  ["running", (one) => curve(rows, "replica_requests", [one.replica_id, "running"], "requests")],
];

function stateOf({ state, is_paused, is_thrashing, error }) {
  return [state, is_paused && "paused", is_thrashing && "thrashing", error].filter(Boolean).join(", ");
}

function curve(rows, name, labels, unit, transform) {
  return rows && html`<${SmallCurve} values=${summed(rows, name, labels, transform)} unit=${unit} />`;
}

function KvBar({ replica }) {
  const capacity = replica.load.kv_capacity_tokens || 1;
  const percent = (num_tokens) => `${Math.min(100, (100 * num_tokens) / capacity)}%`;
  const numbers = [replica.load.kv_used_tokens, replica.kv_predicted_tokens, replica.kv_limit_tokens];
  return html`<span class="kv">
    <svg width="120" height="14" aria-hidden="true">
      <rect class="capacity" width="100%" height="14" />
      <rect class="promised" width=${percent(replica.kv_predicted_tokens)} height="14" />
      <rect class="used" width=${percent(replica.load.kv_used_tokens)} y="4" height="6" />
      <rect class="limit" x=${percent(replica.kv_limit_tokens - capacity / 60)} width="2" height="14" />
    </svg>
    ${numbers.map(count).join(", ")} <span class="quiet">of ${count(replica.load.kv_capacity_tokens)} tokens</span>
  </span>`;
}
