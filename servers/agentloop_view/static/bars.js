// Bars: histograms of what a listing counts, each bar a link to its records, and other values side by side.

import { html } from "./preact-htm.js";
import { link } from "./api.js";
import { NONE, count, plural, reward, seconds } from "./format.js";

const KINDS = [
  { name: "reward", title: "Reward", shown: reward, ends: ["min_reward", "max_reward"] },
  { name: "total_s", title: "Time", shown: seconds, ends: ["min_s", "max_s"] },
  { name: "num_sampled_tokens", title: "Sampled tokens", shown: (value) => count(Math.round(value)) },
];

/** The histograms of a listing's first page. A bar leads to the table of `query` with its range, if all rows are there. */
export function Histograms({ page, query = {} }) {
  return KINDS.filter(({ name }) => page.histograms[name]).map(({ name, title, shown, ends }) => {
    const { counts, edges } = page.histograms[name];
    const bars = counts.map((value, place) => {
      const [from, to] = [edges[place], edges[place + 1]];
      const isLink = ends && value && !page.isPart;
      const href = isLink ? link("table", { ...query, [ends[0]]: from, [ends[1]]: to }) : null;
      return { value, href, words: `${plural(value, "record")} from ${shown(from)} to ${shown(to)}` };
    });
    const number = counts.reduce((sum, value) => sum + value, 0);
    const about = `of ${plural(number, "record")}${page.is_of_latest ? " among the latest" : ""}`;
    const axis = { from: shown(edges[0]), to: shown(edges.at(-1)) };
    return html`<${Bars} key=${name} id=${`by-${name}`} ...${{ title, about, bars, ...axis }} />`;
  });
}

/** The ranges of a query in words, each with a link to the table without it. */
export function Ranges({ query }) {
  return KINDS.filter(({ ends }) => ends?.some((end) => query[end])).map(({ title, shown, ends }) => {
    const [from, to] = ends.map((end) => (query[end] ? shown(Number(query[end])) : NONE));
    const rest = Object.entries(query).filter(([name]) => !ends.includes(name));
    return html`<span>${title} ${from} to ${to} <a href=${link("table", Object.fromEntries(rest))}>any</a></span>`;
  });
}

/** One chart; `bars` are `{value, words, href}`, from 0 up and down, with words at the two ends of its axis. */
export function Bars({ id, title, about, bars, from, to }) {
  const values = bars.map((bar) => bar.value);
  const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
  const y = (value) => (60 * (high - value)) / (high - low || 1);
  const drawn = ({ value, words }, place) => html`<title>${words}</title>
    <rect class="around" x=${place} width="1" height="60" />
    <rect class="bar" x=${place + 0.05} width="0.9" y=${y(Math.max(value, 0))} height=${Math.abs(y(value) - y(0))} />`;
  return html`<figure id=${id}>
    <figcaption>${title} <span class="quiet">${about}</span></figcaption>
    <svg class="bars" viewBox="0 0 ${bars.length} 60" preserveAspectRatio="none">
      ${bars.map((bar, place) =>
        bar.href
          ? html`<a key=${place} href=${bar.href} aria-label=${bar.words}>${drawn(bar, place)}</a>`
          : html`<g key=${place}>${drawn(bar, place)}</g>`,
      )}
    </svg>
    <div class="ends quiet"><span>${from}</span><span>${to}</span></div>
  </figure>`;
}
