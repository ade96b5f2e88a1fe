import { ago, bytes, joules, seconds, short, whole } from "../format.js";
import { Reason, StandIn, State, Table, Workload, Link } from "../parts.jsx";

export function Placements({ rows, of }) {
  const columns = [
    { name: "Replica", hide: "phone", key: (row) => row.id, cell: (row) => <code>{row.id}</code> },
    ...(of ? [] : [{ name: "Workload", key: (row) => row.name, cell: (row) => <Workload of={row} /> }]),
    { name: "Place", key: (row) => `${row.node}/${row.device}`, cell: (row) => <><Link to={`fleet/${row.node}`}>{row.node}</Link><span class="muted">/{row.device}</span> <StandIn is={row.stand_in} /></> },
    { name: "State", key: (row) => row.phase, cell: (row) => <State is={row.draining ? "draining" : row.standby && row.phase === "ready" ? "standby" : row.live !== "ready" ? row.live : row.phase ?? "starting"} /> },
    { name: "Since", end: true, hide: "phone", key: (row) => row.since, cell: (row) => ago(row.since) },
    { name: "Precision", hide: "phone", cell: (row) => row.precision },
    { name: "Answered", end: true, key: (row) => row.requests ?? 0, down: true, cell: (row) => whole(row.requests ?? 0) },
    { name: "Errors", end: true, hide: "phone", cell: (row) => (row.errors ? <b class="bad">{whole(row.errors)}</b> : "0") },
    { name: "p95", end: true, key: (row) => row.p95, down: true, cell: (row) => seconds(row.p95) },
    { name: "Energy", end: true, hide: "phone", key: (row) => row.joules, down: true, cell: (row) => <span title={row.energy}>{joules(row.joules)}</span> },
    { name: "Note", grow: true, has: (row) => row.code || row.stays, cell: (row) => (row.code ? <Reason of={{ code: row.code, found: row.why }} /> : <span class="muted">{row.stays ?? ""}</span>) },
  ];
  return <Table stack label="Replicas" rows={rows} keyOf={(row) => row.id} columns={columns} empty="Nothing runs." />;
}
