/** Number of changes of one character that make one text the other. */
function distance(a: string, b: string): number {
  let before = Array.from({ length: b.length + 1 }, (_, k) => k);
  for (let i = 1; i <= a.length; i++) {
    const now = [i];
    for (let j = 1; j <= b.length; j++) {
      const change = (before[j - 1] ?? 0) + (a[i - 1] === b[j - 1] ? 0 : 1);
      now.push(Math.min((before[j] ?? 0) + 1, (now[j - 1] ?? 0) + 1, change));
    }
    before = now;
  }
  return before[b.length] ?? 0;
}

/** Return the names most like this one. */
export function near(name: string, names: Iterable<string>, most = 3): string[] {
  const wanted = name.toLowerCase().slice(0, 200);
  const scored: [number, string][] = [];
  for (const each of names) {
    const length = Math.max(wanted.length, each.length, 1);
    if (Math.abs(wanted.length - each.length) > length / 2) continue;
    const share = distance(wanted, each.toLowerCase().slice(0, 200)) / length;
    if (share <= 0.5) scored.push([share, each]);
  }
  return scored.sort((a, b) => a[0] - b[0]).slice(0, most).map(([, each]) => each);
}
