// The next days of all jobs, as the service computes them.
import { call } from '../api/client';
import type { ShownJob } from '../api/schema';

export interface Due {
  at: number;
  job: string;
  kind: string;
}

export const DAYS = 7;
const DAY_MS = 86_400_000;
/** Dates that the service is asked for, per schedule; it tells no more. */
const MOST_DATES = 100;

export interface Dues {
  /** Sorted. */
  due: Due[];
  /** Jobs that are due more often than the service tells, each with its last time that is known. */
  cut: Due[];
}

/** All due times of the next days that are known; jobs that are switched off have none. */
export async function dueTimes(jobs: ShownJob[], now: number): Promise<Dues> {
  const wanted = jobs.filter((job) => job.enabled !== false).flatMap((job) => (job.schedule ?? []).map((calendar) => ({ job, calendar })));
  const previews = await Promise.all(
    wanted.map(async ({ job, calendar }) => {
      const { next_ms } = await call('GET /schedule/preview', { query: { calendar, count: MOST_DATES } });
      return next_ms.map((at) => ({ at, job: job.name, kind: job.kind }));
    }),
  );
  return {
    due: previews.flat().filter((due) => due.at < now + DAYS * DAY_MS).sort((a, b) => a.at - b.at),
    cut: previews.flatMap((dates) => (dates.length < MOST_DATES ? [] : dates.slice(-1))),
  };
}

/** Due times by local day, today first. `cut`: jobs that are also due at times that are not known. */
export function byDay({ due, cut }: Dues, now: number): { start: number; due: Due[]; cut: string[] }[] {
  const first = new Date(now);
  return Array.from({ length: DAYS }, (_, offset) => {
    const start = new Date(first.getFullYear(), first.getMonth(), first.getDate() + offset).getTime();
    const end = new Date(first.getFullYear(), first.getMonth(), first.getDate() + offset + 1).getTime();
    const unknown = cut.filter(({ at }) => at < end).map(({ job }) => job);
    return { start, due: due.filter(({ at }) => at >= start && at < end), cut: [...new Set(unknown)] };
  });
}
