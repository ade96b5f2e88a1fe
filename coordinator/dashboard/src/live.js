// The live tables: rows by table and key, as the coordinator sends them, and who shows them.
import { useEffect, useReducer } from "preact/hooks";

const tables = new Map();
const readers = new Set();
const state = { status: "connecting", at: 0 };
let source = null, wanted = "", retry = null, delay = 500, frame = 0, wasLost = false, loggedOut = () => {};
/** The script of this page; its name has a hash of what it was built of. */
const BUILD = import.meta.url.split("/").pop();

export const live = { tables, state };

/** Called once nobody is logged in. */
export function onLoggedOut(call) { loggedOut = call; }

/** Follow these tables, and no others. */
export function follow(names) {
  const asked = [...new Set(["region", ...names])].sort().join(",");
  if (asked === wanted && source) return;
  wanted = asked;
  connect();
}

export function stop() {
  wanted = "";
  source?.close();
  source = null;
  clearTimeout(retry);
}

function connect() {
  source?.close();
  clearTimeout(retry);
  const asked = wanted.split(",");
  for (const name of tables.keys()) if (!asked.includes(name)) tables.delete(name);
  if (state.status === "live") state.status = "connecting";
  const opened = source = new EventSource(`/api/v1/live?tables=${wanted}`);
  let fresh = false;
  opened.addEventListener("whole", () => { fresh = true; for (const name of asked) tables.set(name, new Map()); });
  opened.addEventListener("rows", (event) => {
    const { table, rows } = JSON.parse(event.data);
    const known = tables.get(table) ?? new Map();
    tables.set(table, known);
    for (const [key, row] of rows) {
      if (row === null) known.delete(key);
      else known.set(key, row);
    }
    known.list = null;
    if (!fresh) show();
  });
  opened.addEventListener("now", () => {
    fresh = false; delay = 500;
    Object.assign(state, { status: "live", at: Date.now() });
    show();
    if (wasLost) renew();
    wasLost = false;
  });
  opened.addEventListener("ended", () => { opened.close(); loggedOut(); });
  opened.onerror = () => {
    if (source !== opened) return;
    state.status = "lost";
    wasLost = true;
    show();
    if (opened.readyState === EventSource.CLOSED) again();
  };
}

async function again() {
  delay = Math.min(delay * 2, 10_000);
  try {
    const reply = await fetch("/api/v1/session");
    if (reply.status === 401 || reply.status === 403) return loggedOut();
    if (reply.ok) await renew();
  } catch { /* not reachable: try again */ }
  clearTimeout(retry);
  retry = setTimeout(() => wanted && connect(), delay);
}

/** Load the page again where the coordinator has another by now, as after an upgrade: each knows its own rows. */
async function renew() {
  const reply = await fetch("/").catch(() => null);
  if (reply?.ok && !(await reply.text()).includes(BUILD)) location.reload();
}

function show() {
  if (!frame) frame = requestAnimationFrame(() => { frame = 0; for (const call of readers) call(); });
}

/** Show the component again when something changed. */
export function useLive() {
  const [, again] = useReducer((n) => n + 1, 0);
  useEffect(() => { readers.add(again); return () => readers.delete(again); }, []);
}

/** The rows of a table, the same array until one of them changes; null until they have come. A page is drawn before it
 * follows its tables, so one that nobody followed is not empty but unknown. */
export function useTable(name) {
  useLive();
  const rows = tables.get(name);
  if (rows?.size) return rows.list ??= [...rows.values()];
  return rows && state.status === "live" ? EMPTY : null;
}
const EMPTY = [];

/** Rows by what `keyOf` says of each, in their order. */
export function grouped(rows, keyOf) {
  const found = new Map();
  for (const row of rows) {
    const key = keyOf(row), known = found.get(key);
    if (known) known.push(row); else found.set(key, [row]);
  }
  return found;
}

/** What the coordinator measured of a workload, or of the region (no row), in the last ten seconds. */
export function figuresOf(row) {
  return tables.get("figures")?.get(row ? `${row.tenant}/${row.name}` : "") ?? {};
}

/** One of the operator API's read-only calls. Throws the refusal. */
export async function ask(path, given = {}, body) {
  const query = new URLSearchParams(Object.entries(given).filter(([, value]) => value));
  const reply = await fetch(`/api/v1/${path}?${query}`, body === undefined ? {} :
    { method: "POST", headers: { "content-type": "application/yaml" }, body });
  const told = reply.status === 204 ? {} : await reply.json().catch(() => ({ code: `HTTP_${reply.status}`, found: reply.statusText }));
  if (!reply.ok) {
    if (reply.status === 401) loggedOut();
    throw told;
  }
  return told;
}
