// What the tabs beside the charts show: configuration, checkpoints, samples, incidents. Each is
// fetched when its tab is open and drawn again only when it changed.

import { get, post, runPath } from "./api.js";
import { byId, el, fillPanel, table } from "./dom.js";
import * as format from "./format.js";

const MOST_COMPARED = 16; // the server's limit for one question

function empty(text) {
  return el("p", { class: "empty" }, text);
}

function pill(state) {
  return el("span", { class: "pill", "data-state": state }, state);
}

// -- configuration -------------------------------------------------------------------------------

export async function showConfig(run, runs) {
  const panel = byId("panel-config");
  const compared = runs.length > 1 ? runs.slice(0, MOST_COMPARED) : [];
  const ids = compared.map((other) => encodeURIComponent(other.id)).join(",");
  const [answer, diff] = await Promise.all([
    get(runPath(run.id, "config")),
    ids ? get(`/api/diff?runs=${ids}`) : { rows: [] },
  ]);
  const names = compared.map((other) => other.name);
  fillPanel(panel, run, [answer, diff, names], () => {
    const entries = Object.entries(answer.config ?? {});
    const parts = [];
    if (names.length) parts.push(...diffParts(diff.rows, names));
    parts.push(el("h2", {}, `Configuration of ${run.name}`));
    if (!entries.length) return [...parts, empty("No configuration was found in the folder of this run.")];
    const filter = el("input", { type: "search", placeholder: "Filter settings", "aria-label": "Filter settings", autocomplete: "off", "data-focus": "filter" });
    const box = table(
      "Configuration",
      [{ title: "Setting" }, { title: "Value" }],
      entries.map(([key, value]) => [key, el("span", { class: "code" }, format.plain(value))]),
    );
    filter.addEventListener("input", () => {
      const wanted = filter.value.toLowerCase();
      for (const row of box.querySelectorAll("tbody tr")) {
        row.hidden = !row.textContent.toLowerCase().includes(wanted);
      }
    });
    const environment = Object.entries(answer.environment ?? {});
    const more = environment.length
      ? [
          el("h2", {}, "Environment"),
          table("Environment", [{ title: "What" }, { title: "Value" }], environment.map(([key, value]) => [key, el("span", { class: "code" }, format.plain(value))])),
        ]
      : [];
    if (answer.files?.length) parts.push(el("p", { class: "quiet path" }, `From ${answer.files.join(", ")}`));
    return [...parts, filter, box, ...more];
  });
}

function diffParts(rows, names) {
  const title = el("h2", {}, `Differences of ${names.length} runs`);
  if (!rows.length) return [title, empty("Their configurations are the same.")];
  const columns = [{ title: "Setting" }, ...names.map((name) => ({ title: name }))];
  const cells = rows.map((row) => [
    row.key,
    ...row.values.map((value) => el("span", { class: "code" }, value === null || value === undefined ? "–" : format.plain(value))),
  ]);
  const box = table("Differences of configuration", columns, cells);
  box.classList.add("diff");
  return [title, box];
}

// -- checkpoints ---------------------------------------------------------------------------------

export async function showCheckpoints(run, session) {
  const panel = byId("panel-checkpoints");
  const { checkpoints, left_out: numLeftOut } = await get(runPath(run.id, "checkpoints"));
  fillPanel(panel, run, [checkpoints, numLeftOut, session], () => {
    if (!checkpoints.length) return [empty("No checkpoint is in the run's folder yet.")];
    const verifiable = session.standalone && session.role === "control";
    const columns = [
      { title: "Checkpoint" },
      { title: "Step", number: true },
      { title: "Size", number: true },
      { title: "Saved" },
      { title: "State" },
      ...(verifiable ? [{ title: "Check" }] : []),
    ];
    const rows = checkpoints.map((checkpoint) => {
      const said = el("span", { class: "quiet" }, checkpoint.message ?? "");
      const state = el("span", {}, pill(checkpoint.state), checkpoint.best ? pill("best") : null, said);
      const cells = [
        el("span", { class: "code", title: checkpoint.path }, checkpoint.name),
        format.count(checkpoint.step),
        format.bytes(checkpoint.bytes),
        format.dateTime(checkpoint.saved_at),
        state,
      ];
      if (verifiable) cells.push(verifyButton(run, checkpoint, state));
      return cells;
    });
    const older = numLeftOut ? [el("p", { class: "quiet" }, `${format.count(numLeftOut)} older checkpoints are not listed.`)] : [];
    return [table("Checkpoints", columns, rows), ...older];
  });
}

function verifyButton(run, checkpoint, state) {
  const button = el("button", { type: "button", "data-focus": `verify ${checkpoint.name}` }, "Verify");
  button.addEventListener("click", async () => {
    button.disabled = true;
    button.textContent = "Reading…";
    try {
      const path = `checkpoints/${encodeURIComponent(checkpoint.name)}/verify`;
      const result = await post(runPath(run.id, path), {});
      const said = [result.message, ...(result.problems ?? [])].filter(Boolean).join("; ");
      state.replaceChildren(pill(result.state ?? "unknown"), el("span", { class: "quiet" }, said));
    } catch (error) {
      state.replaceChildren(pill("unknown"), el("span", { class: "quiet" }, error.message));
    }
    button.disabled = false;
    button.textContent = "Verify";
  });
  return button;
}

// -- samples -------------------------------------------------------------------------------------

export async function showSamples(run) {
  const { samples } = await get(runPath(run.id, "samples"));
  fillPanel(byId("panel-samples"), run, [samples], () => {
    if (!samples.length) return [empty("No samples yet. The command Generate writes some, and so does TextgenCallback.")];
    return samples.map((sample) =>
      el(
        "article",
        { class: "card sample" },
        el("h3", {}, `Step ${format.count(sample.step)}`),
        el("p", { class: "generated" }, el("span", { class: "prompt" }, format.plain(sample.prompt ?? "")), el("span", {}, continuation(sample))),
      ),
    );
  });
}

/** What follows the prompt, which some texts repeat. */
function continuation(sample) {
  const text = format.plain(sample.text ?? "");
  const prompt = format.plain(sample.prompt ?? "");
  return prompt && text.startsWith(prompt) ? text.slice(prompt.length) : text;
}

// -- incidents -----------------------------------------------------------------------------------

export async function showIncidents(run) {
  const { incidents } = await get(runPath(run.id, "incidents"));
  fillPanel(byId("panel-incidents"), run, [incidents], () => {
    if (!incidents.length) return [empty("Nothing has gone wrong in this run.")];
    return [
      el(
        "ol",
        { class: "incidents" },
        ...incidents.map((incident) =>
          el(
            "li",
            { class: "card" },
            el(
              "p",
              {},
              el("span", { class: "pill", "data-state": "failed" }, format.plain(incident.kind)),
              el("span", { class: "quiet" }, ` step ${format.count(incident.step)} · ${format.dateTime(incident.timestamp)}`),
            ),
            el("p", { class: "message" }, format.plain(incident.message)),
          ),
        ),
      ),
    ];
  });
}
