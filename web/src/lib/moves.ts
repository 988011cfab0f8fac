// Moves of machines to production storage, as their runs and sessions tell of them.
import type { Moved, RunRecord } from '../api/schema';
import { progressOf } from './runs';
import { duration, size } from './units';

/** Where libvirt keeps disks on most hosts. */
export const IMAGES = '/var/lib/libvirt/images';

/** The file that a disk is moved to, if no other is chosen. */
export function defaultTarget(machine: string, disk: string): string {
  return `${IMAGES}/${machine}-${disk}.qcow2`;
}

/** The run that moves, or moved, the disks of a session. */
export function moveRun(runs: RunRecord[], session: string): RunRecord | undefined {
  return runs.find(({ plan }) => plan?.command === 'move' && plan.arguments.includes(`live/${session}`));
}

/** How the last server of a recovered machine's disks ended: `off` (with the machine), `paused` (cancelled); nothing if it was killed. */
export function lastEnd(runs: RunRecord[], session: string): string | undefined {
  const served = runs.filter(({ plan, progress }) => plan?.command === 'recover' && progress?.['session'] === session);
  const last = served.map(({ id }) => id).sort().at(-1);
  const state: unknown = served.find(({ id }) => id === last)?.result?.counts?.['state'];
  return typeof state === 'string' ? state : undefined;
}

/** How much was moved, in words; nothing without a move. */
export function movedText(moved: Moved | null | undefined, run: RunRecord | undefined): string | undefined {
  if (!moved) return undefined;
  const now = run?.state === 'running' ? progressOf(run.progress) : undefined;
  if (moved.phase === 'copying' && now && now.total > 0) return `${size(now.done)} of ${size(now.total)}, ${size(now.perSecond)}/s`;
  if (moved.phase !== 'settled') return moved.is_running ? 'the copy begins' : 'unfinished';
  const counts = (run?.result?.counts ?? {}) as Record<string, unknown>;
  const number = (name: string) => Number(counts[name] ?? 0);
  const [bytes, ms] = [number('copied_bytes'), number('copy_ms')];
  if (ms <= 0) return 'all of it';
  return `${size(bytes)} in ${duration(ms)} (${size((bytes * 1000) / ms)}/s); its writes waited ${number('held_ms')} ms for the switch`;
}
