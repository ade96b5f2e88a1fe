import { useState } from "preact/hooks";
import { ask, useTable } from "../live.js";
import { bytes, joules, money, percent, plural, seconds } from "../format.js";
import { Empty, Panel, Reason, Refused, StandIn, State, Table } from "../parts.jsx";
import { Candidates } from "./workload.jsx";

const SAMPLE = `apiVersion: shoal/v1
kind: Policy
metadata: {name: frugal}
spec:
  require:
    latency: {p95: 250ms, from: origin}
  optimize: {energy: 0.7, latency: 0.3}
`;

/** What would happen: documents that are pasted, and moves that are only asked about. Nothing is changed. */
export function Plan() {
  const [text, setText] = useState("");
  const [told, setTold] = useState({});
  const look = () => { setTold({ busy: true }); ask("plan", {}, text).then((data) => setTold({ data }), (error) => setTold({ error })); };
  return (
    <>
      <h1>What if <span class="muted">nothing here changes anything</span></h1>
      <div class="grid">
        <Panel title="A plan of documents" wide>
          <form class="stack" onSubmit={(event) => { event.preventDefault(); look(); }}>
            <label for="documents">Policies and workloads as YAML</label>
            <textarea id="documents" rows={12} spellcheck={false} value={text} placeholder={SAMPLE} onInput={(event) => setText(event.currentTarget.value)}
              onKeyDown={(event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); look(); } }} />
            <p><button class="main" disabled={!text.trim() || told.busy}>{told.busy ? "Planning…" : "Show the plan"}</button> <button type="button" class="quiet" onClick={() => setText(SAMPLE)}>Example</button> <span class="muted">Ctrl+Enter. To apply it: shoal apply -f FILE</span></p>
          </form>
          <div aria-live="polite">{told.error ? <Refused error={told.error} /> : told.data ? <Planned plan={told.data} /> : null}</div>
        </Panel>
        <CanMove />
      </div>
    </>
  );
}

function Planned({ plan }) {
  const changes = (plan.workloads ?? []).flatMap((each) => each.changes ?? []).filter((each) => each.sign !== "=");
  const keyOf = (each) => `${each.workload?.tenant}/${each.workload?.name}`;
  const named = new Set((plan.documents ?? []).map((each) => each.name));
  const isTouched = (each) => each.refusal?.code || named.has(keyOf(each)) || (each.changes ?? []).some((one) => one.sign !== "=");
  const touched = (plan.workloads ?? []).filter(isTouched), rest = (plan.workloads ?? []).filter((each) => !isTouched(each));
  if (plan.problems?.length) {
    return <ul class="list">{plan.problems.map((each, at) => <li key={at}><State is={`line ${each.line ?? 0}:${each.column ?? 0}`} tone="bad" /> <Reason of={each.refusal} more /></li>)}</ul>;
  }
  return (
    <>
      <p><State is={plan.changes ? "it would change the region" : "it would change nothing"} tone={plan.changes ? "move" : "good"} /> <span class="muted">{plural((plan.documents ?? []).length, "document")}, {plural(changes.length, "replica")}{plan.hash ? `, plan ${plan.hash.slice(0, 12)}` : ""}</span></p>
      {plan.documents?.length ? <ul class="list">{plan.documents.map((each, at) => <li key={at}><code class={`sign s${each.sign}`}>{each.sign}</code> {each.kind} <b>{each.name}</b>{each.lines?.length ? <pre class="diff">{each.lines.join("\n")}</pre> : null}</li>)}</ul> : null}
      {touched.map((each) => <PlannedWorkload key={keyOf(each)} of={each} />)}
      {rest.length ? <details><summary>{rest.length} others stay as they are</summary>{rest.map((each) => <PlannedWorkload key={keyOf(each)} of={each} />)}</details> : null}
    </>
  );
}

function PlannedWorkload({ of }) {
  return (
    <section class="sub">
      <h3>{of.workload?.name} <span class="muted">{of.delegated_to ? `runs at ${of.delegated_to}` : `${of.placed ?? 0} of ${of.wanted ?? 0} placed`}, policy {of.policy}</span></h3>
      {of.refusal?.code ? <p><Reason of={of.refusal} more />{of.nearest ? <span class="muted"> · it fits with {of.nearest}</span> : null}</p> : null}
      {of.undelegated?.code ? <p>not elsewhere: <Reason of={of.undelegated} more /></p> : null}
      {of.relaxed?.length ? <p class="muted">relaxed: {of.relaxed.join("; ")}</p> : null}
      {of.bids?.length ? <Bids rows={of.bids} /> : null}
      {of.candidates?.length ? <Candidates plan={of} /> : null}
    </section>
  );
}

/** What other regions would offer. */
export function Bids({ rows }) {
  return (
    <Table stack label="Bids of other regions" rows={rows} keyOf={(row) => row.region} columns={[
      { name: "Region", cell: (row) => <>{row.region}{row.chosen ? <span class="tag">chosen</span> : null} <StandIn is={row.offer?.stand_in} /></> },
      { name: "p95 with the way", end: true, cell: (row) => seconds(row.latency_p95_s) },
      { name: "Cost", end: true, cell: (row) => money(row.offer?.cost) },
      { name: "Energy", end: true, cell: (row) => joules(row.offer?.joules) },
      { name: "Gain", end: true, cell: (row) => percent(row.gain) },
      { name: "Why not", grow: true, cell: (row) => <Reason of={row.refusal} /> },
    ]} />
  );
}

function CanMove() {
  const workloads = useTable("workloads") ?? [], devices = useTable("devices") ?? [], regions = useTable("regions") ?? [];
  const [what, setWhat] = useState(""), [to, setTo] = useState("");
  const [told, setTold] = useState({});
  const look = (event) => {
    event.preventDefault();
    const [tenant, name] = what.includes("/") ? what.split("/") : ["", what];
    setTold({ busy: true });
    ask("can-move", { tenant, name, to }).then((data) => setTold({ data, to }), (error) => setTold({ error }));
  };
  return (
    <Panel title="Can it move?" wide>
      <form class="row" onSubmit={look}>
        <label>Workload or model <input list="movable" value={what} onInput={(event) => setWhat(event.currentTarget.value)} required /></label>
        <label>To a node, a device or a region <input list="places" value={to} onInput={(event) => setTo(event.currentTarget.value)} required /></label>
        <button class="main" disabled={told.busy}>{told.busy ? "Looking…" : "Can it?"}</button>
        <datalist id="movable">{workloads.map((each) => <option key={each.name} value={each.tenant === "default" ? each.name : `${each.tenant}/${each.name}`} />)}</datalist>
        <datalist id="places">{[...new Set(devices.map((each) => each.node)), ...devices.map((each) => `${each.node}/${each.name}`), ...regions.map((each) => each.region)].map((each) => <option key={each} value={each} />)}</datalist>
      </form>
      <div aria-live="polite">{told.error ? <Refused error={told.error} /> : told.data ? <Answer of={told.data} to={told.to} /> : null}</div>
    </Panel>
  );
}

const ANSWERS = { yes: ["it can", "good"], "yes-with": ["it can, with a change", "warn"], no: ["it cannot", "bad"] };

function Answer({ of, to }) {
  const [words, tone] = ANSWERS[of.answer] ?? [of.answer, "calm"];
  return (
    <>
      <p><State is={words} tone={tone} /> <b>{of.workload?.name}</b> {of.source_node ? `from ${of.source_node}/${of.source_device} ` : ""}to {to}</p>
      {of.estimates?.length ? (
        <Table stack label="Places" rows={of.estimates} keyOf={(row) => `${row.node}/${row.device}/${row.model}/${row.precision}`} columns={[
          { name: "Place", cell: (row) => <>{row.node}<span class="muted">/{row.device}</span> <StandIn is={row.stand_in} /></> },
          { name: "Answer", cell: (row) => { const [text, shade] = ANSWERS[row.answer] ?? [row.answer, "calm"]; return <State is={text} tone={shade} />; } },
          { name: "Precision", hide: "phone", cell: (row) => row.precision },
          { name: "p95 now → then", end: true, cell: (row) => <>{seconds(row.now?.latency_p95_s?.mid)} → {seconds(row.then?.latency_p95_s?.mid)}</> },
          { name: "Energy now → then", end: true, cell: (row) => <>{joules(row.now?.joules?.mid)} → {joules(row.then?.joules?.mid)}</> },
          { name: "Cost now → then", end: true, hide: "phone", cell: (row) => <>{money(row.now?.cost_usd_per_h)} → {money(row.then?.cost_usd_per_h)}</> },
          { name: "To fetch", end: true, hide: "phone", cell: (row) => bytes(row.fetch_bytes ?? 0) },
          { name: "To load", end: true, hide: "phone", cell: (row) => seconds(row.load_s?.mid) },
          { name: "Needs, or why not", grow: true, cell: (row) => <>{(row.needs ?? []).map((each) => `${each.need}: ${each.what}`).join("; ")} <Reason of={row.refusal} />{row.nearest ? <span class="muted"> · fits with {row.nearest}</span> : null}</> },
        ]} />
      ) : null}
      {of.bids?.length ? <Bids rows={of.bids} /> : null}
      {!of.estimates?.length && !of.bids?.length ? <Empty>No place to compare.</Empty> : null}
    </>
  );
}
