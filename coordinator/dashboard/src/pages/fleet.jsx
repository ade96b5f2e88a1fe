import { useMemo, useState } from "preact/hooks";
import { grouped, useTable } from "../live.js";
import { ago, bytes, digits, money, percent, plural, watts, whole } from "../format.js";
import { Placements } from "./placements.jsx";
import { Bar, Empty, Link, Panel, Reason, StandIn, State, Table, useFilter, Waiting } from "../parts.jsx";

const HEATS = {
  memory: { name: "memory", of: (d) => (d.free === undefined ? undefined : 1 - d.free / d.memory), show: (d) => `${bytes(d.memory - d.free)} of ${bytes(d.memory)} used` },
  busy: { name: "load", of: (d) => d.busy, show: (d) => `${percent(d.busy)} busy` },
  heat: { name: "heat", of: (d) => (d.heat === undefined ? undefined : (d.heat - 25) / 70), show: (d) => `${digits(d.heat)} °C` },
  power: { name: "power", of: (d, top) => (d.watts === undefined ? undefined : d.watts / top), show: (d) => watts(d.watts) },
};

/** Rows come in the order of their changes; each tile keeps its place. */
const byNode = (a, b) => (a.node === b.node ? (a.name < b.name ? -1 : 1) : a.node < b.node ? -1 : 1);

/** More devices than these have smaller tiles. */
const MANY = 300;

/** Every device as a tile. The table has the same as text, so this is hidden from readers of the screen. */
export function HeatMap({ devices }) {
  const [by, setBy] = useState("memory");
  const top = Math.max(1, ...devices.map((each) => each.watts ?? 0));
  const heat = HEATS[by];
  const groups = useMemo(() => [...grouped([...devices].sort(byNode), (each) => each.kind)].sort(([a], [b]) => (a < b ? -1 : 1)), [devices]);
  if (!devices.length) return <Empty>No device has joined yet.</Empty>;
  return (
    <div class="heat">
      <div class="seg" role="group" aria-label="Colour devices by">{Object.entries(HEATS).map(([key, each]) => <button key={key} aria-pressed={by === key} onClick={() => setBy(key)}>{each.name}</button>)}</div>
      <div aria-hidden="true" class={devices.length > MANY ? "many" : ""}>
        {groups.map(([kind, listed]) => (
          <div class="kind" key={kind}><span>{kind} <b>{listed.length}</b></span>
            <div class="tiles">{listed.map((each) => {
              const share = heat.of(each, top);
              const level = share === undefined ? "none" : Math.max(0, Math.min(9, Math.floor(share * 10)));
              return <a key={`${each.node}/${each.name}`} tabIndex={-1} href={`#/fleet/${each.node}`} class={`tile h${level} ${each.live === "ready" ? "" : "down"} ${each.runs ? "runs" : ""} ${each.stand_in ? "stand" : ""}`}
                title={`${each.node}/${each.name}: ${each.product}${each.stand_in ? ` (${each.stand_in})` : ""}, ${share === undefined ? "unknown" : heat.show(each)}${each.runs ? `, runs ${each.runs}` : ""}`} />;
            })}</div>
          </div>
        ))}
      </div>
      <p class="muted legend">none {[0, 3, 6, 9].map((n) => <i class={`tile h${n}`} key={n} />)} full · <i class="tile h2 runs" /> runs something · <i class="tile h2 stand" /> emulated or simulated · <i class="tile h2 down" /> not ready</p>
    </div>
  );
}

export function Fleet({ path }) {
  const nodes = useTable("nodes"), devices = useTable("devices"), placements = useTable("placements");
  const [kind, setKind] = useState("devices");
  const [foundDevices, deviceFilter] = useFilter(devices, (d) => `${d.node} ${d.name} ${d.product} ${d.kind} ${d.vendor} ${d.stand_in ?? ""} ${d.live}`);
  const [foundNodes, nodeFilter] = useFilter(nodes, (n) => `${n.name} ${n.role} ${n.live} ${Object.entries(n.labels ?? {}).flat().join(" ")} ${n.reason?.code ?? ""}`);
  if (!nodes || !devices || !placements) return <Waiting />;
  if (path[1]) return <NodePage name={path[1]} nodes={nodes} devices={devices} placements={placements} />;
  return (
    <>
      <h1>Fleet <span class="muted">{plural(nodes.length, "node")}, {plural(devices.length, "device")}</span></h1>
      <Panel title="Devices at a glance"><HeatMap devices={devices} /></Panel>
      <Panel title={kind === "devices" ? "Devices" : "Nodes"} side={<><div class="seg" role="group" aria-label="Show"><button aria-pressed={kind === "devices"} onClick={() => setKind("devices")}>devices</button><button aria-pressed={kind === "nodes"} onClick={() => setKind("nodes")}>nodes</button></div>{kind === "devices" ? deviceFilter : nodeFilter}</>}>
        {kind === "devices" ? <Devices rows={foundDevices} /> : <Nodes rows={foundNodes} />}
      </Panel>
    </>
  );
}

const stateOf = (node) => node.revoked ? "revoked" : node.quarantined ? "quarantined" : node.live !== "ready" ? node.live : node.cordoned ? "cordoned" : "ready";

function Nodes({ rows }) {
  return (
    <Table label="Nodes" rows={rows} keyOf={(row) => row.name} empty="No node matches. One joins with: shoal token create" columns={[
      { name: "Node", key: (row) => row.name, cell: (row) => <Link to={`fleet/${row.name}`}>{row.name}</Link> },
      { name: "State", key: stateOf, cell: (row) => <State is={stateOf(row)} /> },
      { name: "Role", key: (row) => row.role, cell: (row) => row.role },
      { name: "Memory", end: true, hide: "phone", key: (row) => row.memory, cell: (row) => bytes(row.memory) },
      { name: "System", hide: "phone", cell: (row) => `${row.os ?? ""} ${row.arch ?? ""}` },
      { name: "Joined", end: true, hide: "phone", key: (row) => row.joined, cell: (row) => ago(row.joined) },
      { name: "Labels", hide: "phone", grow: true, cell: (row) => <Labels of={row.labels} /> },
      { name: "Reason", has: (row) => row.reason, cell: (row) => <Reason of={row.reason} /> },
    ]} />
  );
}

export const Labels = ({ of }) => <span class="labels">{Object.entries(of ?? {}).map(([key, value]) => <span key={key}>{key}=<b>{value}</b></span>)}</span>;

export function Devices({ rows }) {
  return (
    <Table label="Devices" rows={rows} keyOf={(row) => `${row.node}/${row.name}`} empty="No device matches." columns={[
      { name: "Device", key: (row) => `${row.node}/${row.name}`, cell: (row) => <><Link to={`fleet/${row.node}`}>{row.node}</Link><span class="muted">/{row.name}</span></> },
      { name: "Product", grow: true, hide: "phone", key: (row) => row.product, cell: (row) => <>{row.product} <StandIn is={row.stand_in} /></> },
      { name: "State", key: (row) => row.power ?? row.live, cell: (row) => <State is={row.throttled ? "throttled" : row.live !== "ready" ? row.live : row.power === "asleep" ? "asleep" : row.reason ? "silent" : "ready"} tone={row.reason ? "bad" : undefined} /> },
      { name: "Memory", end: true, key: (row) => (row.free === undefined ? undefined : row.memory - row.free), down: true, cell: (row) => <Memory of={row} /> },
      { name: "Load", end: true, key: (row) => row.busy, down: true, cell: (row) => percent(row.busy) },
      { name: "Heat", end: true, hide: "phone", key: (row) => row.heat, down: true, cell: (row) => (row.heat === undefined ? "–" : `${digits(row.heat)} °C`) },
      { name: "Power", end: true, hide: "phone", key: (row) => row.watts, down: true, cell: (row) => watts(row.watts) },
      { name: "Cost", end: true, hide: "phone", key: (row) => row.cost, down: true, cell: (row) => money(row.cost) },
      { name: "Runs", end: true, key: (row) => row.runs ?? 0, down: true, cell: (row) => whole(row.runs ?? 0) },
    ]} />
  );
}

function Memory({ of }) {
  if (of.free === undefined) return <>{bytes(of.memory)}</>;
  const used = of.memory - of.free;
  return <span class="meter"><Bar share={used / of.memory} label={`${percent(used / of.memory)} used`} tone={used / of.memory > 0.9 ? "warn" : ""} />{bytes(used)} <span class="muted hide-phone">of {bytes(of.memory)}</span></span>;
}

function NodePage({ name, nodes, devices, placements }) {
  const node = nodes.find((each) => each.name === name);
  if (!node) return <><h1>{name}</h1><Empty>No such node in this region, or not any longer. <Link to="fleet">Fleet</Link></Empty></>;
  const here = placements.filter((each) => each.node === name);
  return (
    <>
      <p class="crumbs"><Link to="fleet">Fleet</Link></p>
      <h1>{name} <State is={stateOf(node)} /></h1>
      {node.reason ? <p><Reason of={node.reason} more /></p> : null}
      <dl class="facts">
        <div><dt>role</dt><dd>{node.role}</dd></div>
        <div><dt>system</dt><dd>{node.os} {node.arch}</dd></div>
        <div><dt>memory</dt><dd>{bytes(node.memory)}</dd></div>
        <div><dt>agent</dt><dd>{node.version}</dd></div>
        <div><dt>last report</dt><dd>{node.seen ? ago(node.seen) : "now"}</dd></div>
        <div><dt>joined</dt><dd>{ago(node.joined)}</dd></div>
        <div><dt>labels</dt><dd><Labels of={node.labels} /></dd></div>
      </dl>
      <Panel title="Its devices"><Devices rows={devices.filter((each) => each.node === name)} /></Panel>
      <Panel title="What runs"><Placements rows={here} /></Panel>
    </>
  );
}
