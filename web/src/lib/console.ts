// The addresses of a running machine's consoles.

/** The websocket of a session's screen or serial port. */
export function socketOf(session: string, what: 'screen' | 'serial'): string {
  return `${location.origin.replace(/^http/, 'ws')}/api/v1/sessions/${encodeURIComponent(session)}/${what}`;
}

/** The message of a console after its connection has ended. It reconnects automatically. */
export function awayText(console: string, { code, reason }: { code: number; reason: string }): string {
  if (code === 1000) return 'The machine has ended.';
  if (reason.includes('is starting')) return 'The machine is starting…';
  return `The ${console} is away${reason && `: ${reason}`}. Trying again.`;
}

export function screenshotOf(session: string): string {
  return `/api/v1/sessions/${encodeURIComponent(session)}/screenshot.png`;
}
