// One chart as plotly wants it: curves, axes and colours. Draws with SVG only.

import { escapeLabel, flatRange, placeMarks, splitValues } from "./series.js";
import { metricKind } from "./format.js";
import { colour } from "./theme.js";

const GIB = 1024 ** 3;
const LONGEST_NAME = 32; // a label wider than the chart would hide it
let loading = null;

/** Plotly's script, fetched when the first chart is drawn; null where it is not installed. */
export function loadPlotly() {
  loading ??= new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = "/assets/plotly.min.js";
    script.onload = () => resolve(globalThis.Plotly ?? null);
    script.onerror = () => resolve(null);
    document.head.append(script);
  });
  return loading;
}

/** The colours of the page, read once for a drawing. */
function readColours() {
  return { text: colour("--quiet"), grid: colour("--line"), card: colour("--card"), ink: colour("--ink") };
}

export function makeFigure(key, curves, unit, range, options) {
  const colours = readColours();
  const traces = curves.flatMap((curve) => tracesOf(key, curve, unit));
  const kind = metricKind(key);
  const flat = flatRange(traces.flatMap((trace) => trace.y), options.log);
  const axis = {
    gridcolor: colours.grid,
    linecolor: colours.grid,
    zeroline: false,
    tickfont: { size: 11 },
    fixedrange: true,
    automargin: true,
  };
  const shown = range ? range.map((value) => value / unit.seconds) : null;
  const layout = {
    autosize: true,
    height: 230,
    margin: { l: 48, r: 12, t: 6, b: 36 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colours.text },
    showlegend: false,
    hovermode: "x unified",
    hoverlabel: { bgcolor: colours.card, bordercolor: colours.grid, font: { color: colours.ink } },
    // A finger on a chart scrolls the page; zooming is for pointers that can aim.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    uirevision: "kept",
    xaxis: {
      ...axis,
      fixedrange: false,
      showgrid: false,
      title: { text: unit.name, font: { size: 11 }, standoff: 4 },
      ...(shown ? { range: shown, autorange: false } : { autorange: true }),
      uirevision: JSON.stringify(shown),
    },
    yaxis: {
      ...axis,
      type: options.log ? "log" : "linear",
      exponentformat: key === "learning_rate" || key === "lr" ? "e" : "SI",
      ...(kind === "percent" ? { tickformat: ".1%" } : {}),
      ...(options.log ? { dtick: null, nticks: 6 } : {}),
      ...(flat ? { range: flat, autorange: false } : { autorange: true }),
    },
  };
  return { traces, layout, config: { displayModeBar: false, responsive: true, doubleClick: false } };
}

function tracesOf(key, curve, unit) {
  const scale = metricKind(key) === "bytes" ? GIB : 1;
  const { y: values, bad } = splitValues(curve.y);
  const scaled = (all) => (scale === 1 ? all : all.map((value) => (value === null ? null : value / scale)));
  const y = scaled(values);
  const x = curve.x.map((value) => (value - curve.start) / unit.seconds);
  const paint = colour(`--${curve.run.colour}`);
  const { name: given } = curve.run;
  const name = escapeLabel(given.length > LONGEST_NAME ? `${given.slice(0, LONGEST_NAME - 1)}…` : given);
  const line = { color: paint, width: 1.75, simplify: false };
  const format = metricKind(key) === "percent" ? ".2%" : ".5~g";
  const base = { x, type: "scatter", name, hovertemplate: `%{y:${format}}<extra>${name}</extra>` };
  const mode = y.length <= 20 ? "lines+markers" : "lines";
  const traces = [];
  if (curve.smooth) {
    traces.push({ ...base, y, mode: "lines", line: { ...line, width: 1 }, opacity: 0.25, hoverinfo: "skip", hovertemplate: null });
    traces.push({ ...base, y: scaled(curve.smooth), mode: "lines", line });
  } else {
    traces.push({ ...base, y, mode, line, marker: { size: 5, color: paint } });
  }
  if (bad.length) {
    traces.push({
      ...base,
      x: bad.map((i) => x[i]),
      y: placeMarks(y, bad),
      text: bad.map((i) => escapeLabel(curve.y[i])),
      mode: "markers",
      marker: { symbol: "x", size: 8, color: colour("--bad") },
      hovertemplate: `%{text}<extra>${name}</extra>`,
    });
  }
  return traces;
}
