// The one way to the API. Each call names an operation of the OpenAPI document.
import { pageWords } from '../lib/words';
import type { Operations, Problem as ProblemDocument } from './schema';

/** An error, in the service's words. */
export class Problem extends Error {
  /** HTTP status; 0 if the service did not answer. */
  readonly status: number;
  readonly kind: string;

  constructor(status: number, message: string, kind = 'io') {
    super(pageWords(message));
    this.status = status;
    this.kind = kind;
  }

  /** The service did not answer, or a proxy before it says so, which sends no problem document. */
  get isGone(): boolean {
    return this.status === 0 || (this.status === 502 && this.kind === 'io');
  }

  /** The address or the thing does not exist, in this version of the service either. */
  get isMissing(): boolean {
    return this.status === 404 || this.status === 405;
  }
}

type Empty = Record<never, never>;
type Part<Name extends string, T> = Empty extends Required<T> ? { [K in Name]?: T } : { [K in Name]: T };
type Body<T> = [T] extends [never] ? { body?: undefined } : { body: T };
type Query<T> = { query?: T };
export type Request<Key extends keyof Operations> = Part<'path', Operations[Key]['path']> &
  Query<Operations[Key]['query']> &
  Body<Operations[Key]['body']> & { once?: string; signal?: AbortSignal };
type Arguments<Key extends keyof Operations> = Empty extends Request<Key> ? [Request<Key>?] : [Request<Key>];

type Untyped = { path?: Record<string, string>; query?: Record<string, unknown>; body?: unknown; once?: string; signal?: AbortSignal };

let onUnauthorized = () => {};
/** Calls `listener` when the login has ended. */
export function whenUnauthorized(listener: () => void): void {
  onUnauthorized = listener;
}

/** The address of an operation, with names escaped: a name is text, never a path. Browsers resolve `..` however it is written. */
export function addressOf(template: string, path: Record<string, string> = {}, query: Record<string, unknown> = {}): string {
  const filled = template.replace(/\{(\w+)\}/g, (_, name: string) => {
    const value = path[name] ?? '';
    if (/^\.{0,2}$/.test(value)) throw new Problem(404, `There is no ${name} “${value}”.`, 'not_found');
    return encodeURIComponent(value);
  });
  const words = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== '');
  const search = new URLSearchParams(words.map(([name, value]) => [name, String(value)])).toString();
  return `/api/v1${filled}${search ? `?${search}` : ''}`;
}

async function problemOf(response: Response): Promise<Problem> {
  try {
    const document = (await response.json()) as Partial<ProblemDocument>;
    return new Problem(response.status, document.detail ?? response.statusText, document.kind);
  } catch {
    return new Problem(response.status, `The service answered ${response.status} ${response.statusText}.`);
  }
}

async function request<T>(operation: string, untyped: Untyped): Promise<T> {
  const [method = 'GET', template = ''] = operation.split(' ');
  const headers: Record<string, string> = { Accept: 'application/json' };
  if (untyped.body !== undefined) headers['Content-Type'] = 'application/json';
  if (untyped.once) headers['Idempotency-Key'] = untyped.once;
  const address = addressOf(template, untyped.path, untyped.query);
  let response: Response;
  try {
    response = await fetch(address, {
      method,
      headers,
      body: untyped.body === undefined ? null : JSON.stringify(untyped.body),
      signal: untyped.signal ?? null,
      credentials: 'same-origin',
    });
  } catch (error) {
    if (error instanceof DOMException && error.name === 'AbortError') throw error;
    const isQuestion = method === 'GET' || operation === 'POST /retention/preview';
    throw new Problem(0, isQuestion ? 'The service does not answer. This page tries again by itself.'
      : 'The service does not answer: whether this was done is not known yet. It is not repeated; look when the service is back.');
  }
  if (!response.ok) {
    if (response.status === 401) onUnauthorized();
    throw await problemOf(response);
  }
  const text = response.status === 204 ? '' : await response.text();
  return (text ? JSON.parse(text) : undefined) as T;
}

/** Calls an operation. */
export function call<Key extends keyof Operations>(operation: Key, ...[given]: Arguments<Key>): Promise<Operations[Key]['answer']> {
  return request(operation, (given ?? {}) as Untyped);
}

/** A key that makes a repeated click start a thing once. */
export function onceKey(): string {
  return crypto.randomUUID();
}

export function problemFrom(error: unknown): Problem {
  return error instanceof Problem ? error : new Problem(-1, error instanceof Error ? error.message : String(error));
}
