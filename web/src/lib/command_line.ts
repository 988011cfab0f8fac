// Command lines that do what the page does.
function quoted(word: string): string {
  return /^[\w@%+=:,./~-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}

/** Joins words as a shell reads them; empty ones are left out. */
export function commandLine(...words: (string | number | false | null | undefined)[]): string {
  return ['coldrise', ...words.filter((word) => word !== false && word !== null && word !== undefined && word !== '')]
    .map((word) => quoted(String(word)))
    .join(' ');
}
