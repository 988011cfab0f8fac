// The state of a machine in one word, worst first.
import type { Alarm, MachineSummary, SessionDetails } from '../api/schema';

export const STATES = ['damaged', 'failing', 'old', 'running', 'empty', 'good'] as const;
export type MachineState = (typeof STATES)[number];
export const STATE_WORDS: Record<MachineState, string> = {
  damaged: 'damaged',
  failing: 'failing',
  old: 'old',
  running: 'running from backup',
  empty: 'no backup',
  // An existing backup does not prove a boot.
  good: 'backed up',
};

const BY_TOPIC: Partial<Record<Alarm['topic'], MachineState>> = {
  damage: 'damaged',
  run_failed: 'failing',
  run_lost: 'failing',
  boot: 'failing',
  age: 'old',
  lag: 'failing',
};

/** A boot check's own session: it is not a recovery. */
export function isOfCheck({ session }: SessionDetails): boolean {
  return session.endsWith('-throwaway');
}

/** A machine runs from it: neither a check nor `protect-live` uses it. */
export function isInUse(session: SessionDetails): boolean {
  return session.is_served && !session.follows && !isOfCheck(session);
}

/** The machines that an alarm is about. */
export function machinesOf(alarm: Alarm): string[] {
  return [...new Set([...(alarm.machine ? [alarm.machine] : []), ...(alarm.affects ?? [])])];
}

/** `alarms` are the active ones of the machine; those of severity info do not count. */
export function stateOf(machine: MachineSummary, alarms: Alarm[], isRunning: boolean): MachineState {
  const found = alarms.filter((alarm) => alarm.severity !== 'info').map((alarm) => BY_TOPIC[alarm.topic]);
  for (const state of ['damaged', 'failing', 'old'] as const) if (found.includes(state)) return state;
  if (isRunning) return 'running';
  return machine.last_good ? 'good' : 'empty';
}
