// Live numbers of a session's disks: counters become rates here.
import type { ActivityTotals } from '../api/schema';

export interface Rate {
  at: number;
  /** Bytes per second. */
  read: number;
  written: number;
  /** Operations per second. */
  operations: number;
}

/** Time that plots show, in milliseconds. */
export const SHOWN_MS = 15 * 60_000;

/** The service sends totals at this interval, if they have changed. */
const SAMPLE_MS = 2_000;
const QUIET = { read: 0, written: 0, operations: 0 };

/** Rates between totals, up to `end`: quiet times bring no totals. Those of another server give none. */
export function ratesOf(totals: ActivityTotals[], end: number): Rate[] {
  const quiet = (from: number, to: number): Rate[] => (to - from > 2 * SAMPLE_MS ? [{ at: from + 1, ...QUIET }, { at: to, ...QUIET }] : []);
  const rates = totals.flatMap((now, index) => {
    const before = totals[index - 1];
    if (!before || now.sampled_at_ms <= before.sampled_at_ms || before.opened_at_ms !== now.opened_at_ms) return [];
    const gap = now.sampled_at_ms - before.sampled_at_ms;
    const seconds = (gap > 2 * SAMPLE_MS ? SAMPLE_MS : gap) / 1000;
    const step = (name: 'reads' | 'writes' | 'read_bytes' | 'written_bytes') => Math.max(0, now[name] - before[name]) / seconds;
    const rate = { at: now.sampled_at_ms, read: step('read_bytes'), written: step('written_bytes'),
      operations: step('reads') + step('writes') };
    return [...quiet(before.sampled_at_ms, now.sampled_at_ms - SAMPLE_MS), rate];
  });
  return [...rates, ...quiet(totals.at(-1)?.sampled_at_ms ?? end, end)];
}

/** Lists of numbers added up, place by place. */
export function addedUp(values: (number[] | undefined)[]): number[] {
  const longest = Math.max(0, ...values.map((list) => list?.length ?? 0));
  return Array.from({ length: longest }, (_, index) => values.reduce((sum, list) => sum + (list?.[index] ?? 0), 0));
}
