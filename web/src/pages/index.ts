// The pages, by the first part of their address. Each is loaded when it is first shown.
import type { Component } from 'svelte';

type Loaded = () => Promise<{ default: Component }>;

export const PAGES: Record<string, Loaded | undefined> = {
  machines: () => import('./Machine.svelte'),
  sessions: () => import('./Session.svelte'),
  activity: () => import('./Activity.svelte'),
  runs: () => import('./Run.svelte'),
  jobs: () => import('./Jobs.svelte'),
  copies: () => import('./Copies.svelte'),
  repository: () => import('./Repository.svelte'),
  files: () => import('./Files.svelte'),
  compare: () => import('./Compare.svelte'),
  hosts: () => import('./Hosts.svelte'),
  access: () => import('./Access.svelte'),
  notifications: () => import('./Notifications.svelte'),
  about: () => import('./About.svelte'),
};
