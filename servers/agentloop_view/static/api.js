// What the pages read, with the key that the user gave; and where the address bar says that they are.

import { html, useEffect, useState } from "./preact-htm.js";

const KEY = "agentloop-key";

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

const held = document.getElementById("held"); // a report's answers, by path
const answers = held && JSON.parse(held.textContent);

const ORDERS = {
  newest: (one, other) => other.seq - one.seq,
  slowest: (one, other) => other.total_s - one.total_s,
  best: (one, other) => other.reward - one.reward,
  worst: (one, other) => one.reward - other.reward,
};

function heldAnswer(path) {
  const [name, query] = path.split("?");
  const answer = answers[name];
  if (answer === undefined) throw Object.assign(new Error("this file does not have it"), { status: 404 });
  if (!answer.records) return answer;
  const { group, failed, task, text = "", order = "newest", ...ranges } = Object.fromEntries(new URLSearchParams(query));
  const { min_reward = -Infinity, max_reward = Infinity, min_s = 0, max_s = Infinity } = ranges;
  const isScored = order === "best" || order === "worst" || ranges.min_reward || ranges.max_reward;
  const isAsked = (one) =>
    (!group || `${one.rollout_id}/${one.group_id}` === group) &&
    (!failed || one.failure !== null) &&
    (!task || one.task_id === task) &&
    (!isScored || (one.reward !== null && one.reward >= min_reward && one.reward < max_reward)) &&
    one.total_s >= min_s &&
    one.total_s < max_s &&
    `${one.task}\n${one.answer}`.toLowerCase().includes(text.toLowerCase());
  const records = answer.records.filter(isAsked).sort(ORDERS[order]);
  const histograms = records.length < answer.records.length ? {} : answer.histograms; // they are of all
  return { ...answer, cursor: "", isPart: answer.cursor !== "", records, histograms };
}

/** Read JSON from `path` of the server that serves these pages. Throws Error with its message and `status`. */
export async function read(path, signal) {
  if (answers) return heldAnswer(path);
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(new URL(`..${path}`, document.baseURI), { headers, signal });
  if (answer.ok) return answer.json();
  const said = await answer.json().catch(() => null);
  const message = said?.error?.message ?? `the server answers ${answer.status}`;
  if (answer.status === 401) window.dispatchEvent(new CustomEvent("refused", { detail: message }));
  throw Object.assign(new Error(message), { status: answer.status });
}

/** The path of a query; what is empty is left out. */
export function withQuery(path, query) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== false);
  const text = new URLSearchParams(given).toString();
  return text ? `${path}?${text}` : path;
}

/** Call `act(signal)` now and, while the page is visible, `every_s` after each end; 0: once. */
export function useRepeated(act, every_s, dependencies) {
  useEffect(() => {
    const gone = new AbortController();
    let timer = 0;
    const again = async () => {
      if (!document.hidden) await act(gone.signal);
      wait();
    };
    const wait = () => {
      if (every_s && !gone.signal.aborted) timer = setTimeout(again, 1000 * every_s);
    };
    act(gone.signal).then(wait);
    return () => {
      gone.abort();
      clearTimeout(timer);
    };
  }, [every_s, ...dependencies]);
}

/** The latest answer of `path` (null: none is asked for) and the error since, read again every so many seconds. */
export function useRead(path, every_s = 0) {
  const [state, setState] = useState({ path, value: null, error: null });
  const ask = async (signal) => {
    if (path === null) return;
    try {
      const value = await read(path, signal);
      if (!signal.aborted) setState({ path, value, error: null });
    } catch (error) {
      if (!signal.aborted) setState((old) => ({ path, value: old.path === path ? old.value : null, error }));
    }
  };
  useRepeated(ask, every_s, [path]);
  return state.path === path ? state : { path, value: null, error: null };
}

/** What `draw` makes of the latest answer, below the error since. */
export function Reading({ path, every_s = 0, draw }) {
  const { value, error } = useRead(path, every_s);
  const missing = error === null && html`<p class="quiet">reading …</p>`;
  return html`${error && html`<p class="bad">${error.message}</p>`} ${value === null ? missing : draw(value)}`;
}

export function link(page, query = {}) {
  return withQuery(`#/${page}`, query);
}

/** Change the address without a step back for each letter that was typed. */
export function replaceQuery(page, query) {
  location.replace(link(page, query));
}

function routeOfAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, seq] = (path || "overview").split("/");
  return { page, seq, query: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

/** The page of the address bar, the record that it names, and its query. */
export function useRoute() {
  const [route, setRoute] = useState(routeOfAddress);
  useEffect(() => {
    const follow = () => setRoute(routeOfAddress());
    window.addEventListener("hashchange", follow);
    return () => window.removeEventListener("hashchange", follow);
  }, []);
  return route;
}
