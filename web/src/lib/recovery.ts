// The requests of the Recover drawer: the same choices as requests, as command lines and in words.
import type { Hardware, Host, Hypervisor, Start } from '../api/schema';
import { commandLine, shellLine } from './command_line';
import type { Point } from './points';
import { serverOf, type Protocol, type Server } from './servers';
import { size } from './units';

export type Way = 'boot' | 'libvirt' | 'vsphere' | 'nbd' | 'nfs' | 'restore' | 'download';

export interface Choices {
  session: string;
  /** `null`: as proposed. */
  memory: number | null;
  cpus: number | null;
  network: 'isolated' | 'connected';
  isForOthers: boolean;
  /** IP address and port. */
  listen: string;
  /** Networks, one per line. */
  clients: string;
  tls: 'certificates' | 'psk';
  tlsPath: string;
  disk: string;
  format: string;
  target: string;
  isReplacing: boolean;
  /** Of the machine under libvirt; empty: as stored. */
  name: string;
  /** A new identity: it can run in parallel with the original. */
  isNew: boolean;
  link: 'none' | 'same' | 'named';
  /** Of libvirt, if the link is `named`. */
  networkName: string;
  /** The host of libvirt that runs it; empty: the service's. */
  on: string;
  /** URI of libvirt; empty: the system's. */
  connect: string;
  /** Name of the vCenter or ESXi; empty: the first. */
  hypervisor: string;
  /** The host of it that runs the machine; empty: its only one. */
  host: string;
  /** Hosts that get the datastore, too. */
  otherHosts: string[];
}

export function firstChoices(): Choices {
  return {
    session: '', memory: null, cpus: null, network: 'isolated', isForOthers: false, listen: '', clients: '',
    tls: 'certificates', tlsPath: '', disk: '', format: 'qcow2', target: '', isReplacing: false,
    name: '', isNew: false, link: 'none', networkName: '', on: '', connect: '', hypervisor: '', host: '', otherHosts: [],
  };
}

export interface Plan {
  /** The runs to start, in this order. */
  starts: Start[];
  /** The same on the command line. */
  lines: string[];
  /** The effect, in words. */
  will: string;
  /** When it can be used, and how much is moved until then. */
  clocks: string;
  /** The data that it overwrites irrevocably, if any. */
  overwrites?: string;
}

/** Image files of a disk that hold only what is stored, by the format's word. */
export const DOWNLOADS: Record<string, string> = { qcow2: 'sparse.qcow2', raw: 'raw', vhdx: 'dynamic.vhdx', vhd: 'dynamic.vhd',
  vmdk: 'sparse.vmdk' };
const STEP_MIB = 64;

/** Memory for the machine, in MiB, if this host has less now than the original had. */
export function memoryProposal(hardware: Hardware | undefined, host: Host | undefined): number | undefined {
  const fitting = host?.fitting_memory_mib ?? Infinity;
  if (!hardware || hardware.memory_mib <= fitting) return undefined;
  return Math.max(STEP_MIB, Math.floor((fitting * 0.9) / STEP_MIB) * STEP_MIB);
}

/** The proposed name of a session of the machine. */
export function sessionName(machine: string, at: Date): string {
  return `${machine.slice(0, 40)}-${at.toISOString().slice(5, 16).replace(/\D/g, '')}`;
}

export function bootPlan(point: Point, choices: Choices, memory: number | undefined, host: Host | undefined): Plan {
  const { session, cpus, network } = choices;
  const hardware = { ...(memory ? { memory_mib: memory } : {}), ...(cpus ? { cpus } : {}) };
  return {
    starts: [{ kind: 'boot', address: point.address, session, network, ...hardware }],
    lines: [commandLine('boot', point.address, '--name', session, ...(memory ? ['--memory', `${memory}M`] : []),
      ...(cpus ? ['--cpus', cpus] : []),
      '--network', network === 'connected' ? 'user' : 'isolated')],
    will: `Publishes the point as session ${session} and starts a machine on it. Its disks stay in the backup, `
      + 'and what it writes is kept beside them. If it does not start, its run says why.',
    clocks: host?.has_kvm === false ? 'Starts within seconds, then boots slowly without KVM; nothing is moved.'
      : 'Usable within seconds; nothing is moved.',
  };
}

export function libvirtPlan(point: Point, choices: Choices): Plan {
  const { name, isNew, link, networkName, on, connect } = choices;
  const network = link === 'named' ? networkName : link;
  return {
    starts: [{ kind: 'recover', address: point.address, to: 'libvirt', network, new_uuid: isNew, ...(name ? { name } : {}),
      ...(on ? { on } : {}), ...(connect ? { connect } : {}) }],
    lines: [commandLine('recover', point.address, '--to', 'libvirt', ...(on ? ['--on', on] : []), ...(name ? ['--name', name] : []), isNew && '--new-uuid',
      ...(link === 'none' ? [] : ['--network', network || 'NETWORK']), ...(connect ? ['--connect', connect] : []))],
    will: `Publishes the point as a session and starts the machine on it under libvirt on ${on || 'this host'}, with the hardware that was stored. `
      + 'Its disks stay in the backup until they are moved to production. If it does not start, nothing is left, and its run says why.',
    clocks: 'Usable within seconds; nothing is moved. It can be moved later, while it runs.',
  };
}

export function vspherePlan(point: Point, choices: Choices, server: Hypervisor): Plan {
  const { name, isNew, link, host, otherHosts } = choices;
  const to = `${server.kind}:${server.name}`;
  const hosts = [host, ...otherHosts.filter((other) => other !== host)].filter(Boolean);
  const network = link === 'same' ? 'same' : 'none';
  return {
    starts: [{ kind: 'recover', address: point.address, to, hosts, network, new_uuid: isNew, ...(name ? { name } : {}) }],
    lines: [commandLine('--server', location.origin, '--token-file', 'TOKEN', 'recover', point.address, '--to', to,
      ...hosts.flatMap((one) => ['--host', one]), ...(name ? ['--name', name] : []), isNew && '--new-uuid',
      ...(network === 'same' ? ['--network', 'same'] : []))],
    will: `Publishes the point as a session, mounts it on the host over NFS as a datastore, registers the machine from there and powers it on. `
      + 'If a step fails, everything is undone, and its run says why.',
    clocks: 'Usable within seconds; nothing is moved. It can be moved later, while it runs.',
  };
}

/** Networks that a server is for. */
function allowed(protocol: Protocol, { isForOthers, clients }: Choices): string[] {
  return isForOthers && protocol === 'nfs' ? clients.split(/[\s,]+/).filter(Boolean) : [];
}

/** The server that `choices` ask for. */
export function wantedServer(protocol: Protocol, choices: Choices): Server {
  const { isForOthers, listen, tls, tlsPath } = choices;
  const keys = isForOthers && protocol === 'nbd' ? [`--tls-${tls}=${tlsPath}`] : [];
  return serverOf(protocol, [`--listen=${listen}`, ...keys, ...allowed(protocol, choices).map((client) => `--allow=${client}`)]);
}

export function servePlan(protocol: Protocol, point: Point, choices: Choices, running: Server[]): Plan {
  const { session, isForOthers, listen, tls, tlsPath } = choices;
  const wanted = wantedServer(protocol, choices);
  const isThere = running.some((server) => server.terms === wanted.terms);
  const isTaken = !isThere && running.some((server) => server.port === wanted.port);
  const allow = allowed(protocol, choices);
  const isTls = isForOthers && protocol === 'nbd';
  const serve: Start = {
    kind: 'serve', protocol, listen,
    ...(allow.length > 0 ? { allow } : {}), ...(isTls ? { [tls === 'psk' ? 'tls_psk' : 'tls_certificates']: tlsPath }
      : {}),
  };
  const option = tls === 'psk' ? '--tls-psk' : '--tls-certificates';
  const line = commandLine('serve', protocol, '--listen', listen, isTls && option, isTls && tlsPath,
    ...allow.flatMap((client) => ['--allow', client]));
  const server = isThere ? `The ${protocol.toUpperCase()} server that runs already serves it.`
    : `Starts a server of all points and sessions over ${protocol.toUpperCase()}; it runs until its run is cancelled.`
      + (isTaken ? ` One with other settings has port ${wanted.port}: choose another port, or stop that one first.` : '');
  return {
    // The session first: a server gives out all points, so none is left behind for nothing.
    starts: [{ kind: 'publish', address: point.address, session }, ...(isThere ? [] : [serve])],
    lines: [commandLine('publish', point.address, '--name', session), ...(isThere ? [] : [line])],
    will: `Publishes the point as session ${session}, writable; the point itself never changes. ${server} `
      + 'If the server cannot start, its run says why; the session stays, and another server can serve it.',
    clocks: 'Usable within seconds; nothing is moved.',
  };
}

/** The file that a restore makes in the service's folder, if no target is named. */
export function defaultTarget(machine: string, point: Point, { disk, format }: Choices): string {
  return `${machine}-${point.point}-${disk}.${format}`;
}

export function restorePlan(point: Point, choices: Choices, target: string): Plan {
  const { disk, format, isReplacing } = choices;
  const isInPlace = /^(\/dev\/|nbds?[:+])/.test(target);
  const bytes = point.disks.find((found) => found.disk === disk)?.size_bytes;
  const written = isInPlace ? 'raw' : format;
  const place = target.includes('/') ? target : `${target} in the service’s folder of restored images`;
  return {
    starts: [{ kind: 'restore', address: `${point.address}/${disk}`, target, format: written, replace: isReplacing && !isInPlace }],
    lines: [commandLine('restore', `${point.address}/${disk}`, target, '--format', written, isReplacing && !isInPlace && '--force')],
    will: `Copies disk ${disk}, ${size(bytes)}, to ${place}. The run shows how much is moved. `
      + `If it fails or is cancelled, ${isInPlace ? 'the target is partly written: restore again' : 'no file is made'}.`,
    clocks: `Usable when all of it is moved: up to ${size(bytes)}.`,
    ...(isInPlace ? { overwrites: target } : {}),
  };
}

/** The address of a disk's image file, and the name that it is saved under. */
export function download(machine: string, point: Point, choices: Choices): { address: string; name: string; line: string } {
  const file = `${choices.disk}.${DOWNLOADS[choices.format] ?? 'raw'}`;
  const parts = [machine, point.point, file].map(encodeURIComponent);
  const address = `/api/v1/machines/${parts[0]}/points/${parts[1]}/disks/${parts[2]}`;
  const name = defaultTarget(machine, point, choices);
  return { address, name, line: shellLine('curl', '--cacert', 'cert.pem', '-H', 'Authorization: Bearer TOKEN', '-C', '-', '-o', name,
    location.origin + address) };
}
