// The user of the page, and their permissions.
import { call, problemFrom, type Problem } from '../api/client';
import type { Me, Role } from '../api/schema';

export const ROLES: Role[] = ['viewer', 'operator', 'admin', 'backup', 'metrics'];

/** Roles that do not see the machines: their purpose, and their pages. */
const NARROW: Partial<Record<Role, { may: string; pages: string[] }>> = {
  backup: { may: 'starts backups of jobs and sees their runs', pages: ['activity', 'runs', 'about'] },
  metrics: { may: 'reads /metrics, for programs such as Prometheus', pages: ['about'] },
};

class Caller {
  /** `undefined`: not requested yet; `null`: not logged in. */
  me = $state.raw<Me | null | undefined>();
  problem = $state.raw<Problem | undefined>();

  async ask(): Promise<void> {
    try {
      this.me = await call('GET /me');
      this.problem = undefined;
    } catch (error) {
      const problem = problemFrom(error);
      if (problem.status === 401) this.me = null;
      else this.problem = problem;
    }
  }

  get isAdmin(): boolean {
    return this.me?.role === 'admin';
  }

  /** The purpose of the role, if it has few of the pages. */
  get onlyMay(): string | undefined {
    return this.me ? NARROW[this.me.role]?.may : undefined;
  }

  mayOpen(page: string): boolean {
    const narrow = this.me ? NARROW[this.me.role] : undefined;
    return !narrow || narrow.pages.includes(page);
  }

  /** May start runs, open consoles, see screenshots. */
  get isOperator(): boolean {
    return this.isAdmin || this.me?.role === 'operator';
  }
}

export const caller = new Caller();
