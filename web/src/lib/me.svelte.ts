// Who uses the page, and what they may do.
import { call, problemFrom, type Problem } from '../api/client';
import type { Me, Role } from '../api/schema';

export const ROLES: Role[] = ['viewer', 'operator', 'admin', 'backup', 'metrics'];

class Caller {
  /** `undefined`: not asked yet; `null`: not logged in. */
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

  /** May start runs, open consoles, see screenshots. */
  get isOperator(): boolean {
    return this.isAdmin || this.me?.role === 'operator';
  }
}

export const caller = new Caller();
