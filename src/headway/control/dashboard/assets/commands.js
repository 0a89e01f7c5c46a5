// Buttons for what may be asked of a run, the dialog that asks first, and what became of it.

import { Refused, Unreachable, get, newCommandId, post, runPath } from "./api.js";
import { announce, byId, el, fill, setText, show } from "./dom.js";
import * as format from "./format.js";
import { isLive } from "./runs.js";

const LOOK_MS = 500;
const MOST_RECEIPTS = 5;

// Those that are known here have a place and a short name; any other comes with its own name.
const GROUPS = [
  ["pause", "resume", "save_checkpoint", "evaluate_now", "generate_now", "set_learning_rate"],
  ["extend_max_steps", "profile_next_steps", "set_log_level"],
  ["graceful_stop", "save_and_stop", "abort"],
];
const SHORT = {
  pause: "Pause",
  resume: "Resume",
  save_checkpoint: "Save",
  evaluate_now: "Evaluate",
  generate_now: "Generate",
  set_learning_rate: "Learning rate",
  extend_max_steps: "Length",
  profile_next_steps: "Profile",
  set_log_level: "Log level",
  graceful_stop: "Stop",
  save_and_stop: "Save and stop",
  abort: "Abort",
};
// What the button of the dialog says where the short name would not say what it does.
const VERB = {
  set_learning_rate: "Set the rate",
  extend_max_steps: "Set the length",
  set_log_level: "Set the level",
};
const DANGER = new Set(GROUPS[2]);
const ENDS_WITHOUT_A_SAVE = new Set(["graceful_stop", "abort"]);
const SETTLED = new Set(["applied", "refused", "failed"]);

function nameOf(command) {
  return SHORT[command] ?? command.replaceAll("_", " ");
}

export class Commands {
  constructor() {
    this.kinds = null;
    this.receipts = [];
    this.run = null;
    byId("ask-cancel").addEventListener("click", () => byId("ask").close());
    byId("ask-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
  }

  async load() {
    const answer = await get("/api/commands");
    this.kinds = answer.commands ?? answer;
    delete this.kinds.status;
  }

  /** Buttons as they are now: which may be pressed, and if none, why. */
  show(run, phase, role) {
    this.run = run;
    const why = whyNot(run, role);
    const paused = phase === "paused" || phase === "pausing";
    const placed = GROUPS.map((names) => names.filter((name) => name in this.kinds));
    const known = new Set(GROUPS.flat());
    placed[1].push(...Object.keys(this.kinds).filter((name) => !known.has(name)));
    const useless = paused ? "pause" : "resume";
    placed[0] = placed[0].filter((name) => name !== useless);
    show(byId("commands"), isLive(run));
    fill(byId("commands"), [run.id, why, placed], () =>
      placed.filter((names) => names.length).map((names) =>
        el("div", { class: "command-group" }, ...names.map((name) => this.makeButton(name, why))),
      ),
    );
    show(byId("commands-why"), why !== null);
    setText(byId("commands-why"), why ?? "");
    this.showReceipts();
  }

  makeButton(name, why) {
    return el(
      "button",
      {
        type: "button",
        class: DANGER.has(name) ? "danger" : name === "resume" ? "primary" : null,
        "data-command": name,
        // Pause and resume take each other's place; the focus goes along.
        "data-focus": name === "resume" ? "pause" : name,
        title: why ?? this.kinds[name].help,
        disabled: why !== null,
        "aria-describedby": why === null ? null : "commands-why",
        onclick: () => this.ask(name),
      },
      nameOf(name),
    );
  }

  // -- the dialog ------------------------------------------------------------------------------

  ask(name) {
    const kind = this.kinds[name];
    this.asked = { name, run: this.run, id: newCommandId() };
    setText(byId("ask-title"), `${nameOf(name)}: ${this.run.name}`);
    setText(byId("ask-help"), kind.help);
    const send = byId("ask-send");
    setText(send, VERB[name] ?? nameOf(name));
    send.className = DANGER.has(name) ? "danger" : "primary";
    send.disabled = false;
    show(byId("ask-error"), false);
    byId("ask-fields").replaceChildren(...makeFields(kind));
    byId("ask").showModal();
    (byId("ask-fields").querySelector("input:not([type=radio]), select, textarea") ?? send).focus();
  }

  async send() {
    const { name, run, id } = this.asked;
    const send = byId("ask-send");
    let data;
    try {
      data = readFields(this.kinds[name]);
    } catch (error) {
      this.refuse(error.message);
      return;
    }
    send.disabled = true;
    try {
      const receipt = await post(runPath(run.id, "control"), { command: name, data, id });
      byId("ask").close();
      this.keep(run, { ...receipt, command: name, id, data });
    } catch (error) {
      // The id stays: pressing again after a lost answer cannot make it happen twice.
      this.refuse(explain(error));
    } finally {
      send.disabled = false;
    }
  }

  refuse(text) {
    setText(byId("ask-error"), text);
    show(byId("ask-error"), true);
  }

  // -- receipts --------------------------------------------------------------------------------

  keep(run, receipt) {
    const kept = { ...receipt, state: receipt.state ?? "accepted", run: run.id, sent: Date.now() / 1000 };
    this.receipts.unshift(kept);
    this.receipts.length = Math.min(this.receipts.length, MOST_RECEIPTS);
    this.showReceipts();
    this.watch(kept);
  }

  async watch(receipt) {
    const isOpen = () => !SETTLED.has(receipt.state) && !receipt.gone && this.receipts.includes(receipt);
    while (isOpen()) {
      // At once: a run's own server answers when it is settled, and a run that ends takes it along.
      await this.look(receipt);
      this.showReceipts();
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    }
  }

  async look(receipt) {
    try {
      const path = runPath(receipt.run, `commands/${encodeURIComponent(receipt.id)}`);
      const { state, step, message } = await get(path);
      Object.assign(receipt, { state, step, message, unseen: 0 });
      if (SETTLED.has(state)) announce(`${nameOf(receipt.command)}: ${describe(receipt)}`);
    } catch (error) {
      // Nobody is left to ask; where the end of the run is all that was asked for, that is the answer.
      receipt.unseen = (receipt.unseen ?? 0) + 1;
      const ended = error instanceof Refused || receipt.unseen > 10;
      if (ended && ENDS_WITHOUT_A_SAVE.has(receipt.command)) receipt.state = "applied";
      else receipt.gone = ended;
    }
  }

  showReceipts() {
    const rows = this.receipts
      .filter((receipt) => receipt.run === this.run?.id)
      .map((receipt) => [receipt.command, receipt.gone ? "unknown" : receipt.state, describe(receipt), receipt.sent]);
    show(byId("receipts"), rows.length > 0);
    fill(byId("receipts"), rows, () =>
      rows.map(([command, state, text, sent]) =>
        el(
          "li",
          { "data-command": command, "data-state": state },
          el("time", { class: "quiet" }, format.clock(sent)),
          el("span", { class: "pill", "data-state": state }, state),
          el("span", {}, el("strong", {}, nameOf(command)), ` ${text}`),
        ),
      ),
    );
  }
}

function whyNot(run, role) {
  if (!isLive(run)) return null;
  if (role !== "control") return "This token may only read. Commands need the control token of the job.";
  if (!run.controllable) return "This run takes no commands: its process has no control server that answers.";
  return null;
}

function describe(receipt) {
  if (receipt.gone) return "the run ended before it said what became of it";
  const said = receipt.message && receipt.state !== "accepted" ? `: ${receipt.message}` : "";
  const at = receipt.step === null || receipt.step === undefined ? "" : ` after step ${format.count(receipt.step)}`;
  if (receipt.state === "accepted") return "waits for the end of the step under way";
  return `${receipt.state}${at || (DANGER.has(receipt.command) && !said ? ": the run has ended" : "")}${said}`;
}

function explain(error) {
  if (error instanceof Unreachable) return `No answer (${error.message}). Press again to retry; it cannot happen twice.`;
  const valid = Object.entries(error.answer?.valid_fields ?? {}).map(([name, text]) => `${name}: ${text}`);
  return [error.message, ...valid].join("\n");
}

// -- fields --------------------------------------------------------------------------------------

function makeFields(kind) {
  const choose = kind.exactly_one_of ?? [];
  const several = choose.length > 1;
  return Object.entries(kind.fields).map(([name, field]) => {
    const input = makeInput(name, field);
    if (field.kind === "boolean") {
      return el("label", { class: "check field" }, input, el("span", {}, capital(field.help)));
    }
    const hint = describeField(field);
    const label = el("label", { class: "field" }, el("span", {}, `${capital(name.replaceAll("_", " "))}: ${field.help}`), input);
    if (hint) label.append(el("small", { class: "quiet" }, hint));
    if (!several || !choose.includes(name)) return label;
    const radio = el("input", {
      type: "radio",
      name: "one-of",
      value: name,
      checked: name === choose[0],
      "aria-label": `Give ${name}`,
    });
    input.addEventListener("input", () => {
      radio.checked = true;
    });
    return el("div", { class: "one-of" }, radio, label);
  });
}

function makeInput(name, field) {
  const id = `field-${name}`;
  if (field.kind === "boolean") return el("input", { id, type: "checkbox", checked: field.default === true });
  if (field.choices?.length) {
    return el("select", { id }, ...field.choices.map((choice) => el("option", { value: choice }, choice)));
  }
  if (field.kind === "string") return el("textarea", { id, rows: "3", maxlength: field.most_characters });
  const value = field.default ?? "";
  return el("input", { id, type: "text", inputmode: "decimal", autocomplete: "off", value: String(value) });
}

function describeField(field) {
  const limit = (words, value) => (value === null || value === undefined ? null : `${words} ${value}`);
  return [limit("at least", field.least), limit("above", field.above), limit("at most", field.most)]
    .filter(Boolean)
    .join(", ");
}

function readFields(kind) {
  const data = {};
  const choose = kind.exactly_one_of ?? [];
  const chosen = choose.length > 1 ? document.querySelector("input[name=one-of]:checked")?.value : choose[0];
  for (const [name, field] of Object.entries(kind.fields)) {
    if (choose.includes(name) && name !== chosen) continue;
    const input = byId(`field-${name}`);
    if (field.kind === "boolean") {
      data[name] = input.checked;
      continue;
    }
    const text = input.value.trim();
    if (text === "") {
      if (name === chosen) throw new Error(`${name} is needed: ${field.help}`);
      continue;
    }
    if (field.kind === "string") {
      data[name] = text;
      continue;
    }
    const value = Number(text);
    if (!Number.isFinite(value)) throw new Error(`${name} must be a number, not ${text}`);
    data[name] = value;
  }
  return data;
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
