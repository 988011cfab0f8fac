// The output of a serial console, as plain text. Escape sequences are dropped; \r, \n, \b and tabs are obeyed.

/** Lines that are kept. */
const MAX_LINES = 2_000;
/** Longer lines are broken. */
const MAX_COLUMNS = 400;

export class SerialText {
  /** Finished lines, the oldest first. */
  lines: string[] = [];
  /** The line that is being written. */
  current: string[] = [];
  #column = 0;
  /** An escape sequence that has not ended yet. */
  #escape = '';
  #decoder = new TextDecoder();

  add(bytes: Uint8Array): void {
    for (const character of this.#decoder.decode(bytes, { stream: true })) this.#put(character);
  }

  get text(): string {
    return [...this.lines, this.current.join('')].join('\n');
  }

  #put(character: string): void {
    if (this.#escape) return this.#continue(character);
    if (character === '\x1b') this.#escape = character;
    else if (character === '\n') this.#end();
    else if (character === '\r') this.#column = 0;
    else if (character === '\b') this.#column = Math.max(0, this.#column - 1);
    else if (character === '\t') this.#column = Math.min(MAX_COLUMNS, (Math.floor(this.#column / 8) + 1) * 8);
    else if (character >= ' ' && character !== '\x7f') this.#write(character);
  }

  #write(character: string): void {
    if (this.#column >= MAX_COLUMNS) this.#end();
    while (this.current.length < this.#column) this.current.push(' ');
    this.current[this.#column] = character;
    this.#column += 1;
  }

  #end(): void {
    this.lines.push(this.current.join('').trimEnd());
    if (this.lines.length > MAX_LINES) this.lines.splice(0, this.lines.length - MAX_LINES);
    this.current = [];
    this.#column = 0;
  }

  /** ESC [ … letter, ESC ] … BEL, ESC ( x, or ESC and one character. */
  #continue(character: string): void {
    this.#escape += character;
    const kind = this.#escape[1] ?? '';
    const isOver =
      kind === '[' ? this.#escape.length > 2 && character >= '@' && character <= '~'
      : kind === ']' ? character === '\x07' || this.#escape.endsWith('\x1b\\')
      : kind === '(' || kind === ')' ? this.#escape.length > 2
      : true;
    if (!isOver && this.#escape.length < 256) return;
    // Erase to the end of the line: prompts that are edited.
    if (isOver && /^\x1b\[0?K$/.test(this.#escape)) this.current.length = Math.min(this.current.length, this.#column);
    this.#escape = '';
  }
}

const KEYS: Record<string, string> = {
  Enter: '\r', Backspace: '\x7f', Tab: '\t', Escape: '\x1b', Delete: '\x1b[3~',
  ArrowUp: '\x1b[A', ArrowDown: '\x1b[B', ArrowRight: '\x1b[C', ArrowLeft: '\x1b[D', Home: '\x1b[H', End: '\x1b[F',
};

/** The text that a key sends to the console; `undefined` for keys that the browser keeps. */
export function bytesOf(event: Pick<KeyboardEvent, 'key' | 'ctrlKey' | 'altKey' | 'metaKey'>): string | undefined {
  if (event.metaKey) return undefined;
  if (event.ctrlKey) return /^[a-z[\\\]]$/i.test(event.key) ? String.fromCharCode(event.key.toUpperCase().charCodeAt(0) & 31) : undefined;
  const prefix = event.altKey ? '\x1b' : '';
  if (event.key.length === 1) return prefix + event.key;
  return KEYS[event.key];
}
