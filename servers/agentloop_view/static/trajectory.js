// One trajectory: its facts, its course, the tree of its paths, and of one path the messages and the tokens.

import { html, useMemo, useState } from "./preact-htm.js";
import { Reading, link, replaceQuery } from "./api.js";
import { NONE, count, milliseconds, moment, plural, reward, seconds, versions } from "./format.js";
import { Grid, NUMBER } from "./grid.js";
import { groupOf } from "./table.js";
import { Timeline } from "./timeline.js";
import { tokensOf } from "./token_rows.js";
import { COLORINGS, Tokens } from "./tokens.js";

const SHOWN_CHARS = 20_000; // of a text at first: browsers take seconds to lay out a line of megabytes

export function Trajectory({ query, seq }) {
  return html`<${Reading} path=${`/trajectories/${seq}`} draw=${(page) => drawn(page, query, seq)} />`;
}

function drawn(page, query, seq) {
  const { paths, task_messages } = page.record;
  const place = Math.min(Number(query.path ?? 0), paths.length - 1);
  return html`
    <${Facts} ...${page} seq=${seq} />
    <${Timeline} record=${page.record} />
    ${paths.length > 1 && html`<${Paths} ...${{ paths, place, seq, query }} />`}
    ${place < 0
      ? html`<p>Nothing was rendered, so it has no tokens.</p><${Messages} messages=${task_messages} />`
      : html`<${Path} key=${place} ...${{ page, place, query, seq }} />`}
  `;
}

function Facts({ record, annotations, seq }) {
  const sampled = record.paths.flatMap((path) => path.weight_versions.map((span) => span.version));
  sampled.sort((one, other) => one - other);
  const { timings, times } = record;
  const lost = Object.entries(times?.[5] ?? {}).map(([cause, num_tokens]) => `${count(num_tokens)} by ${cause}`);
  const numbers = (named) => Object.entries(named).map(([name, value]) => `${name} ${reward(value)}`).join(", ");
  const annotated = Object.entries(annotations).filter(([, one]) => one.scope !== "token");
  const facts = {
    reward: reward(record.reward),
    annotations: annotated.map(([name, { values }]) => `${name} ${values[0].map(reward).join(" | ")}`).join(", "),
    "its parts": numbers(record.components),
    end: record.is_complete ? record.stop_reason : html`<span class="bad">${record.stop_reason}, not complete</span>`,
    reason: record.end_reason,
    error: record.error ?? record.reward_error,
    time: `${seconds(timings.total_s)}, after ${seconds(timings.queue_s)} in the queue`,
    generating: `${seconds(timings.generate_s)}, of it unavailable ${seconds(timings.unavailable_s)}`,
    tools: `${plural(record.num_tool_calls, "call")}, ${count(record.num_tool_errors)} failed, ${seconds(timings.tool_s)}`,
    scoring: seconds(timings.reward_s),
    began: moment(times?.[0]),
    weights: `${versions(sampled[0], sampled.at(-1))}, ${count(record.staleness)} behind`,
    "lost tokens": lost.join(", "),
    metrics: numbers(record.metrics),
    worker: times?.[2],
    attempt: record.attempt && `${record.attempt}, ${record.num_stale_attempts} dropped as stale`,
  };
  return html`
    <h1>
      ${record.task_id} <span class="quiet">record ${seq}, sample ${record.sample_index} of${" "}</span>
      <a href=${link("group", { group: groupOf(record) })}>its group</a>
    </h1>
    <dl class="facts">
      ${Object.entries(facts)
        .filter(([, value]) => value)
        .map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>
  `;
}

function Paths({ paths, place, seq, query }) {
  const row = (path, number, depth) => [{ path, number, depth }, ...rows(number, depth + 1)];
  const isChild = (path, parent) => (path.lineage ?? path).parent === parent;
  const rows = (parent, depth) => paths.flatMap((path, at) => (isChild(path, parent) ? row(path, at, depth) : []));
  return html`<section>
    <h2>Paths</h2><ul class="paths">
      ${rows(null, 0).map(({ path, number, depth }) => {
        const { agent, lineage, split_reason, split_detail, response_mask } = path;
        const about = [
          split_reason,
          `${plural(response_mask.filter(Boolean).length, "token")} in the mask, ${plural(path.turns.length, "turn")}`,
          path.num_shared > 0 && `${plural(path.num_shared, "token")} shared with path ${path.parent}`,
          ...[!path.is_trainable && "not for training", path.reward !== null && `reward ${reward(path.reward)}`],
        ];
        return html`<li key=${number} ref=${(item) => item && (item.style.marginLeft = `${1.5 * depth}em`)}>
          <a href=${link(`trajectory/${seq}`, { ...query, path: number })} aria-current=${number === place}>
            path ${number}${agent && `, agent ${agent}`}${lineage && html`: <strong>${lineage.kind}</strong>`}
          </a>
          ${" "}<span class="quiet">${about.filter(Boolean).join(", ")}</span>
          ${[lineage?.evidence, split_detail].filter(Boolean).map((text) => html`<div class="detail">${text}</div>`)}
        </li>`;
      })}
    </ul>
  </section>`;
}

function Path({ page, place, query, seq }) {
  const tokens = useMemo(() => tokensOf(page, place), [page, place]);
  const { path } = tokens;
  const num_response = count(path.response_ids.length);
  const turns = path.turns.map((turn) => ({ ...turn, number: tokens.numbers.get(turn.turn_id) }));
  const colorings = [...COLORINGS, ...tokens.annotated.keys()];
  const coloring = colorings.includes(query.color) ? query.color : colorings[0];
  const choose = (event) => replaceQuery(`trajectory/${seq}`, { ...query, color: event.target.value });
  return html`
    <section class="path">
      <div>
        <h2>Messages</h2>
        <${Messages} messages=${path.messages} />
      </div>
      <div>
        <h2>
          Tokens${" "}
          <span class="quiet">${count(tokens.num_prompt)} of the prompt, ${num_response} of the response</span>
          <label>
            Color by${" "}
            <select onChange=${choose}>
              ${colorings.map((name) => html`<option value=${name} selected=${name === coloring}>${name}</option>`)}
            </select>
          </label>
        </h2>
        ${page.missing && html`<p class="bad">${page.missing}</p>`}
        <${Tokens} tokens=${tokens} coloring=${coloring} />
        <details>
          <summary>Turns</summary>
          <${Grid} columns=${TURNS} rows=${turns} keyOf=${(turn) => turn.turn_id} />
        </details>
      </div>
    </section>
  `;
}

function Messages({ messages }) {
  return html`<ol class="messages">
    ${messages.map(
      ({ role, name, tool_call_id, reasoning, images, content, tool_calls }, number) => html`<li class=${role} key=${number}>
        <h3>${role} <span class="quiet">${name} ${tool_call_id}</span></h3>
        ${reasoning && html`<details open><summary>reasoning</summary><${Text} text=${reasoning} /></details>`}
        ${images.length > 0 && html`<p class="quiet">${plural(images.length, "image")}</p>`}
        <${Text} text=${content} />
        ${tool_calls.map((call) => html`<${Call} call=${call} key=${call.id} />`)}
      </li>`,
    )}
  </ol>`;
}

function Call({ call }) {
  return html`<div class="call">
    <strong>${call.name}</strong> <span class="quiet">${call.id}</span>
    <${Text} text=${call.error === null ? JSON.stringify(call.arguments, null, 1) : call.text} />
    ${call.error !== null && html`<p class="bad">${call.error}</p>`}
  </div>`;
}

/** A text of a model, a tool or a user. It is only ever set as text, and only as much of it as can be looked at. */
function Text({ text }) {
  const [isWhole, setWhole] = useState(false);
  if (!text) return null;
  const isCut = !isWhole && text.length > SHOWN_CHARS;
  return html`<pre>${isCut ? text.slice(0, SHOWN_CHARS) : text}</pre>
    ${isCut && html`<button onClick=${() => setWhole(true)}>show all ${count(text.length)} characters</button>`}`;
}

const TURNS = [
  ["turn", (turn) => turn.number, NUMBER],
  ["replica", (turn) => turn.replica_id],
  ["prompt tokens", (turn) => count(turn.prompt_len), NUMBER],
  ["cached", (turn) => count(turn.cached_tokens), NUMBER],
  ["sampled", (turn) => count(turn.end - turn.start), NUMBER],
  ["place", ({ times }) => spent(times && times[3]), NUMBER],
  ["prefill", ({ times }) => spent(times && times[1] && times[1] - times[0] - times[3]), NUMBER],
  ["decode", ({ times }) => spent(times && times[1] && times[2] - times[1]), NUMBER],
  ["unavailable", ({ times }) => spent(times && times[4]), NUMBER],
  ["end", (turn) => turn.finish_reason],
  ["reward", (turn) => reward(turn.reward), NUMBER],
  ["sampling", ({ sampling }) => (sampling === null ? NONE : sampledBy(sampling))],
];

const spent = (microseconds) => milliseconds(microseconds === null ? null : microseconds / 1000);

function sampledBy({ temperature, top_p, top_k, min_p, constraint_kind }) {
  return `temperature ${temperature}, top-p ${top_p}, top-k ${top_k}, min-p ${min_p}, ${constraint_kind ?? "free"}`;
}
