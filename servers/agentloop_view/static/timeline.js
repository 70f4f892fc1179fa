// The course of a trajectory as lanes over time, on bands of the weight versions that its tokens were sampled under.

import { html, useLayoutEffect, useRef, useState } from "./preact-htm.js";
import { count, milliseconds, seconds } from "./format.js";

const LANES = ["queue", "place", "prefill", "decode", "tools", "reward", "unavailable"];
const LANE_PX = 18;
const NAMES_PX = 80;
const BAND_PX = 18;
const AXIS_PX = 18;
const QUEUE_SHARE = 0.15; // of the rest: longer waits in the queue are cut

/** What happened, as `{lane, from_us, to_us, words}`; the queue is before 0. Without times: nothing. */
function eventsOf({ times, timings, paths }) {
  const [, ended_us, , calls] = times;
  const events = [{ lane: "queue", from_us: -1e6 * timings.queue_s, to_us: 0, words: "waits for a worker" }];
  for (const [place, turn] of turnsOf(paths).entries()) {
    if (turn.times === null) continue;
    const [begun_us, first_us, until_us, place_us, unavailable_us] = turn.times;
    const name = `turn ${place + 1} on ${turn.replica_id}`;
    const sampled = `${count(turn.end - turn.start)} tokens sampled`;
    const placed_us = begun_us + place_us;
    events.push({ lane: "place", from_us: begun_us, to_us: placed_us, words: `${name} waits for its place` });
    if (first_us !== null) {
      const cached = `${count(turn.prompt_len)} tokens, of which ${count(turn.cached_tokens)} were cached`;
      events.push({ lane: "prefill", from_us: placed_us, to_us: first_us, words: `${name}, to its first token: ${cached}` });
    }
    const untold = first_us === null ? ", prefill included" : "";
    const words = `${name}: ${sampled}${untold}`;
    events.push({ lane: "decode", from_us: first_us ?? placed_us, to_us: until_us, words });
    const stood = `${name}: its engine stood still, at a time that is not known: drawn at the turn's end`;
    events.push({ lane: "unavailable", from_us: until_us - unavailable_us, to_us: until_us, words: stood });
  }
  for (const [name, begun_us, duration_us, outcome] of calls) {
    const call = { lane: "tools", from_us: begun_us, to_us: begun_us + duration_us, words: `${name}: ${outcome}` };
    events.push({ ...call, isBad: outcome !== "ok" });
  }
  events.push({ lane: "reward", from_us: ended_us - 1e6 * timings.reward_s, to_us: ended_us, words: "scoring" });
  return events.filter((event) => event.to_us > event.from_us);
}

/** The turns of a record, each once, in the order by which all pages number them: as they began. */
export function turnsOf(paths) {
  const turns = new Map(paths.flatMap((path) => path.turns.map((turn) => [turn.turn_id, turn])));
  return [...turns.values()].sort((one, other) => (one.times?.[0] ?? 0) - (other.times?.[0] ?? 0));
}

/** The versions over time, each until the next one begins; within a turn as its tokens are, evenly spread. */
function bandsOf(paths, end_us) {
  const begins = [];
  for (const path of paths) {
    for (const turn of path.turns.filter((one) => one.times)) {
      const from_us = turn.times[1] ?? turn.times[0];
      const each_us = (turn.times[2] - from_us) / (turn.end - turn.start || 1);
      for (const span of path.weight_versions) {
        const start = Math.max(span.start, turn.start);
        const isFirst = span.start <= turn.start; // it was under this version from its beginning on
        if (start < Math.min(span.end, turn.end)) {
          const into_us = each_us * (start - turn.start);
          begins.push({ version: span.version, from_us: isFirst ? turn.times[0] : from_us + into_us });
        }
      }
    }
  }
  begins.sort((one, other) => one.from_us - other.from_us);
  const bands = begins.filter((band, place) => place === 0 || begins[place - 1].version !== band.version);
  return bands.map((band, place) => ({ ...band, to_us: bands[place + 1]?.from_us ?? end_us }));
}

export function Timeline({ record }) {
  const box = useRef(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const watch = new ResizeObserver(([{ contentRect }]) => setWidth(contentRect.width));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const missing = html`<p class="quiet">This record has no times.</p>`;
  const drawing = width > NAMES_PX && record.times && drawn(record, width);
  return html`<section>
    <h2>Course</h2>
    <div class="timeline" ref=${box}>${record.times === null ? missing : drawing}</div>
  </section>`;
}

function drawn(record, width) {
  const events = eventsOf(record);
  const to_us = Math.max(record.times[1], ...events.map((event) => event.to_us), 1);
  const from_us = Math.max(-QUEUE_SHARE * to_us, Math.min(0, ...events.map((event) => event.from_us)));
  const bands = bandsOf(record.paths, to_us);
  const lanes = LANES.filter((lane) => events.some((event) => event.lane === lane));
  const scale = (width - NAMES_PX - 8) / (to_us - from_us);
  const x = (at_us) => NAMES_PX + scale * (at_us - from_us);
  const bottom = BAND_PX + lanes.length * LANE_PX;
  const found = [...new Set(bands.map((band) => band.version))].sort((one, other) => one - other);
  const number = (version) => found.indexOf(version) % 6;
  const step_us = stepOf((to_us - from_us) / (width / 110));
  const tick = (at_us) => (step_us < 1e4 ? milliseconds(at_us / 1e3) : seconds(at_us / 1e6));
  const ticks = Array.from({ length: Math.floor(to_us / step_us) + 1 }, (_, place) => place * step_us);
  return html`<svg width=${width} height=${bottom + AXIS_PX} role="img" aria-label="course of the trajectory">
    <text class="name" x="0" y=${BAND_PX - 5}>weights</text>
    ${bands.map(
      ({ version, ...band }) => html`<g class=${`version-${number(version)}`}>
        <rect class="band" x=${x(band.from_us)} width=${scale * (band.to_us - band.from_us)} y="0" height=${bottom} />
        <text x=${x(band.from_us) + 4} y=${BAND_PX - 5}>${version}</text>
      </g>`,
    )}
    ${lanes.map((lane, row) => html`<text class="name" x="0" y=${BAND_PX + (row + 1) * LANE_PX - 5}>${lane}</text>`)}
    ${events.map(
      (event) => html`<rect
        class=${`event ${event.lane} ${event.isBad ? "is-bad" : ""}`} x=${x(Math.max(event.from_us, from_us))}
        width=${Math.max(1, scale * (event.to_us - Math.max(event.from_us, from_us)))}
        y=${BAND_PX + lanes.indexOf(event.lane) * LANE_PX + 3} height=${LANE_PX - 6}
      >
        <title>${event.words}, ${milliseconds((event.to_us - event.from_us) / 1000)}</title>
      </rect>`,
    )}
    ${record.times[4].map(
      ([at_us, replica]) => html`<g class="move">
        <line x1=${x(at_us)} x2=${x(at_us)} y1=${BAND_PX} y2=${bottom} />
        <text x=${x(at_us) + 3} y=${bottom - 3}>moved to ${replica}</text>
      </g>`,
    )}
    ${ticks.map(
      (at_us) => html`<line class="tick" x1=${x(at_us)} x2=${x(at_us)} y1=${bottom} y2=${bottom + 4} />
        <text class="name" x=${x(at_us)} y=${bottom + 15}>${tick(at_us)}</text>`,
    )}
  </svg>`;
}

/** The step of an axis: the next larger of 1, 2 and 5 times a power of ten. */
function stepOf(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}
