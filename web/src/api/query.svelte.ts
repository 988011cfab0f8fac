// A value of the API that stays current: fetched at first, after events that concern it, and when the
// service is back. For use while a component is set up.
import { now } from '../lib/now.svelte';
import { problemFrom, type Problem } from './client';
import { stream, type StreamEvent } from './events.svelte';

/** Least time between two fetches of one value, in milliseconds. */
const SHORTEST_PAUSE_MS = 400;
const RETRY_MS = 3_000;

export interface Query<T> {
  /** The last value; it stays while a newer one is fetched. */
  readonly value: T | undefined;
  /** Why the last fetch failed. */
  readonly problem: Problem | undefined;
  /** Fetches again. */
  again(): void;
}

/** `load` runs again when what it reads changes, such as a filter, and after events that `concerns` chooses. */
export function query<T>(load: () => Promise<T>, concerns: (event: StreamEvent) => boolean = () => false): Query<T> {
  let value = $state.raw<T | undefined>();
  let problem = $state.raw<Problem | undefined>();
  let turn = $state(0);
  let newest = 0;
  let last = 0;
  let timer: ReturnType<typeof setTimeout> | undefined;

  const soon = (pause: number) => {
    if (timer !== undefined) return;
    timer = setTimeout(() => {
      timer = undefined;
      turn += 1;
    }, pause);
  };

  $effect(() => {
    void turn;
    const mine = (newest += 1);
    last = Date.now();
    load().then(
      (loaded) => {
        if (mine !== newest) return;
        value = loaded;
        now.ms = Date.now();
        problem = undefined;
      },
      (error: unknown) => {
        if (mine !== newest) return;
        problem = problemFrom(error);
        if (problem.isGone || problem.status === 503) soon(RETRY_MS);
      },
    );
  });
  $effect(() => {
    const stop = stream.listen((event) => {
      if (event.type === 'reset' || concerns(event)) soon(Math.max(0, last + SHORTEST_PAUSE_MS - Date.now()));
    });
    return () => {
      stop();
      newest = -1;
      clearTimeout(timer);
    };
  });
  return {
    get value() {
      return value;
    },
    get problem() {
      return problem;
    },
    again: () => soon(0),
  };
}
