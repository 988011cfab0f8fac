// Keys that work on every page. A page adds its own while it is shown.
import { go } from './route.svelte';

const PAGES: Record<string, string> = { m: 'machines', a: 'activity', j: 'jobs', r: 'repository', u: 'access', n: 'notifications' };

class Shortcuts {
  /** Whether the list of keys is shown. */
  isListed = $state(false);
  #own = new Map<string, () => void>();

  /** `key` does `action` until the returned function is called. */
  add(key: string, action: () => void): () => void {
    this.#own.set(key, action);
    return () => {
      if (this.#own.get(key) === action) this.#own.delete(key);
    };
  }

  press(key: string): boolean {
    const action = this.#own.get(key);
    action?.();
    return action !== undefined;
  }
}
export const shortcuts = new Shortcuts();

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT|CANVAS)$/.test(target.tagName));
}

export function listenForKeys(): () => void {
  let isGoing = false;
  const listen = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || isTyping(event.target)) return;
    if (document.querySelector('dialog[open]')) return;
    if (isGoing && PAGES[event.key]) {
      go(`#/${PAGES[event.key]}`);
      isGoing = false;
    } else if (event.key === 'g') {
      isGoing = true;
      setTimeout(() => (isGoing = false), 1200);
      return;
    } else if (event.key === '?') {
      shortcuts.isListed = true;
    } else if (event.key === '/' && !shortcuts.press('/')) {
      go('#/machines?search');
    } else if (event.key !== '/' && !shortcuts.press(event.key)) {
      return;
    }
    event.preventDefault();
  };
  addEventListener('keydown', listen);
  return () => removeEventListener('keydown', listen);
}
