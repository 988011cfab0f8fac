// Time marks of a session: which ones are shown, and where.
import { call, onceKey } from '../api/client';
import type { Followed, MarksDetails, MarkStretch, SessionDetails } from '../api/schema';
import { firstAt, toPixel, type Span } from '../timeline/scale';
import { commandLine } from './command_line';
import type { Point } from './points';
import { answerOf } from './runs';
import { duration } from './units';

export type Mark = MarksDetails['marks'][number];

/** How far back the strip shows, from the newest mark. */
export const REACHES: [name: string, ms: number][] = [['the last 10 min', 600_000], ['the last hour', 3_600_000],
  ['the last day', 86_400_000]];
/** Least width of what is drawn of a mark: others in it are not seen. */
const COLUMN_PX = 1.5;
/** Rings nearer than this would be a blot. */
const LEAST_RING_STEP_PX = 8;

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

/** A ring on a stem for each consistent mark: the lines of the others have none. As the `d` of an SVG path. */
export function ringsOf(marks: Mark[], span: Span, width: number, base: number, top: number): string {
  const columns: number[] = [];
  for (const mark of marks) {
    const x = Math.round(toPixel(mark.marked_at_ms, span, width));
    if (mark.is_consistent && x - (columns.at(-1) ?? -Infinity) >= LEAST_RING_STEP_PX) columns.push(x);
  }
  return columns.map((x) => `M${x} ${base}V${top + 6}a3 3 0 1 1 .01 0`).join('');
}

/** Where stretches of marks begin and end, and how fine they are. Those too narrow for words have none. */
export function stretchesIn(stretches: MarkStretch[], span: Span, width: number): { x: number; width: number; text: string }[] {
  return stretches.flatMap(({ from_ms, to_ms, finest_step_s }) => {
    const [from, to] = [from_ms, to_ms].map((ms) => Math.min(width, Math.max(0, toPixel(ms, span, width)))) as [number, number];
    const text = stepText(finest_step_s);
    return to - from < 3 ? [] : [{ x: from, width: to - from, text: to - from > 12 + 6.5 * text.length ? text : '' }];
  });
}

const stepText = (seconds: number) => (seconds > 0 ? `each ${duration(seconds * 1000)}` : 'one mark');

/** `2026-11-27 03:04:05`, in UTC as in the addresses of marks. */
export function utc(ms: number): string {
  return new Date(ms).toISOString().slice(0, 19).replace('T', ' ');
}

/** How fine the marks are, the newest first: `each 1 s up to 10 min ago`. */
export function fineness({ stretches }: MarksDetails, now: number): string[] {
  return stretches.toReversed().map(({ finest_step_s: step, from_ms }) =>
    `${stepText(step)} up to ${duration(now - from_ms)} ago`);
}

/** The session whose marks count for a machine: the newest that follows it, else the newest that is served. */
export function markedSession(sessions: SessionDetails[]): SessionDetails | undefined {
  const newestOf = (some: SessionDetails[]) => some.toSorted((a, b) => a.created_at_ms - b.created_at_ms).at(-1);
  return newestOf(sessions.filter(({ follows }) => follows)) ?? newestOf(sessions.filter((session) => session.is_served));
}

/** The session of a mark's address, `live/SESSION@TIME`, and the time in it, `20261127T030405Z`. */
function partsOf({ address }: Mark): { session: string; time: string } {
  const [, session = '', time = ''] = /^live\/(.+)@(.+)$/.exec(address) ?? [];
  return { session, time };
}

/** A mark in the form of a point, to be recovered by its address: the run that does it makes the point. And the point of its session. */
export async function asPoint(mark: Mark): Promise<{ point: Point; base: string }> {
  const { session, time } = partsOf(mark);
  const { disks, point: base } = await call('GET /sessions/{session}', { path: { session } });
  const point: Point = { address: mark.address, point: time, kind: 'synthetic', created_at_ms: mark.marked_at_ms, is_protected: false,
    is_in_future: false, is_passed_over: false, disks, size_bytes: disks.reduce((sum, disk) => sum + disk.size_bytes, 0) };
  return { point, base };
}

/** Makes the restore point of a mark, and returns its name. */
export async function sealed(mark: Pick<Mark, 'address'>): Promise<string> {
  const { run } = await call('POST /runs', { body: { kind: 'seal', session: mark.address }, once: onceKey() });
  const { address } = await answerOf(run);
  return String(address).split('/')[1] ?? '';
}

/** Up to when a session has what its machine wrote. */
export function reachOf(follows: { lag_s?: number | null } | null | undefined): string {
  return typeof follows?.lag_s === 'number' ? `everything up to ${duration(follows.lag_s * 1000)} ago` : 'no complete state yet';
}

/** The line that follows a machine again. */
export function followLine({ source }: Followed, machine: string, session: string): string {
  const [, from = source, on] = /^(.*?)(?: on (\S+))?$/.exec(source) ?? [];
  return commandLine('protect-live', machine, '--from', from, ...(on ? ['--on', on] : []), '--name', session);
}
