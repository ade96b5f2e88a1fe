import { ask, figuresOf, useTable } from "../live.js";
import { ago, carbon, digits, joules, money, percent, rate, seconds, whole } from "../format.js";
import { Empty, Link, Panel, Reason, Refused, StandIn, Stat, State, Table, useAsked, Waiting } from "../parts.jsx";
import { Timeline, WORKLOAD_CHARTS } from "../chart.jsx";
import { Bids } from "./plan.jsx";
import { Pareto } from "./pareto.jsx";
import { Placements } from "./placements.jsx";
import { MoveRow } from "./migrations.jsx";
import { EventList } from "./events.jsx";

/** Most candidates that are loaded: as many rows as a table shows at first. */
const CANDIDATES = 150;

export function WorkloadPage({ path }) {
  const [, tenant, name] = path;
  const rows = useTable("workloads"), all = useTable("placements"), moves = useTable("migrations") ?? [], events = useTable("events") ?? [];
  const agreements = useTable("agreements") ?? [];
  const row = rows?.find((each) => each.name === name && each.tenant === tenant);
  const placed = (all ?? []).filter((each) => each.name === name && each.tenant === tenant);
  const where = all && placed.map((each) => `${each.id}${each.phase}`).join();
  // Asked again whenever it runs elsewhere; so not before it is known where.
  const told = useAsked(() => (all ? ask("explain", { tenant, name, most: CANDIDATES, brief: 1 }) : new Promise(() => {})), [tenant, name, row?.revision, row?.state, where]);
  if (!rows || !all) return <Waiting />;
  const away = row?.reason?.code === "DELEGATED" ? agreements.find((each) => each.agreement === row.reason.asked) ?? {} : null;
  const now = row ? figuresOf(row) : {};
  const key = (each) => each.workload?.name === name && (each.workload?.tenant ?? "default") === tenant;
  return (
    <>
      <p class="crumbs"><Link to="workloads">Workloads</Link>{tenant !== "default" ? ` / ${tenant}` : ""}</p>
      <h1>{name} {row ? <State is={row.state} /> : <span class="muted">not applied</span>}</h1>
      {row?.reason ? <p><Reason of={row.reason} more />{row.retry_at ? <span class="muted"> · next try {ago(row.retry_at)}</span> : null}</p> : null}
      {row ? (
        <div class="stats">
          <Stat name="Replicas" value={`${row.ready ?? 0} of ${row.wanted ?? 0}`} note={`policy ${row.policy ?? "–"}, revision ${row.revision ?? 0}`} />
          <Stat name="Requests" value={rate(now.requests_per_s)} note={`${whole(row.answered ?? 0)} answered`} />
          <Stat name="Lost" value={whole(row.lost ?? 0)} tone={row.lost ? "bad" : ""} note={`${whole(row.refused ?? 0)} refused, ${whole(row.retried ?? 0)} retried`} />
          {away ? (
            <Stat name="p95 with the way" value={seconds(away.delivered?.latency_p95_s)} note={`at ${away.counterpart ?? "another region"}, promised ${seconds(away.offer?.latency_p95_s)}`} />
          ) : <Stat name="p95 at the worker" value={seconds(now.latency_p95_s)} note={now.within_bound === undefined ? "no requests, or no bound" : `${percent(now.within_bound)} within the bound`} />}
          {away ? (
            <Stat name="Energy" value={joules(away.offer?.joules)} note="an inference, as it was offered" />
          ) : <Stat name="Energy" value={joules(now.energy)} note={`an inference, ${placed.find((each) => each.energy)?.energy ?? "unknown"}`} />}
        </div>
      ) : null}
      <div class="grid">
        {row ? <Timeline charts={WORKLOAD_CHARTS} of={row} /> : null}
        <Panel title="Where it runs" wide>{away && !placed.length ? <Away agreement={away} said={row.reason.found} /> : <Placements rows={placed} of={row} />}</Panel>
        <Panel title="What else was possible" wide>
          {told.error ? <Refused error={told.error} /> : told.data ? <><Pareto candidates={told.data.plan?.candidates ?? []} /><Candidates plan={told.data.plan} holds={told.data.move_holds} empty={away ? "While another region runs it, places here are compared only when its agreement is looked at again." : undefined} />{told.data.left_out ? <p class="more muted">{whole(told.data.left_out)} more candidates, which do no better: <code>shoal explain</code></p> : null}{told.data.plan?.bids?.length ? <Bids rows={told.data.plan.bids} /> : null}</> : <Waiting />}
        </Panel>
        <Panel title="Moves">{moves.filter(key).length ? moves.filter(key).reverse().slice(0, 8).map((move) => <MoveRow key={move.id} move={move} />) : <Empty>It has not moved.</Empty>}</Panel>
        <Panel title="Events"><EventList events={events.filter((each) => each.workload === name && each.tenant === tenant).slice(-12).reverse()} /></Panel>
      </div>
    </>
  );
}

/** Where another region runs it. */
function Away({ agreement, said }) {
  return (
    <p><State is={agreement.service ?? agreement.state ?? "starting"} /> {agreement.counterpart ? <>region <Link to="federation">{agreement.counterpart}</Link></> : said} <StandIn is={agreement.offer?.stand_in} />
      {agreement.agreement ? <span class="muted"> under agreement <code>{agreement.agreement}</code>, {money(agreement.offer?.cost)}, {whole(agreement.delivered?.requests ?? 0)} answered</span> : null}</p>
  );
}

export function Candidates({ plan, holds, empty = "No candidate is known." }) {
  const rows = plan?.candidates ?? [];
  const fitting = rows.filter((each) => !each.refusal?.code);
  return (
    <>
      {plan?.changes?.length ? <ul class="list">{plan.changes.map((each, at) => <li key={at}><code>{each.sign}</code> {each.node}/{each.device} <span class="muted">{each.why}</span></li>)}</ul> : null}
      {holds?.length ? <ul class="list">{holds.map((each, at) => <li key={at}>It does not move to {each.to || "another place"} <StandIn is={each.to_stand_in} />: {each.why} <span class="muted">({each.hold}: {each.found})</span></li>)}</ul> : null}
      <Table label="Candidates" rows={rows} keyOf={(row) => `${row.node}/${row.device}/${row.model}/${row.precision}`} sort={{ at: 2, down: false }} empty={empty} onRow={(row) => (row.current ? "current" : row.refusal?.code ? "out" : "")} columns={[
        { name: "Place", key: (row) => `${row.node}/${row.device}`, cell: (row) => <>{row.node}<span class="muted">/{row.device}</span> <StandIn is={row.stand_in} />{row.current ? <span class="tag">now</span> : null}{row.chosen && !row.current ? <span class="tag">next</span> : null}{row.pareto ? <span class="tag" title="No other candidate is better in every term">Pareto</span> : null}</> },
        { name: "Precision", hide: "phone", key: (row) => row.precision, cell: (row) => row.precision },
        { name: "Score", end: true, key: (row) => (row.refusal?.code ? undefined : row.score ?? 0), cell: (row) => (row.refusal?.code ? "–" : digits(row.score ?? 0)) },
        { name: "p95", end: true, key: (row) => row.prediction?.latency_p95_s?.mid, cell: (row) => <Interval of={row.prediction?.latency_p95_s} show={seconds} /> },
        { name: "Energy", end: true, key: (row) => row.prediction?.joules?.mid, cell: (row) => <Interval of={row.prediction?.joules} show={joules} /> },
        { name: "Cost", end: true, hide: "phone", key: (row) => row.cost_usd_per_h, cell: (row) => money(row.cost_usd_per_h) },
        { name: "Carbon", end: true, hide: "phone", key: (row) => row.carbon_g_per_h, cell: (row) => carbon(row.carbon_g_per_h) },
        { name: "Why not", grow: true, has: (row) => row.refusal?.code, cell: (row) => row.refusal?.code ? <><Reason of={row.refusal} />{row.nearest ? <span class="muted"> · fits with {row.nearest}</span> : null}</> : null },
      ]} />
    </>
  );
}

const Interval = ({ of, show }) => (of?.mid === undefined ? <>–</> : <span title={`${show(of.low)} to ${show(of.high)}`}>{show(of.mid)}</span>);
