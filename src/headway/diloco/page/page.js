// The page of a DiLoCo server. All that comes from outside is shown as text, never as markup.
"use strict";

const PERIOD_MS = 2000;
// The token stands behind the # of the address, which no browser sends to a server.
let token = new URLSearchParams(location.hash.slice(1)).get("token") || "";
if (token) history.replaceState(null, "", location.pathname);

const byId = (id) => document.getElementById(id);

function make(name, text) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  return element;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return Number(value).toLocaleString("en", { maximumSignificantDigits: digits });
}

const whole = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${number(value)} ${units[unit]}`;
}

const seconds = (value) => (value === null || value === undefined ? "–" : `${number(value)} s`);

function fill(id, columns, rows) {
  const head = make("tr");
  for (const [title] of columns) head.append(make("th", title));
  byId(id).tHead.replaceChildren(head);
  byId(id).tBodies[0].replaceChildren(
    ...rows.map((row) => {
      const line = make("tr");
      for (const [, show] of columns) line.append(make("td", show(row)));
      return line;
    }),
  );
}

function drawDrift(rounds) {
  const svg = byId("drift");
  svg.replaceChildren();
  if (rounds.length < 2) return;
  const most = Math.max(...rounds.map((round) => round.drift)) || 1;
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const points = rounds.map((round, index) => {
    const x = (index * 640) / (rounds.length - 1);
    return `${x.toFixed(1)},${(115 - (110 * round.drift) / most).toFixed(1)}`;
  });
  line.setAttribute("points", points.join(" "));
  svg.append(line);
}

function show(status) {
  byId("state").textContent = `${status.mode}, up ${seconds(status.uptime_s)}`;
  byId("state").className = "";
  const refused = Object.values(status.refused).reduce((sum, count) => sum + count, 0);
  const figures = [
    ["Round", whole(status.commit)],
    ["Workers", `${status.workers.length} of ${status.expected}`],
    ["Parameters", status.model ? whole(status.model.num_parameters) : "none yet"],
    ["Received", bytes(status.received_bytes)],
    ["Sent", bytes(status.sent_bytes)],
    ["Last drift", number(status.last_drift)],
    ["Last round", seconds(status.last_round_s)],
    ["Last commit", seconds(status.last_commit_s)],
    ["Let go", whole(status.num_evicted)],
    ["Refused", whole(refused)],
    ["State", status.state_hash || "–"],
  ];
  byId("figures").replaceChildren(
    ...figures.map(([title, value]) => {
      const box = make("div");
      box.append(make("dt", title), make("dd", value));
      return box;
    }),
  );
  fill(
    "workers",
    [
      ["Worker", (w) => w.id],
      ["Step", (w) => whole(w.step)],
      ["Steps/s", (w) => number(w.steps_per_second)],
      ["Steps per round", (w) => whole(w.sync_every)],
      ["Sends", (w) => w.comm],
      ["Ranks", (w) => `${w.group.world_size} ${w.group.strategy}`],
      ["Seen", (w) => `${seconds(w.seen_s_ago)} ago`],
      ["Accepted", (w) => whole(w.num_accepted)],
      ["Refused", (w) => whole(w.num_refused)],
      ["Received", (w) => bytes(w.received_bytes)],
      ["Sent", (w) => bytes(w.sent_bytes)],
      ["Norm", (w) => number(w.last_norm)],
    ],
    status.workers,
  );
  fill(
    "rounds",
    [
      ["Round", (r) => r.id],
      ["Fragment", (r) => whole(r.fragment)],
      ["State", (r) => r.state],
      ["Submitted", (r) => `${r.num_submitted} of ${status.expected}`],
      ["By", (r) => r.submitted.join(", ")],
      ["Open for", (r) => seconds(r.opened_s_ago)],
      ["Deadline in", (r) => seconds(r.deadline_in_s)],
    ],
    status.rounds,
  );
  drawDrift(status.recent_rounds);
  fill(
    "recent",
    [
      ["Round", (r) => r.round_id],
      ["Fragment", (r) => whole(r.fragment)],
      ["Workers", (r) => whole(r.num_workers)],
      ["Drift", (r) => number(r.drift)],
      ["Took", (r) => seconds(r.round_s)],
      ["Commit", (r) => seconds(r.commit_s)],
    ],
    status.recent_rounds.slice(-12).reverse(),
  );
  byId("shown").hidden = false;
}

async function renew() {
  try {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const answer = await fetch("/diloco/v1/status", { headers, cache: "no-store" });
    byId("entry").hidden = answer.status !== 401;
    if (!answer.ok) throw new Error((await answer.json()).error);
    show(await answer.json());
  } catch (error) {
    byId("state").textContent = String(error.message || error);
    byId("state").className = "bad";
  }
  setTimeout(renew, PERIOD_MS);
}

byId("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
});
renew();
