import type { VNode } from "preact";
import { number } from "../lib/format";
import type { Bin } from "../lib/stats";

const HEIGHT = 64;

interface HistogramProps {
  bins: Bin[];
  href?: (bin: Bin) => string;
  name: string;
}

/** Bars of equal width; each is a link where `href` says so. */
export function Histogram({ bins, href, name }: HistogramProps): VNode {
  const most = Math.max(...bins.map((bin) => bin.count), 1);
  const whole = bins.every((bin) => Number.isInteger(bin.from) && Number.isInteger(bin.to));
  const first = bins[0];
  const last = bins[bins.length - 1];
  const range = (bin: Bin): string => {
    if (bin.from === bin.to || (whole && bin.to - bin.from === 1)) return number(bin.from);
    return `${number(bin.from)} to ${whole || bin === last ? "" : "below "}${number(whole ? bin.to - 1 : bin.to)}`;
  };
  return (
    <div class="histogram">
      <svg viewBox={`0 0 ${bins.length * 10} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={`histogram of ${name}`}>
        {bins.map((bin, k) => {
          const height = bin.count ? Math.max(2, (bin.count / most) * HEIGHT) : 0;
          const bar = (
            <>
              <title>{`${range(bin)}: ${number(bin.count, 1)} ${name}`}</title>
              <rect class="hit" x={k * 10} y="0" width="10" height={HEIGHT} />
              <rect class="bar" x={k * 10 + 0.6} y={HEIGHT - height} width="8.8" height={height} />
            </>
          );
          return href && bin.count ? (
            <a key={k} href={href(bin)} aria-label={`${range(bin)}: ${number(bin.count, 1)} ${name}`}>
              {bar}
            </a>
          ) : (
            <g key={k}>{bar}</g>
          );
        })}
      </svg>
      <div class="histogram-ends dim">
        <span>{first ? number(first.from) : ""}</span>
        <span>{last ? number(whole && last.to > last.from ? last.to - 1 : last.to) : ""}</span>
      </div>
    </div>
  );
}
