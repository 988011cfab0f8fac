// Starting runs, and the content of run records.
import { call, onceKey } from '../api/client';
import { stream } from '../api/events.svelte';
import type { RunRecord, Start } from '../api/schema';
import type { Tone } from '../parts/Badge.svelte';
import { attempt, messages } from './messages.svelte';
import { to } from './route.svelte';
import { count, duration } from './units';
import { pageWords } from './words';

/** Interval of looking whether a run serves. */
const LOOKING_MS = 300;

/** Starts a run and shows a message with a link to it. */
export async function startRun(body: Start, what: string): Promise<boolean> {
  return attempt(async () => {
    const started = await call('POST /runs', { body, once: onceKey() });
    messages.add(`${what}: started.`, { link: { address: to('runs', started.run), text: 'Follow it' } });
    void sayEnd(started.run, what);
  });
}

/** A run's record, once it has ended. */
function ended(id: string): Promise<RunRecord> {
  return new Promise((resolve) => {
    const look = async () => {
      const run = await call('GET /runs/{id}', { path: { id } });
      if (run.state !== 'running' && stop()) resolve(run);
    };
    // A run that has not begun is not known yet; its events will arrive.
    const lookAgain = () => void look().catch(() => undefined);
    const stop = stream.listen((event) => {
      if (event.type === 'reset' || (event.type === 'run' && event.id === id && event.state !== 'running')) lookAgain();
    });
    lookAgain();
  });
}

/** The findings of a verify. Its list is absent if it was too long to be kept. */
export interface FoundDamage {
  summary: string;
  /** MACHINE/POINT/DISK or live/SESSION/DISK. */
  disks: string[];
}

const DAMAGED: [name: string, word: string][] = [['damaged_pages', 'page'], ['damaged_documents', 'document'],
  ['damaged_layers', 'layer'], ['damaged_markers', 'marker'], ['damaged_files', 'file']];

/** The damage that the run has found; nothing if it is not a verify, or found none. */
export function damageOf({ state, plan, result }: RunRecord): FoundDamage | undefined {
  if (plan?.command !== 'verify' || state !== 'failed' || result?.exit_code !== 1 || result.error) return undefined;
  const counts = (result.counts ?? {}) as Record<string, unknown>;
  const list = (name: string) => (Array.isArray(counts[name]) ? (counts[name] as { disk?: string }[]) : []);
  const found = [{ count: Number(counts['damaged_chunks'] ?? 0), word: 'chunk' },
    ...DAMAGED.map(([name, word]) => ({ count: list(name).length, word }))].filter((one) => one.count > 0);
  const disks = list('affected').flatMap(({ disk }) => disk ?? []);
  const what = found.map((one) => count(one.count, one.word)).join(', ') || 'Something';
  const owners = [...new Set(disks.map((disk) => disk.split('/').slice(0, disk.startsWith('live/') ? 2 : 1).join('/')))];
  const affects = owners.length > 0 ? `, affects ${owners.slice(0, 5).join(', ')}${owners.length > 5 ? ' and others' : ''}`
    : result.counts ? ', affects no point and no session' : '';
  return { summary: `${what} damaged${affects}`, disks };
}

function failureOf(run: RunRecord): string {
  const said = run.result?.error?.message ?? damageOf(run)?.summary;
  if (said) return pageWords(said);
  return run.result ? `it ended with exit code ${run.result.exit_code}.` : 'the run has no result: its process was killed.';
}

/** Waits for the end of a run; throws why it failed. */
export async function succeeded(id: string): Promise<void> {
  const run = await ended(id);
  if (run.state !== 'ok') throw new Error(run.state === 'cancelled' ? 'It was cancelled.' : failureOf(run));
}

/** Waits for the end of a run; returns its answer, or throws why it failed. */
export async function answerOf(id: string): Promise<Record<string, unknown>> {
  const run = await ended(id);
  if (run.state !== 'ok') throw new Error(run.state === 'cancelled' ? 'It was cancelled.' : failureOf(run));
  return run.result?.counts ?? {};
}

/** Waits until a run serves a session, and returns its name; throws why the run failed. */
export async function servedSession(id: string): Promise<string> {
  for (;;) {
    // A run that has not begun is not known yet.
    const run = await call('GET /runs/{id}', { path: { id } }).catch(() => undefined);
    // One that needs no server has ended already.
    const session: unknown = run?.progress?.['session'] ?? (run?.state === 'ok' ? run.result?.counts?.['session'] : undefined);
    if (typeof session === 'string') return session;
    if (run && run.state !== 'running') throw new Error(run.state === 'cancelled' ? 'It was cancelled.' : failureOf(run));
    await new Promise((resolve) => setTimeout(resolve, LOOKING_MS));
  }
}

/** Says how a run ended, once it has: also on another page than the one that started it. */
export async function sayEnd(id: string, what: string): Promise<void> {
  const run = await ended(id);
  const link = { address: to('runs', id), text: 'Show the run' };
  const made = run.plan?.command === 'seal' || run.plan?.command === 'unpublish' ? run.result?.counts?.['address'] : undefined;
  if (run.state === 'ok' && typeof made === 'string')
    messages.add(`${what}: done. It made the point`, { link: { address: to('machines', ...made.split('/')), text: made } });
  else if (run.state === 'ok') messages.add(`${what}: done.`, { link });
  else if (run.state === 'cancelled') messages.add(`${what}: cancelled.`, { link });
  else messages.add(`${what}: ${failureOf(run)}`, { isBad: true, link });
}

export const RUN_TONES: Record<RunRecord['state'], Tone> = { running: 'accent', ok: 'good', failed: 'bad', cancelled: 'none',
  lost: 'warn' };

/** Runs that end only on request: servers and machines. They have no progress. */
export function isEndless({ plan, machine }: RunRecord): boolean {
  const isUndo = plan?.arguments.includes('--undo');
  return Boolean(machine) || plan?.command.startsWith('serve ') === true || plan?.command === 'attach'
    || (plan?.command === 'recover' && !isUndo);
}

export interface Progress {
  phase: string;
  disk: string;
  done: number;
  total: number;
  perSecond: number;
  /** Expected rest, in milliseconds, if it can be known. */
  restMs?: number;
}

/** The progress of a run; parts that it does not know are 0. */
export function progressOf(raw: unknown): Progress | undefined {
  if (typeof raw !== 'object' || raw === null) return undefined;
  const fields = raw as Record<string, unknown>;
  const number = (name: string) => (typeof fields[name] === 'number' ? fields[name] : 0);
  const word = (name: string) => (typeof fields[name] === 'string' ? fields[name] : '');
  const [done, total, perSecond] = [number('done_bytes'), number('total_bytes'), number('bytes_per_second')];
  const rest = perSecond > 0 && total > done ? { restMs: ((total - done) / perSecond) * 1000 } : {};
  return { phase: word('phase'), disk: word('disk'), done, total, perSecond, ...rest };
}

/** The subject of a run, in few words. */
export function subjectOf(run: RunRecord): string {
  const plan = run.plan;
  if (!plan) return run.id;
  if (plan.machine) return plan.point ? `${plan.machine}/${plan.point}` : plan.machine;
  const words = plan.arguments.slice(plan.arguments.indexOf('--') + 1);
  const named = plan.arguments.includes('--') ? words.slice(0, 3).join(', ') + (words.length > 3 ? '…' : '') : '';
  return named || 'whole repository';
}

/** How long a run took, or has taken until now. A lost one: until it was found lost. */
export function took({ plan, state, ended_at_ms }: RunRecord, now: number): string {
  const until = state === 'running' ? now : ended_at_ms;
  return plan && until ? duration(until - plan.started_at_ms) : '–';
}

/** Cancels a run, as Ctrl-C does. */
export function cancelRun(id: string): Promise<boolean> {
  return attempt(() => call('POST /runs/{id}/cancel', { path: { id } }), 'The run was asked to end.');
}
