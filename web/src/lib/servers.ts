// Servers of disks that run on the service's host, and how hypervisors reach a session's disks through them.
import type { Hardware, RunRecord } from '../api/schema';
import { shellLine } from './command_line';

export type Protocol = 'nbd' | 'nfs';

export interface Server {
  /** Its run; empty for one that is not started yet. */
  run: string;
  protocol: Protocol;
  /** As clients write it. */
  host: string;
  port: number;
  /** Only programs on the service's host reach it. */
  isLocal: boolean;
  tls: 'none' | 'certificates' | 'psk';
  isReadOnly: boolean;
  /** Its clients, its content and its transport: equal for servers that can stand for each other. */
  terms: string;
}

export const DEFAULT_LISTEN: Record<Protocol, string> = { nbd: '127.0.0.1:10809', nfs: '127.0.0.1:2049' };
const ESXI_PORT = 2049;
/** The page was opened at an address of this host only. */
export const isOpenedLocally = /^(localhost$|127\.|\[::1\])/.test(location.hostname);
/** The service's host, as other hosts call it. */
export const HOST = isOpenedLocally ? 'HOST' : location.hostname;

/** The server of these arguments of `coldrise serve`. */
export function serverOf(protocol: Protocol, words: string[], run = ''): Server {
  const text = words.join(' ');
  const listen = /--listen[= ](\S+)/.exec(text)?.[1] ?? DEFAULT_LISTEN[protocol];
  const [, address = '', port = ''] = /^(.*):(\d+)$/.exec(listen) ?? [];
  const isAny = address === '0.0.0.0' || address === '[::]';
  const tls = text.includes('--tls-certificates') ? 'certificates' : text.includes('--tls-psk') ? 'psk' : 'none';
  const given = (option: string) => [...text.matchAll(new RegExp(`--${option}[= ](\\S+)`, 'g'))].map((found) => found[1]).sort();
  const isReadOnly = words.includes('--read-only');
  return {
    run, protocol, tls, port: Number(port), host: isAny ? HOST : address,
    isLocal: /^(127\.|\[::1\])/.test(address), isReadOnly,
    terms: JSON.stringify([protocol, listen, ...['allow', 'tls-certificates', 'tls-psk'].map(given), isReadOnly]),
  };
}

/** Those of running runs. Servers at Unix sockets are left out: they are for programs that know them. */
export function serversOf(runs: RunRecord[]): Server[] {
  return runs.flatMap(({ id, state, plan }) => {
    const protocol = plan?.command === 'serve nbd' ? 'nbd' : plan?.command === 'serve nfs' ? 'nfs' : undefined;
    const isOther = !plan || !protocol || state !== 'running' || plan.arguments.some((word) => word.startsWith('--socket'));
    return isOther ? [] : [serverOf(protocol, plan.arguments, id)];
  });
}

/** Whether lines for this server have the word HOST, or name an address of its own host only. */
export function isUnnamed({ isLocal, host }: Server): boolean {
  return isOpenedLocally && (isLocal || host === 'HOST');
}

export interface Line {
  /** For what the line is, such as `QEMU`. */
  title: string;
  line: string;
}

/** QEMU with disks that it opens at these places; it emulates without KVM. */
function qemu(hardware: Hardware | undefined, drives: string[], objects: string[] = []): string {
  const bus = hardware?.disk_bus === 'sata' || hardware?.disk_bus === 'ide' ? 'ide' : 'virtio';
  return shellLine('qemu-system-x86_64', '-accel', 'kvm', '-accel', 'tcg', '-m', hardware?.memory_mib ?? 2048, '-smp', hardware?.cpus ?? 2,
    ...objects.flatMap((object) => ['-object', object]), ...drives.flatMap((drive) => ['-drive', `${drive},format=raw,if=${bus}`]));
}

function nbdLines(server: Server, exports: string[], hardware: Hardware | undefined): Line[] {
  const { host, port, tls } = server;
  if (tls === 'none') {
    const uris = exports.map((name) => `nbd://${host}:${port}/${name}`);
    return [
      { title: 'QEMU', line: qemu(hardware, uris.map((uri) => `file=${uri},file.reconnect-delay=60`)) },
      ...exports.map((name, index) => ({ title: `Linux: ${name} as a block device`, line: shellLine('nbd-client', '-N', name, host, port,
        `/dev/nbd${index}`) })),
    ];
  }
  const object = tls === 'psk' ? 'tls-creds-psk,id=tls,endpoint=client,username=NAME,dir=KEYS'
    : 'tls-creds-x509,id=tls,endpoint=client,dir=CERTIFICATES';
  const drives = exports.map((name) =>
    `file.driver=nbd,file.host=${host},file.port=${port},file.export=${name},file.tls-creds=tls,file.reconnect-delay=60`);
  return [{ title: 'QEMU', line: qemu(hardware, drives, [object]) }];
}

function nfsLines(server: Server, session: string, disks: string[], hardware: Hardware | undefined): Line[] {
  const { host, port, isLocal } = server;
  const esxi = !isLocal && port === ESXI_PORT ? [
    { title: 'ESXi: mount as a datastore', line: shellLine('esxcli', 'storage', 'nfs', 'add', '-H', host, '-s', '/coldrise', '-v',
      'coldrise') },
    { title: 'ESXi: register the machine', line: shellLine('vim-cmd', 'solo/registervm',
      `/vmfs/volumes/coldrise/live/${session}/${session}.vmx`) },
  ] : [];
  return [
    ...esxi,
    { title: 'Linux: mount', line: shellLine('mount', '-t', 'nfs', '-o', `vers=4.1,port=${port}`, `${host}:/coldrise`, '/mnt') },
    { title: 'QEMU, after the mount', line: qemu(hardware, disks.map((disk) => `file=/mnt/live/${session}/${disk}.raw`)) },
  ];
}

/** The address of a session at a server. */
export function addressAt({ protocol, host, port, tls }: Server, session: string): string {
  return protocol === 'nbd' ? `nbd${tls === 'none' ? '' : 's'}://${host}:${port}/live/${session}/`
    : `${host}:/coldrise/live/${session}/${port === ESXI_PORT ? '' : ` (port ${port})`}`;
}

/** Lines to copy, with which hypervisors use the session's disks. */
export function linesOf(server: Server, session: string, disks: string[], hardware?: Hardware): Line[] {
  return server.protocol === 'nbd' ? nbdLines(server, disks.map((disk) => `live/${session}/${disk}`), hardware)
    : nfsLines(server, session, disks, hardware);
}

/** How other hosts reach a server that listens on its own host only. */
export function tunnel({ host, port }: Server): string {
  return shellLine('ssh', '-N', '-L', `${port}:${host}:${port}`, HOST);
}
