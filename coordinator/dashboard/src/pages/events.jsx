import { useTable } from "../live.js";
import { clock, moment } from "../format.js";
import { Empty, Link, Panel, StandIn, Table, useFilter, Workload } from "../parts.jsx";

const NEEDS = { short: "no place at home fits", better: "another region may do better", moved: "it is to move to another region" };
/** What an event says, in words. */
export const messageOf = (event) => (event.code === "SOLICITED" ? NEEDS[event.message] ?? event.message : event.message);
/** A digest is shown as its beginning. */
export const subjectOf = (event) => (event.subject ?? "").replace(/(sha256:[0-9a-f]{10})[0-9a-f]{54}/g, "$1…");

export function EventList({ events }) {
  if (!events.length) return <Empty>Nothing has happened yet.</Empty>;
  return <ol class="list events">{events.map((each) => (
    <li key={each.sequence}><time class="muted num" dateTime={moment(each.at)} title={moment(each.at)}>{clock(each.at)}</time> <code>{each.code}</code> <span title={each.subject}>{subjectOf(each)}</span> <span class="muted">{messageOf(each)}</span></li>
  ))}</ol>;
}

export function Events() {
  const rows = useTable("events");
  const [found, filter] = useFilter(rows, (row) => `${row.code} ${row.subject} ${row.message} ${row.actor} ${row.node ?? ""} ${row.tenant ?? ""}/${row.workload ?? ""}`);
  return (
    <>
      <h1>Events <span class="muted">{rows ? `the newest ${rows.length}` : ""}</span></h1>
      <Panel title="What happened" side={filter}>
        <Table stack label="Events" rows={found} keyOf={(row) => row.sequence} sort={{ at: 0, down: true }} empty="No event matches." columns={[
          { name: "When", key: (row) => row.sequence, down: true, cell: (row) => <time class="num" dateTime={moment(row.at)} title={moment(row.at)}>{clock(row.at)}</time> },
          { name: "Event", key: (row) => row.code, cell: (row) => <code>{row.code}</code> },
          { name: "Subject", key: (row) => row.subject, cell: (row) => <span title={row.subject}>{subjectOf(row)}</span> },
          { name: "Message", grow: true, has: (row) => row.message, cell: (row) => messageOf(row) },
          { name: "Workload", hide: "phone", cell: (row) => (row.workload ? <Workload of={{ tenant: row.tenant, name: row.workload }} /> : null) },
          { name: "Node", hide: "phone", cell: (row) => (row.node ? <><Link to={`fleet/${row.node}`}>{row.node}</Link> <StandIn is={row.stand_in} /></> : null) },
          { name: "By", hide: "phone", cell: (row) => <span class="muted">{row.actor}</span> },
        ]} />
      </Panel>
    </>
  );
}
