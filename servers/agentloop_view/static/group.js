// The samples of a group side by side, and two of them compared token by token.

import { html, useMemo } from "./preact-htm.js";
import { Reading, link, replaceQuery, withQuery } from "./api.js";
import { count, plural, reward, seconds, versions } from "./format.js";
import { Grid, NUMBER } from "./grid.js";
import { End } from "./table.js";
import { tokensOf } from "./token_rows.js";
import { Tokens } from "./tokens.js";

export function Group({ query }) {
  const path = withQuery("/trajectories", { group: query.group, limit: 200 });
  return html`<${Reading} path=${path} draw=${(page) => drawn(page, query)} />`;
}

function drawn(page, query) {
  const samples = [...page.records].sort((one, other) => one.sample_index - other.sample_index);
  const [first] = samples;
  const byReward = [...samples].sort((one, other) => (other.reward ?? 0) - (one.reward ?? 0));
  const chosen = { a: query.a ?? String(byReward[0]?.seq), b: query.b ?? String(byReward.at(-1)?.seq) };
  const number = `${page.cursor && "the latest "}${plural(samples.length, "sample")}`;
  const choose = (name) => (event) => replaceQuery("group", { ...query, ...chosen, [name]: event.target.value });
  return html`
    <h1>${first?.task_id} <span class="quiet">group ${query.group}, ${number}</span></h1>
    <p>${first?.task}</p>
    <${Samples} ...${{ samples, chosen, choose }} />
    ${samples.length > 1 && html`<${Comparison} key=${`${chosen.a} ${chosen.b}`} ...${chosen} />`}
  `;
}

function Samples({ samples, chosen, choose }) {
  const choice = (name) => (sample) => html`<input type="radio" name=${name} value=${sample.seq}
    aria-label=${`compare sample ${sample.sample_index} as ${name}`}
    checked=${chosen[name] === String(sample.seq)} onChange=${choose(name)} />`;
  const meter = (name) => {
    const most = Math.max(...samples.map((sample) => sample[name] ?? 0), 1e-9);
    return ["", (sample) => html`<meter value=${sample[name] ?? 0} max=${most}></meter>`];
  };
  const columns = [
    ["A", choice("a")],
    ["B", choice("b")],
    ["sample", (sample) => html`<a href=${link(`trajectory/${sample.seq}`)}>${sample.sample_index}</a>`],
    meter("reward"),
    ["reward", (sample) => reward(sample.reward), NUMBER],
    meter("total_s"),
    ["time", (sample) => seconds(sample.total_s), NUMBER],
    meter("num_sampled_tokens"),
    ["sampled tokens", (sample) => count(sample.num_sampled_tokens), NUMBER],
    ["turns", (sample) => count(sample.num_turns), NUMBER],
    ["weights", (sample) => versions(sample.oldest_version, sample.newest_version), NUMBER],
    ["end", (sample) => html`<${End} record=${sample} />`],
    ["answer", (sample) => html`<span class="line">${sample.answer}</span>`],
  ];
  return html`<${Grid} id="samples" isWalked columns=${columns} rows=${samples} keyOf=${(sample) => sample.seq} />`;
}

function Comparison({ a, b }) {
  const both = (one) => (other) => html`<${Compared} pages=${[one, other]} />`;
  const second = (one) => html`<${Reading} path=${`/trajectories/${b}`} draw=${both(one)} />`;
  return html`<${Reading} path=${`/trajectories/${a}`} draw=${second} />`;
}

function Compared({ pages }) {
  const latest = (page) => page.record.paths.length > 0 && tokensOf(page, page.record.paths.length - 1);
  const sides = useMemo(() => pages.map(latest), []);
  if (!sides.every(Boolean)) return html`<p>One of them has no tokens.</p>`;
  const place = firstDifference(sides[0].ids, sides[1].ids);
  const alike = `A and B have the same ${count(sides[0].ids.length)} tokens.`;
  const into_response = place - sides[0].num_prompt;
  const into = into_response < 0 ? "within A's prompt" : `${count(into_response)} tokens into A's response`;
  const differ = `A and B share their first ${count(place)} tokens and differ from there, ${into}.`;
  const marked = (tokens) => (place === null ? null : Math.min(place, tokens.ids.length - 1));
  return html`
    <h2>Compared, in their latest paths</h2>
    <p id="difference">${place === null ? alike : differ}</p>
    <section class="path">
      ${sides.map((tokens, number) => {
        const [name, { record }] = ["AB"[number], pages[number]];
        return html`<div key=${name}>
          <h3>${name}: sample ${record.sample_index}, reward ${reward(record.reward)}</h3>
          <${Tokens} tokens=${tokens} coloring="mask" marked=${marked(tokens)} label=${`tokens of ${name}`} />
        </div>`;
      })}
    </section>
  `;
}

/** The first place where two arrays differ, also where one has ended; null if they are equal. */
function firstDifference(one, other) {
  const place = one.findIndex((id, index) => id !== other[index]);
  if (place >= 0) return place;
  return one.length === other.length ? null : one.length;
}
