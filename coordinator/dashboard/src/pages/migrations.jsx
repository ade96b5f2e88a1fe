import { useTable } from "../live.js";
import { ago, bytes, carbon, digits, joules, money, percent, plural, seconds, span, whole, clock } from "../format.js";
import { Bar, Empty, Link, Panel, Reason, StandIn, State, Table, useFilter, Waiting, Workload } from "../parts.jsx";

const STAGES = ["queued", "planned", "reserved", "staging", "warming", "verifying", "shifting", "draining", "done"];
const placeName = (place) => (!place ? "–" : place.region ? `region ${place.region}` : `${place.node}${place.device ? `/${place.device}` : ""}`);
const isOver = (move) => ["done", "aborted"].includes(move.stage);

/** The way of a move as steps: those behind it, where it is, and those to come. Only what waits there has a queue. */
export function Track({ move }) {
  const been = new Set((move.stages ?? []).map((each) => each.stage));
  const failed = ["aborted", "rolling_back"].includes(move.stage);
  return (
    <ol class="track" aria-label={`Stage: ${move.stage}`}>
      {STAGES.filter((stage) => stage !== "queued" || been.has(stage)).map((stage) => (
        <li key={stage} class={stage === move.stage ? (stage === "done" ? "good" : "now") : been.has(stage) ? (failed ? "was failed" : "was") : ""} title={stage}><span>{stage}</span></li>
      ))}
      {failed ? <li class="bad" title={move.stage}><span>{move.stage.replace("_", " ")}</span></li> : null}
    </ol>
  );
}

export function MoveRow({ move }) {
  return (
    <article class="move">
      <p><Link to={`migrations/${move.id}`}>{move.id}</Link> <b><Workload of={{ tenant: move.workload?.tenant ?? "default", name: move.workload?.name ?? "" }} /></b> {placeName(move.source)} → {placeName(move.target) === "–" ? move.to || "a place" : placeName(move.target)}
        {!isOver(move) && move.share ? <span class="tag">{percent(move.share)} of requests</span> : null}</p>
      <Track move={move} />
      {move.reason?.code ? <p class="muted"><Reason of={move.reason} /></p> : null}
    </article>
  );
}

export function Migrations({ path }) {
  const rows = useTable("migrations");
  const [found, filter] = useFilter(rows, (row) => `${row.id} ${row.workload?.tenant}/${row.workload?.name} ${row.stage} ${row.cause} ${placeName(row.source)} ${placeName(row.target)}`);
  if (!rows) return <Waiting />;
  if (path[1]) return <MovePage move={rows.find((each) => each.id === path[1])} id={path[1]} />;
  const under = rows.filter((move) => !isOver(move));
  return (
    <>
      <h1>Migrations <span class="muted">{plural(under.length, "move")} under way</span></h1>
      {under.length ? <Panel title="Under way">{under.map((move) => <MoveRow key={move.id} move={move} />)}</Panel> : null}
      <Panel title="All that are kept" side={filter}>
        <Table stack label="Migrations" rows={found} keyOf={(row) => row.id} sort={{ at: 0, down: true }} empty="Nothing has moved yet: shoal migrate WORKLOAD --to NODE" columns={[
          { name: "Began", key: (row) => row.stages?.[0]?.at ?? 0, down: true, cell: (row) => <Link to={`migrations/${row.id}`}>{ago(row.stages?.[0]?.at)}</Link> },
          { name: "Workload", key: (row) => row.workload?.name, cell: (row) => <Workload of={{ tenant: row.workload?.tenant ?? "default", name: row.workload?.name }} /> },
          { name: "Stage", key: (row) => row.stage, cell: (row) => <State is={row.stage} /> },
          { name: "From", cell: (row) => <>{placeName(row.source)} <StandIn is={row.source?.stand_in} /></> },
          { name: "To", cell: (row) => <>{row.target ? placeName(row.target) : row.to} <StandIn is={row.target?.stand_in} /></> },
          { name: "Cause", hide: "phone", key: (row) => row.cause, cell: (row) => row.cause },
          { name: "Took", end: true, hide: "phone", cell: (row) => (row.stages?.length > 1 ? span(row.stages.at(-1).at - row.stages[0].at) : "–") },
          { name: "Reason", grow: true, has: (row) => row.reason?.code, cell: (row) => <Reason of={row.reason} /> },
        ]} />
      </Panel>
    </>
  );
}

function MovePage({ move, id }) {
  if (!move) return <><h1>{id}</h1><Empty>No such migration is kept. <Link to="migrations">Migrations</Link></Empty></>;
  const before = move.expected?.before, hoped = move.expected?.after, came = move.came?.after;
  return (
    <>
      <p class="crumbs"><Link to="migrations">Migrations</Link></p>
      <h1>{move.workload?.name} <span class="muted">{placeName(move.source)} <StandIn is={move.source?.stand_in} /> → {move.target ? placeName(move.target) : move.to} <StandIn is={move.target?.stand_in ?? move.to_stand_in} /></span> <State is={move.stage} /></h1>
      <p>{move.why ? `${move.why}. ` : ""}<span class="muted">cause: {move.cause}, by {move.actor} · <Link to={`traces/${move.id}`}>trace</Link></span></p>
      {move.reason?.code ? <p><Reason of={move.reason} more /></p> : null}
      <Track move={move} />
      <div class="grid">
        <Panel title="Stages">
          <ol class="list">{(move.stages ?? []).map((each, at) => (
            <li key={at}><span class="muted num">{clock(each.at)}</span> <b>{each.stage}</b> {each.note} <span class="muted">{at + 1 < move.stages.length ? span(move.stages[at + 1].at - each.at) : ""}</span></li>
          ))}</ol>
        </Panel>
        <Panel title="Before and after">
          {before || came ? (
            <Table label="Before and after" rows={[
              ["p95 at the worker", "latency_p95_s", seconds], ["energy of an inference", "joules", joules], ["cost", "cost_usd_per_h", money], ["carbon", "carbon_g_per_h", carbon],
            ].filter(([, figure]) => [before, hoped, came].some((each) => each?.[figure] !== undefined))} keyOf={(row) => row[0]} columns={[
              { name: "Figure", cell: (row) => row[0] },
              { name: "Before", end: true, cell: (row) => row[2](before?.[row[1]]) },
              { name: "Expected", end: true, cell: (row) => row[2](hoped?.[row[1]]) },
              { name: "Measured", end: true, cell: (row) => row[2](came?.[row[1]]) },
            ]} />
          ) : <Empty>Nothing is known of it yet.</Empty>}
          {move.came ? <p class="muted">measured over {span(move.came.over_s)}: {whole(move.came.requests)} requests, {whole(move.came.errors ?? 0)} errors</p> : null}
        </Panel>
        <Panel title="Guard">
          {move.readings?.length ? (
            <Table stack label="Guard readings" rows={move.readings.map((each, at) => ({ ...each, at }))} keyOf={(row) => row.at} columns={[
              { name: "Share", cell: (row) => percent(row.share) },
              { name: "Held", end: true, cell: (row) => span(row.held_s) },
              { name: "Old p95", end: true, cell: (row) => seconds(row.source?.latency_p95_s) },
              { name: "New p95", end: true, cell: (row) => seconds(row.target?.latency_p95_s) },
              { name: "Requests", end: true, cell: (row) => `${whole(row.source?.requests ?? 0)} + ${whole(row.target?.requests ?? 0)}` },
              { name: "Outcome", cell: (row) => <State is={row.outcome} /> },
            ]} />
          ) : <Empty>No share of the requests was judged yet.</Empty>}
        </Panel>
        <Panel title="Comparison of answers"><Verdict of={move.verdict} sum={move.verdict_sha256} /></Panel>
      </div>
    </>
  );
}

/** What an answer was compared with, in words. */
const AGAINST = { source: "what the old replica answers", reference: "the reference answers" };

function Verdict({ of, sum }) {
  if (!of) return <Empty>No answers were compared.</Empty>;
  return (
    <>
      <p><State is={of.passed ? "passed" : "failed"} /> {plural(of.samples ?? 0, `${of.inputs ?? ""} input`.trim())}, against {AGAINST[of.against] ?? of.against}</p>
      {of.code ? <p><Reason of={{ code: of.code, found: of.reason }} /></p> : null}
      {of.drifts?.length ? (
        <Table stack label="Compared outputs" rows={of.drifts} keyOf={(row) => `${row.output}/${row.metric}`} columns={[
          { name: "Output", cell: (row) => row.output },
          { name: "Measure", cell: (row) => <code>{row.metric}</code> },
          { name: "Bound", end: true, cell: (row) => digits(row.bound ?? 0, 4) },
          { name: "Worst", end: true, cell: (row) => digits(row.worst ?? 0, 4) },
          { name: "Outcome", cell: (row) => <State is={row.passed ? "passed" : "failed"} /> },
        ]} />
      ) : null}
      {sum ? <p class="more muted">in the audit log as <code title={sum}>{sum.slice(0, 16)}</code></p> : null}
    </>
  );
}
