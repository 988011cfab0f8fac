// Files in restore points: addresses of pages and downloads.
import { addressOf, call } from '../api/client';
import type { FileEntry, PointState } from '../api/schema';
import { attempt } from './messages.svelte';
import { to } from './route.svelte';

/** A path in a file system of a point. Names that are not text have their bytes in `hex`. */
export interface Place {
  machine: string;
  point: string;
  system: string;
  path: string;
  hex?: string | undefined;
}

/** The place's name in requests. */
export function queryOf({ system, path, hex }: Place): { system: string; path?: string; path_hex?: string } {
  return hex ? { system, path_hex: hex } : { system, path };
}

/** The same file system at another path. */
export function at(place: Place, entry: Pick<FileEntry, 'path' | 'path_hex'>): Place {
  return { ...place, path: entry.path, hex: entry.path_hex ?? undefined };
}

/** The address of the page that shows a place. */
export function pageOf(place: Place): string {
  return `${to('files', place.machine, place.point)}?${new URLSearchParams(queryOf(place)).toString()}`;
}

export function downloadOf(place: Place): string {
  const { machine, point } = place;
  return addressOf('/machines/{machine}/points/{point}/files/content', { machine, point }, queryOf(place));
}

/** Downloads a place. A refusal is shown here: the browser would show it as a page, or as a broken download. */
export async function download(place: Place): Promise<void> {
  await attempt(async () => {
    const { machine, point } = place;
    await call('GET /machines/{machine}/points/{point}/files/list', { path: { machine, point }, query: { ...queryOf(place), count: 1 } });
    const link = document.createElement('a');
    link.href = downloadOf(place);
    link.click();
  });
}

/** Neighbouring points that have the same version. */
export interface Version {
  state: PointState;
  /** The newest first. */
  points: string[];
}

/** Adds points that follow, each older than the one before. */
export function versionsOf(states: PointState[]): Version[] {
  const versions: Version[] = [];
  const key = ({ point: _, ...rest }: PointState) => JSON.stringify(rest);
  for (const state of states) {
    const last = versions.at(-1);
    if (last && key(last.state) === key(state)) last.points.push(state.point);
    else versions.push({ state, points: [state.point] });
  }
  return versions;
}
