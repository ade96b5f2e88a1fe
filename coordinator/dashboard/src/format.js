// Figures as people read them: three digits, the unit beside the figure, `–` for what is unknown.
export const NONE = "–";
const known = (value) => value !== undefined && value !== null && Number.isFinite(value);

export function digits(value, most = 3) {
  if (!known(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || size < 1e-4) return value.toExponential(1);
  const after = Math.max(0, most - 1 - Math.floor(Math.log10(size)));
  const text = value.toFixed(Math.min(after, 8));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : Number(text).toLocaleString("en");
}
export const whole = (value) => (known(value) ? Math.round(value).toLocaleString("en") : NONE);
export function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${digits(value)} ${units[at]}`;
}
export function seconds(value) {
  if (!known(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${digits(value * 1e6)} µs`;
  if (value < 1) return `${digits(value * 1e3)} ms`;
  if (value < 120) return `${digits(value)} s`;
  return span(value);
}
export function span(value) {
  if (!known(value)) return NONE;
  const s = Math.max(0, Math.round(value));
  if (s < 60) return `${s}s`;
  if (s < 3600) return `${Math.floor(s / 60)}m ${s % 60 ? `${s % 60}s` : ""}`.trim();
  if (s < 86400) return `${Math.floor(s / 3600)}h ${Math.floor((s % 3600) / 60) ? `${Math.floor((s % 3600) / 60)}m` : ""}`.trim();
  return `${Math.floor(s / 86400)}d ${Math.floor((s % 86400) / 3600) ? `${Math.floor((s % 86400) / 3600)}h` : ""}`.trim();
}
export const ago = (at) => (at ? `${span(Date.now() / 1000 - at)} ago` : NONE);
export const watts = (value) => (known(value) ? `${digits(value)} W` : NONE);
export const joules = (value) => (!known(value) ? NONE : value < 1 ? `${digits(value * 1e3)} mJ` : `${digits(value)} J`);
export const money = (value) => (known(value) ? `$${digits(value)}/h` : NONE);
export const carbon = (value) => (known(value) ? `${digits(value)} g/h` : NONE);
export const percent = (value) => (known(value) ? `${digits(value * 100)} %` : NONE);
export const rate = (value) => (known(value) ? `${digits(value)}/s` : NONE);
export const clock = (at) => (at ? new Date(at * 1000).toLocaleTimeString("en-GB") : NONE);
export const moment = (at) => (at ? new Date(at * 1000).toISOString().replace("T", " ").slice(0, 19) + "Z" : NONE);
export const short = (digest) => (digest ?? "").replace(/^sha256:/, "").slice(0, 10);
export const plural = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;
