// Time marks of a session: which ones are shown, and where.
import type { MarksDetails } from '../api/schema';
import { firstAt, toPixel, type Span } from '../timeline/scale';
import { duration } from './units';

export type Mark = MarksDetails['marks'][number];

/** How far back the strip shows, from the newest mark. */
export const REACHES: [name: string, ms: number][] = [['the last 10 min', 600_000], ['the last hour', 3_600_000],
  ['the last day', 86_400_000]];
/** Least width of what is drawn of a mark: others in it are not seen. */
const COLUMN_PX = 1.5;

/** The marks of the last `reachMs`, or from `chosenMs` on if that is older, and their span. */
export function lastOf(marks: Mark[], reachMs: number, chosenMs = Infinity): { shown: Mark[]; span: Span } {
  const [oldest = 0, to = 0] = [marks[0]?.marked_at_ms, marks.at(-1)?.marked_at_ms];
  const from = Math.max(oldest, Math.min(to - reachMs, chosenMs));
  // A single mark is at the right.
  return { shown: marks.slice(firstAt(timesOf(marks), from)), span: { from: Math.min(from, to - 1), to } };
}

const timesOf = (marks: Mark[]) => marks.map((mark) => mark.marked_at_ms);

/** Index of the last of some marks that is not after `ms`; 0 if all are. */
export function lastUntil(marks: Mark[], ms: number): number {
  return Math.max(0, firstAt(timesOf(marks), ms + 1) - 1);
}

/** Index of the mark nearest to `ms`. */
export function nearest(marks: Mark[], ms: number): number {
  const before = lastUntil(marks, ms);
  const distance = (index: number) => Math.abs((marks[index]?.marked_at_ms ?? Infinity) - ms);
  return distance(before + 1) < distance(before) ? before + 1 : before;
}

/** How tall the line of a mark is, of 1: taller the nearer its neighbour. 1 s: 1, 10 s: 0.7, 1 min: 0.47. */
function tallness(marks: Mark[], index: number): number {
  const step = (a: number, b: number) => (marks[b]?.marked_at_ms ?? Infinity) - (marks[a]?.marked_at_ms ?? -Infinity);
  const seconds = Math.min(step(index - 1, index), step(index, index + 1)) / 1000;
  return Math.min(1, Math.max(0.25, 1 - 0.3 * Math.log10(seconds)));
}

/** A line for each mark, from `base` upwards, as the `d` of an SVG path. */
export function linesOf(marks: Mark[], span: Span, width: number, base: number, height: number): string {
  const columns = new Map<number, number>();
  marks.forEach((mark, index) => {
    const column = Math.round(toPixel(mark.marked_at_ms, span, width) / COLUMN_PX);
    columns.set(column, Math.max(columns.get(column) ?? 0, tallness(marks, index)));
  });
  return [...columns].map(([column, tall]) => `M${column * COLUMN_PX} ${base}v-${Math.round(tall * height)}`).join('');
}

/** `2026-11-27 03:04:05`, in UTC as in the addresses of marks. */
export function utc(ms: number): string {
  return new Date(ms).toISOString().slice(0, 19).replace('T', ' ');
}

/** How fine the marks are, the newest first: `each 1 s up to 10 min ago`. */
export function fineness({ stretches }: MarksDetails, now: number): string[] {
  return stretches.toReversed().map(({ finest_step_s: step, from_ms }) =>
    `${step > 0 ? `each ${duration(step * 1000)}` : 'one mark'} up to ${duration(now - from_ms)} ago`);
}
