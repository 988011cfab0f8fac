// Differences of two texts, line by line (longest common subsequence).
export interface Line {
  sign: ' ' | '-' | '+';
  text: string;
}

/** Longer texts are compared as a whole: the table grows with the product of their lines. */
const MAX_LINES = 1_000;

export function differences(left: string, right: string): Line[] {
  const [a, b] = [left.split('\n'), right.split('\n')];
  const all = (sign: Line['sign'], lines: string[]) => lines.map((text) => ({ sign, text }));
  if (left === right) return all(' ', a);
  if (a.length > MAX_LINES || b.length > MAX_LINES) return [...all('-', a), ...all('+', b)];
  const width = b.length + 1;
  const common = new Uint16Array((a.length + 1) * width);
  const at = (i: number, j: number) => common[i * width + j] ?? 0;
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) common[i * width + j] = a[i] === b[j] ? at(i + 1, j + 1) + 1
      : Math.max(at(i + 1, j), at(i, j + 1));
  }
  const found: Line[] = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      found.push({ sign: ' ', text: a[i] ?? '' });
      i += 1;
      j += 1;
    } else if (i < a.length && (j === b.length || at(i + 1, j) >= at(i, j + 1))) {
      found.push({ sign: '-', text: a[i] ?? '' });
      i += 1;
    } else {
      found.push({ sign: '+', text: b[j] ?? '' });
      j += 1;
    }
  }
  return found;
}
