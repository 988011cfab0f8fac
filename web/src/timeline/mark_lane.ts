// The lane of time marks below the points, and the stops of keys on both.
import { linesOf, nearest, ringsOf, stretchesIn, type Mark } from '../lib/marks';
import type { MarkStretch } from '../api/schema';
import { firstAt, toPixel, toTime, type Span } from './scale';

/** What the lane adds to the height. */
export const LANE_PX = 50;
export const LANE_TOP_PX = 112;
const BASE_Y = 144;
/** How near a pointer must be. */
const REACH_PX = 14;
/** A key passes over marks that are nearer than this: they are one line. */
const LEAST_STEP_PX = 3;

export interface Lane {
  marks: Mark[];
  /** Times of the marks, sorted. */
  times: number[];
  stretches: MarkStretch[];
  /** The time of the chosen mark. */
  chosenMs: number | undefined;
}

interface View {
  span: Span;
  width: number;
}

type LaneColours = Record<'sunken' | 'surface' | 'accent' | 'good' | 'soft' | 'ink', string>;

export function drawLane(context: CanvasRenderingContext2D, lane: Lane, { span, width }: View, colours: LaneColours): void {
  context.fillStyle = colours.sunken;
  context.fillRect(0, LANE_TOP_PX, width, BASE_Y - LANE_TOP_PX);
  // With a neighbour on each side: a line is as tall as it is near.
  const shown = lane.marks.slice(Math.max(0, firstAt(lane.times, span.from) - 1), firstAt(lane.times, span.to) + 1);
  context.strokeStyle = colours.accent;
  context.lineWidth = 1.5;
  context.stroke(new Path2D(linesOf(shown, span, width, BASE_Y, BASE_Y - LANE_TOP_PX - 6)));
  const rings = new Path2D(ringsOf(shown, span, width, BASE_Y, LANE_TOP_PX + 1));
  context.strokeStyle = colours.good;
  context.fillStyle = colours.surface;
  context.fill(rings);
  context.stroke(rings);
  context.strokeStyle = colours.soft;
  context.fillStyle = colours.soft;
  context.lineWidth = 1;
  context.textAlign = 'center';
  for (const stretch of stretchesIn(lane.stretches, span, width)) {
    context.stroke(new Path2D(`M${stretch.x} ${BASE_Y + 3}v4h${stretch.width}v-4`));
    context.fillText(stretch.text, stretch.x + stretch.width / 2, BASE_Y + 19);
  }
  context.textAlign = 'left';
  if (lane.chosenMs === undefined) return;
  const x = toPixel(lane.chosenMs, span, width);
  const handle = new Path2D(`M${x} ${BASE_Y}V${LANE_TOP_PX - 1}`);
  for (const [colour, thickness] of [[colours.surface, 5], [colours.ink, 2]] as const) {
    context.strokeStyle = colour;
    context.lineWidth = thickness;
    context.stroke(handle);
  }
  context.fillStyle = colours.ink;
  context.fill(new Path2D(`M${x - 6} ${LANE_TOP_PX - 11}h12v5l-6 6-6-6z`));
}

/** The mark at a place of the lane; undefined if none is near. */
export function markAt(lane: Lane, { span, width }: View, x: number, y: number): Mark | undefined {
  if (y < LANE_TOP_PX - 6 || y > BASE_Y + 8) return undefined;
  const mark = markNear(lane, { span, width }, x);
  return mark && Math.abs(toPixel(mark.marked_at_ms, span, width) - x) <= REACH_PX ? mark : undefined;
}

export function markNear(lane: Lane, { span, width }: View, x: number): Mark | undefined {
  return lane.marks[nearest(lane.marks, toTime(x, span, width))];
}

/** A point, by its index, or a mark, by its time. */
export type Stop = { point: number } | { ms: number };

/** The next stop before or after one: each point, and each mark with a line of its own. */
export function nextStop(from: Stop, direction: 1 | -1, points: number[], marks: number[], { span, width }: View): Stop {
  const at = 'ms' in from ? from.ms : (points[from.point] ?? 0);
  const gap = Math.max(1, ((span.to - span.from) * LEAST_STEP_PX) / Math.max(width, 1));
  const isAhead = direction > 0;
  const point = 'point' in from ? from.point + direction : isAhead ? firstAt(points, at + 1) : firstAt(points, at) - 1;
  let mark = isAhead ? firstAt(marks, at + gap) : firstAt(marks, at - gap + 1) - 1;
  // The outermost is always reached.
  if (isAhead) mark = Math.min(mark, marks.length - 1);
  else mark = Math.max(mark, 0);
  const [pointMs, markMs] = [points[point], marks[mark]];
  const isMark = markMs !== undefined && (markMs - at) * direction > 0 && (pointMs === undefined || (pointMs - markMs) * direction > 0);
  if (isMark) return { ms: markMs };
  return pointMs === undefined ? from : { point };
}
