// The list of runs, and what stands over the tabs about the one that is open.

import { announce, byId, el, fill, setAttr, setText, show } from "./dom.js";
import * as format from "./format.js";

export const COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];
const LIVE = new Set(["running", "paused"]);

export function isLive(run) {
  return LIVE.has(run.state);
}

function compareBy(order) {
  const value = {
    name: (run) => run.name.toLowerCase(),
    state: (run) => run.state,
    loss: (run) => format.asNumber(run.latest?.loss) ?? Infinity,
    eval_loss: (run) => format.asNumber(run.latest?.eval_loss) ?? Infinity,
    step: (run) => -(run.step ?? 0),
    updated: (run) => (isLive(run) ? -1e12 : 0) - (run.updated_at ?? 0),
  }[order];
  return (a, b) => {
    const [left, right] = [value(a), value(b)];
    if (left === right) return a.id < b.id ? -1 : 1;
    return left < right ? -1 : 1;
  };
}

/** The list at the side. `open(id)` and `compare(id, on)` are called for what the user does. */
export class RunList {
  constructor(open, compare) {
    this.open = open;
    this.compare = compare;
    this.rows = new Map();
    this.last = null;
    byId("run-filter").addEventListener("input", () => this.show(...this.last));
    byId("run-sort").addEventListener("change", () => this.show(...this.last));
    // On a phone the list would fill the screen before the run.
    if (matchMedia("(max-width: 899px)").matches) byId("run-drawer").open = false;
  }

  show(runs, focus, colours, numLeftOut) {
    this.last = [runs, focus, colours, numLeftOut];
    const wanted = byId("run-filter").value.toLowerCase();
    const listed = runs
      .filter((run) => run.name.toLowerCase().includes(wanted) || run.state.includes(wanted))
      .sort(compareBy(byId("run-sort").value));
    const list = byId("runs");
    const ids = new Set(listed.map((run) => run.id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.box.remove();
      this.rows.delete(id);
    }
    listed.forEach((run, i) => {
      if (!this.rows.has(run.id)) this.rows.set(run.id, this.makeRow(run.id));
      const row = this.rows.get(run.id);
      this.fillRow(row, run, run.id === focus, colours.get(run.id) ?? null);
      if (list.children[i] !== row.box) list.insertBefore(row.box, list.children[i] ?? null);
    });
    setText(byId("run-count"), countRuns(runs.length, numLeftOut));
    show(byId("runs-empty"), listed.length === 0);
    setText(byId("runs-empty"), runs.length ? "No run has that in its name." : "No runs here yet.");
  }

  makeRow(id) {
    const box = el("li", { class: "run", "data-run": id });
    const tick = el("input", { type: "checkbox", onchange: (event) => this.compare(id, event.target.checked) });
    const name = el("span", { class: "run-row-name" });
    const state = el("span", { class: "pill" });
    const facts = el("span", { class: "quiet" });
    const bar = el("progress", { max: "1", "aria-hidden": "true" });
    const button = el(
      "button",
      { type: "button", class: "run-open", onclick: () => this.open(id) },
      el("span", { class: "run-line" }, name, state),
      facts,
      bar,
    );
    box.append(tick, button);
    return { box, tick, button, name, state, facts, bar };
  }

  fillRow(row, run, focused, colour) {
    setText(row.name, run.name);
    showState(row.state, run.state);
    const loss = run.latest?.loss;
    const steps = run.max_steps && isLive(run) ? `${format.count(run.step)} / ${format.count(run.max_steps)}` : format.count(run.step);
    const parts = [`step ${steps}`, loss === undefined || loss === null ? null : `loss ${format.number(loss)}`];
    if (!isLive(run)) parts.push(format.ago(run.updated_at));
    setText(row.facts, parts.filter(Boolean).join(" · "));
    show(row.bar, isLive(run) && Boolean(run.max_steps));
    if (run.max_steps) row.bar.value = Math.min(1, (run.step ?? 0) / run.max_steps);
    setAttr(row.button, "aria-current", focused ? "true" : null);
    setAttr(row.tick, "aria-label", focused ? `${run.name} is open` : `Compare ${run.name}`);
    setAttr(row.tick, "title", focused ? "Open" : "Compare");
    setAttr(row.tick, "aria-disabled", focused ? "true" : null);
    row.tick.checked = colour !== null;
    row.tick.className = colour ?? "";
  }
}

function countRuns(shown, leftOut) {
  if (leftOut) return `The newest ${shown} of ${format.count(shown + leftOut)} runs`;
  return shown === 1 ? "1 run" : `${shown} runs`;
}

export function showState(pill, state) {
  setText(pill, state);
  setAttr(pill, "data-state", state);
}

const NOTES = {
  paused: (run) => `Paused after step ${format.count(run.step)}. Nothing is computed until it is resumed.`,
  pausing: (run) => `Comes to a pause after step ${format.count(run.step)}: what is under way is done first.`,
  failed: () => "This run failed. The post-mortem tab says what is known about it.",
  lost: (run) =>
    `The process of this run is gone: no sign of it since ${format.dateTime(run.updated_at)}. Its files are shown as they were left; the post-mortem tab says how to go on.`,
};

/** Name, state, progress and the newest figures of the open run. */
export function showOverview(run, status) {
  setText(byId("run-name"), run.name);
  document.title = `${run.name} · Headway`;
  const phase = isLive(run) && status?.status ? status.status : run.state;
  const before = byId("run-state").dataset.state;
  if (before !== undefined && before !== phase && byId("run-state").dataset.run === run.id) {
    announce(`${run.name}: ${phase}`);
  }
  byId("run-state").dataset.run = run.id;
  showState(byId("run-state"), phase);
  const called = run.run_name && run.run_name !== run.name ? `${run.run_name} · ` : "";
  setText(byId("run-where"), called + (run.output_dir ?? ""));
  const step = Math.max(run.step ?? 0, isLive(run) ? (format.asNumber(status?.global_step) ?? 0) : 0);
  const most = format.asNumber(status?.max_steps) ?? run.max_steps;
  const bar = byId("run-progress");
  show(bar, Boolean(most));
  if (most) bar.value = Math.min(1, step / most);
  setText(byId("run-steps"), describeProgress(run, step, most, status));
  byId("run-steps").dataset.step = String(step);
  const note = (NOTES[isLive(run) ? phase : run.state])?.({ ...run, step });
  show(byId("run-note"), Boolean(note));
  setText(byId("run-note"), note ?? "");
  setAttr(byId("run-note"), "class", run.state === "failed" || run.state === "lost" ? "banner banner-bad" : "banner");
  const newest = isLive(run) ? { ...pickNumbers(status?.metrics), ...pickNumbers(status) } : {};
  showTiles({ ...run.latest, ...newest });
  show(byId("incident-count"), run.incidents > 0);
  setText(byId("incident-count"), String(run.incidents ?? ""));
}

function describeProgress(run, step, most, status) {
  const parts = [most ? `Step ${format.count(step)} of ${format.count(most)}` : `Step ${format.count(step)}`];
  const epoch = format.asNumber(status?.epoch ?? run.epoch);
  if (epoch !== null) parts.push(`epoch ${epoch.toFixed(2)}`);
  const started = format.asNumber(run.started_at);
  if (started !== null) {
    const until = isLive(run) ? Date.now() / 1000 : (run.updated_at ?? started);
    parts.push(`${format.duration(until - started)} ${isLive(run) ? "so far" : "in all"}`);
  }
  const left = format.asNumber(status?.eta_s);
  if (left !== null && run.state === "running") parts.push(`${format.duration(left)} to go`);
  return parts.join(" · ");
}

function pickNumbers(status) {
  const entries = Object.entries(status ?? {}).filter(([, value]) => format.asNumber(value) !== null);
  return Object.fromEntries(entries);
}

const TILES = [
  ["Loss", ["loss"]],
  ["Eval loss", ["eval_loss"]],
  ["Learning rate", ["learning_rate", "lr"]],
  ["Gradient norm", ["grad_norm"]],
  ["Tokens / s", ["tokens_per_second", "tok_per_sec"]],
  ["MFU", ["mfu"]],
  ["Peak memory", ["memory", "peak_mem", "peak_memory", "peak_mem_allocated"]],
];

function showTiles(latest) {
  const rows = TILES.map(([title, names]) => {
    const key = names.find((name) => latest[name] !== undefined && latest[name] !== null);
    return key && [title, key, format.metric(key, latest[key])];
  }).filter(Boolean);
  fill(byId("tiles"), rows, () =>
    rows.map(([title, key, text]) => el("div", { "data-key": key }, el("dt", {}, title), el("dd", {}, text))),
  );
}
