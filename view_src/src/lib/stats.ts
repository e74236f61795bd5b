export type Numbers = number[] | Float64Array;

export function mean(values: Numbers): number {
  let sum = 0;
  for (const value of values) sum += value;
  return values.length ? sum / values.length : Number.NaN;
}

/** Standard deviation over all values (not of a sample). */
export function spread(values: number[]): number {
  const center = mean(values);
  return Math.sqrt(mean(values.map((value) => (value - center) ** 2)));
}

export interface Bin {
  from: number;
  to: number;
  count: number;
}

/** Return equal bins from the least to the greatest value; whole numbers where all values are. */
export function histogram(values: Numbers, most = 24): Bin[] {
  if (!values.length) return [];
  let low = Number.POSITIVE_INFINITY;
  let high = Number.NEGATIVE_INFINITY;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low === high) return [{ from: low, to: Number.isInteger(low) ? low + 1 : low, count: values.length }];
  const whole = values.every(Number.isInteger);
  const width = whole ? Math.max(1, Math.ceil((high - low + 1) / most)) : (high - low) / most;
  const size = whole ? Math.ceil((high - low + 1) / width) : most;
  const bins = Array.from({ length: size }, (_, k) => ({ from: low + k * width, to: whole ? Math.min(low + (k + 1) * width, high + 1) : low + (k + 1) * width, count: 0 }));
  for (const value of values) {
    const bin = bins[Math.min(size - 1, Math.floor((value - low) / width))];
    if (bin) bin.count++;
  }
  return bins;
}
