import type { VNode } from "preact";
import { COLORS, type ColorBy, type EpisodeModel } from "../lib/tokens";

interface ColorBarProps {
  color: ColorBy;
  setColor: (by: ColorBy) => void;
  template: boolean;
  setTemplate: (on: boolean) => void;
  model: Pick<EpisodeModel, "hasLearner" | "hasAdvantages">;
  newest: number;
}

export function isKnown(by: ColorBy, model: ColorBarProps["model"]): boolean {
  return (by !== "advantage" || model.hasAdvantages) && (by !== "ratio" || model.hasLearner);
}

/** Return the next color for which the record has values. */
export function nextColor(color: ColorBy, by: number, model: ColorBarProps["model"]): ColorBy {
  const known = COLORS.map(([key]) => key).filter((key) => isKnown(key, model));
  const place = known.indexOf(color);
  return known[(place + by + known.length) % known.length] ?? "logprob";
}

type Entry = [string, string];

function legend(color: ColorBy, newest: number): Entry[] {
  switch (color) {
    case "logprob":
      return [["p0", "p \u2265 .90"], ["p1", ".37"], ["p2", ".05"], ["p3", ".0025"], ["p4", "less"], ["missing", "missing"]];
    case "advantage":
      return [["neg3", "\u2212\u2212"], ["neg1", "\u2212"], ["d0", "0"], ["pos1", "+"], ["pos3", "++"], ["missing", "not recorded"]];
    case "ratio":
      return [["neg2", "learner less"], ["d0", "the same"], ["pos2", "learner more"], ["missing", "not recorded"]];
    case "version":
      return [0, 1, 2, 3, 4].filter((age) => age <= newest).map((age) => [`v${age}`, `${newest - age}${age === 4 ? " or older" : ""}`]);
    case "mask":
      return [["trained", "trained on"], ["untrained", "not"]];
    default:
      return [];
  }
}

export function ColorBar({ color, setColor, template, setTemplate, model, newest }: ColorBarProps): VNode {
  return (
    <div class="color-bar">
      <label>
        color by{" "}
        <select value={color} onChange={(event) => setColor(event.currentTarget.value as ColorBy)}>
          {COLORS.map(([key, name]) => (
            <option key={key} value={key} disabled={!isKnown(key, model)}>
              {name}
            </option>
          ))}
        </select>
      </label>
      <span class="legend" aria-label="legend">
        {legend(color, newest).map(([tone, name]) => (
          <span key={tone} class={`t ${tone}`}>
            {name}
          </span>
        ))}
      </span>
      <span class="legend-who" aria-label="who made the tokens">
        <span class="who k-prompt">prompt</span>
        <span class="who k-action">action</span>
        <span class="who k-feedback">feedback</span>
        <span class="who k-close">synthesized close</span>
      </span>
      <label class="check">
        <input type="checkbox" checked={template} onChange={(event) => setTemplate(event.currentTarget.checked)} /> template
        tokens
      </label>
    </div>
  );
}
