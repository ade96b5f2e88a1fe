import { useMemo } from "preact/hooks";
import { ask, useTable, live } from "../live.js";
import { ago, bytes, clock, digits, money, percent, plural, seconds, span, whole } from "../format.js";
import { messageOf } from "./events.jsx";
import { Empty, Link, Panel, Reason, Refused, StandIn, State, Table, useAsked, Workload, Waiting } from "../parts.jsx";

export function Federation() {
  const members = useTable("regions"), agreements = useTable("agreements"), events = useTable("events");
  const own = [...(live.tables.get("region")?.values() ?? [])][0];
  const ledger = useAsked(() => ask("get", { kind: "ledger" }), [agreements?.length]);
  if (!members || !agreements || !own) return <Waiting />;
  return (
    <>
      <h1>Federation {own.federation ? <span class="muted">{own.federation}, {plural(members.length, "region")}</span> : null}</h1>
      {own.federation ? <Panel title="Regions and agreements"><Map own={own.name} members={members} agreements={agreements} /></Panel> : <Empty>{own.name} is in no federation: shoal federation join</Empty>}
      <div class="grid">
        <Panel title="Regions" wide>
          <Table stack label="Regions" rows={members} keyOf={(row) => row.region} empty="None." columns={[
            { name: "Region", key: (row) => row.region, cell: (row) => <>{row.region}{row.region === own.name ? <span class="tag">this one</span> : null}</> },
            { name: "Distance", end: true, key: (row) => row.rtt_s ?? 0, cell: (row) => (row.region === own.name ? "–" : seconds(row.rtt_s)) },
            { name: "Trust", end: true, key: (row) => row.trust, cell: (row) => digits(row.trust) },
            { name: "Standing", end: true, hide: "phone", key: (row) => row.standing, cell: (row) => digits(row.standing) },
            { name: "Residency", hide: "phone", cell: (row) => row.residency ?? "–" },
            { name: "Offers", grow: true, cell: (row) => row.classes?.length ? <span class="places">{row.classes.map((each, at) => <span key={at}>{whole(each.devices)} {each.device_class} <span class="muted">{bytes(each.free_bytes)} free{each.cost_usd_per_h !== undefined ? `, ${money(each.cost_usd_per_h)}` : ""}</span></span>)}</span> : <span class="muted">{row.advertises ? "nothing" : "says nothing now"}</span> },
          ]} />
        </Panel>
        <Panel title="Agreements" wide>
          <Table stack label="Agreements" rows={agreements} keyOf={(row) => `${row.side}/${row.agreement}`} empty="Nothing runs for another region, and nothing elsewhere." columns={[
            { name: "Agreement", key: (row) => row.agreement, cell: (row) => <code>{row.agreement}</code> },
            { name: "Workload", cell: (row) => <Workload of={{ tenant: row.workload?.tenant ?? "default", name: row.workload?.name }} /> },
            { name: "Side", key: (row) => row.side, cell: (row) => <>{row.side === "origin" ? "runs at" : "for"} <b>{row.counterpart}</b> <StandIn is={row.offer?.stand_in} /></> },
            { name: "State", key: (row) => row.state, cell: (row) => <><State is={row.state} /> {row.service ? <State is={row.service} /> : null}</> },
            { name: "Promised p95", end: true, cell: (row) => seconds(row.offer?.latency_p95_s) },
            { name: "Delivered p95", end: true, cell: (row) => seconds(row.delivered?.latency_p95_s) },
            { name: "Requests", end: true, hide: "phone", cell: (row) => whole(row.delivered?.requests ?? 0) },
            { name: "Cost", end: true, hide: "phone", cell: (row) => money(row.offer?.cost) },
            { name: "Lease", end: true, hide: "phone", cell: (row) => span(row.lease_s ?? 0) },
            { name: "Agreed", end: true, hide: "phone", key: (row) => row.agreed_at, cell: (row) => ago(row.agreed_at) },
            { name: "Reason", grow: true, has: (row) => row.reason?.code, cell: (row) => <Reason of={row.reason} /> },
          ]} />
        </Panel>
        <Panel title="Negotiations" wide><Negotiations events={events ?? []} /></Panel>
        <Panel title="Ledger of bids and awards" wide>{ledger.error ? <Refused error={ledger.error} /> : <Bids entries={ledger.data?.ledger ?? (ledger.data ? [] : null)} />}</Panel>
      </div>
    </>
  );
}

/** Regions by their distance in time, and what runs between them. The tables have the same as text. */
function Map({ own, members, agreements }) {
  const others = members.filter((each) => each.region !== own);
  const [width, height] = others.length < 3 ? [440, 110] : [720, 290], centre = { x: others.length === 1 ? 80 : width / 2, y: height / 2 };
  const far = Math.max(...others.map((each) => each.rtt_s ?? 0), 1e-4);
  const places = others.map((each, at) => {
    const turn = (2 * Math.PI * at) / others.length - Math.PI / 2 + (others.length < 3 ? Math.PI / 2 : 0);
    const away = 0.55 + 0.45 * Math.sqrt((each.rtt_s ?? far) / far);
    return { each, x: centre.x + Math.cos(turn) * (others.length === 1 ? 280 : width / 2 - 75) * away, y: centre.y + Math.sin(turn) * (height / 2 - 38) * away };
  });
  const runs = agreements.map((one) => (one.side === "origin" ? `${one.workload?.name} runs at ${one.counterpart}` : `${one.workload?.name} of ${one.counterpart} runs here`));
  const said = `${own} and ${plural(others.length, "other region")}: ${others.map((each) => `${each.region}, ${seconds(each.rtt_s)} away`).join("; ")}. ${runs.join("; ")}`.trim();
  return (
    <svg class={`map ${others.length < 3 ? "few" : ""}`} viewBox={`0 0 ${width} ${height}`} role="img" aria-label={said}>
      {places.map(({ each, x, y }) => {
        const here = agreements.filter((one) => one.counterpart === each.region);
        const out = here.filter((one) => one.side === "origin"), into = here.filter((one) => one.side === "delegate");
        const mid = { x: (x + centre.x) / 2, y: (y + centre.y) / 2 };
        return (
          <g key={each.region}>
            <line x1={centre.x} y1={centre.y} x2={x} y2={y} class={here.length ? "deal" : ""} stroke-width={1 + Math.min(5, here.length)} />
            <text x={mid.x} y={mid.y - 6} class="small">{seconds(each.rtt_s)}</text>
            {here.length ? <text x={mid.x} y={mid.y + 14} class="small strong">{[out.length ? `${out.length} there` : "", into.length ? `${into.length} here` : ""].filter(Boolean).join(", ")}</text> : null}
          </g>
        );
      })}
      {[{ each: members.find((one) => one.region === own) ?? { region: own }, x: centre.x, y: centre.y, here: true }, ...places].map(({ each, x, y, here }) => (
        <g key={each.region} transform={`translate(${x} ${y})`}>
          <circle r={here ? 38 : 34} class={here ? "own" : each.advertises ? "region" : "region silent"} />
          <text y="-3" class="name">{each.region}</text>
          <text y="11" class="tiny">{plural((each.classes ?? []).reduce((sum, one) => sum + (one.devices ?? 0), 0), "device")}</text>
        </g>
      ))}
    </svg>
  );
}

const KINDS = new Set(["SOLICITED", "BID", "COUNTERED", "DECLINED", "NO_BID", "AWARDED", "GRANTED", "RELEASED", "EXPIRED"]);
const ENDS = new Set(["NO_BID", "GRANTED", "RELEASED", "EXPIRED"]);

/** The events of each negotiation, from what was asked to what came of it. */
export function negotiationsOf(events) {
  const open = new Map_(), all = [];
  for (const each of events) {
    if (!KINDS.has(each.code) || !each.workload) continue;
    const key = `${each.tenant}/${each.workload}`;
    let found = open.get(key);
    if (!found || (each.code === "SOLICITED" && found.lines.some((line) => line.code !== "SOLICITED" && ENDS.has(line.code)))) {
      found = { id: each.subject, tenant: each.tenant, workload: each.workload, lines: [] };
      open.set(key, found);
      all.push(found);
    }
    found.lines.push(each);
    if (ENDS.has(each.code)) open.delete(key);
  }
  return all.reverse();
}
const Map_ = globalThis.Map;

function Negotiations({ events }) {
  const found = useMemo(() => negotiationsOf(events), [events]);
  if (!found.length) return <Empty>Nothing was asked of other regions lately.</Empty>;
  return found.slice(0, 12).map((each) => {
    const last = each.lines.at(-1), awarded = each.lines.find((line) => line.code === "AWARDED");
    const winner = awarded ? partsOf(awarded).region : "";
    return (
      <article class="move" key={each.id + each.lines[0].sequence}>
        <p><b><Workload of={{ tenant: each.tenant, name: each.workload }} /></b> <State is={last.code.toLowerCase().replace("_", " ")} tone={last.code === "GRANTED" ? "good" : ENDS.has(last.code) ? "warn" : "move"} /> {winner ? <>won by <b>{winner}</b></> : null} <span class="muted">{ago(each.lines[0].at)}</span> <Link to={`traces/${each.id}`} class="muted">trace</Link></p>
        <ol class="list">
          {each.lines.map((line) => {
            const { region, terms } = partsOf(line);
            return <li key={line.sequence}><time class="muted num">{clock(line.at)}</time> <code>{line.code}</code> {region ? <b>{region}</b> : null} {line.code === "SOLICITED" || line.code === "NO_BID" ? messageOf(line) : terms}{winner && region === winner && line.code === "BID" ? <span class="tag">won</span> : null}</li>;
          })}
        </ol>
      </article>
    );
  });
}

/** A bid's event says: region, perhaps a code, terms; two blanks between them. */
function partsOf(line) {
  const [region, ...rest] = (line.message ?? "").split("  ");
  return { region: line.code === "SOLICITED" || line.code === "NO_BID" ? "" : region, terms: rest.join("  ") };
}

function Bids({ entries }) {
  const rows = entries?.filter((each) => ["offered", "countered", "declined", "awarded", "granted", "released", "expired"].includes(each.what)) ?? null;
  return (
    <Table stack label="Bids" rows={rows} keyOf={(row) => row.sequence} sort={{ at: 0, down: true }} empty="Nothing was bid and nothing awarded." columns={[
      { name: "When", key: (row) => row.sequence, down: true, cell: (row) => ago(row.at) },
      { name: "What", key: (row) => row.what, cell: (row) => <State is={row.what} tone={row.what === "granted" ? "good" : ["declined", "expired"].includes(row.what) ? "warn" : "calm"} /> },
      { name: "With", key: (row) => row.counterpart, cell: (row) => row.counterpart },
      { name: "Workload", cell: (row) => row.workload },
      { name: "Terms", grow: true, cell: (row) => <>{row.code ? <code>{row.code}</code> : null} {row.terms}</> },
    ]} />
  );
}
