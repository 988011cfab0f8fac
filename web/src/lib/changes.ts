// Ranges of a disk that differ, as cells of a picture.
import type { DifferingRange } from '../api/schema';

/** The share of each of `cells` equal parts of the disk that differs, 0 to 1. */
export function shareOf(ranges: DifferingRange[], bytes: number, cells: number): number[] {
  const cell = Math.max(1, bytes) / cells;
  const shares = new Array<number>(cells).fill(0);
  for (const range of ranges) {
    // For a joined range only the amount that differs is known: it is spread evenly.
    const density = range.differing_bytes / range.length_bytes;
    const end = range.offset_bytes + range.length_bytes;
    for (let index = Math.floor(range.offset_bytes / cell); index < cells && index * cell < end; index += 1) {
      const inside = Math.min(end, (index + 1) * cell) - Math.max(range.offset_bytes, index * cell);
      shares[index] = Math.min(1, (shares[index] ?? 0) + (inside * density) / cell);
    }
  }
  return shares;
}
