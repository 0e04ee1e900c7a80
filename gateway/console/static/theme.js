// The theme that is chosen, and its colours for canvases.

const KEY = "pando.theme";
export const THEMES = ["system", "light", "dark"];

export const theme = {
  get: () => localStorage.getItem(KEY) ?? THEMES[0],
  set: (name) => {
    localStorage.setItem(KEY, name);
    document.documentElement.dataset.theme = name;
  },
};

/** Return the computed values of custom properties; a canvas does not know `light-dark()`. */
export function coloursOf(names) {
  const probe = document.createElement("span");
  document.body.append(probe);
  const colours = names.map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  });
  probe.remove();
  return Object.fromEntries(colours);
}

/** Call `changed` whenever the colours change; returns the function that ends this. */
export function onThemeChange(changed) {
  const chosen = new MutationObserver(changed);
  chosen.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", changed);
  return () => {
    chosen.disconnect();
    system.removeEventListener("change", changed);
  };
}
