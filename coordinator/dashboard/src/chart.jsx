// Figures over time: small charts that share one cursor, with their values as text.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { ask } from "./live.js";
import { carbon, clock, joules, money, percent, rate, seconds, watts } from "./format.js";
import { Panel } from "./parts.jsx";

export const WORKLOAD_CHARTS = [
  { figure: "requests_per_s", name: "Requests", show: rate },
  { figure: "latency_p95_s", name: "p95 at the worker", show: seconds },
  { figure: "within_bound", name: "Within the bound", show: percent, top: 1 },
  { figure: "energy", name: "Energy of an inference", show: joules },
  { figure: "cost_usd_per_h", name: "Cost", show: money },
  { figure: "carbon_g_per_h", name: "Carbon of its requests", show: carbon },
];
export const REGION_CHARTS = [
  { figure: "requests_per_s", name: "Requests", show: rate },
  { figure: "energy", name: "Power", show: watts },
  { figure: "cost_usd_per_h", name: "Cost of workloads", show: money },
  { figure: "carbon_g_per_h", name: "Carbon of requests", show: carbon },
];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The last hour, or day, of a workload, or of the region, as charts. */
export function Timeline({ charts, of, bound }) {
  const [day, setDay] = useState(false);
  const [told, setTold] = useState(null);
  useEffect(() => {
    let over = false, timer = 0;
    const look = () => ask("timeline", { name: of?.name, tenant: of?.tenant, coarse: day ? "1" : "" })
      .then((data) => { if (!over) setTold(data); }, () => {})
      .finally(() => { if (!over) timer = setTimeout(look, day ? 60_000 : 10_000); });
    look();
    return () => { over = true; clearTimeout(timer); };
  }, [of?.name, of?.tenant, day]);
  const byName = new Map((told?.series ?? []).map((each) => [each.figure, each.values ?? []]));
  const isKnown = (each) => knownOf(byName.get(each.figure)).length > 1;
  const shown = told ? charts.filter(isKnown) : charts, lacking = charts.filter((each) => !shown.includes(each));
  return (
    <Panel title={day ? "The last day" : "The last hour"} wide side={<div class="seg" role="group" aria-label="Time"><button aria-pressed={!day} onClick={() => setDay(false)}>hour</button><button aria-pressed={day} onClick={() => setDay(true)}>day</button></div>}>
      <div class="charts">
        {shown.map((each) => <Chart key={each.figure} {...each} bound={each.figure === "latency_p95_s" ? bound : undefined} start={told?.start_at} step={told?.step_s} values={byName.get(each.figure)} />)}
      </div>
      {lacking.length ? <p class="more muted">Not known of this time: {lacking.map((each) => each.name.toLowerCase()).join(", ")}.</p> : null}
    </Panel>
  );
}

const knownOf = (values) => (values ?? []).filter((v) => v !== null && v !== undefined);

function Chart({ name, show, values: all, start: begins, step, top, bound }) {
  const place = useRef(null), drawn = useRef(null);
  const [at, setAt] = useState(null);
  // Time before anything was known is left out, but for ten minutes: a young region's charts are not empty space.
  const first = Math.max(0, Math.min((all ?? []).findIndex((v) => v !== null && v !== undefined), (all ?? []).length - 600 / (step || 10)));
  const values = useMemo(() => all?.slice(first), [all, first]);
  const start = begins + first * step;
  const known = knownOf(values);
  useEffect(() => {
    if (!place.current || known.length < 2) return undefined;
    const draw = () => {
      drawn.current?.destroy();
      if (!place.current) return;
      const muted = colour("--muted"), line = colour("--line"), accent = colour("--accent");
      const font = "11px system-ui, sans-serif";
      drawn.current = new uPlot({
        width: place.current.clientWidth, height: 104, padding: [6, 14, 0, 0], legend: { show: false },
        cursor: { sync: { key: "time" }, drag: { x: false, y: false }, points: { size: 5 } },
        scales: { y: { range: (_, low, high) => [0, top ?? (Math.max(high, bound ?? 0) * 1.15 || 1)] } },
        axes: [
          { stroke: muted, font, size: 20, gap: 2, grid: { show: false }, ticks: { show: false }, values: (_, all) => all.map((each) => clock(each).slice(0, 5)), space: 54 },
          { stroke: muted, font, size: 58, gap: 4, grid: { stroke: line, width: 1 }, ticks: { show: false }, space: 30, values: (_, all) => all.map((each) => (each ? show(each) : "0")) },
        ],
        series: [{}, { stroke: accent, width: 1.5, fill: colour("--accent-soft"), points: { show: false } },
          ...(bound ? [{ stroke: colour("--warn"), width: 1, dash: [4, 4], points: { show: false } }] : [])],
        hooks: { setCursor: [(plot) => setAt(plot.cursor.idx ?? null)] },
      }, dataOf(), place.current);
    };
    const dataOf = () => [values.map((_, n) => start + n * step), values.map((v) => v ?? null), ...(bound ? [values.map(() => bound)] : [])];
    draw();
    const sized = new ResizeObserver(() => place.current && drawn.current?.setSize({ width: place.current.clientWidth, height: 104 }));
    sized.observe(place.current);
    const themed = new MutationObserver(draw);
    themed.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", draw);
    return () => { sized.disconnect(); themed.disconnect(); system.removeEventListener("change", draw); drawn.current?.destroy(); drawn.current = null; };
  }, [values, bound]);
  const shown = at !== null && values?.[at] !== null && values?.[at] !== undefined ? values[at] : [...known].at(-1);
  return (
    <figure class="chart">
      <figcaption><span>{name}</span> <b class="num">{show(shown)}</b> <span class="muted num">{at !== null && start ? clock(start + at * step) : known.length ? `highest ${show(Math.max(...known))}` : ""}</span></figcaption>
      {known.length < 2 ? <p class="empty" /> : <div class="plot" ref={place} aria-hidden="true" />}
    </figure>
  );
}
