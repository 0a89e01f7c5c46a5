// The page: who is looking, which run is open, and the loop that asks for news.
// It only reads, every two seconds; what reaches a run is a command, and nothing else.

import { Refused, Unreachable, get, runPath, setToken, takeToken, tokenInUse } from "./api.js";
import { Charts } from "./charts.js";
import { Commands } from "./commands.js";
import { announce, byId, clearPanel, setAttr, setText, show } from "./dom.js";
import { clock } from "./format.js";
import * as panels from "./panels.js";
import { showPostMortem } from "./post_mortem.js";
import { COLOURS, RunList, isLive, showOverview } from "./runs.js";
import { startTabs } from "./tabs.js";
import { startTheme } from "./theme.js";

const EVERY_MS = 2000;
const HIDDEN_EVERY_MS = 15000;
const MOST_WAIT_MS = 30000;
const LONGEST_MS = 2 ** 31 - 1; // that a timer takes

const page = {
  session: null,
  runs: [],
  numLeftOut: 0, // of too many, only the newest are sent
  focus: null,
  status: null,
  colours: new Map(), // run id -> colour, for the runs in the charts
  tab: "charts",
  failures: 0,
  silentSince: null,
};

let charts;
let commands;
let list;
let openTab;
let newsWanted = false;
let wake = () => {
  newsWanted = true; // while a look is under way: there is another one right after it
};

// -- the address keeps what is open, so that it can be shared and gone back to -------------------

function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  page.focus = said.get("run") ?? page.focus;
  const compared = said.get("with")?.split(",") ?? [];
  for (const id of [page.focus, ...compared]) if (id) giveColour(id);
  return said.get("tab") ?? "charts";
}

function writeAddress() {
  const said = new URLSearchParams();
  if (page.focus && page.runs.length > 1) said.set("run", page.focus);
  const compared = [...page.colours.keys()].filter((id) => id !== page.focus);
  if (compared.length) said.set("with", compared.join(","));
  if (page.tab !== "charts") said.set("tab", page.tab);
  const text = said.toString();
  history.replaceState(null, "", location.pathname + (text ? `#${text}` : ""));
}

/** A run keeps its colour for as long as it is in the charts. */
function giveColour(id) {
  if (page.colours.has(id)) return;
  const used = [...page.colours.values()];
  const uses = (colour) => used.filter((other) => other === colour).length;
  page.colours.set(id, COLOURS.reduce((best, colour) => (uses(colour) < uses(best) ? colour : best)));
}

// -- what the user does --------------------------------------------------------------------------

function openRun(id) {
  const alone = page.colours.size === 1;
  if (alone) page.colours.delete(page.focus);
  page.focus = id;
  page.status = null;
  giveColour(id);
  if (matchMedia("(max-width: 899px)").matches) byId("run-drawer").open = false;
  announce(`Opened ${focused()?.name ?? id}`);
  render();
  wake();
}

function compareRun(id, on) {
  if (on) giveColour(id);
  else if (id !== page.focus) page.colours.delete(id);
  render();
  wake();
}

function focused() {
  return page.runs.find((run) => run.id === page.focus) ?? null;
}

function drawnRuns() {
  return page.runs
    .filter((run) => page.colours.has(run.id))
    .map((run) => ({ ...run, colour: page.colours.get(run.id) }));
}

// -- news ----------------------------------------------------------------------------------------

function settleFocus() {
  for (const id of page.colours.keys()) if (!page.runs.some((run) => run.id === id)) page.colours.delete(id);
  if (focused()) return;
  const newest = [...page.runs].sort(
    (a, b) => Number(isLive(b)) - Number(isLive(a)) || (b.updated_at ?? 0) - (a.updated_at ?? 0),
  )[0];
  page.focus = newest?.id ?? null;
  if (page.focus) giveColour(page.focus);
}

function render() {
  const run = focused();
  list.show(page.runs, page.focus, page.colours, page.numLeftOut);
  show(byId("run-list"), page.session.standalone || page.runs.length > 1);
  setAttr(byId("workspace"), "data-single", page.session.standalone || page.runs.length > 1 ? null : "true");
  show(byId("main"), run !== null); // nothing is left of a run whose folder is gone
  writeAddress();
  if (run === null) return;
  clearForAnother(run);
  showOverview(run, page.status);
  commands.show(run, page.status?.status ?? run.state, page.session.role);
}

/** Nothing of the run before may stand under the name of the one that is open now. */
function clearForAnother(run) {
  if (!charts.draws(run)) charts.clear();
  for (const panel of document.querySelectorAll("[role=tabpanel]")) {
    if (panel.id !== "panel-charts" && panel.dataset.run !== run.id) clearPanel(panel, run.id);
  }
}

async function fetchTab() {
  const run = focused();
  charts.visible = page.tab === "charts";
  if (run === null) return;
  const runs = drawnRuns();
  if (page.tab === "charts") await charts.follow(runs);
  else if (page.tab === "config") await panels.showConfig(run, runs);
  else if (page.tab === "checkpoints") await panels.showCheckpoints(run, page.session);
  else if (page.tab === "samples") await panels.showSamples(run);
  else if (page.tab === "incidents") await panels.showIncidents(run);
  else if (page.tab === "post_mortem") await showPostMortem(run);
}

async function lookOnce() {
  if (page.session === null) {
    page.session = await get("/api/session");
    await commands.load();
    enter();
  }
  const answer = await get("/api/runs");
  page.runs = answer.runs;
  page.numLeftOut = answer.left_out ?? 0;
  settleFocus();
  const run = focused();
  const status = run && isLive(run) ? await get(runPath(run.id, "status")) : null;
  if (run?.id === page.focus) page.status = status; // else another one was opened meanwhile
  render();
  await fetchTab();
}

/** A run may vanish between two requests; that is news, not an error. */
function isNews(error) {
  return error instanceof Refused && (error.status === 404 || error.status === 410);
}

async function followForever() {
  for (;;) {
    let wait = document.hidden ? HIDDEN_EVERY_MS : EVERY_MS;
    try {
      await lookOnce();
      page.failures = 0;
      showReached();
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        askForToken(tokenInUse() ? "The server does not accept this token: it is wrong, or of another job." : null);
        newsWanted = false;
        await pause(LONGEST_MS);
        continue;
      }
      if (!(error instanceof Unreachable) && !isNews(error)) console.warn(error);
      if (!isNews(error)) {
        page.failures += 1;
        wait = Math.min(MOST_WAIT_MS, EVERY_MS * 2 ** (page.failures - 1));
        showSilence(error, wait);
      }
    }
    await pause(wait);
  }
}

/** Wait, or less: until the user wants news, or the page is looked at again. */
async function pause(ms) {
  const during = wake;
  if (!newsWanted) {
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
  newsWanted = false;
  wake = during;
}

// -- what is said about the connection -----------------------------------------------------------

function showReached() {
  const before = page.silentSince;
  page.silentSince = null;
  show(byId("trouble"), false);
  const connection = byId("connection");
  connection.dataset.state = "live";
  setText(connection, "Connected");
  connection.title = `Last answer at ${clock(Date.now() / 1000)}`;
  if (before !== null) announce("The server answers again");
}

function showSilence(error, wait) {
  page.silentSince ??= Date.now() / 1000;
  const connection = byId("connection");
  connection.dataset.state = "silent";
  const run = focused();
  const answered = error.answered || error instanceof Refused;
  setText(connection, answered ? "No data" : "No answer");
  const what = answered ? `The server cannot answer (${error.message})` : "No answer from the server";
  const parts = [
    `${what} since ${clock(page.silentSince)}. Trying again every ${Math.round(wait / 1000)} s;`,
    "what is shown below is from before.",
  ];
  if (page.session && !page.session.standalone && run && !answered) {
    parts.push(
      "This page is served by the run itself and goes away when the run ends. To see it then:",
      `headway dashboard ${run.output_dir ?? "RUN_DIR"}`,
    );
  }
  setText(byId("trouble-text"), parts.join(" "));
  byId("trouble-text").title = error.message;
  show(byId("trouble"), true);
}

function askForToken(why) {
  page.session = null;
  show(byId("workspace"), false);
  show(byId("trouble"), false);
  show(byId("forget"), false);
  show(byId("role"), false);
  show(byId("sign-in"), true);
  show(byId("sign-in-why"), why !== null);
  setText(byId("sign-in-why"), why ?? "");
  byId("connection").dataset.state = "locked";
  setText(byId("connection"), "Not signed in");
  byId("token").focus();
}

function enter() {
  show(byId("sign-in"), false);
  show(byId("workspace"), true);
  show(byId("forget"), tokenInUse() !== null);
  const { role } = page.session;
  show(byId("role"), true);
  setText(byId("role"), role === "control" ? "control" : "read only");
  byId("role").title = role === "control" ? "This token may send commands" : "This token may only read";
}

// -- start ---------------------------------------------------------------------------------------

function start() {
  takeToken();
  startTheme(() => charts?.drawAll());
  charts = new Charts();
  commands = new Commands();
  list = new RunList(openRun, compareRun);
  let ready = false;
  openTab = startTabs((name) => {
    page.tab = name;
    charts.visible = name === "charts";
    if (ready) {
      writeAddress();
      wake();
    }
  });
  openTab(readAddress());
  ready = true;
  byId("retry").addEventListener("click", () => wake());
  byId("forget").addEventListener("click", () => {
    setToken(null);
    page.runs = [];
    location.reload();
  });
  byId("sign-in").addEventListener("submit", (event) => {
    event.preventDefault();
    setToken(byId("token").value);
    byId("token").value = "";
    wake();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) wake();
  });
  addEventListener("hashchange", () => {
    const before = tokenInUse();
    if (takeToken() !== before) page.session = null; // another token may be of another role
    openTab(readAddress());
    wake();
  });
  followForever();
}

start();
