// What the pages are made of.
import { useEffect, useMemo, useState } from "preact/hooks";
import { NONE, whole } from "./format.js";

const TONES = {
  ready: "good", done: "good", active: "good", granted: "good", awake: "good", live: "good", passed: "good",
  progressing: "move", starting: "move", fetching: "move", loading: "move", warming: "move", verifying: "move", draining: "move",
  shifting: "move", queued: "move", planned: "move", reserved: "move", staging: "move", awarding: "move", staged: "calm", standby: "calm",
  pending: "warn", suspect: "warn", cordoned: "warn", waking: "warn", "rolling_back": "warn", withdrawing: "warn", stopping: "warn",
  short: "warn", deleting: "warn", throttled: "warn",
  lost: "bad", failed: "bad", aborted: "bad", revoked: "bad", quarantined: "bad",
};
export const toneOf = (state) => TONES[state] ?? "calm";
const MARKS = { good: "●", move: "◐", warn: "▲", bad: "✕", calm: "○" };

/** A state as a word, a mark and a colour, so that no meaning rests on colour alone. */
export function State({ is, tone = toneOf(is) }) {
  return <span class={`state ${tone}`}><span aria-hidden="true">{MARKS[tone]}</span>{is || NONE}</span>;
}

export const StandIn = ({ is }) => (is ? <span class="standin" title={is === "emulated"
  ? "Emulated: the real model runs on a CPU, paced and metered by published figures" : "Simulated: the answers are the chip's, its times are not"}>{is}</span> : null);

export function Reason({ of, more }) {
  if (!of?.code) return null;
  return (
    <span class="reason">
      <code>{of.code}</code> {of.found}
      {more && of.asked ? <span class="muted"> · {of.code === "DELEGATED" ? "agreement" : "wanted:"} {of.asked}</span> : null}
      {more && of.remedy ? <span class="muted"> · try: {of.remedy}</span> : null}
    </span>
  );
}

/** A share of a whole as a bar; the figure is beside it as text. */
export function Bar({ share, mark, label, tone = "" }) {
  const at = Math.max(0, Math.min(1, share || 0));
  return (
    <svg class={`bar ${tone}`} viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label={label}>
      <rect class="whole" width="100" height="6" rx="2" />
      <rect class="part" width={at * 100} height="6" rx="2" />
      {mark !== undefined ? <rect class="mark" x={Math.min(99, mark * 100)} width="1.4" height="6" /> : null}
    </svg>
  );
}

export function Stat({ name, value, note, tone = "", href }) {
  const inner = <><span class="name">{name}</span><b class={`value ${tone}`}>{value}</b>{note ? <span class="note">{note}</span> : null}</>;
  return <div class="stat">{href ? <a href={href}>{inner}</a> : inner}</div>;
}

export function Panel({ title, side, children, wide }) {
  return (
    <section class={`panel ${wide ? "wide" : ""}`}>
      <header><h2>{title}</h2>{side}</header>
      {children}
    </section>
  );
}

export const Empty = ({ children }) => <p class="empty">{children}</p>;
export const Waiting = () => <p class="empty" aria-busy="true">Waiting for the coordinator…</p>;

const SHOWN = 150;

/** most: rows that are shown until one asks for more. stack: on a phone each row is a block, a line for each cell. columns: {name, cell, key (to sort by), end (right-aligned), hide ("phone"), has (shown only if that is so of a row)}. */
export function Table({ label, rows, columns, keyOf, sort, empty = "None.", onRow, most: shown = SHOWN, stack }) {
  const [by, setBy] = useState(sort ?? { at: 0, down: false });
  const [most, setMost] = useState(shown);
  const sorted = useMemo(() => {
    const key = columns[by.at]?.key;
    if (!key || !rows) return rows ?? [];
    const keyed = rows.map((row) => [key(row), row]);
    keyed.sort(([a], [b]) => (a === b ? 0 : a === undefined || a === null ? 1 : b === undefined || b === null ? -1 : a < b ? -1 : 1) * (by.down ? -1 : 1));
    return keyed.map(([, row]) => row);
  }, [rows, by, columns]);
  if (rows === null) return <Waiting />;
  if (!rows.length) return <Empty>{empty}</Empty>;
  const lacking = columns.map((column) => column.has !== undefined && !rows.some(column.has));
  return (
    <>
      <div class="scroll" tabIndex={0} role="region" aria-label={label}>
        <table class={stack ? "stack" : undefined}>
          <thead>
            <tr>
              {columns.map((column, at) => lacking[at] ? null : (
                <th key={column.name} scope="col" class={cls(column)} aria-sort={by.at === at && column.key ? (by.down ? "descending" : "ascending") : undefined}>
                  {column.key ? (
                    <button onClick={() => setBy({ at, down: by.at === at ? !by.down : Boolean(column.down) })}>
                      {column.name}<span aria-hidden="true">{by.at === at ? (by.down ? " ↓" : " ↑") : ""}</span>
                    </button>
                  ) : column.name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {sorted.slice(0, most).map((row) => (
              <tr key={keyOf(row)} class={onRow?.(row)}>
                {columns.map((column, at) => lacking[at] ? null : at === 0
                  ? <th key={column.name} scope="row" class={cls(column)}>{column.cell(row)}</th>
                  : <td key={column.name} class={cls(column)} data-name={stack ? column.name : undefined}>{column.cell(row)}</td>)}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {sorted.length > most ? (
        <p class="more"><button class="quiet" onClick={() => setMost(most * 4)}>Show more</button> <span class="muted">{whole(most)} of {whole(sorted.length)}</span></p>
      ) : null}
    </>
  );
}
const cls = (column) => [column.end ? "end" : "", column.hide ? `hide-${column.hide}` : "", column.grow ? "grow" : ""].filter(Boolean).join(" ");

export function Filter({ value, onInput, label }) {
  return <input type="search" class="filter" value={value} placeholder="Filter  /" aria-label={label} onInput={(event) => onInput(event.currentTarget.value)} />;
}

export function useFilter(rows, textOf) {
  const [text, setText] = useState("");
  const found = useMemo(() => {
    if (!rows || !text.trim()) return rows;
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    return rows.filter((row) => { const has = textOf(row).toLowerCase(); return words.every((word) => has.includes(word)); });
  }, [rows, text]);
  return [found, <Filter value={text} onInput={setText} label="Filter rows" />];
}

/** What an asynchronous call told: {data, error}; asked again whenever `of` changes. */
export function useAsked(call, of) {
  const [told, setTold] = useState({});
  useEffect(() => {
    let over = false;
    setTold((before) => ({ ...before, busy: true }));
    call().then((data) => over || setTold({ data }), (error) => over || setTold({ error }));
    return () => { over = true; };
  }, of);
  return told;
}

export function Refused({ error }) {
  return (
    <div class="refused" role="alert">
      <p><strong>{error.found || "It was refused."}</strong> <code>{error.code}</code></p>
      {error.asked ? <p class="muted">wanted: {error.asked}</p> : null}
      {error.remedy ? <p class="muted">try: {error.remedy}</p> : null}
    </div>
  );
}

export const Link = ({ to, children, ...rest }) => <a href={`#/${to}`} {...rest}>{children}</a>;
export const workloadPath = (row) => `workloads/${encodeURIComponent(row.tenant)}/${encodeURIComponent(row.name)}`;
/** A workload's name; its tenant only where that is not the default one. */
export const Workload = ({ of }) => <Link to={workloadPath(of)}>{of.tenant && of.tenant !== "default" ? <span class="muted">{of.tenant}/</span> : null}{of.name}</Link>;

/** A small line of past values. */
export function Spark({ values, label, width = 96, height = 22 }) {
  const known = values.filter((v) => v !== null && v !== undefined);
  if (known.length < 2) return <span class="muted">{NONE}</span>;
  const top = Math.max(...known, 1e-12), step = width / (values.length - 1);
  let pen = false, path = "";
  values.forEach((v, at) => {
    if (v === null || v === undefined) { pen = false; return; }
    path += `${pen ? "L" : "M"}${(at * step).toFixed(1)} ${(height - 2 - (v / top) * (height - 4)).toFixed(1)}`;
    pen = true;
  });
  return <svg class="spark" width={width} height={height} viewBox={`0 0 ${width} ${height}`} role="img" aria-label={label}><path d={path} /></svg>;
}
