import type { VNode } from "preact";
import type { Stores } from "../data/store";
import type { RunName, Runs } from "../data/types";
import { bytes, number } from "../lib/format";
import { links } from "../lib/router";
import { oneLine } from "../lib/visible";
import { Card, Empty, Text } from "../ui/bits";
import { useLoaded } from "../ui/hooks";

export function RunList({ stores, runs, unknown }: { stores: Stores; runs: Runs; unknown: number | null }): VNode {
  return (
    <div class="narrow">
      {unknown !== null && <Empty title={`There is no run ${unknown} here.`}>Choose one of these.</Empty>}
      <Card title="Runs" note={`${runs.runs.length}`}>
        <table class="table">
          <thead>
            <tr>
              <th>run</th>
              <th>kind</th>
              <th>environment</th>
              <th>model</th>
              <th class="right">reward</th>
              <th class="right">size</th>
            </tr>
          </thead>
          <tbody>
            {runs.runs.map((run) => (
              <RunRow key={run.run} stores={stores} run={run} />
            ))}
          </tbody>
        </table>
      </Card>
    </div>
  );
}

const KINDS = { run: "run", train: "training", eval: "evaluations" };

function RunRow({ stores, run }: { stores: Stores; run: RunName }): VNode {
  const { value: meta } = useLoaded(`meta-${run.run}`, () => stores.source.meta(run.run));
  const size = Object.values(meta?.sizes ?? {}).reduce((sum, each) => sum + each, 0);
  return (
    <tr>
      <td class="nowrap">
        <a href={links.overview(run.run)}>
          <Text value={run.name} line />
        </a>
        {meta?.is_writing && <span class="state live">live</span>}
      </td>
      <td>{KINDS[run.kind]}</td>
      <td class="clip" title={oneLine(meta?.env ?? "")}>
        <Text value={meta?.env ?? "\u2014"} line />
      </td>
      <td class="nowrap">
        <Text value={meta?.model ?? "\u2014"} line />
      </td>
      <td class="right">{number(meta?.metrics?.reward?.mean)}</td>
      <td class="right">{meta ? bytes(size) : ""}</td>
    </tr>
  );
}
