// Short messages at the edge of the page: started runs and refused requests.
import { problemFrom } from '../api/client';
import { stream } from '../api/events.svelte';

export interface Message {
  id: number;
  text: string;
  isBad: boolean;
  /** It says that the service did not answer. */
  isGone: boolean;
  link?: { address: string; text: string };
}

const SHOWN_MS = 8_000;

class Messages {
  all = $state<Message[]>([]);
  #last = 0;

  constructor() {
    stream.whenBack(() => {
      this.all = this.all.filter((message) => !message.isGone);
    });
  }

  add(text: string, more: { isBad?: boolean; isGone?: boolean; link?: Message['link'] } = {}): void {
    const id = (this.#last += 1);
    this.all.push({ id, text, isBad: more.isBad ?? false, isGone: more.isGone ?? false, ...(more.link ? { link: more.link } : {}) });
    if (!more.isBad) setTimeout(() => this.remove(id), SHOWN_MS);
  }

  remove(id: number): void {
    this.all = this.all.filter((message) => message.id !== id);
  }

  clear(): void {
    this.all = [];
  }
}
export const messages = new Messages();

/** Does `work`; a failure becomes a message. Returns whether it worked. */
export async function attempt(work: () => Promise<unknown>, done?: string): Promise<boolean> {
  try {
    await work();
    if (done) messages.add(done);
    return true;
  } catch (error) {
    const { message, isGone } = problemFrom(error);
    messages.add(message, { isBad: true, isGone });
    return false;
  }
}
