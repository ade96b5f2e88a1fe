// The dashboard: who is logged in, where the page is, and its frame.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { follow, live, onLoggedOut, stop, useLive, useTable } from "./live.js";
import { digits } from "./format.js";
import { Overview } from "./pages/overview.jsx";
import { Fleet } from "./pages/fleet.jsx";
import { Workloads } from "./pages/workloads.jsx";
import { WorkloadPage } from "./pages/workload.jsx";
import { Migrations } from "./pages/migrations.jsx";
import { Events } from "./pages/events.jsx";
import { Federation } from "./pages/federation.jsx";
import { Plan } from "./pages/plan.jsx";
import { Traces } from "./pages/traces.jsx";
import { ICONS } from "./icons.jsx";

const PAGES = {
  "": { name: "Overview", key: "o", show: Overview, tables: ["node_states", "devices", "workloads", "places", "migrations", "latest_events", "figures"] },
  fleet: { name: "Fleet", key: "f", show: Fleet, tables: ["nodes", "devices", "placements"] },
  workloads: { name: "Workloads", key: "w", show: (props) => (props.path.length > 1 ? <WorkloadPage {...props} /> : <Workloads />), tables: ["workloads", "figures"], list: ["places"], one: ["placements", "migrations", "events", "agreements"] },
  migrations: { name: "Migrations", key: "m", show: Migrations, tables: ["migrations"] },
  federation: { name: "Federation", key: "r", show: Federation, tables: ["regions", "agreements", "events"] },
  events: { name: "Events", key: "e", show: Events, tables: ["events"] },
  plan: { name: "What if", key: "p", show: Plan, tables: ["workloads", "devices", "regions"] },
  traces: { name: "Traces", key: "t", show: Traces, tables: ["migrations", "events"] },
};

function pathOf() {
  return location.hash.replace(/^#\/?/, "").split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
}

function App() {
  const [who, setWho] = useState(undefined);
  const [path, setPath] = useState(pathOf);
  useEffect(() => {
    onLoggedOut(() => { stop(); setWho(null); });
    const enter = () => begin().then(setWho, () => setWho(null));
    enter();
    // A link that is opened in a window that shows this page already changes only the part after #.
    const moved = () => { if (linkOf()) enter(); setPath(pathOf()); scrollTo(0, 0); };
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  const page = PAGES[path[0]] ?? PAGES[""];
  const isOne = path.length > 1;
  useEffect(() => { if (who) follow([...page.tables, ...((isOne ? page.one : page.list) ?? [])]); }, [who, page, isOne]);
  useEffect(() => { document.title = `${page.name} · ${who?.region ?? "Shoal"}`; document.getElementById("main")?.focus({ preventScroll: true }); }, [page, who]);
  if (who === undefined) return <p class="loading">Logging in…</p>;
  if (who === null) return <Login />;
  return <Frame who={who} page={page} path={path} />;
}

const linkOf = () => /^#link=([\w-]+)$/.exec(location.hash)?.[1];

/** Uses a one-time link, which then leaves the address bar, and tells who is logged in. */
async function begin() {
  const link = linkOf();
  if (link) {
    history.replaceState(null, "", location.pathname);
    await fetch("/api/v1/login", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ link }) });
  }
  const reply = await fetch("/api/v1/session");
  return reply.ok ? reply.json() : null;
}

function Login() {
  return (
    <main class="login" id="main" tabIndex={-1}>
      <h1>{ICONS.logo} Shoal</h1>
      <p>Nobody is logged in here, or the session has ended.</p>
      <p>On a machine with a context of this region, run</p>
      <pre>shoal dashboard</pre>
      <p>and open the link that it prints: it works once, within two minutes. Or come with the certificate of an operator or a viewer.</p>
    </main>
  );
}

function Frame({ who, page, path }) {
  const [help, setHelp] = useState(false);
  useKeys(setHelp);
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to content</a>
      <Top who={who} onHelp={() => setHelp(true)} />
      <nav aria-label="Pages">
        <ul>
          {Object.entries(PAGES).map(([at, each]) => (
            <li key={at}>
              <a href={`#/${at}`} aria-current={each === page ? "page" : undefined} title={`${each.name} (g ${each.key})`}>{ICONS[at || "overview"]}<span>{each.name}</span></a>
            </li>
          ))}
        </ul>
      </nav>
      <main id="main" tabIndex={-1}><page.show path={path} /></main>
      {help ? <Help onClose={() => setHelp(false)} /> : null}
    </>
  );
}

function Top({ who, onHelp }) {
  useLive();
  const region = [...(live.tables.get("region")?.values() ?? [])][0];
  const [theme, setTheme] = useTheme();
  const next = theme === "dark" ? "light" : theme === "light" ? "" : "dark";
  return (
    <header class="top">
      <a class="brand" href="#/">{ICONS.logo}<span>{who.region}</span></a>
      {region?.federation ? <span class="fact hide-phone">in {region.federation}</span> : null}
      {region?.signals?.filter((each) => each.value !== undefined).map((each) => (
        <span class={`fact hide-phone ${each.stale ? "warn" : ""}`} key={each.name} title={each.why}>{each.name} <b>{digits(each.value)}</b> {each.unit}</span>
      ))}
      {region && !region.writable ? <span class="fact bad" title={region.refusal}>the store takes no writes</span> : null}
      <span class="spring" />
      <span class={`conn ${live.state.status}`} role="status">{live.state.status === "live" ? "live" : live.state.status === "lost" ? "reconnecting…" : "connecting…"}</span>
      <span class="fact hide-phone" title={`${who.role} ${who.name}`}>{who.name}, read-only</span>
      <button class="icon" onClick={() => setTheme(next)} aria-label={`Colours: ${theme || "as the system"}. Change`} title={`Colours: ${theme || "as the system"}`}>{ICONS.theme}</button>
      <button class="icon hide-phone" onClick={onHelp} aria-label="Keyboard help" title="Keyboard (?)">?</button>
    </header>
  );
}

function useTheme() {
  const [theme, setTheme] = useState(() => { try { return localStorage.getItem("theme") ?? ""; } catch { return ""; } });
  useEffect(() => {
    if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
    try { localStorage.setItem("theme", theme); } catch { /* private window */ }
  }, [theme]);
  return [theme, setTheme];
}

function useKeys(setHelp) {
  useEffect(() => {
    let leader = 0;
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) { if (event.key === "Escape") event.target.blur(); return; }
      if (event.key === "/") { const field = document.querySelector(".filter"); if (field) { event.preventDefault(); field.focus(); } }
      else if (event.key === "?") setHelp(true);
      else if (event.key === "Escape") setHelp(false);
      else if (event.key === "g") leader = Date.now();
      else if (Date.now() - leader < 1500) {
        const found = Object.entries(PAGES).find(([, each]) => each.key === event.key);
        if (found) location.hash = `#/${found[0]}`;
        leader = 0;
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

function Help({ onClose }) {
  return (
    <dialog open class="help" aria-label="Keyboard">
      <h2>Keyboard</h2>
      <dl>
        {Object.values(PAGES).map((each) => <div key={each.key}><dt><kbd>g</kbd> <kbd>{each.key}</kbd></dt><dd>{each.name}</dd></div>)}
        <div><dt><kbd>/</kbd></dt><dd>Filter</dd></div>
        <div><dt><kbd>Esc</kbd></dt><dd>Close, leave a field</dd></div>
      </dl>
      <p class="muted"><a href="/assets/licences.txt">Licences of what this page is built of</a></p>
      <button autoFocus onClick={onClose}>Close</button>
    </dialog>
  );
}

render(<App />, document.getElementById("root"));
