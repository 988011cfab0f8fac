// Machines of a job whose disks differ from those of the others, as lines of text: `db01 vda=raw:/dev/vg1/root`.
type Exceptions = Record<string, Record<string, string>>;

export function exceptionLines(exceptions: Exceptions): string {
  return Object.entries(exceptions)
    .flatMap(([machine, disks]) => Object.entries(disks).map(([disk, source]) => `${machine} ${disk}=${source}`))
    .join('\n');
}

/** The parsed lines. A line of another form becomes a disk without a source, which the service refuses. */
export function exceptionsOf(text: string): Exceptions {
  const exceptions: Exceptions = {};
  for (const line of text.split('\n').map((found) => found.trim()).filter(Boolean)) {
    const [, machine = line, disk = '', source = ''] = /^(\S+)\s+([^\s=]+)=(.*)$/.exec(line) ?? [];
    exceptions[machine] = { ...exceptions[machine], [disk]: source };
  }
  return exceptions;
}
