// What is known about a failure: who failed first and how, how to go on, and the last of the run.

import { Refused, get, runPath } from "./api.js";
import { byId, el, fillPanel, table } from "./dom.js";
import * as format from "./format.js";

export async function showPostMortem(run) {
  let found = null;
  if (run.post_mortem ?? run.state === "failed") {
    try {
      found = await get(runPath(run.id, "post_mortem"));
    } catch (error) {
      if (!(error instanceof Refused && error.status === 404)) throw error;
    }
  }
  fillPanel(byId("panel-post_mortem"), run, [found], () =>
    found === null
      ? [el("p", { class: "empty" }, "There is no post-mortem: no failure of this run was written down.")]
      : findings(found),
  );
}

function findings(report) {
  const parts = [whatHappened(report)];
  if (report.resume_command) parts.push(howToGoOn(report));
  if (report.traceback) {
    parts.push(finding("traceback", "First traceback", el("pre", { tabindex: "0" }, format.plain(report.traceback))));
  }
  if (report.last_steps?.length) parts.push(finding("last_steps", "The last steps", lastSteps(report.last_steps)));
  if (report.memory && typeof report.memory === "object") {
    parts.push(finding("memory", "Memory", memory(report.memory)));
  }
  return parts;
}

function finding(key, title, ...children) {
  return el("section", { class: "card finding", "data-key": key }, el("h3", {}, title), ...children);
}

function spellCheckpoint(found) {
  if (!found) return "none: it begins anew";
  return found.step === null ? `what is in ${found.path} was not looked at` : `${found.path} (step ${found.step})`;
}

function whatHappened(report) {
  const alone = report.culprit_rank === null || report.culprit_rank === undefined || report.world_size === 1;
  const died = alone && report.error_type === "lost" && !report.signal;
  const who = died ? "The run died without a word" : alone ? "The run failed" : `Rank ${report.culprit_rank} of ${report.world_size ?? "?"} failed first`;
  const kind = report.signal ? `ended by ${report.signal}` : report.error_type;
  const what = [kind, report.error].filter(Boolean).map(format.plain).join(": ");
  const facts = [
    ["When", format.dateTime(report.time)],
    ["After step", report.step],
    ["Exit code", report.exit_code],
    ["Last checkpoint", spellCheckpoint(report.checkpoint)],
    ["Process", report.pid ? `${report.pid} on ${report.host ?? "?"}` : null],
    ["Told by", report.reported_by],
    ["Run", report.run_id],
    ["Headway", report.version],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return finding(
    "what",
    who,
    el("pre", {}, what || "for a reason nobody could tell"),
    el("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, format.plain(value))])),
  );
}

function howToGoOn(report) {
  const command = format.plain(report.resume_command);
  return finding(
    "resume_command",
    "Go on with",
    report.directory ? el("p", { class: "quiet" }, `in ${format.plain(report.directory)}`) : null,
    el("pre", { tabindex: "0" }, command),
    copyButton(command),
  );
}

function lastSteps(steps) {
  const names = [...new Set(steps.flatMap((step) => Object.keys(step)))];
  const columns = ["step", ...names.filter((name) => name !== "step")];
  return table(
    "The last steps",
    columns.map((title) => ({ title, number: true })),
    steps.map((step) => columns.map((name) => (name in step ? format.metric(name, step[name]) : "–"))),
  );
}

function memory(places) {
  const rows = Object.entries(places).flatMap(([place, facts]) =>
    facts && typeof facts === "object"
      ? Object.entries(facts).map(([name, value]) => [place, name.replace(/_bytes$/, "").replaceAll("_", " "), figure(name, value)])
      : [[place, "", format.plain(facts)]],
  );
  return table("Memory", [{ title: "Where" }, { title: "What" }, { title: "How much", number: true }], rows);
}

function figure(name, value) {
  return name.endsWith("_bytes") ? format.bytes(value) : typeof value === "number" ? format.number(value) : format.plain(value);
}

function copyButton(text) {
  const button = el("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select it by hand";
    }
  });
  return button;
}
