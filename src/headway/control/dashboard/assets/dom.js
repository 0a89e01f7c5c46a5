// Making and changing elements. Data of a run becomes text nodes and attributes, never markup.

/** An element: `el("p", {class: "quiet", onclick: f}, "text", child)`. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Write a text only where it differs, so that what a reader has selected or focused stays. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

export function setAttr(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export const READING = "Reading…";

const drawn = new WeakMap();

/**
 * Fill a container from data, but only when the data changed; what had the focus keeps it, by
 * its `data-focus` name.
 */
export function fill(container, data, build) {
  const signature = JSON.stringify(data);
  if (drawn.get(container) === signature) return;
  drawn.set(container, signature);
  const focused = container.contains(document.activeElement)
    ? document.activeElement.dataset.focus
    : undefined;
  container.replaceChildren(...build(data));
  if (focused === undefined) return;
  for (const node of container.querySelectorAll("[data-focus]")) {
    if (node.dataset.focus === focused) node.focus();
  }
}

/** Make a panel that of another run: nothing of the one before may stand under its name. */
export function clearPanel(panel, run) {
  panel.dataset.run = run;
  fill(panel, null, () => [el("p", { class: "empty" }, READING)]);
}

/** As `fill`, with what was fetched about a run; nothing if another one was opened meanwhile. */
export function fillPanel(panel, run, data, build) {
  if (panel.dataset.run === run.id) fill(panel, [run.id, ...data], build);
}

/** A table that a screen reader can walk: `columns` are {title, number}, `rows` lists of nodes. */
export function table(caption, columns, rows) {
  const head = columns.map((c) => el("th", { scope: "col", class: c.number ? "number" : null }, c.title));
  const body = rows.map((cells) =>
    el(
      "tr",
      {},
      ...cells.map((cell, i) =>
        el(
          i === 0 ? "th" : "td",
          {
            scope: i === 0 ? "row" : null,
            class: columns[i].number ? "number" : null,
            "data-title": columns[i].title,
          },
          cell,
        ),
      ),
    ),
  );
  return el(
    "div",
    { class: "table-box", tabindex: "0", role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", { class: "hidden-label" }, caption),
      el("thead", {}, el("tr", {}, ...head)),
      el("tbody", {}, ...body),
    ),
  );
}

/** Say something to a screen reader. */
export function announce(text) {
  setText(byId("announce"), text);
}
