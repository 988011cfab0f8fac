// Addresses of pages: #/machines/web01?x=y. Notifications link to them.
class Route {
  /** The parts of the path, unescaped. */
  parts = $state.raw<string[]>([]);
  search = $state.raw(new URLSearchParams());

  constructor() {
    this.#read();
    addEventListener('hashchange', () => this.#read());
  }

  get page(): string {
    return this.parts[0] ?? 'machines';
  }

  #read(): void {
    const [path = '', search = ''] = location.hash.slice(1).split('?');
    this.parts = path.split('/').filter(Boolean).map(unescaped);
    this.search = new URLSearchParams(search);
  }
}

function unescaped(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export const route = new Route();

/** The address of a page. */
export function to(...parts: string[]): string {
  return `#/${parts.map(encodeURIComponent).join('/')}`;
}

export function go(address: string, replace = false): void {
  if (!replace) location.hash = address;
  else location.replace(address);
}
