// Sentences of the audit log. The request stays below each: the log's entries are requests.
import type { AuditEntry } from '../api/schema';

// The request, and its effect. $1 is the part in parentheses; {name} is a field of the request's body.
const REQUESTS: [request: RegExp, sentence: string][] = [
  [/^POST \/runs\/(.+)\/cancel$/, 'cancelled run $1'],
  [/^DELETE \/queue\/(.+)$/, 'cancelled run $1'],
  [/^PATCH \/queue$/, 'set the number of runs at once'],
  [/^POST \/jobs$/, 'added job {name}'],
  [/^PUT \/jobs\/(.+)$/, 'changed job $1'],
  [/^DELETE \/jobs\/(.+)$/, 'deleted job $1'],
  [/^POST \/jobs\/(.+)\/start$/, 'started job $1'],
  [/^POST \/users$/, 'added user {name}'],
  [/^PATCH \/users\/(.+)$/, 'changed user $1'],
  [/^DELETE \/users\/(.+)$/, 'removed user $1'],
  [/^POST \/tokens$/, 'made token {name}'],
  [/^DELETE \/tokens\/(.+)$/, 'revoked token $1'],
  [/^POST \/login$/, 'logged in'],
  [/^DELETE \/login$/, 'logged out'],
  [/^DELETE \/logins\/(.+)$/, 'ended login $1'],
  [/^POST \/setup$/, 'made the first administrator'],
  [/^PUT \/hypervisors\/(.+)$/, 'set hypervisor $1'],
  [/^DELETE \/hypervisors\/(.+)$/, 'removed hypervisor $1'],
  [/^POST \/hypervisors\/(.+)\/test$/, 'tested the login to hypervisor $1'],
  [/^PUT \/notifications\/settings$/, 'changed the notification settings'],
  [/^POST \/notifications\/targets$/, 'added a notification target'],
  [/^PUT \/notifications\/targets\/(.+)$/, 'changed notification target $1'],
  [/^DELETE \/notifications\/targets\/(.+)$/, 'removed notification target $1'],
  [/^POST \/notifications\/targets\/(.+)\/test$/, 'sent a test to notification target $1'],
  [/^POST \/alarms\/(.+)\/acknowledge$/, 'acknowledged alarm $1'],
  [/^POST \/sessions\/(.+)\/keys$/, 'typed on the keyboard of live/$1'],
  [/^POST \/sessions\/(.+)\/power$/, 'used the power switch of live/$1: {action}'],
];

const RUNS: Record<string, string> = {
  'check-boot': 'a boot check', attach: 'to attach', detach: 'to detach', forget: 'to forget', protect: 'to protect',
  unprotect: 'to unprotect', quarantine: 'to quarantine', release: 'to release', publish: 'to publish', unpublish: 'to unpublish',
  serve: 'to serve', recover: 'a recovery', verify: 'a verification',
};

type Fields = Record<string, unknown>;

function fields(subject: string): Fields {
  try {
    const found: unknown = JSON.parse(subject);
    return typeof found === 'object' && found !== null ? (found as Fields) : {};
  } catch {
    // Cut off after 500 characters.
    return Object.fromEntries([...subject.matchAll(/"(\w+)":"([^"\\]*)"/g)].map(([, name, value]) => [name, value]));
  }
}

function networkOf(asked: Fields): string {
  return { connected: 'with the host\'s network', none: 'without a network' }[String(asked['network'])] ?? 'isolated';
}

/** `started a boot of web01/latest (isolated)`. */
function startOf(asked: Fields): string {
  const kind = String(asked['kind']);
  const what = asked['undo'] === true ? 'to undo a recovery' : (RUNS[kind] ?? `a ${kind}`);
  const addresses = Array.isArray(asked['addresses']) ? asked['addresses'].join(', ') : undefined;
  const of = asked['address'] ?? addresses ?? asked['machine'] ?? (asked['session'] ? `live/${String(asked['session'])}` : undefined);
  const subject = of === undefined ? '' : what.startsWith('to ') && asked['undo'] !== true ? ` ${String(of)}` : ` of ${String(of)}`;
  const details = [asked['to'] && `to ${String(asked['to'])}`, kind === 'boot' && networkOf(asked),
    asked['discard'] === true && 'discards its writes', asked['target'] && `to ${String(asked['target'])}`].filter(Boolean);
  return `started ${what}${subject}${details.length > 0 ? ` (${details.join(', ')})` : ''}`;
}

/** The effect of the entry's request; the request itself if it is unknown. */
export function auditSentence({ action, subject }: AuditEntry): string {
  const request = decodeURIComponent(action.replace(' /api/v1', ' '));
  const asked = fields(subject);
  if (request === 'POST /runs' && asked['kind'] !== undefined) return startOf(asked);
  for (const [pattern, sentence] of REQUESTS) {
    if (pattern.test(request)) {
      return request.replace(pattern, sentence).replace(/\{(\w+)\}/g, (_, name: string) => String(asked[name] ?? '')).trim();
    }
  }
  return subject && !subject.startsWith('{') ? `${action} ${subject}` : action;
}
