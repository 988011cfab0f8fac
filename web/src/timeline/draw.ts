// Draws the timeline: one lane of backups, one of sealed sessions that branch off, one of time marks, one axis.
import { bootBadge, type Point } from '../lib/points';
import type { Tone } from '../parts/Badge.svelte';
import { drawLane, LANE_PX, type Lane } from './mark_lane';
import { firstAt, ticks, toPixel, type Span } from './scale';

const HEIGHT_PX = 148;
const BACKUP_Y = 44;
const BRANCH_Y = 92;
const AXIS_Y = 122;
const RADIUS = 8;
/** Marks nearer than this become bars. */
const CROWDED_PX = 9;
/** Smaller marks have no space for a sign: their shape shows it. */
const LEAST_SIGN_PX = 6;
const COLUMN_PX = 5;

export interface Branch {
  /** When the point was made that it starts from, and when the session was sealed, or now. */
  from: number;
  /** It starts from a sealed session, whose lane is its own. */
  isFromSealed: boolean;
  to: number;
  isOpen: boolean;
}

export interface Scene {
  points: Point[];
  /** Times of the points, sorted. */
  times: number[];
  branches: Branch[];
  /** Time marks, if there are any. */
  lane: Lane | undefined;
  span: Span;
  width: number;
  chosen: number;
  hovered: number;
  now: number;
}

type Colours = Record<Tone | 'ink' | 'soft' | 'line' | 'surface' | 'accent' | 'sunken', string>;

function coloursOf(element: Element): Colours {
  const style = getComputedStyle(element);
  const of = (name: string) => style.getPropertyValue(`--${name}`).trim();
  return {
    good: of('good'), bad: of('bad'), warn: of('warn'), live: of('live'), none: of('none'), accent: of('accent'),
    ink: of('ink'), soft: of('soft'), line: of('line'), surface: of('surface'), sunken: of('sunken'),
  };
}

export const heightOf = (lane: Lane | undefined) => HEIGHT_PX + (lane ? LANE_PX : 0);
const axisOf = (lane: Lane | undefined) => AXIS_Y + (lane ? LANE_PX : 0);

export function draw(canvas: HTMLCanvasElement, scene: Scene): void {
  const context = canvas.getContext('2d');
  if (!context) return;
  const scale = devicePixelRatio || 1;
  const heightPx = heightOf(scene.lane);
  const [width, height] = [Math.round(scene.width * scale), Math.round(heightPx * scale)];
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, scene.width, heightPx);
  const colours = coloursOf(canvas);
  context.font = '12px system-ui, sans-serif';
  drawAxis(context, scene, colours);
  if (scene.lane) drawLane(context, scene.lane, scene, colours);
  drawBranches(context, scene, colours);
  drawPoints(context, scene, colours);
}

function drawAxis(context: CanvasRenderingContext2D, { span, width, now, lane }: Scene, colours: Colours): void {
  const axis = axisOf(lane);
  context.lineWidth = 1;
  for (const tick of ticks(span, width)) {
    const x = Math.round(toPixel(tick.ms, span, width)) + 0.5;
    context.strokeStyle = colours.line;
    context.globalAlpha = tick.isMajor ? 1 : 0.55;
    line(context, x, 8, x, axis + 6);
    context.globalAlpha = 1;
    context.fillStyle = tick.isMajor ? colours.ink : colours.soft;
    // No half of a date at the edge.
    if (x + 5 + context.measureText(tick.text).width <= width) context.fillText(tick.text, x + 5, axis + 18);
  }
  context.strokeStyle = colours.line;
  line(context, 0, axis + 0.5, width, axis + 0.5);
  const x = toPixel(now, span, width);
  if (x < 0 || x > width) return;
  context.strokeStyle = colours.accent;
  context.setLineDash([3, 3]);
  line(context, x, 8, x, axis);
  context.setLineDash([]);
  context.fillStyle = colours.accent;
  context.textAlign = 'right';
  context.fillText('now', x - 5, 16);
  context.textAlign = 'left';
}

function drawBranches(context: CanvasRenderingContext2D, { branches, span, width }: Scene, colours: Colours): void {
  for (const branch of branches) {
    const [from, to] = [toPixel(branch.from, span, width), toPixel(branch.to, span, width)];
    if (to < -50 || from > width + 50) continue;
    const bend = Math.min(26, Math.max(6, (to - from) / 2));
    context.strokeStyle = branch.isOpen ? colours.live : colours.soft;
    context.lineWidth = branch.isOpen ? 2.5 : 1.5;
    context.setLineDash(branch.isOpen ? [5, 4] : []);
    context.beginPath();
    const y = branch.isFromSealed ? BRANCH_Y : BACKUP_Y;
    context.moveTo(from, y);
    context.bezierCurveTo(from + bend, y, from, BRANCH_Y, from + bend, BRANCH_Y);
    context.lineTo(Math.max(to, from + bend), BRANCH_Y);
    context.stroke();
    context.setLineDash([]);
    if (!branch.isOpen) continue;
    context.fillStyle = colours.live;
    context.beginPath();
    context.moveTo(to - 4, BRANCH_Y - 7);
    context.lineTo(to + 8, BRANCH_Y);
    context.lineTo(to - 4, BRANCH_Y + 7);
    context.fill();
  }
}

function drawPoints(context: CanvasRenderingContext2D, scene: Scene, colours: Colours): void {
  const { points, times, span, width } = scene;
  context.strokeStyle = colours.line;
  context.lineWidth = 2;
  line(context, 0, BACKUP_Y, width, BACKUP_Y);
  const margin = ((span.to - span.from) / Math.max(width, 1)) * 2 * RADIUS;
  const [first, end] = [firstAt(times, span.from - margin), firstAt(times, span.to + margin)];
  const crowd = columnsOf(scene, first, end);
  for (const column of crowd.bars.values()) drawBar(context, column, colours);
  for (const { index, gap } of crowd.alone) drawMark(context, scene, index, colours, Math.min(1, Math.max(3.5, gap / 2 - 1.5) / RADIUS));
  for (const index of [scene.hovered, scene.chosen]) {
    if (points[index]) drawMark(context, scene, index, colours, index === scene.chosen ? 1.3 : 1.15);
  }
}

interface Bar {
  x: number;
  y: number;
  counts: Partial<Record<Tone, number>>;
  count: number;
}

interface Alone {
  index: number;
  /** To the nearest mark of the same lane, in pixels. */
  gap: number;
}

/** Points with space around them in their lane, and bars for those without. */
function columnsOf(scene: Scene, first: number, end: number): { bars: Map<number, Bar>; alone: Alone[] } {
  const bars = new Map<number, Bar>();
  const lanes = (['backup', 'synthetic'] as const).flatMap((kind) => laneOf(scene, kind, first, end, bars));
  return { bars, alone: lanes };
}

function laneOf({ points, times, span, width }: Scene, kind: Point['kind'], first: number, end: number, bars: Map<number, Bar>): Alone[] {
  const lane: number[] = [];
  for (let index = first; index < end; index += 1) if (points[index]?.kind === kind) lane.push(index);
  const at = (place: number) => toPixel(times[lane[place] ?? -1] ?? Infinity, span, width);
  const alone: Alone[] = [];
  for (const [place, index] of lane.entries()) {
    const point = points[index];
    if (!point) continue;
    const x = at(place);
    const gap = Math.min(place > 0 ? x - at(place - 1) : Infinity, place + 1 < lane.length ? at(place + 1) - x : Infinity);
    if (gap > CROWDED_PX) {
      alone.push({ index, gap });
      continue;
    }
    const y = kind === 'backup' ? BACKUP_Y : BRANCH_Y;
    const column = Math.round(x / COLUMN_PX);
    const key = column * 2 + (kind === 'backup' ? 0 : 1);
    const bar = bars.get(key) ?? { x: column * COLUMN_PX, y, counts: {}, count: 0 };
    const { tone } = bootBadge(point);
    bar.counts[tone] = (bar.counts[tone] ?? 0) + 1;
    bar.count += 1;
    bars.set(key, bar);
  }
  return alone;
}

const STACK: Tone[] = ['bad', 'warn', 'none', 'good'];

/** Taller for more points; failures are at the bottom and keep at least three pixels. */
function drawBar(context: CanvasRenderingContext2D, bar: Bar, colours: Colours): void {
  const height = Math.min(40, 12 + 6 * Math.log2(bar.count));
  let y = bar.y + height / 2;
  for (const tone of STACK) {
    const share = bar.counts[tone] ?? 0;
    if (share === 0) continue;
    const part = Math.max(3, (height * share) / bar.count);
    context.fillStyle = colours[tone];
    context.globalAlpha = tone === 'none' ? 0.55 : 1;
    context.fillRect(bar.x - 1.75, y - part, 3.5, part);
    y -= part;
  }
  context.globalAlpha = 1;
}

function drawMark(context: CanvasRenderingContext2D, scene: Scene, index: number, colours: Colours, size: number): void {
  const point = scene.points[index];
  if (!point) return;
  const x = toPixel(scene.times[index] ?? 0, scene.span, scene.width);
  const y = point.kind === 'backup' ? BACKUP_Y : BRANCH_Y;
  const radius = RADIUS * size;
  const { tone } = bootBadge(point);
  context.save();
  context.translate(x, y);
  if (index === scene.chosen) {
    context.strokeStyle = colours.accent;
    context.lineWidth = 2;
    context.beginPath();
    context.arc(0, 0, radius + 4, 0, 2 * Math.PI);
    context.stroke();
    line(context, 0, radius + 4, 0, axisOf(scene.lane) - y);
  }
  if (radius < LEAST_SIGN_PX && tone === 'bad') {
    context.strokeStyle = colours.bad;
    context.lineWidth = 2;
    line(context, -radius, -radius, radius, radius);
    line(context, -radius, radius, radius, -radius);
    return context.restore();
  }
  outline(context, point.kind, radius);
  context.fillStyle = tone === 'none' ? colours.surface : colours[tone];
  context.strokeStyle = colours[tone];
  context.lineWidth = 2;
  context.fill();
  context.stroke();
  if (radius >= LEAST_SIGN_PX) sign(context, tone, colours.surface, size);
  if (point.is_protected) {
    context.fillStyle = colours.ink;
    context.fillRect(-4, -radius - 9, 8, 6);
    context.strokeStyle = colours.ink;
    context.lineWidth = 1.5;
    context.beginPath();
    context.arc(0, -radius - 9, 2.7, Math.PI, 0);
    context.stroke();
  }
  context.restore();
}

function outline(context: CanvasRenderingContext2D, kind: Point['kind'], radius: number): void {
  context.beginPath();
  if (kind === 'backup') return context.arc(0, 0, radius, 0, 2 * Math.PI);
  const r = radius * 1.2;
  context.moveTo(0, -r);
  context.lineTo(r, 0);
  context.lineTo(0, r);
  context.lineTo(-r, 0);
  context.closePath();
}

function sign(context: CanvasRenderingContext2D, tone: Tone, colour: string, size: number): void {
  context.strokeStyle = colour;
  context.lineWidth = 1.8 * size;
  context.lineCap = 'round';
  const stroke = (...at: number[]) => {
    context.beginPath();
    for (let i = 0; i < at.length; i += 2) context.lineTo((at[i] ?? 0) * size, (at[i + 1] ?? 0) * size);
    context.stroke();
  };
  if (tone === 'good') stroke(-3.2, 0.2, -0.8, 2.6, 3.4, -2.4);
  if (tone === 'bad') {
    stroke(-2.6, -2.6, 2.6, 2.6);
    stroke(-2.6, 2.6, 2.6, -2.6);
  }
  if (tone === 'warn') {
    stroke(0, -4, 0, 0.6);
    stroke(0, 3.6, 0, 3.7);
  }
}

function line(context: CanvasRenderingContext2D, x1: number, y1: number, x2: number, y2: number): void {
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
}

/** The point nearest to a place, if one is near. */
export function pointAt({ points, times, span, width }: Scene, x: number, y: number): number {
  const reach = 14;
  let best = -1;
  let least = reach * reach;
  const middle = firstAt(times, span.from + ((x - reach) / width) * (span.to - span.from));
  for (let index = middle; index < points.length; index += 1) {
    const point = points[index];
    if (!point) break;
    const dx = toPixel(times[index] ?? Infinity, span, width) - x;
    if (dx > reach) break;
    const dy = (point.kind === 'backup' ? BACKUP_Y : BRANCH_Y) - y;
    const distance = dx * dx + dy * dy * 0.3;
    if (distance < least) [best, least] = [index, distance];
  }
  return best;
}
