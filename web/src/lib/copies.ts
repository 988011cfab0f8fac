// Copies elsewhere: their states in words, and the savings by cause.
import type { CopyCounts, CopyState, MachineCopies, TargetCopies } from '../api/schema';
import type { Tone } from '../parts/Badge.svelte';
import { count, elapsed, size } from './units';

/** Unknown states are grey, not green. */
export const COPY_TONES: Record<CopyState, Tone> = {
  current: 'good', copying: 'live', behind: 'warn', never: 'none', unknown: 'none', failing: 'bad',
};
const STATES: Record<CopyState, string> = {
  current: 'up to date', copying: 'copying', behind: 'behind', never: 'never copied', unknown: 'unknown', failing: 'failing',
};

type Behind = Pick<MachineCopies & TargetCopies, 'points_behind' | 'bytes_behind' | 'is_exact' | 'behind_since_ms'>;

/** How far behind: `3 points, 1.2 GiB`. Empty if nothing is missing. */
export function behindWords({ points_behind: points, bytes_behind: bytes, is_exact: isExact }: Behind): string {
  if (points === null || points === undefined) return '';
  if (points === 0) return '';
  const missing = count(points, 'point');
  return bytes === null || bytes === undefined ? missing : `${missing}, ${isExact ? '' : 'up to '}${size(bytes)}`;
}

/** The badge: `behind by 3 points, 2 h`. */
export function copyWords(copies: Behind & { state: CopyState }, now: number): string {
  const { state, points_behind: points, behind_since_ms: since } = copies;
  if (state !== 'behind' || !points) return STATES[state];
  return `behind by ${count(points, 'point')}${since ? `, ${elapsed(now - since)}` : ''}`;
}

export interface Part {
  name: string;
  bytes: number;
  colour: string;
}

/** The processed bytes, unfinished copies included. */
export function offeredBytes({ line, size_bytes: size }: CopyCounts): number {
  return line ? line.unchanged_bytes + line.zero_bytes + line.known_bytes + line.content_bytes : size;
}

/** The bytes of the copied points: not sent, by cause, and sent. */
export function savedParts(counts: CopyCounts): Part[] {
  const { line, size_bytes: all, read_bytes: read, stored_bytes: stored } = counts;
  if (line) {
    const content = line.content_bytes - line.delta_bytes;
    return [{ name: 'unchanged', bytes: line.unchanged_bytes, colour: 'good' }, { name: 'empty', bytes: line.zero_bytes, colour: 'line-strong' },
      { name: 'was there already', bytes: line.known_bytes, colour: 'accent' }, { name: 'same as before in part', bytes: line.delta_bytes, colour: 'live' },
      { name: 'compressed away', bytes: Math.max(0, content - line.packed_bytes), colour: 'warn' }, { name: 'sent', bytes: line.sent_bytes, colour: 'ink' }];
  }
  return [{ name: 'unchanged or empty', bytes: Math.max(0, all - read), colour: 'good' },
    { name: 'was there, or compressed away', bytes: Math.max(0, read - stored), colour: 'accent' }, { name: 'stored', bytes: stored, colour: 'ink' }];
}
