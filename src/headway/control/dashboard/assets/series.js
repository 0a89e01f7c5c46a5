// From what the server sends to what is drawn: pure functions, no page and no network.

/** Labels inside a chart are read as a small markup; make it plain text. */
export function escapeLabel(text) {
  return String(text)
    .replace(/&/g, "&amp;")
    .replace(/</g, "&lt;")
    .replace(/>/g, "&gt;")
    .replace(/%\{/g, "%&#123;");
}

/** Numbers, with null for a gap, and where the values are that are no finite numbers. */
export function splitValues(values) {
  const bad = [];
  const y = values.map((value, i) => {
    if (typeof value === "number" && Number.isFinite(value)) return value;
    if (value !== null) bad.push(i);
    return null;
  });
  return { y, bad };
}

/** Where marks for values that are no numbers go: at the height of the last one that was. */
export function placeMarks(y, bad) {
  const heights = [];
  let last = y.find((value) => value !== null) ?? 0;
  let next = 0;
  y.forEach((value, i) => {
    if (value !== null) last = value;
    if (bad[next] === i) {
      heights.push(last);
      next += 1;
    }
  });
  return heights;
}

/** Room around a curve that is one straight line; plotly alone would take from -1 to 1. */
export function flatRange(y, log) {
  const values = y.filter((value) => value !== null && (!log || value > 0));
  const [first] = values;
  if (first === undefined || values.some((value) => value !== first)) return null;
  if (log) return [Math.log10(first) - 0.5, Math.log10(first) + 0.5];
  return first === 0 ? [-1, 1] : [first - Math.abs(first) / 2, first + Math.abs(first) / 2];
}

/** A unit in which a span of seconds reads well. */
export function timeUnit(spanSeconds) {
  if (spanSeconds > 2 * 86400) return { name: "days", seconds: 86400 };
  if (spanSeconds > 2 * 3600) return { name: "hours", seconds: 3600 };
  if (spanSeconds > 120) return { name: "minutes", seconds: 60 };
  return { name: "seconds", seconds: 1 };
}

export const USUAL = [
  { title: "Training loss", names: ["loss"] },
  { title: "Evaluation loss", names: ["eval_loss"] },
  { title: "Learning rate", names: ["learning_rate", "lr"] },
  { title: "Gradient norm", names: ["grad_norm"] },
  { title: "Tokens per second", names: ["tokens_per_second", "tok_per_sec"] },
  { title: "Model FLOPs utilisation", names: ["mfu"] },
  { title: "Peak memory", names: ["memory", "peak_mem", "peak_memory", "peak_mem_allocated"] },
];

/** The usual metrics among the keys there are. */
export function usualKeys(keys) {
  const there = new Set(keys);
  return USUAL.map((entry) => entry.names.find((name) => there.has(name))).filter(Boolean);
}

export function titleOf(key) {
  return USUAL.find((entry) => entry.names.includes(key))?.title ?? key;
}
