// The time marks of a session, fetched again while they change. For use while a component is set up.
import { untrack } from 'svelte';
import { call } from '../api/client';
import { query } from '../api/query.svelte';
import type { MarksDetails } from '../api/schema';
import { SHOWN_MS } from './activity';

const LOOKING_MS = 5_000;

export interface Lag {
  at: number;
  seconds: number;
}

export interface SessionMarks {
  readonly value: MarksDetails | undefined;
  /** How far behind its machine the session was while the page was open. */
  readonly lags: Lag[];
  readonly problem: ReturnType<typeof query>['problem'];
  again(): void;
}

/** `session` may change, or be missing for now. `isLive`: its marks change. */
export function sessionMarks(session: () => string | undefined, isLive: () => boolean): SessionMarks {
  const details = query(async () => {
    const name = session();
    return name ? call('GET /sessions/{session}/marks', { path: { session: name } }) : undefined;
  }, (event) => event.type === 'session' && event.session === session());
  const value = $derived(details.value?.session === session() ? details.value : undefined);
  /** A list of tens of thousands is fetched less often. */
  const pause = $derived(Math.max(LOOKING_MS, value?.marks.length ?? 0));
  $effect(() => {
    if (!isLive()) return;
    const timer = setInterval(() => {
      if (!document.hidden) details.again();
    }, pause);
    return () => clearInterval(timer);
  });

  let lags = $state.raw<Lag[]>([]);
  let of: string | undefined;
  $effect(() => {
    const seconds = value?.follows?.lag_s;
    if (!value || typeof seconds !== 'number') return;
    const at = Date.now();
    const before = of === value.session ? untrack(() => lags) : [];
    of = value.session;
    lags = [...before.filter((lag) => lag.at > at - SHOWN_MS), { at, seconds }];
  });
  return {
    get value() {
      return value;
    },
    get lags() {
      return lags;
    },
    get problem() {
      return details.problem;
    },
    again: details.again,
  };
}
