// Dark and light: what the system says, or what was chosen here.

import { byId, setText } from "./dom.js";

const KEY = "headway-theme";
const THEMES = ["auto", "light", "dark"];

/** Watches the theme and calls `changed` when colours differ from before. */
export function startTheme(changed) {
  const button = byId("theme");
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    setText(button, `Theme: ${theme}`);
  };
  let theme = localStorage.getItem(KEY);
  if (!THEMES.includes(theme)) theme = "auto";
  apply(theme);
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(KEY, theme);
    apply(theme);
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}

/** A colour of the style sheet as it is now, for what draws by itself. */
export function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
