// Light, dark, or as the system says.
export type Theme = 'auto' | 'light' | 'dark';
const NAME = 'coldrise-theme';
const stored = localStorage.getItem(NAME);

class Choice {
  theme = $state<Theme>(stored === 'light' || stored === 'dark' ? stored : 'auto');
}
export const choice = new Choice();

export function applyTheme(theme: Theme = choice.theme): void {
  choice.theme = theme;
  if (theme === 'auto') localStorage.removeItem(NAME);
  else localStorage.setItem(NAME, theme);
  document.documentElement.dataset['theme'] = theme;
}
