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
/** Dates that the service is asked for, per schedule. */
const MOST_DATES = 100;

/** All due times of the next days, sorted; jobs that are switched off have none. */
export async function dueTimes(jobs: ShownJob[], now: number): Promise<Due[]> {
  const wanted = jobs.filter((job) => job.enabled !== false).flatMap((job) => (job.schedule ?? []).map((calendar) => ({ job, calendar })));
  const previews = await Promise.all(
    wanted.map(async ({ job, calendar }) => {
      const { next_ms } = await call('GET /schedule/preview', { query: { calendar, count: MOST_DATES } });
      return next_ms.map((at) => ({ at, job: job.name, kind: job.kind }));
    }),
  );
  return previews.flat().filter((due) => due.at < now + DAYS * DAY_MS).sort((a, b) => a.at - b.at);
}

/** Due times by local day, today first. */
export function byDay(due: Due[], now: number): { start: number; due: Due[] }[] {
  const first = new Date(now);
  return Array.from({ length: DAYS }, (_, offset) => {
    const start = new Date(first.getFullYear(), first.getMonth(), first.getDate() + offset).getTime();
    const end = new Date(first.getFullYear(), first.getMonth(), first.getDate() + offset + 1).getTime();
    return { start, due: due.filter(({ at }) => at >= start && at < end) };
  });
}
