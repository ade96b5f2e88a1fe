import { rateOf, useTable } from "../live.js";
import { ago, percent, plural, rate, seconds, whole } from "../format.js";
import { Panel, Reason, State, Table, useFilter, Workload } from "../parts.jsx";
import { Places, worst } from "./overview.jsx";

const ORDER = { pending: 0, deleting: 1, progressing: 2, ready: 3 };

export function Workloads() {
  const rows = useTable("workloads"), placements = useTable("placements") ?? [];
  const [found, filter] = useFilter(rows, (row) => `${row.tenant}/${row.name} ${row.policy} ${row.state} ${row.reason?.code ?? ""}`);
  return (
    <>
      <h1>Workloads <span class="muted">{rows ? plural(rows.length, "workload") : ""}</span></h1>
      <Panel title="All workloads" side={filter}>
        <Table label="Workloads" rows={found} keyOf={(row) => `${row.tenant}/${row.name}`} sort={{ at: 1, down: false }} empty="No workload matches. Apply one with: shoal apply -f FILE" columns={[
          { name: "Workload", key: (row) => `${row.tenant}/${row.name}`, cell: (row) => <Workload of={row} /> },
          { name: "State", key: (row) => ORDER[row.state] ?? 0, cell: (row) => <State is={row.state} /> },
          { name: "Replicas", end: true, key: (row) => row.ready ?? 0, cell: (row) => `${row.ready ?? 0}/${row.wanted ?? 0}` },
          { name: "Requests", end: true, key: (row) => rateOf(row) ?? -1, down: true, cell: (row) => rate(rateOf(row)) },
          { name: "Answered", end: true, hide: "phone", key: (row) => row.answered ?? 0, down: true, cell: (row) => whole(row.answered ?? 0) },
          { name: "Lost", end: true, hide: "phone", key: (row) => row.lost ?? 0, down: true, cell: (row) => (row.lost ? <b class="bad">{whole(row.lost)}</b> : "0") },
          { name: "p95", end: true, key: (row) => worst(placements, row), down: true, cell: (row) => seconds(worst(placements, row)) },
          { name: "Policy", hide: "phone", key: (row) => row.policy, cell: (row) => row.policy },
          { name: "Runs on", grow: true, hide: "phone", cell: (row) => <Places of={row} placements={placements} /> },
          { name: "Reason", cell: (row) => <Reason of={row.reason} /> },
        ]} />
      </Panel>
    </>
  );
}
