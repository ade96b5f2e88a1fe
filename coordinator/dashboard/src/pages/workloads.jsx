import { figuresOf, useTable } from "../live.js";
import { joules, money, percent, plural, rate, seconds, whole } from "../format.js";
import { Panel, Reason, Spark, State, Table, useFilter, Workload } from "../parts.jsx";
import { Places, usePlaced } from "./overview.jsx";

/** That another region runs it is said where it runs. */
const isUnusual = (row) => row.reason && row.reason.code !== "DELEGATED";
const ORDER = { pending: 0, deleting: 1, progressing: 2, ready: 3 };

export function Workloads() {
  const rows = useTable("workloads"), placed = usePlaced(useTable("places"));
  const [found, filter] = useFilter(rows, (row) => `${row.tenant}/${row.name} ${row.policy} ${row.state} ${row.reason?.code ?? ""}`);
  return (
    <>
      <h1>Workloads <span class="muted">{rows ? plural(rows.length, "workload") : ""}</span></h1>
      <Panel title="All workloads" side={filter}>
        <Table label="Workloads" rows={found} keyOf={(row) => `${row.tenant}/${row.name}`} sort={{ at: 1, down: false }} empty="No workload matches. Apply one with: shoal apply -f FILE" columns={[
          { name: "Workload", key: (row) => `${row.tenant}/${row.name}`, cell: (row) => <Workload of={row} /> },
          { name: "State", key: (row) => ORDER[row.state] ?? 0, cell: (row) => <State is={row.state} /> },
          { name: "Replicas", end: true, hide: "phone", key: (row) => row.ready ?? 0, cell: (row) => `${row.ready ?? 0}/${row.wanted ?? 0}` },
          { name: "Requests", end: true, key: (row) => figuresOf(row).requests_per_s, down: true, cell: (row) => rate(figuresOf(row).requests_per_s) },
          { name: "Five minutes", hide: "phone", cell: (row) => <Spark values={figuresOf(row).past_requests_per_s ?? []} label={`Requests of ${row.name} in the last five minutes`} /> },
          { name: "Lost", end: true, hide: "phone", key: (row) => row.lost ?? 0, down: true, cell: (row) => (row.lost ? <b class="bad">{whole(row.lost)}</b> : "0") },
          { name: "p95", end: true, key: (row) => figuresOf(row).latency_p95_s, down: true, cell: (row) => seconds(figuresOf(row).latency_p95_s) },
          { name: "In bound", end: true, hide: "phone", key: (row) => figuresOf(row).within_bound, cell: (row) => <span class={figuresOf(row).within_bound < 0.95 ? "bad" : ""}>{percent(figuresOf(row).within_bound)}</span> },
          { name: "Energy", end: true, hide: "phone", key: (row) => figuresOf(row).energy, down: true, cell: (row) => joules(figuresOf(row).energy) },
          { name: "Cost", end: true, hide: "phone", key: (row) => figuresOf(row).cost_usd_per_h, down: true, cell: (row) => money(figuresOf(row).cost_usd_per_h) },
          { name: "Policy", hide: "phone", key: (row) => row.policy, cell: (row) => row.policy },
          { name: "Runs on", grow: true, hide: "phone", cell: (row) => <Places of={row} placed={placed} /> },
          { name: "Reason", has: isUnusual, cell: (row) => (isUnusual(row) ? <Reason of={row.reason} /> : null) },
        ]} />
      </Panel>
    </>
  );
}
