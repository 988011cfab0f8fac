// How jobs of kind protect-live follow their machines, fetched again while it is shown. For use while a component is set up.
import { call } from '../api/client';
import { query, type Query } from '../api/query.svelte';
import type { FollowedMachine, FollowState } from '../api/schema';
import type { Tone } from '../parts/Badge.svelte';

const LOOKING_MS = 5_000;

export const FOLLOW_TONES: Record<FollowState, Tone> = { absent: 'none', follows: 'good', starting: 'accent', retrying: 'warn', behind: 'bad', stopped: 'bad' };
export const FOLLOW_WORDS: Record<FollowState, string> = { follows: 'follows', starting: 'starts', retrying: 'tries again',
  behind: 'is behind', stopped: 'not followed', absent: 'does not run from Coldrise' };

/** All that the user sees, or those of one machine. */
export function followedMachines(machine?: string): Query<FollowedMachine[]> {
  const found = query(() => call('GET /followed', { query: machine ? { machine } : {} }),
    (event) => event.type === 'job' || event.type === 'session' || (event.type === 'run' && (!machine || event.machine === machine)));
  $effect(() => {
    if (!found.value?.length) return;
    const timer = setInterval(() => {
      if (!document.hidden) found.again();
    }, LOOKING_MS);
    return () => clearInterval(timer);
  });
  return found;
}

/** The machines of a job by state, the worst first: `1 tries again`, `2 follow`. */
export function byState(machines: FollowedMachine[]): { state: FollowState; count: number }[] {
  return (Object.keys(FOLLOW_TONES) as FollowState[]).toReversed()
    .map((state) => ({ state, count: machines.filter((one) => one.state === state).length })).filter(({ count }) => count > 0);
}
