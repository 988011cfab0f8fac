// The meaning of a restore point's marks.
import type { ListedPoint, PointPage } from '../api/schema';
import type { Tone } from '../parts/Badge.svelte';

export type Point = PointPage['points'][number];

/** The boot badge of a point: its tone and its words. */
export function bootBadge(point: Pick<ListedPoint, 'boot' | 'is_boot_worse' | 'quarantine'>): { tone: Tone; text: string } {
  if (point.quarantine === 'damaged') return { tone: 'bad', text: 'damaged' };
  if (point.boot === 'failed') return { tone: 'bad', text: 'boot failed' };
  if (point.boot === 'ok' && point.is_boot_worse) return { tone: 'warn', text: 'boots, worse than usual' };
  if (point.boot === 'ok') return { tone: 'good', text: 'boot verified' };
  if (point.boot === 'not_proven') return { tone: 'none', text: 'boot not proven' };
  return { tone: 'none', text: 'not booted' };
}

export function kindWord(kind: Point['kind']): string {
  return kind === 'backup' ? 'backup' : 'sealed session';
}

/** Points that can be recovered: not in quarantine, not dated in the future. */
export function isRecoverable(point: Point): boolean {
  return !point.quarantine && !point.is_in_future;
}

/**
 * The newest recoverable point whose boot is verified, the newest recoverable one, and the newest backup among them: by the time
 * that they show, which is not the order of their names.
 */
export function choices(points: Point[]): { verified?: Point; newest?: Point; backup?: Point } {
  const good = inTime(points.filter(isRecoverable));
  const verified = good.findLast((point) => point.boot === 'ok');
  const newest = good.at(-1);
  const backup = good.findLast((point) => point.kind === 'backup');
  return { ...(verified ? { verified } : {}), ...(newest ? { newest } : {}), ...(backup ? { backup } : {}) };
}

/**
 * The time that a point shows, in milliseconds since 1970. A backup: its name's, not that of its storing. A sealed session:
 * the time mark that it was sealed at, else when it was sealed, as its name has the time of the point that it began from.
 */
export function timeOf(point: { point: string; created_at_ms: number; marked_at_ms?: number | null }): number {
  if (point.marked_at_ms) return point.marked_at_ms;
  const parts = /^(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z$/.exec(point.point)?.slice(1).map(Number);
  if (!parts) return point.created_at_ms;
  const [year = 0, month = 1, day = 1, hour = 0, minute = 0, second = 0] = parts;
  return Date.UTC(year, month - 1, day, hour, minute, second);
}

/** Points by the time that they show, the oldest first. */
export function inTime(points: Point[]): Point[] {
  const times = new Map(points.map((point) => [point, timeOf(point)]));
  return points.toSorted((a, b) => (times.get(a) ?? 0) - (times.get(b) ?? 0));
}

/** The points of a session's origin that were sealed after its publish, in time; also those of its siblings. */
export function sealsAfter(session: { point: string; created_at_ms: number }, points: Point[]): Point[] {
  const root = (name: string) => name.split('+')[0];
  return inTime(points).filter(({ kind, point, created_at_ms }) => kind === 'synthetic' && created_at_ms > session.created_at_ms
    && root(point) === root(session.point));
}
