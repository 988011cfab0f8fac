// Time and pixels. Pure: no canvas here.
import { clock } from '../lib/units';

export interface Span {
  /** Milliseconds since 1970. */
  from: number;
  to: number;
}

const SECOND = 1_000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
const SHORTEST_SPAN_MS = 10 * SECOND;
const LEAST_ROOM_MS = 5 * MINUTE;
const LONGEST_SPAN_MS = 40 * 365 * DAY;
const STEPS = [SECOND, 5 * SECOND, 15 * SECOND, MINUTE, 5 * MINUTE, 15 * MINUTE, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 7 * DAY];
/** Months of the longer steps. */
const MONTH_STEPS = [1, 3, 6, 12, 24, 60, 120];
const LEAST_TICK_PX = 84;

export function toPixel(ms: number, span: Span, width: number): number {
  return ((ms - span.from) / (span.to - span.from)) * width;
}

export function toTime(pixel: number, span: Span, width: number): number {
  return span.from + (pixel / width) * (span.to - span.from);
}

/** Zooms by `factor` (below 1: nearer) around a time. */
export function zoomed(span: Span, factor: number, around: number): Span {
  const length = Math.min(LONGEST_SPAN_MS, Math.max(SHORTEST_SPAN_MS, (span.to - span.from) * factor));
  const share = (around - span.from) / (span.to - span.from);
  const from = around - length * share;
  return { from, to: from + length };
}

export function moved(span: Span, ms: number): Span {
  return { from: span.from + ms, to: span.to + ms };
}

/** A span that shows all of it, with room at both ends. */
export function around(first: number, last: number): Span {
  // On a phone this is as much as the ring of a chosen point needs.
  const room = Math.max((last - first) * 0.06, LEAST_ROOM_MS);
  return { from: first - room, to: last + room };
}

export interface Tick {
  ms: number;
  text: string;
  /** The start of a day or of a year. */
  isMajor: boolean;
}

const MONTHS = ['Jan', 'Feb', 'Mar', 'Apr', 'May', 'Jun', 'Jul', 'Aug', 'Sep', 'Oct', 'Nov', 'Dec'];

/** Ticks at round local times. */
export function ticks(span: Span, width: number): Tick[] {
  const least = ((span.to - span.from) * LEAST_TICK_PX) / Math.max(width, 1);
  const step = STEPS.find((candidate) => candidate >= least);
  return step === undefined ? monthTicks(span, least) : timeTicks(span, step);
}

function timeTicks(span: Span, step: number): Tick[] {
  const found: Tick[] = [];
  const start = new Date(span.from);
  start.setHours(0, 0, 0, 0);
  let ms = start.getTime();
  // Clocks change by a multiple of such a step.
  if (step < HOUR) ms += Math.floor((span.from - ms) / step) * step;
  while (ms <= span.to) {
    const date = new Date(ms);
    const time = clock(ms, step < MINUTE);
    const isMidnight = /^00:00(:00)?$/.test(time);
    if (ms >= span.from) found.push({ ms, isMajor: isMidnight, text: isMidnight ? `${date.getDate()} ${MONTHS[date.getMonth()]}` : time });
    if (step >= DAY) date.setDate(date.getDate() + step / DAY);
    else date.setTime(ms + step);
    // Each day begins at its own midnight, also where the clock changes.
    if (step < DAY && date.getDate() !== new Date(ms).getDate()) date.setHours(0, 0, 0, 0);
    ms = Math.max(date.getTime(), ms + 1);
  }
  return found;
}

function monthTicks(span: Span, least: number): Tick[] {
  const months = MONTH_STEPS.find((candidate) => candidate * 30 * DAY >= least) ?? 120;
  const found: Tick[] = [];
  const date = new Date(new Date(span.from).getFullYear(), 0, 1);
  while (date.getTime() <= span.to) {
    const isYear = date.getMonth() === 0;
    if (date.getTime() >= span.from)
      found.push({ ms: date.getTime(), isMajor: isYear, text: isYear ? String(date.getFullYear()) : (MONTHS[date.getMonth()] ?? '') });
    date.setMonth(date.getMonth() + months);
  }
  return found;
}

/** Index of the first of sorted times that is not before `ms`. */
export function firstAt(times: number[], ms: number): number {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((times[middle] ?? Infinity) < ms) low = middle + 1;
    else high = middle;
  }
  return low;
}
