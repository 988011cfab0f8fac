// Command lines that do what the page does.
function quoted(word: string): string {
  return /^[\w@%+=:,./~-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}

type Word = string | number | false | null | undefined;

/** Joins words as a shell reads them; empty ones are left out. */
export function shellLine(...words: Word[]): string {
  return words.filter((word) => word !== false && word !== null && word !== undefined && word !== '')
    .map((word) => quoted(String(word)))
    .join(' ');
}

/** A line of this product's own program. */
export function commandLine(...words: Word[]): string {
  return shellLine('coldrise', ...words);
}
