const icon = (...paths) => <svg class="i" viewBox="0 0 20 20" aria-hidden="true">{paths.map((d) => <path d={d} />)}</svg>;
export const ICONS = {
  logo: <svg class="i logo" viewBox="0 0 32 32" aria-hidden="true"><path class="a" d="M4 11c5-5 11-5 15 0-4 5-10 5-15 0zm13 0l5-4v8z" /><path class="b" d="M9 21c5-5 11-5 15 0-4 5-10 5-15 0zm13 0l5-4v8z" /></svg>,
  overview: icon("M3 3h6v6H3z", "M11 3h6v4h-6z", "M11 9h6v8h-6z", "M3 11h6v6H3z"),
  fleet: icon("M3 4h14v5H3z", "M3 11h14v5H3z", "M6 6.5h.01", "M6 13.5h.01"),
  workloads: icon("M10 2l7 4v8l-7 4-7-4V6z", "M3 6l7 4 7-4", "M10 10v8"),
  migrations: icon("M3 7h12", "M12 4l3 3-3 3", "M17 13H5", "M8 10l-3 3 3 3"),
  federation: icon("M10 6a2 2 0 100-4 2 2 0 000 4z", "M4 17a2 2 0 100-4 2 2 0 000 4z", "M16 17a2 2 0 100-4 2 2 0 000 4z", "M9 6l-4 7", "M11 6l4 7", "M6 15h8"),
  events: icon("M4 5h12", "M4 10h12", "M4 15h8"),
  plan: icon("M5 2h7l4 4v12H5z", "M8 10h5", "M8 13h5"),
  traces: icon("M3 5h9", "M6 9h9", "M8 13h5", "M12 17h5"),
  theme: icon("M10 3a7 7 0 100 14z", "M10 3a7 7 0 010 14"),
};
