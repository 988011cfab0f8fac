// Messages of the service for its command line and API, reworded for readers of the page.
const WORDS: [string, string][] = [
  ['or overwrite it with --force', 'or check “Overwrite existing files”'],
  ['or use --force to replace it', 'or check “Replace an existing file”'],
  [': start one: POST /api/v1/runs with the kind boot', ''],
  [': DELETE /queue/RUN', ''],
  ['; see /api/v1/openapi.json', ''],
  [': name another file system (MACHINE/POINT:vda2/PATH), or boot the point', ': choose another file system, or boot the point'],
];

export function pageWords(text: string): string {
  return WORDS.reduce((found, [said, meant]) => found.replace(said, meant), text);
}
