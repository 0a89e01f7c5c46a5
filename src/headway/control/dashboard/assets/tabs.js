// The row of tabs: one is open, arrow keys move, and the panel of each is shown and hidden.

import { byId } from "./dom.js";

/** Makes the tabs work; `opened(name)` is called when one is chosen. Returns how to open one. */
export function startTabs(opened) {
  const tabs = [...byId("tabs").querySelectorAll("[role=tab]")];
  const nameOf = (tab) => tab.id.slice("tab-".length);

  function open(name) {
    const known = tabs.some((tab) => nameOf(tab) === name);
    for (const tab of tabs) {
      const chosen = nameOf(tab) === (known ? name : nameOf(tabs[0]));
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !chosen;
      if (chosen) {
        tab.scrollIntoView({ block: "nearest", inline: "nearest" });
        opened(nameOf(tab));
      }
    }
  }

  byId("tabs").addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) open(nameOf(tab));
  });
  byId("tabs").addEventListener("keydown", (event) => {
    const at = tabs.indexOf(document.activeElement);
    const to = {
      ArrowRight: (at + 1) % tabs.length,
      ArrowLeft: (at - 1 + tabs.length) % tabs.length,
      Home: 0,
      End: tabs.length - 1,
    }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    tabs[to].focus();
    open(nameOf(tabs[to]));
  });
  return open;
}
