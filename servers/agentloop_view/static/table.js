// The table of all records: filters that stand in the address, pages by cursor, and rows that keys walk through.

import { html, useEffect, useRef, useState } from "./preact-htm.js";
import { link, read, replaceQuery, withQuery } from "./api.js";
import { Histograms, Ranges } from "./bars.js";
import { count, plural, reward, seconds, shortMoment, versions } from "./format.js";
import { Grid, NUMBER } from "./grid.js";

const ORDERS = ["newest", "slowest", "best", "worst"];
const PAGE_SIZE = 100;

export function Table({ query }) {
  const change = (changed) => replaceQuery("table", { ...query, ...changed });
  const type = (name) => (event) => change({ [name]: event.target.value });
  const onlyFailed = (event) => change({ failed: event.target.checked });
  const current = query.text ? "newest" : (query.order ?? "newest");
  const listed = useListing(query);
  return html`
    <form class="filters" role="search" onSubmit=${(event) => event.preventDefault()}>
      <label>
        Order ${" "}
        <select disabled=${Boolean(query.text)} title="a search lists the newest first" onChange=${type("order")}>
          ${ORDERS.map((order) => html`<option value=${order} selected=${order === current}>${order}</option>`)}
        </select>
      </label>
      <label>
        Search <input type="search" placeholder="in task and answer" value=${query.text} onInput=${type("text")} />
      </label>
      <label>Task <input placeholder="task id" value=${query.task} onInput=${type("task")} /></label>
      <label><input type="checkbox" checked=${query.failed === "true"} onChange=${onlyFailed} /> failed only</label>
      <${Ranges} query=${query} />
    </form>
    ${listed.first && html`<section class="charts"><${Histograms} page=${listed.first} query=${query} /></section>`}
    ${listed.error && html`<p class="bad">${listed.error.message}</p>`}
    <${Grid} id="records" isWalked over=${OVER} columns=${COLUMNS} rows=${listed.records} keyOf=${({ seq }) => seq} />
    <p class="quiet">
      ${plural(listed.records.length, "record")} shown${" "}
      ${listed.cursor && html`<button disabled=${listed.isLoading} onClick=${listed.more}>more</button>`}
      ${!listed.cursor && !listed.isLoading && (listed.first?.isPart ? "— this file has no more" : "— these are all")}
    </p>
  `;
}

/** The records of a query so far, and `more` to add the next page. */
function useListing(address) {
  const none = { records: [], cursor: "", first: null, error: null };
  const [state, setState] = useState(none);
  const [isLoading, setLoading] = useState(true);
  const asked = useRef(null);
  const query = { ...address, order: address.text ? "newest" : address.order, limit: PAGE_SIZE };
  const load = async (before, { signal }) => {
    setLoading(true);
    try {
      const page = await read(withQuery("/trajectories", { ...query, cursor: before.cursor }), signal);
      const records = [...before.records, ...page.records];
      setState({ records, cursor: page.cursor, first: before.first ?? page, error: null });
    } catch (error) {
      if (signal.aborted) return;
      setState({ ...before, error });
    }
    setLoading(false);
  };
  useEffect(() => {
    asked.current = new AbortController();
    load(none, asked.current);
    return () => asked.current.abort();
  }, [withQuery("", query)]);
  return { ...state, isLoading, more: () => load(state, asked.current) };
}

export const groupOf = (record) => `${record.rollout_id}/${record.group_id}`;

const COLUMNS = [
  ["#", (one) => html`<a href=${link(`trajectory/${one.seq}`)}>${one.seq}</a>`, NUMBER],
  ["task", (one) => html`<span class="line">${one.task_id} <span class="quiet">${one.task}</span></span>`],
  ["answer", (one) => html`<span class="line">${one.answer}</span>`],
  ["reward", (one) => reward(one.reward), NUMBER],
  ["end", (one) => html`<${End} record=${one} />`],
  ["time", (one) => seconds(one.total_s), NUMBER],
  ["turns", (one) => count(one.num_turns), NUMBER],
  ["calls", (one) => count(one.num_tool_calls), NUMBER],
  ["failed", (one) => count(one.num_tool_errors), NUMBER],
  ["prompt", (one) => count(one.num_prompt_tokens), NUMBER],
  ["observed", (one) => count(one.num_observed_tokens), NUMBER],
  ["sampled", (one) => count(one.num_sampled_tokens), NUMBER],
  ["weights", (one) => versions(one.oldest_version, one.newest_version), NUMBER],
  ["stale", (one) => count(one.staleness), NUMBER],
  ["replica", (one) => html`<span class="short">${one.replica}</span>`],
  ["began", (one) => shortMoment(one.began_at)],
  ["group", (one) => html`<a href=${link("group", { group: groupOf(one) })}>group</a> ${one.sample_index}`],
];

/** Some of the columns, by their heads. */
export const columnsOf = (...heads) => COLUMNS.filter(([head]) => heads.includes(head));

const OVER = html`<tr>
  <th colspan="7"></th>
  <th colspan="2" class="over">tools</th>
  <th colspan="3" class="over">tokens</th>
  <th colspan="5"></th>
</tr>`;

export function End({ record }) {
  return html`<span class=${record.failure ? "bad" : ""} title=${record.failure ?? ""}>${record.stop_reason}</span>`;
}
