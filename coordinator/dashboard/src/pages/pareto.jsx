import { useState } from "preact/hooks";
import { carbon, joules, money, seconds } from "../format.js";

const AXES = {
  energy: { name: "energy", of: (each) => each.prediction?.joules?.mid, show: joules },
  cost: { name: "cost", of: (each) => each.cost_usd_per_h, show: money },
  carbon: { name: "carbon", of: (each) => each.carbon_g_per_h, show: carbon },
};
const WIDTH = 560, HEIGHT = 230, LEFT = 64, BOTTOM = 30, TOP = 12, RIGHT = 16;

/** Candidates by latency and one other figure. Those on the line are better in none without being worse in another. */
export function Pareto({ candidates }) {
  const [by, setBy] = useState("energy");
  const axis = AXES[by];
  const all = candidates.map((each) => ({ each, x: each.prediction?.latency_p95_s?.mid, y: axis.of(each) })).filter(({ x, y }) => x > 0 && y !== undefined && y >= 0);
  const usable = Object.entries(AXES).filter(([, each]) => candidates.some((one) => each.of(one) !== undefined));
  const chooser = <div class="seg" role="group" aria-label="Compare latency with">{usable.map(([key, each]) => <button key={key} aria-pressed={by === key} onClick={() => setBy(key)}>{each.name}</button>)}</div>;
  if (all.length < 2) return usable.length > 1 ? chooser : null;
  const xs = all.map(({ x }) => Math.log10(x)), low = Math.min(...xs) - 0.1, high = Math.max(...xs) + 0.1, top = Math.max(...all.map(({ y }) => y)) * 1.1 || 1;
  const at = ({ x, y }) => [LEFT + ((Math.log10(x) - low) / (high - low)) * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - (y / top) * (HEIGHT - BOTTOM - TOP)];
  const front = [];
  for (const point of all.filter(({ each }) => !each.refusal?.code).sort((a, b) => a.x - b.x || a.y - b.y)) if (!front.length || point.y < front.at(-1).y) front.push(point);
  const best = front.map((point) => `${point.each.node}/${point.each.device}: ${seconds(point.x)}, ${axis.show(point.y)}`).join("; ");
  return (
    <figure class="pareto">
      <figcaption>Latency against {axis.name} {chooser}</figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`Candidates by p95 and ${axis.name}. None is better in both than: ${best}.`}>
        {[0, 0.5, 1].map((share) => { const y = HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP); return <g key={share}><line class="rule" x1={LEFT} x2={WIDTH - RIGHT} y1={y} y2={y} /><text class="tick end" x={LEFT - 6} y={y + 4}>{axis.show(top * share)}</text></g>; })}
        {[0, 0.5, 1].map((share) => <text key={share} class="tick" text-anchor={share === 1 ? "end" : share ? "middle" : "start"} x={LEFT + share * (WIDTH - LEFT - RIGHT)} y={HEIGHT - 8}>{seconds(10 ** (low + share * (high - low)))}</text>)}
        <polyline class="front" points={front.map((point) => at(point).join(",")).join(" ")} />
        {all.map((point) => {
          const [x, y] = at(point), { each } = point;
          const kind = each.current ? "now" : each.refusal?.code ? "out" : front.includes(point) ? "best" : "fits";
          return <g key={`${each.node}/${each.device}/${each.model}/${each.precision}`}><circle cx={x} cy={y} r={each.current ? 6 : 4.5} class={kind}><title>{`${each.node}/${each.device} ${each.precision}${each.stand_in ? ` (${each.stand_in})` : ""}: ${seconds(point.x)}, ${axis.show(point.y)}${each.refusal?.code ? `; ${each.refusal.code}` : ""}`}</title></circle>
            {all.length <= 12 ? <text class="tick" x={x + 9} y={y - 6} text-anchor={x > WIDTH * 0.75 ? "end" : "start"} dx={x > WIDTH * 0.75 ? -18 : 0}>{each.node}</text> : null}</g>;
        })}
      </svg>
      <p class="muted legend"><i class="dot now" /> where it runs · <i class="dot best" /> none is better in both · <i class="dot fits" /> fits · <i class="dot out" /> excluded · p95 across, {axis.name} up</p>
    </figure>
  );
}
