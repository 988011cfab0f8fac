// The addresses of a running machine's consoles.

/** The websocket of a session's screen or serial port. */
export function socketOf(session: string, what: 'screen' | 'serial'): string {
  return `${location.origin.replace(/^http/, 'ws')}/api/v1/sessions/${encodeURIComponent(session)}/${what}`;
}

export function screenshotOf(session: string): string {
  return `/api/v1/sessions/${encodeURIComponent(session)}/screenshot.png`;
}
