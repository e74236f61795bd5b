import type { VNode } from "preact";
import type { Change, Comparison, Difference, Ratio } from "../lib/comparison";
import { change, decimals, fixed, number, percent, plain, plural } from "../lib/format";
import { Card, Text } from "../ui/bits";

export function CompareCards({ comparison }: { comparison: Comparison }): VNode {
  const { num_tasks: tasks, num_clusters: units } = comparison.difference;
  return (
    <div class="compare-cards">
      <Card title="Difference, B − A" note={`over ${plural(tasks, "task")}${units === null ? "" : ` in ${plural(units, "unit")}`}`}>
        <IntervalPlot difference={comparison.difference} margin={comparison.margin} />
        <Checks comparison={comparison} />
      </Card>
      {comparison.environments.length > 0 && (
        <Card title="Environments" note={`mean ${comparison.by}`}>
          <Changes changes={comparison.environments} />
        </Card>
      )}
      <Card title="Passed">
        <Changes changes={fewPasses(comparison.passes)} />
        {comparison.passes.length === 0 && <p class="dim">No score says what passed.</p>}
      </Card>
      <Card title="Stop reasons and lengths">
        <Changes changes={comparison.stop_reasons} share />
        <Lengths name="sampled tokens, B / A" ratio={comparison.lengths} />
        <Lengths name="of episodes passed in both" ratio={comparison.lengths_passed} />
      </Card>
      {comparison.cost && (
        <Card title="Dollars per episode">
          <Changes changes={[comparison.cost]} />
        </Card>
      )}
      <FlagsThatDiffer comparison={comparison} />
      {comparison.info.length > 0 && (
        <Card title="info" note="means of the last turn" className="wide">
          <Changes changes={comparison.info} />
        </Card>
      )}
    </div>
  );
}

function fewPasses(changes: Change[]): Change[] {
  const of = (sign: string): Change[] => changes.filter((each) => each.name.startsWith(`pass${sign}`));
  const [at, all] = [of("@"), of("^")];
  return [...new Set([at[0], at[at.length - 1], all[all.length - 1]])].filter((each): each is Change => each !== undefined);
}

/** The interval about zero, with what is too small to matter in gray. */
function IntervalPlot({ difference, margin }: { difference: Difference; margin: number }): VNode {
  const { mean, ci95_low: low, ci95_high: high } = difference;
  const ends = [mean, low ?? mean, high ?? mean, 0, margin, -margin];
  const most = Math.max(...ends.map(Math.abs)) * 1.25 || 1;
  const x = (value: number): number => 300 + (value / most) * 280;
  // The ends of a narrow interval have one label.
  const isNarrow = x(high ?? mean) - x(low ?? mean) < 60;
  const labels: [number, string][] =
    low === null || high === null ? [] : isNarrow ? [[x(mean), `${change(low, 2)} to ${change(high, 2)}`]] : [[x(low), change(low, 2)], [x(high), change(high, 2)]];
  const tone = low !== null && low > margin ? "pos" : high !== null && high < -margin ? "neg" : "neutral";
  return (
    <svg class="interval" viewBox="0 0 600 64" role="img" aria-label={`difference ${change(mean)}, interval ${interval(difference)}`}>
      {margin > 0 && <rect class="margin" x={x(-margin)} y="6" width={x(margin) - x(-margin)} height="36" />}
      <line class="zero" x1="300" y1="4" x2="300" y2="44" />
      {low !== null && high !== null && <line class={`range ${tone}`} x1={x(low)} y1="24" x2={x(high)} y2="24" />}
      <circle class={tone} cx={x(mean)} cy="24" r="6" />
      <text x="300" y="60">0</text>
      {labels.map(([at, text]) => Math.abs(at - 300) > (labels.length > 1 ? 34 : 64) && <text key={at} x={at} y="60">{text}</text>)}
    </svg>
  );
}

function Checks({ comparison }: { comparison: Comparison }): VNode {
  const { difference, sign_flips: flips, pairing, precision, share_above: above, share_bound: bound } = comparison;
  const facts: [string, string][] = [];
  if (flips) facts.push(["sign flips", `p ${number(flips.p)}${flips.is_exact ? ", exact" : ""}`]);
  if (pairing) {
    facts.push(["standard error", `${number(difference.se, 4)}, unpaired ${number(pairing.se_unpaired, 4)}`]);
    facts.push(["correlation of the tasks", fixed(pairing.correlation)]);
  }
  if (above) facts.push(["P(B > A)", `${fixed(above.b, 3)}, 95 % ${interval(above.difference, 0.5)}`]);
  if (comparison.are_identical && bound !== null) facts.push(["tasks that differ", `at most ${percent(bound)}`]);
  return (
    <>
      <dl class="facts">
        {facts.map(([name, text]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
      {precision && (
        <p class="hint">
          ±{number(precision.half)} would be ±{number(precision.half_more_episodes)} with 4 times the episodes per task, ±
          {number(precision.half_more_tasks)} with 4 times the {comparison.cluster === null ? "tasks" : "units"}. {percent(precision.share_within)} of the variance is within
          tasks.
        </p>
      )}
    </>
  );
}

function interval(difference: Difference, shift = 0): string {
  const { ci95_low: low, ci95_high: high } = difference;
  if (low === null || high === null) return "\u2014";
  return shift ? `${fixed(low + shift)} to ${fixed(high + shift)}` : `${change(low)} to ${change(high)}`;
}

function Changes({ changes, share = false }: { changes: Change[]; share?: boolean }): VNode | null {
  if (!changes.length) return null;
  const write = (value: number): string => (share ? percent(value) : number(value, decimals(value)));
  return (
    <table class="table">
      <thead>
        <tr>
          <th />
          <th class="right">A</th>
          <th class="right">B</th>
          <th class="right">B − A</th>
          <th class="right">95 %</th>
          <th class="right">q</th>
          {changes.some(({ verdict }) => verdict !== null) && <th>verdict</th>}
        </tr>
      </thead>
      <tbody>
        {changes.map(({ name, a, b, difference, q, verdict }) => (
          <tr key={name}>
            <td>
              <Text value={name} line />
            </td>
            <td class="right">{write(a)}</td>
            <td class="right">{write(b)}</td>
            <td class="right">{change(difference.mean)}</td>
            <td class="right nowrap dim">{interval(difference)}</td>
            <td class="right dim">{q === null ? "" : number(q, 2)}</td>
            {verdict !== null && <td>{verdict.replace("_", " ")}</td>}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Lengths({ name, ratio }: { name: string; ratio: Ratio | null }): VNode | null {
  if (!ratio) return null;
  const ends = ratio.ci95_low === null ? "" : `, 95 % ${fixed(ratio.ci95_low)} to ${fixed(ratio.ci95_high)}`;
  return (
    <p class="hint">
      {name}: <strong>{fixed(ratio.ratio)}</strong>
      {ends}, {plural(ratio.num_tasks, "task")}
    </p>
  );
}

function FlagsThatDiffer({ comparison }: { comparison: Comparison }): VNode | null {
  const changed = Object.entries(comparison.changed);
  if (!changed.length) return null;
  return (
    <Card title="Flags that differ" note={`${changed.length}${comparison.caveats.some((each) => each.text.startsWith("--")) ? ", besides what is named above" : ""}`}>
      <dl class="facts mono flags">
        {changed.map(([name, [a, b]]) => (
          <div key={name}>
            <dt>
              --
              <Text value={name} line />
            </dt>
            <dd>
              <Text value={plain(a)} line /> → <Text value={plain(b)} line />
            </dd>
          </div>
        ))}
      </dl>
    </Card>
  );
}
