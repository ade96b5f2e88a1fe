import { useEffect, useState } from "preact/hooks";
import { ask, useTable } from "../live.js";
import { ago, digits, moment, plural, seconds } from "../format.js";
import { Empty, Link, Panel, Refused, State, useAsked, Waiting } from "../parts.jsx";
import { negotiationsOf } from "./federation.jsx";

export function Traces({ path }) {
  const id = path[1] ?? "";
  const [text, setText] = useState(id);
  useEffect(() => setText(id), [id]);
  const moves = useTable("migrations") ?? [], events = useTable("events") ?? [];
  const told = useAsked(() => (id ? ask("trace", { id }) : Promise.resolve(null)), [id]);
  return (
    <>
      <h1>Traces</h1>
      <Panel title="Find one">
        <form class="row" onSubmit={(event) => { event.preventDefault(); location.hash = `#/traces/${encodeURIComponent(text.trim())}`; }}>
          <label>A trace, a migration, a negotiation or its agreement <input class="wide filter" value={text} onInput={(event) => setText(event.currentTarget.value)} required /></label>
          <button class="main">Show it</button>
        </form>
        <p class="muted">Ids of requests: <code>shoal infer WORKLOAD --trace</code>. Lately:{" "}
          {moves.slice(-5).reverse().map((each) => <span key={each.id}><Link to={`traces/${each.id}`}>{each.id}</Link> ({each.workload?.name} moved {ago(each.stages?.[0]?.at)}) </span>)}
          {negotiationsOf(events).slice(0, 3).map((each) => <span key={each.id + each.lines[0].sequence}><Link to={`traces/${each.id}`}>{each.id}</Link> ({each.workload} negotiated) </span>)}
        </p>
      </Panel>
      {!id ? null : told.error ? <Refused error={told.error} /> : told.data ? <Waterfall of={told.data} /> : <Waiting />}
    </>
  );
}

/** Spans in the order of a tree, each with its depth. */
function treeOf(spans) {
  const ids = new Set(spans.map((each) => each.id)), children = new Map();
  for (const each of spans) { const at = ids.has(each.parent) ? each.parent : ""; children.set(at, [...(children.get(at) ?? []), each]); }
  const found = [], seen = new Set();
  const walk = (at, depth) => { for (const each of (children.get(at) ?? []).sort((a, b) => a.began - b.began)) { if (seen.has(each)) continue; seen.add(each); found.push({ span: each, depth }); walk(each.id, depth + 1); } };
  walk("", 0);
  for (const each of spans) if (!seen.has(each)) found.push({ span: each, depth: 0 });
  return found;
}

function Waterfall({ of }) {
  const spans = of.spans ?? [];
  if (!spans.length) return <Empty>No spans of it are known any longer.{of.silent?.length ? ` No answer from ${of.silent.join(", ")}.` : ""}</Empty>;
  const began = Math.min(...spans.map((each) => each.began)), end = Math.max(...spans.map((each) => each.began + (each.seconds ?? 0)));
  const whole = Math.max(end - began, 1e-6);
  return (
    <Panel title={`Trace ${of.trace}`} side={<span class="muted">{plural(spans.length, "span")}, {seconds(whole)}, from {moment(began)}</span>}>
      <div class="scroll" tabIndex={0} role="region" aria-label="Spans">
        <table class="falls">
          <thead><tr><th scope="col">Span</th><th scope="col" class="hide-phone">Where</th><th scope="col" class="end hide-phone">After</th><th scope="col" class="end">Took</th><th scope="col" class="fall">{seconds(whole)}</th></tr></thead>
          <tbody>
            {treeOf(spans).map(({ span: each, depth }, at) => {
              const from = ((each.began - began) / whole) * 100, wide = ((each.seconds ?? 0) / whole) * 100;
              const attributes = Object.entries(each.attributes ?? {}).map(([k, v]) => `${k}=${v}`).join("\n");
              return (
                <tr key={each.id ?? at} title={attributes}>
                  <th scope="row"><span class={`deep d${Math.min(depth, 8)}`}>{each.name}</span> {each.code ? <code class="bad">{each.code}</code> : null}{each.open ? <State is="open" tone="move" /> : null}</th>
                  <td class="hide-phone">{each.node || each.region}<span class="muted"> {each.process}</span></td>
                  <td class="end hide-phone">{seconds(each.began - began)}</td>
                  <td class="end">{seconds(each.seconds ?? 0)}</td>
                  <td class="fall"><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true"><rect class={each.code ? "failed" : ""} x={Math.min(from, 99.5)} width={Math.max(wide, 0.5)} y="1.5" height="7" rx="1" /></svg></td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {of.silent?.length ? <p class="muted">No answer from {of.silent.join(", ")}: their spans are not among these.</p> : null}
    </Panel>
  );
}
