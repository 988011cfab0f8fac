// Servers of hypervisors, in words.
import type { HypervisorKind } from '../api/schema';

export const KINDS: Record<HypervisorKind, string> = { vcenter: 'vCenter', esxi: 'ESXi' };
