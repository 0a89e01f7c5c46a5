// Numbers, sizes and times as people read them. A value may also be "nan", "inf" or "-inf".

const NONE = "–";

export function asNumber(value) {
  if (Array.isArray(value)) {
    const numbers = value.map(asNumber).filter((v) => v !== null);
    return numbers.length ? Math.max(...numbers) : null;
  }
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

export function count(value) {
  const number = asNumber(value);
  return number === null ? NONE : Math.round(number).toLocaleString("en-US");
}

export function number(value) {
  if (typeof value === "string") return value;
  const v = asNumber(value);
  if (v === null) return NONE;
  const size = Math.abs(v);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return v.toExponential(2);
  if (Number.isInteger(v) || size >= 1e4) return Math.round(v).toLocaleString("en-US");
  return String(Number(v.toPrecision(5)));
}

export function percent(value) {
  const v = asNumber(value);
  return v === null ? number(value) : `${(v * 100).toFixed(1)} %`;
}

export function bytes(value) {
  let v = asNumber(value);
  if (v === null) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (v >= 1024 && i < units.length - 1) {
    v /= 1024;
    i += 1;
  }
  return `${i ? v.toFixed(v < 10 ? 2 : 1) : v} ${units[i]}`;
}

export function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function ago(unixSeconds) {
  const at = asNumber(unixSeconds);
  if (at === null) return NONE;
  const s = Date.now() / 1000 - at;
  if (s < 5) return "now";
  if (s < 60) return `${Math.round(s / 5) * 5} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ago`;
  return `${Math.floor(s / 86400)} d ago`;
}

export function clock(unixSeconds) {
  const at = asNumber(unixSeconds);
  return at === null ? NONE : new Date(at * 1000).toLocaleTimeString("en-GB");
}

export function dateTime(unixSeconds) {
  const at = asNumber(unixSeconds);
  if (at === null) return NONE;
  const date = new Date(at * 1000);
  return `${date.toLocaleDateString("en-CA")} ${date.toLocaleTimeString("en-GB")}`;
}

/** Any value of a configuration or a file, on one line or as indented JSON. */
export function plain(value) {
  if (value === null || value === undefined) return "none";
  if (typeof value === "string") return value;
  return JSON.stringify(value);
}

const MEMORY = /(^|[_/. ])(mem|memory)([_/. ]|$)/i;

/** How a metric is shown, by its name. */
export function metricKind(key) {
  if (/(^|[_/ ])mfu$/i.test(key)) return "percent";
  if (MEMORY.test(key) && !/(fraction|percent|ratio)/i.test(key)) return "bytes";
  return "number";
}

export function metric(key, value) {
  return { percent, bytes, number }[metricKind(key)](value);
}
