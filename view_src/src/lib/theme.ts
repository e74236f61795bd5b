const KEY = "agentenv.theme";

/** What a reader chose, kept by the browser where it has storage. */
export function kept(key: string): string | null {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

export function keep(key: string, value: string): void {
  try {
    localStorage.setItem(key, value);
  } catch {
    // Without storage the choice holds until the page is closed.
  }
}

export function isDark(): boolean {
  const chosen = document.documentElement.dataset["theme"];
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function applyTheme(): void {
  // Paper is light, so charts are drawn again for it.
  matchMedia("print").addEventListener("change", () => window.dispatchEvent(new Event("themechange")));
  const chosen = kept(KEY);
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset["theme"] = chosen;
}

export function toggleTheme(): void {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset["theme"] = next;
  keep(KEY, next);
  window.dispatchEvent(new Event("themechange"));
}
