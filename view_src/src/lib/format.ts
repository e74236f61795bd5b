// Numbers as the page writes them. "\u2014" is what was not recorded, 0 is zero.

export const NONE = "\u2014";
const MINUS = "\u2212";

const formats = new Map<number, Intl.NumberFormat>();

/** Write a number with up to `digits` decimals; a format is made once, since making one takes longer than its use. */
function written(value: number, digits: number): string {
  let format = formats.get(digits);
  if (!format) formats.set(digits, (format = new Intl.NumberFormat("en-US", { maximumFractionDigits: digits })));
  return format.format(value);
}

const missing = (value: number | null | undefined): value is null | undefined =>
  value === null || value === undefined || Number.isNaN(value);

/** A number with up to `digits` decimals, without trailing zeros. */
export function number(value: number | null | undefined, digits = 3): string {
  if (missing(value)) return NONE;
  if (!Number.isFinite(value)) return value > 0 ? "inf" : `${MINUS}inf`;
  if (value !== 0 && Math.abs(value) < 10 ** -digits) return value.toExponential(1).replace("-", MINUS);
  return written(value, digits).replace("-", MINUS);
}

/** A number with exactly `digits` decimals. */
export function fixed(value: number | null | undefined, digits = 2): string {
  if (missing(value)) return NONE;
  if (!Number.isFinite(value)) return value > 0 ? "inf" : `${MINUS}inf`;
  return value.toFixed(digits).replace(/^-(?=0\.?0*$)/, "").replace("-", MINUS);
}

/** At least `digits` decimals, and up to 9, so that a small number shows two of its own; as the terminal does. */
export function decimals(value: number | null, digits = 3): number {
  const size = Math.abs(value ?? 0);
  return size >= 1e-9 && size < 1 ? Math.max(digits, Math.min(9, 1 - Math.floor(Math.log10(size)))) : digits;
}

/** A number with its sign. */
export function signed(value: number | null | undefined, digits = 2): string {
  if (missing(value)) return NONE;
  const text = fixed(Math.abs(value), digits);
  if (Number(Math.abs(value).toFixed(digits)) === 0) return `\u00b1${text}`;
  return `${value > 0 ? "+" : MINUS}${text}`;
}

/** A difference of two runs. */
export function change(value: number | null, digits = 3): string {
  return signed(value, decimals(value, digits));
}

export function count(value: number | null | undefined): string {
  return missing(value) ? NONE : written(value, 0);
}

export function percent(share: number | null | undefined, digits = 0): string {
  return missing(share) ? NONE : `${(share * 100).toFixed(digits).replace("-", MINUS)} %`;
}

/** A duration. What was measured is more than 0; other trainers' records have none. */
export function seconds(value: number | null | undefined): string {
  if (missing(value) || value === 0) return NONE;
  if (value >= 120) return `${(value / 60).toFixed(1)} min`;
  return `${value >= 10 ? value.toFixed(0) : value >= 0.1 ? value.toFixed(2) : value.toFixed(3)} s`;
}

export function bytes(value: number): string {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} GB`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} MB`;
  return `${(value / 1e3).toFixed(0)} kB`;
}

export function plural(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** A probability from its logarithm. */
export function probability(logprob: number): string {
  const p = Math.exp(logprob);
  if (p >= 0.995) return "1.00";
  return p >= 0.01 ? p.toFixed(2) : p.toPrecision(1);
}

/** A value of unknown type as text. */
export function plain(value: unknown): string {
  if (value === null || value === undefined) return NONE;
  if (typeof value === "number") return number(value, 4);
  return typeof value === "string" ? value : JSON.stringify(value);
}
