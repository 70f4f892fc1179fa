// The frame of the viewer: its pages, the state of the service above them, and the question for a key.

import { html, render, useEffect, useState } from "./preact-htm.js";
import { keepKey, link, read, useRead, useRoute } from "./api.js";
import { count, plural } from "./format.js";
import { Group } from "./group.js";
import { Fleet, Live, Why } from "./live.js";
import { Overview } from "./overview.js";
import { Table } from "./table.js";
import { Trajectory } from "./trajectory.js";
import { Weights } from "./weights.js";

const PAGES = { overview: Overview, table: Table, trajectory: Trajectory, group: Group, weights: Weights };
const LIVE_PAGES = { fleet: Fleet, live: Live, why: Why };
const SEEN = { 403: "own", 404: "stored" }; // by the answer to what is an admin's; else all
const WITHOUT = { own: "with a user's key", stored: "for a stored run" };
const MENU = ["overview", "table", "weights", ...Object.keys(LIVE_PAGES)];

function App() {
  const route = useRoute();
  const [seen, setSeen] = useState(null); // null: not known yet
  const [refusal, setRefusal] = useState(null);
  const [attempt, setAttempt] = useState(0); // counts keys and changes between light and dark: all is drawn anew
  useEffect(() => {
    read("/flight?limit=1").then(() => setSeen("all"), (error) => setSeen(SEEN[error.status] ?? "all"));
  }, [attempt]);
  useEffect(() => {
    const again = () => setAttempt((number) => number + 1);
    window.addEventListener("refused", (event) => setRefusal(event.detail));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  }, []);
  const accept = (key) => {
    keepKey(key);
    setRefusal(null);
    setSeen(null);
    setAttempt(attempt + 1);
  };
  if (refusal !== null) return html`<${KeyQuestion} refusal=${refusal} accept=${accept} />`;
  const isLive = seen === "all" || seen === "own";
  const seesAll = seen === "all" || seen === "stored";
  const pages = seen in WITHOUT ? PAGES : { ...PAGES, ...LIVE_PAGES };
  const Page = pages[route.page];
  const missing = html`<p>There is no page “${route.page}” ${WITHOUT[seen]}.</p>`;
  return html`
    <header>
      <strong>agentloop</strong>
      <nav>
        ${MENU.filter((name) => name in (seen === null ? PAGES : pages)).map(
          (name) => html`<a href=${link(name)} aria-current=${name === route.page ? "page" : null}>${name}</a>`,
        )}
      </nav>
      ${isLive && html`<${ServiceState} key=${attempt} seesAll=${seesAll} />`}
      ${seen === "stored" && html`<span class="quiet">a stored run</span>`}
    </header>
    <main key=${`${route.page} ${route.seq} ${attempt}`}>
      ${Page === undefined ? missing : html`<${Page} ...${{ ...route, isLive, seesAll }} />`}
    </main>
  `;
}

function ServiceState({ seesAll }) {
  const { value: status, error } = useRead("/status", 2);
  if (error !== null) return html`<span class="bad">${error.message}</span>`;
  if (status === null) return null;
  const words = [
    status.is_paused ? "paused" : status.is_ready ? "ready" : "no replica takes traffic",
    `weights ${count(status.weight_version)}`,
    `${plural(status.replicas.length, "replica")}, ${plural(status.num_workers, "worker")}`,
  ];
  const word = seesAll ? html`<a class="bad" href=${link("why")}>degraded</a>` : "degraded";
  const degraded = status.degraded.length ? html` · ${word}` : "";
  return html`<span class=${status.is_ready ? "quiet" : "bad"}>${words.join(" · ")}${degraded}</span>`;
}

function KeyQuestion({ refusal, accept }) {
  const submit = (event) => {
    event.preventDefault();
    accept(new FormData(event.target).get("key"));
  };
  return html`
    <main class="question">
      <h1>agentloop</h1>
      <p>The service asks for a key: ${refusal}</p>
      <form onSubmit=${submit}>
        <label>Key <input type="password" name="key" autocomplete="off" autofocus required /></label>
        <button>Open</button>
      </form>
      <p class="quiet">It is kept until this tab is closed, and sent to this service only.</p>
    </main>
  `;
}

render(html`<${App} />`, document.body);
