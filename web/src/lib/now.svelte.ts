// The time, for ages: it moves every ten seconds, not while the page is hidden, and with each answer of the service.
class Now {
  ms = $state(Date.now());
  constructor() {
    setInterval(() => {
      if (!document.hidden) this.ms = Date.now();
    }, 10_000);
    document.addEventListener('visibilitychange', () => {
      this.ms = Date.now();
    });
  }
}
export const now = new Now();
