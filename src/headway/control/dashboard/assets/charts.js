// The grid of charts: which metrics, which axis, which part of the run; and drawing them.
// The server thins curves out to what a screen shows; zooming in asks it again for that part.

import { get, runPath } from "./api.js";
import { READING, byId, el, fill, setText, show } from "./dom.js";
import { metric, metricKind } from "./format.js";
import { loadPlotly, makeFigure } from "./figure.js";
import { timeUnit, titleOf, usualKeys } from "./series.js";

const MOST_POINTS = 1500;
const MOST_KEYS = 64; // the server's limit for one question
const KEY = "headway-charts";

export class Charts {
  constructor() {
    this.runs = [];
    this.keysOf = new Map(); // run id -> {version, keys}
    this.dataOf = new Map(); // run id -> {query, x, series}
    this.startOf = new Map(); // run id -> its first time, where times are dates
    this.cards = new Map();
    this.range = null;
    this.visible = false;
    this.options = { x: "step", smoothing: 0, log: false, chosen: null };
    try {
      Object.assign(this.options, JSON.parse(localStorage.getItem(KEY) ?? "{}"));
    } catch {
      localStorage.removeItem(KEY);
    }
    const draw = (entries) => {
      for (const entry of entries) {
        const card = entry.target.card;
        card.onScreen = entry.isIntersecting;
        if (card.onScreen) this.draw(card);
      }
    };
    // A little before it is scrolled to; a long page of charts costs only what is looked at.
    this.seen = new IntersectionObserver(draw, { rootMargin: "400px" });
    this.wire();
  }

  wire() {
    const { options } = this;
    const axis = byId("axis-x");
    const slider = byId("smoothing");
    const log = byId("log-y");
    axis.value = options.x;
    slider.value = String(options.smoothing);
    log.checked = options.log;
    const changed = () => {
      options.smoothing = Number(slider.value);
      options.log = log.checked;
      setText(byId("smoothing-value"), options.smoothing ? options.smoothing.toFixed(2) : "off");
      localStorage.setItem(KEY, JSON.stringify(options));
      this.drawAll();
    };
    slider.addEventListener("input", () => {
      changed();
      this.askSoon(); // means of all points, of which the page has few
    });
    log.addEventListener("change", changed);
    axis.addEventListener("change", () => {
      options.x = axis.value;
      this.range = null;
      changed();
      this.refreshSoon();
    });
    byId("zoom-reset").addEventListener("click", () => this.zoom(null));
    byId("metric-filter").addEventListener("input", () => this.listMetrics());
    byId("metric-reset").addEventListener("click", () => this.choose(null));
    changed();
  }

  /** The runs to draw, with a colour each; fetches what is new about them. */
  async follow(runs) {
    this.runs = runs;
    for (const map of [this.keysOf, this.dataOf, this.startOf]) {
      for (const id of map.keys()) if (!runs.some((run) => run.id === id)) map.delete(id);
    }
    await this.refresh();
  }

  draws(run) {
    return this.runs.some((one) => one.id === run.id);
  }

  /** Show nothing until there is something of the runs that are drawn now. */
  clear() {
    this.runs = [];
    this.range = null;
    show(byId("zoom-reset"), false);
    this.layOut();
  }

  async refresh() {
    if (!this.visible) return;
    await Promise.all(this.runs.map((run) => this.fetchKeys(run)));
    this.layOut();
    const news = await Promise.all(this.runs.map((run) => this.fetchSeries(run)));
    const drawn = this.runs.map((run) => run.id + run.colour).join();
    if (news.some(Boolean) || drawn !== this.drawn) this.drawAll();
    this.drawn = drawn;
  }

  /** Refresh now, after something the user did; the page's own loop tells of trouble. */
  refreshSoon() {
    this.refresh().catch(() => {});
  }

  async fetchKeys(run) {
    const version = `${run.step} ${run.updated_at}`;
    if (this.keysOf.get(run.id)?.version === version) return;
    const { keys, complete } = await get(runPath(run.id, "keys"));
    const names = keys.map((key) => key.name);
    this.keysOf.set(run.id, { version: complete === false ? null : version, keys: names });
  }

  /** Fetches the curves of a run if they may have changed, and says whether it did. */
  async fetchSeries(run) {
    const there = new Set(this.keysOf.get(run.id)?.keys ?? []);
    const keys = this.shownKeys().filter((key) => there.has(key)).slice(0, MOST_KEYS);
    if (!keys.length) return false;
    const width = byId("charts").clientWidth || 800;
    const points = String(Math.min(MOST_POINTS, Math.max(300, Math.round(width * 1.5))));
    const names = keys.map((key) => ["key", key]); // each by itself: a name may hold a comma
    const asked = new URLSearchParams([...names, ["x", this.options.x], ["points", points]]);
    if (this.options.smoothing) asked.set("smoothing", String(this.options.smoothing));
    if (this.range) {
      const [from, to] = this.range;
      const margin = (to - from) * 0.02;
      const start = this.options.x === "time" ? (this.startOf.get(run.id) ?? 0) : 0;
      asked.set("from", String(from - margin + start));
      asked.set("to", String(to + margin + start));
    }
    const query = asked.toString();
    const version = `${query} ${run.step} ${run.updated_at}`;
    if (this.dataOf.get(run.id)?.version === version) return false;
    const { x, series, complete } = await get(runPath(run.id, `series?${query}`));
    if (x === "time" && !this.range) this.startOf.set(run.id, firstDate(series));
    // A long log may still be being read; then the same question has another answer next time.
    this.dataOf.set(run.id, { version: complete === false ? null : version, x, series });
    return true;
  }

  // -- which metrics ---------------------------------------------------------------------------

  allKeys() {
    const names = new Set();
    for (const run of this.runs) for (const name of this.keysOf.get(run.id)?.keys ?? []) names.add(name);
    return [...names].sort();
  }

  shownKeys() {
    const all = this.allKeys();
    const usual = usualKeys(all);
    if (this.options.chosen === null) return usual.length ? usual : all.slice(0, 6);
    const chosen = new Set(this.options.chosen);
    return [...usual.filter((key) => chosen.has(key)), ...all.filter((key) => chosen.has(key) && !usual.includes(key))];
  }

  choose(chosen) {
    this.options.chosen = chosen;
    localStorage.setItem(KEY, JSON.stringify(this.options));
    this.refreshSoon();
  }

  listMetrics() {
    const wanted = byId("metric-filter").value.toLowerCase();
    const shown = new Set(this.shownKeys());
    const keys = this.allKeys().filter((key) => key.toLowerCase().includes(wanted));
    const data = keys.map((key) => [key, shown.has(key)]);
    fill(byId("metric-list"), data, () =>
      data.map(([key, on]) =>
        el(
          "li",
          {},
          el(
            "label",
            { class: "check" },
            el("input", {
              type: "checkbox",
              checked: on,
              "data-focus": key,
              onchange: (event) => {
                const next = new Set(this.shownKeys());
                if (event.target.checked) next.add(key);
                else next.delete(key);
                this.choose([...next]);
              },
            }),
            el("span", {}, key),
          ),
        ),
      ),
    );
  }

  // -- cards -----------------------------------------------------------------------------------

  layOut() {
    const keys = this.shownKeys();
    const grid = byId("charts");
    for (const [key, card] of this.cards) {
      if (keys.includes(key)) continue;
      this.seen.unobserve(card.box);
      globalThis.Plotly?.purge(card.plot);
      card.box.remove();
      this.cards.delete(key);
    }
    keys.forEach((key, i) => {
      if (!this.cards.has(key)) this.cards.set(key, this.makeCard(key));
      const { box } = this.cards.get(key);
      if (grid.children[i] !== box) grid.insertBefore(box, grid.children[i] ?? null);
    });
    const empty = byId("charts-empty");
    show(empty, keys.length === 0);
    const nothing = this.allKeys().length
      ? "No metric is chosen: see Metrics above."
      : "Nothing was logged yet. Curves appear here with the first record of the log.";
    setText(empty, this.runs.length ? nothing : READING);
    this.listMetrics();
    this.showLegend();
  }

  makeCard(key) {
    const title = titleOf(key);
    const plot = el("div", { class: "plot", "data-key": key });
    const latest = el("span", { class: "chart-latest" });
    const caption = el("figcaption", { class: "quiet" });
    const box = el(
      "figure",
      {
        class: "card chart",
        tabindex: "0",
        role: "group",
        "aria-label": `${title}. Plus and minus zoom, arrow keys move, 0 shows the whole run.`,
        onkeydown: (event) => this.moveByKey(event),
      },
      el("header", {}, el("h3", { title: key }, title), latest),
      plot,
      caption,
    );
    const card = { key, box, plot, latest, caption, onScreen: false };
    box.card = card;
    this.seen.observe(box);
    return card;
  }

  showLegend() {
    const legend = byId("legend");
    show(legend, this.runs.length > 1);
    fill(legend, this.runs.map((run) => [run.name, run.colour]), (rows) =>
      rows.map(([name, colour]) =>
        el("li", {}, el("span", { class: `swatch ${colour}`, "aria-hidden": "true" }), name),
      ),
    );
  }

  // -- zoom ------------------------------------------------------------------------------------

  /** Show this part of the horizontal axis in every chart; null is all of it. */
  zoom(range) {
    this.range = range;
    show(byId("zoom-reset"), range !== null);
    this.drawAll();
    this.askSoon();
  }

  /** Ask when the user has come to rest. */
  askSoon() {
    clearTimeout(this.asking);
    this.asking = setTimeout(() => this.refreshSoon(), 150);
  }

  moveByKey(event) {
    if (event.target !== event.currentTarget) return;
    const [from, to] = this.range ?? this.extent();
    const span = to - from;
    const moved = {
      "+": [from + span / 4, to - span / 4],
      "-": [from - span / 2, to + span / 2],
      ArrowLeft: [from - span / 5, to - span / 5],
      ArrowRight: [from + span / 5, to + span / 5],
      0: null,
    }[event.key === "=" ? "+" : event.key];
    if (moved === undefined || !(span > 0)) return;
    event.preventDefault();
    const [first, last] = this.whole ?? [from, to];
    if (moved === null || moved[1] - moved[0] >= (last - first) * 1.01) this.zoom(null);
    else this.zoom(moved);
  }

  /** From where to where the curves go, in the unit of the axis. */
  extent() {
    let first = Infinity;
    let last = -Infinity;
    for (const run of this.runs) {
      const start = this.startFor(run);
      for (const curve of Object.values(this.dataOf.get(run.id)?.series ?? {})) {
        if (!curve.x.length) continue;
        first = Math.min(first, curve.x[0] - start);
        last = Math.max(last, curve.x.at(-1) - start);
      }
    }
    if (!this.range) this.whole = [first, last];
    return [first, last];
  }

  startFor(run) {
    return this.dataOf.get(run.id)?.x === "time" ? (this.startOf.get(run.id) ?? 0) : 0;
  }

  // -- drawing ---------------------------------------------------------------------------------

  drawAll() {
    for (const card of this.cards.values()) if (card.onScreen) this.draw(card);
  }

  async draw(card) {
    if (!this.visible) return;
    const curves = this.runs
      .map((run) => ({ run, start: this.startFor(run), ...this.dataOf.get(run.id)?.series[card.key] }))
      .filter((curve) => curve.x?.length > 0);
    if (!curves.length) return;
    this.describe(card, curves);
    const Plotly = await loadPlotly();
    if (Plotly === null) {
      setText(card.plot, "Charts need the Python package plotly: pip install 'headway[dashboard]'");
      return;
    }
    const [first, last] = this.extent();
    const unit = this.options.x === "time" ? timeUnit(last - first) : { name: this.options.x, seconds: 1 };
    const { traces, layout, config } = makeFigure(card.key, curves, unit, this.range, this.options);
    if (!card.box.isConnected) return;
    await Plotly.react(card.plot, traces, layout, config);
    card.box.dataset.points = String(Math.max(...curves.map((curve) => curve.x.length)));
    if (card.wired) return;
    card.wired = true;
    card.plot.on("plotly_relayout", (change) => {
      const from = change["xaxis.range[0]"];
      const to = change["xaxis.range[1]"];
      if (from !== undefined) this.zoom([from * card.unit, to * card.unit]);
      else if (change["xaxis.autorange"]) this.zoom(null);
    });
    card.plot.on("plotly_doubleclick", () => this.zoom(null));
  }

  describe(card, curves) {
    const [first, last] = this.extent();
    card.unit = this.options.x === "time" ? timeUnit(last - first).seconds : 1;
    const newest = curves.map((curve) => curve.y.findLast((value) => value !== null));
    setText(card.latest, curves.length === 1 ? metric(card.key, newest[0] ?? null) : "");
    const shown = Math.max(...curves.map((curve) => curve.x.length));
    const total = Math.max(...curves.map((curve) => curve.total));
    const thinned = curves.some((curve) => curve.decimated);
    const text = thinned
      ? `${shown.toLocaleString("en-US")} of ${total.toLocaleString("en-US")} points: lowest and highest of each stretch`
      : `${total.toLocaleString("en-US")} ${total === 1 ? "point" : "points"}`;
    const unit = metricKind(card.key) === "bytes" ? ", in GiB" : "";
    setText(card.caption, text + unit);
  }
}

/** The earliest time, where times are dates and not seconds since the start. */
function firstDate(series) {
  const first = Math.min(...Object.values(series).map((curve) => curve.x[0] ?? Infinity));
  return Number.isFinite(first) && first > 1e8 ? first : 0;
}
