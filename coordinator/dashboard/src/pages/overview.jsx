import { useMemo } from "preact/hooks";
import { figuresOf, grouped, useTable } from "../live.js";
import { ago, money, NONE, plural, rate, seconds, watts, whole } from "../format.js";
import { Empty, Link, Panel, Reason, Spark, StandIn, Stat, State, Table, Workload, Waiting } from "../parts.jsx";
import { REGION_CHARTS, Timeline } from "../chart.jsx";
import { MoveRow } from "./migrations.jsx";
import { EventList } from "./events.jsx";
import { HeatMap } from "./fleet.jsx";

export function Overview() {
  const [nodes, devices, workloads, places, moves, events] =
    ["node_states", "devices", "workloads", "places", "migrations", "latest_events"].map(useTable);
  const placed = usePlaced(places);
  if (!nodes || !workloads || !devices || !places) return <Waiting />;
  const ready = nodes.filter((node) => node.live === "ready").length;
  const served = workloads.filter((each) => each.state === "ready").length;
  const power = devices.filter((each) => each.watts !== undefined && !each.shares);
  const using = new Set(places.map((each) => `${each.node}/${each.device}`));
  const now = figuresOf();
  const under = (moves ?? []).filter((move) => !["queued", "done", "aborted"].includes(move.stage));
  const lost = workloads.reduce((sum, each) => sum + (each.lost ?? 0), 0);
  return (
    <>
      <h1 class="hidden">Overview</h1>
      <div class="stats">
        <Stat name="Nodes ready" value={`${ready} of ${nodes.length}`} tone={ready < nodes.length ? "warn" : ""} href="#/fleet" note={plural(devices.length, "device")} />
        <Stat name="Workloads ready" value={`${served} of ${workloads.length}`} tone={served < workloads.length ? "warn" : ""} href="#/workloads" note={plural(places.length, "replica")} />
        <Stat name="Requests" value={rate(now.requests_per_s)} note={lost ? `${whole(lost)} lost since start` : "none lost"} tone={lost ? "bad" : ""} />
        <Stat name="Power" value={power.length ? watts(power.reduce((sum, each) => sum + each.watts, 0)) : NONE} note={`${power.length} of ${devices.length} devices tell`} />
        <Stat name="Cost of workloads" value={money(now.cost_usd_per_h)} note={`${plural(using.size, "device")} in use`} />
        <Stat name="Moves under way" value={whole(under.length)} href="#/migrations" note={`${whole((moves ?? []).length)} kept`} />
      </div>
      <Timeline charts={REGION_CHARTS} />
      <div class="cols">
        <div>
          <Attention nodes={nodes} workloads={workloads} devices={devices} />
          {under.length ? <Panel title="Moves under way">{under.map((move) => <MoveRow key={move.id} move={move} />)}</Panel> : null}
          <Panel title="Workloads" side={<Link to="workloads">all</Link>}>
            <Table label="Workloads" rows={workloads} most={12} keyOf={(row) => `${row.tenant}/${row.name}`} empty="Nothing is applied yet: shoal apply -f FILE" sort={{ at: 2, down: true }}
              columns={[
                { name: "Workload", key: (row) => row.name, cell: (row) => <Workload of={row} /> },
                { name: "State", key: (row) => row.state, cell: (row) => <State is={row.state} /> },
                { name: "Requests", end: true, key: (row) => figuresOf(row).requests_per_s, down: true, cell: (row) => rate(figuresOf(row).requests_per_s) },
                { name: "Five minutes", hide: "phone", cell: (row) => <Spark values={figuresOf(row).past_requests_per_s ?? []} label={`Requests of ${row.name} in the last five minutes`} /> },
                { name: "p95", end: true, cell: (row) => seconds(figuresOf(row).latency_p95_s) },
                { name: "Runs on", grow: true, hide: "phone", cell: (row) => <Places of={row} placed={placed} /> },
              ]} />
          </Panel>
        </div>
        <div>
          <Panel title="Devices" side={<Link to="fleet">fleet</Link>}><HeatMap devices={devices} /></Panel>
          <Panel title="Events" side={<Link to="events">all</Link>}><EventList events={(events ?? []).slice(-14).reverse()} /></Panel>
        </div>
      </div>
    </>
  );
}

/** Rows of `places` by workload, for `Places`. */
export const usePlaced = (places) => useMemo(() => grouped(places ?? [], (each) => `${each.tenant}/${each.name}`), [places]);

export function Places({ of, placed }) {
  const all = placed.get(`${of.tenant}/${of.name}`);
  if (!all) return <span class="muted">{of.reason?.code === "DELEGATED" ? of.reason.found : "nowhere"}</span>;
  return <span class="places">{all.map((each, at) => <span key={at} class={each.phase === "ready" ? "" : "muted"}>{each.node}<span class="muted">/{each.device}</span><StandIn is={each.stand_in} /></span>)}</span>;
}

function Attention({ nodes, workloads, devices }) {
  const found = [
    ...workloads.filter((each) => each.state !== "ready").map((each) => ({ key: `w${each.tenant}/${each.name}`, tone: each.state === "pending" ? "warn" : "move", what: <Workload of={each} />, state: each.state, reason: each.reason, since: each.since })),
    ...nodes.filter((each) => each.live !== "ready" || each.reason).map((each) => ({ key: `n${each.name}`, what: <Link to={`fleet/${each.name}`}>{each.name}</Link>, state: each.revoked ? "revoked" : each.quarantined ? "quarantined" : each.live !== "ready" ? each.live : each.cordoned ? "cordoned" : "not ready", reason: each.reason, since: each.seen })),
    ...devices.filter((each) => each.reason || each.throttled).map((each) => ({ key: `d${each.node}/${each.name}`, what: <Link to={`fleet/${each.node}`}>{each.node}/{each.name}</Link>, state: each.throttled ? "throttled" : "silent", reason: each.reason, since: each.since })),
  ];
  return (
    <Panel title="Needs a look">
      {found.length ? (
        <ul class="list">{found.slice(0, 12).map((each) => (
          <li key={each.key}><State is={each.state} tone={each.tone} /> <b>{each.what}</b> <Reason of={each.reason} />{each.since ? <span class="muted"> {ago(each.since)}</span> : null}</li>
        ))}{found.length > 12 ? <li class="muted">and {found.length - 12} more</li> : null}</ul>
      ) : <Empty>All nodes answer, and every workload is served as asked.</Empty>}
    </Panel>
  );
}
