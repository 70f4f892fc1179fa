// Curves of `GET /history`: its rows gathered in the page, uPlot's charts of them with the weight updates as marks,
// and small curves in a table's cell.

import { html, useEffect, useRef, useState } from "./preact-htm.js";
import { read, useRepeated } from "./api.js";
import { NONE } from "./format.js";

const KEPT_S = 900;
const EVERY_S = 2;
const CURVES = ["--series-1", "--series-2", "--series-3", "--series-4"];

/** A color of the style sheet, which knows light and dark. */
export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The last quarter of an hour of the series of some names; null before the first answer. */
export function useHistory(names) {
  const [rows, setRows] = useState(null);
  const kept = useRef({ times: [], series: new Map() });
  const ask = async (signal) => {
    const asked = [...names.map((name) => ["metric", name]), ["since", kept.current.times.at(-1) ?? 0]];
    const page = await read(`/history?${new URLSearchParams(asked)}`, signal).catch(() => null);
    if (page === null || signal.aborted) return;
    kept.current = joined(kept.current, page);
    setRows(kept.current);
  };
  useRepeated(ask, EVERY_S, []);
  return rows;
}

function joined(old, page) {
  const times = [...old.times, ...page.times];
  const first = Math.max(0, times.findIndex((at_s) => at_s > times.at(-1) - KEPT_S));
  const series = new Map();
  const fresh = new Map(page.series.map((one) => [[one.name, ...one.labels].join(" "), one]));
  for (const key of new Set([...old.series.keys(), ...fresh.keys()])) {
    const { name, labels } = fresh.get(key) ?? old.series.get(key);
    const before = old.series.get(key)?.values ?? old.times.map(() => null);
    const after = fresh.get(key)?.values ?? page.times.map(() => null);
    const values = [...before, ...after].slice(first);
    if (values.some((value) => value !== null)) series.set(key, { name, labels, values });
  }
  return { times: times.slice(first), series };
}

/** The series of a name that have all of some labels, added up; null where there is none. */
export function summed(rows, name, labels = [], transform = (values) => values) {
  const has = (one) => one.name === name && labels.every((label) => one.labels.includes(label));
  const wanted = [...rows.series.values()].filter(has);
  const columns = wanted.map((one) => transform(one.values, rows.times));
  return rows.times.map((_, row) => {
    const there = columns.map((values) => values[row]).filter((value) => value !== null);
    return there.length ? there.reduce((sum, value) => sum + value, 0) : null;
  });
}

/** What a counter grew by a second, between each row and the one before; a counter that begins anew has a gap. */
export function rates(values, times) {
  return values.map((value, row) => {
    const before = row ? values[row - 1] : null;
    if (value === null || before === null || value < before) return null;
    return (value - before) / (times[row] - times[row - 1]);
  });
}

/** The weight updates as `{at_s, version}`. */
export function updatesOf(rows) {
  const versions = summed(rows, "weight_version");
  return rows.times.flatMap((at_s, row) => {
    const isNew = row > 0 && versions[row - 1] !== null && versions[row] !== versions[row - 1];
    return isNew && versions[row] !== null ? [{ at_s, version: versions[row] }] : [];
  });
}

/** One chart; `curves` are `{label, values}`, and `marks` those of `updatesOf`. */
export function Chart({ title, unit, times, curves, marks }) {
  const place = useRef(null);
  const drawn = useRef(null);
  const latest = useRef(marks);
  latest.current = marks;
  const data = [times, ...curves.map((curve) => curve.values)];
  useEffect(() => {
    const chart = new window.uPlot(optionsOf(curves, unit, () => latest.current), data, place.current);
    const watch = new ResizeObserver(([{ contentRect }]) => chart.setSize({ width: contentRect.width, height: 130 }));
    watch.observe(place.current);
    drawn.current = chart;
    return () => {
      watch.disconnect();
      chart.destroy();
    };
  }, [curves.length]);
  useEffect(() => drawn.current.setData(data), [times]);
  return html`<figure>
    <figcaption>${title} <span class="quiet">${unit}</span></figcaption>
    <div class="chart" ref=${place}></div>
  </figure>`;
}

function optionsOf(curves, unit, marks) {
  const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
  const look = { width: 1.5, points: { show: false } };
  const shown = (_, value) => (value === null || value === undefined ? NONE : `${+value.toFixed(2)} ${unit}`);
  return {
    width: 300,
    height: 130,
    cursor: { sync: { key: "overview" }, y: false, drag: { x: false, y: false } },
    scales: { y: { range: (_, low, high) => [0, Math.max(1, 1.1 * high)] } },
    axes: [{ ...axis, size: 24, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 48 }],
    series: [
      { label: "time", value: (_, at_s) => (at_s ? clock(at_s) : NONE) },
      ...curves.map(({ label }, place) => ({ ...look, label, stroke: color(CURVES[place]), value: shown })),
    ],
    hooks: { draw: [(chart) => drawMarks(chart, marks())] },
  };
}

const clock = (at_s) => new Date(1000 * at_s).toLocaleTimeString("sv");

function drawMarks(chart, marks) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = color("--mark");
  ctx.font = `${10 * devicePixelRatio}px system-ui`;
  ctx.textAlign = "left";
  for (const { at_s, version } of marks) {
    const x = chart.valToPos(at_s, "x", true);
    ctx.beginPath();
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillText(`v${version}`, x + 3 * devicePixelRatio, bbox.top + 10 * devicePixelRatio);
  }
  ctx.restore();
}

/** A curve for a table's cell, from 0 to its largest value, which stands beside it with its unit. */
export function SmallCurve({ values, unit }) {
  const top = Math.max(...values.filter((value) => value !== null), 0);
  const x = (place) => (70 * place) / (values.length - 1 || 1);
  const points = values.map((value, place) => `${x(place)},${19 - (18 * (value ?? 0)) / (top || 1)}`);
  return html`<span class="small-curve">
    <svg width="70" height="20" aria-hidden="true"><polyline points=${points.join(" ")} /></svg>
    <span class="quiet">≤ ${+top.toFixed(1)} ${unit}</span>
  </span>`;
}
