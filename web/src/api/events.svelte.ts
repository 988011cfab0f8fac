// The one event stream: it feeds every view, and reports whether the service is reachable.
import { call } from './client';
import type { Event as ServiceEvent } from './schema';

export type StreamEvent = ServiceEvent | { type: 'reset' };
type Listener = (event: StreamEvent) => void;

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10_000;

class Stream {
  /** The connection; `away` after the first failure. */
  status = $state<'connecting' | 'open' | 'away'>('connecting');
  #listeners = new Set<Listener>();
  #source: EventSource | undefined;
  #backListeners = new Set<() => void>();
  #timer: ReturnType<typeof setTimeout> | undefined;
  #pause = FIRST_PAUSE_MS;
  #wasLost = false;

  start(): void {
    if (this.#source) return;
    const source = new EventSource('/api/v1/events');
    this.#source = source;
    source.onopen = () => {
      if (this.status === 'away') for (const listener of this.#backListeners) listener();
      this.status = 'open';
      this.#pause = FIRST_PAUSE_MS;
      // A new EventSource has no Last-Event-ID: missed changes are fetched again.
      if (this.#wasLost) this.#tell({ type: 'reset' });
      this.#wasLost = false;
    };
    source.onmessage = (message: MessageEvent<string>) => this.#tell(JSON.parse(message.data) as StreamEvent);
    source.addEventListener('reset', () => this.#tell({ type: 'reset' }));
    source.onerror = () => {
      this.status = 'away';
      // The browser itself reconnects to a stream that broke; not to an address that refused.
      if (source.readyState !== EventSource.CLOSED) return;
      this.stop();
      this.status = 'away';
      this.#wasLost = true;
      // It may have refused because the login has ended: the answer to any call says that.
      void call('GET /me').catch(() => undefined);
      this.#timer = setTimeout(() => this.start(), this.#pause);
      this.#pause = Math.min(this.#pause * 2, LONGEST_PAUSE_MS);
    };
  }

  stop(): void {
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#source = undefined;
    this.status = 'connecting';
  }

  /** Call what it returns to stop; that returns whether it still listened. */
  listen(listener: Listener): () => boolean {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Calls `listener` whenever the service answers again. Call what it returns to stop. */
  whenBack(listener: () => void): () => void {
    this.#backListeners.add(listener);
    return () => this.#backListeners.delete(listener);
  }

  #tell(event: StreamEvent): void {
    for (const listener of this.#listeners) listener(event);
  }
}

export const stream = new Stream();
