// For svelte-check; the build's own options are in vite.config.ts.
export default { compilerOptions: { runes: true } };
