// Runs: the checkpoints of a directory over time, what each took and who waited; verification; differences.

import {
  LongList, ask, bars, brief, bytes, count, facts, fill, failure, followIn, link, moment, node, seconds, some, table, takeKeys,
} from "./elements.js";

const VERDICTS = {
  dead: "its process is gone", abandoned: "of another machine, silent for long", running: "its process runs",
  leased: "its lease has not run out, may be running", unknown: "of another machine, may be running",
  undecided: "prepared; its program will complete or remove it",
};

export async function runPage(place, signal, about, [source]) {
  const found = await ask("ls", { source }, signal);
  const { logs, problems } = await logsOf(about, signal);
  const steps = found.checkpoints.map((checkpoint) => withWaits(checkpoint, found.directory, logs));
  const title = [node("h1", {}, found.directory), facts([
    ["checkpoints", `${count(steps.length)}, ${bytes(steps.reduce((sum, step) => sum + step.bytes, 0))}`],
    steps.length > 0 && ["newest", `${steps.at(-1).name}, ${moment(steps.at(-1).committed_at)}`],
  ])];
  fill(place, ...title, problems.map(failure), steps.length ? chartsOf(steps, source) : node("p", {}, "There are no checkpoints here."),
    ...(steps.length ? stepsOf(steps, source, signal) : []), ...orbaxOf(found, source), ...unreadableOf(found), ...attemptsOf(found));
  const list = place.querySelector(".steps");
  if (list) takeKeys(list);
}

/** What each log says: of saves by checkpoint, and of calls of a Checkpointer by directory and step. */
async function logsOf(about, signal) {
  const [logs, problems] = [[], []];
  for (const { source, path } of about.sources.filter((each) => each.kind === "log")) {
    try {
      const found = await ask("log", { source }, signal);
      logs.push({
        name: path.split("/").at(-1),
        saves: new Map(found.saves.map((save) => [save.path, save])),
        calls: new Map(found.calls.map((call) => [`${call.step} ${call.directory}`, call])),
      });
    } catch (error) {
      if (signal.aborted) throw error;
      problems.push(error);
    }
  }
  return { logs, problems };
}

/**
 * A checkpoint with what logs say of its last save. The save's end is in logs only: a record is written before it. What
 * a Checkpointer waited for earlier saves is before the save began, so it is added.
 */
function withWaits(checkpoint, directory, logs) {
  const waits = [];
  for (const { name, saves, calls } of logs) {
    const save = saves.get(checkpoint.path);
    const call = calls.get(`${checkpoint.step} ${directory}`);
    if (!save) continue;
    const earlier = call?.waited_s ?? 0;
    waits.push({
      log: name, earlier_s: earlier, blocked_s: Math.max(call?.blocking_s ?? 0, save.blocked_s),
      written_s: earlier + save.written_s, duration_s: earlier + save.duration_s,
    });
  }
  const durations = waits.map((save) => save.duration_s);
  return { ...checkpoint, waits, duration_s: durations.length ? Math.max(...durations) : checkpoint.duration_s };
}

function waited(step, what = "blocked_s") {
  return step.waits.length ? Math.max(...step.waits.map((save) => save[what])) : null;
}

function slowest(step) {
  if (!step.waits.length) return "";
  const last = step.waits.reduce((one, two) => (two.written_s > one.written_s ? two : one));
  const most = step.waits.reduce((one, two) => (two.blocked_s > one.blocked_s ? two : one));
  return step.waits.length === 1 ? most.log : `${most.log}; last to write: ${last.log}`;
}

const MOST_BARS = 400;
const lastPicked = new Map(); // the checkpoint, by run: to which whoever comes back returns

function chartsOf(steps, source) {
  const last = steps.slice(-MOST_BARS);
  const ends = [last[0].name, last.at(-1).name];
  const open = (at) => { location.hash = link("checkpoint", source, last[at].name); };
  const sizes = last.map((step) => ({ value: step.bytes, title: `${step.name}: ${bytes(step.bytes)}` }));
  const durations = last.map((step) => ({
    value: step.duration_s, part: waited(step),
    title: `${step.name}: committed after ${seconds(step.duration_s)}` +
      (step.waits.length ? `, the program waited ${seconds(waited(step))}, of which ${seconds(waited(step, "earlier_s"))} for earlier saves` : ""),
  }));
  const hasWaits = last.some((step) => step.waits.length);
  return node("div", { class: "charts" },
    bars(`size of each checkpoint${steps.length > MOST_BARS ? `, of the last ${MOST_BARS}` : ""}`, sizes, bytes, ends, open),
    bars(`time from the call to the commit${hasWaits ? ", and how long the program waited" : ""}`, durations, seconds, ends, open));
}

function stepsOf(steps, source, signal) {
  const chosen = new Set();
  const outcome = node("div", { role: "status" });
  const compare = node("button", {
    disabled: true,
    click: () => {
      const [one, two] = [...chosen].sort((a, b) => a - b).map((number) => steps[number].name);
      location.hash = link("diff", source, one, source, two);
    },
  }, "Compare the two that are marked");
  const verify = node("button", {
    disabled: true,
    click: () => followIn(outcome, "verify", { source, name: steps[[...chosen][0]].name }, signal, verified),
  }, "Verify the one that is marked");
  const mark = (number) => node("input", {
    type: "checkbox", tabindex: -1, "aria-label": `mark ${steps[number].name}`, checked: chosen.has(number),
    click: (event) => event.stopPropagation(),
    change: (event) => {
      if (event.target.checked) chosen.add(number);
      else chosen.delete(number);
      compare.disabled = chosen.size !== 2;
      verify.disabled = chosen.size !== 1;
    },
  });
  const list = new LongList({
    label: "checkpoints: Enter opens one, space marks it", kind: "steps",
    headings: ["", "checkpoint", "step", "arrays", "size", "committed", "took", "waited", "for earlier", "who waited longest"],
    make: (number) => {
      const step = steps[number];
      const cells = step.problem ? ["", bytes(step.bytes), node("span", { class: "bad", title: step.problem }, step.problem), "", "", "", ""]
        : [count(step.arrays), bytes(step.bytes), moment(step.committed_at), seconds(step.duration_s), seconds(waited(step)),
          seconds(waited(step, "earlier_s")), slowest(step)];
      return [mark(number), node("a", { href: link("checkpoint", source, step.name), tabindex: -1 }, step.name), step.step ?? "", ...cells];
    },
    onPick: (number) => lastPicked.set(source, steps[number].name),
    onEnter: (number) => { location.hash = link("checkpoint", source, steps[number].name); },
    onSpace: (number) => list.rows.get(number)?.querySelector("input").click(),
  });
  queueMicrotask(() => {
    list.show(steps.length);
    const before = steps.findIndex((step) => step.name === lastPicked.get(source));
    if (before >= 0) list.go(before);
  });
  const hint = steps.some((step) => step.waits.length) ? null
    : node("p", { class: "faint" }, "Give the window the logs of the program, with its level INFO, and it shows who waited for each save.");
  return [node("h2", {}, "Checkpoints"), list.element, node("div", { class: "tools" }, compare, verify), hint, outcome];
}

/** What a verification has found, for people. */
export function verified(found) {
  const outcomes = found.checkpoints ?? found.models;
  return node("div", {}, outcomes.map((outcome) => [
    node("p", { class: outcome.intact ? "good" : "bad" },
      `${outcome.path}: ${outcome.intact ? "intact" : some(outcome.damages.length, "damage")}`,
      ` (${bytes(outcome.bytes_read)} in ${some(outcome.files, "file")} read)`),
    outcome.damages.length ? table(["file", "problem", "arrays"], outcome.damages.slice(0, 200).map((damage) =>
      [damage.path, damage.problem, namesOf(damage.arrays ?? damage.tensors ?? [])])) : null,
    (outcome.strays ?? []).map((stray) => node("p", { class: "faint" }, `not its own: ${stray}`)),
  ]));
}

function namesOf(names) {
  return names.slice(0, 5).join(", ") + (names.length > 5 ? ` and ${names.length - 5} more` : "");
}

function orbaxOf(found, source) {
  if (!found.orbax_checkpoints.length) return [];
  const names = found.orbax_checkpoints.map((path) => path.split("/").at(-1));
  return [node("h2", {}, "In Orbax's layout"), node("p", {}, names.slice(0, 500).flatMap((name) =>
    [node("a", { href: link("checkpoint", source, name) }, name), " "]))];
}

function unreadableOf(found) {
  if (!found.unreadable.length) return [];
  return [node("h2", {}, "Directories that you cannot read"),
    node("p", { class: "faint" }, "They may be checkpoints. Ask whoever owns them for permission to read."),
    table(["directory", "problem"], found.unreadable.slice(0, 500).map(({ path, problem }) => [path, node("span", { class: "bad" }, problem)]))];
}

function attemptsOf(found) {
  if (!found.attempts.length) return [];
  return [node("h2", {}, "Saves and exports that did not end"),
    table(["of", "size", "silent for", "state"], found.attempts.map((attempt) => {
      const { host, process } = attempt.owner ?? {};
      const owner = host === undefined ? "" : ` (process ${process} on ${host})`;
      return [attempt.checkpoint ?? attempt.path, bytes(attempt.bytes), seconds(attempt.silent_s), VERDICTS[attempt.verdict] + owner];
    }))];
}

// ---- logs --------------------------------------------------------------------------------------

export async function logPage(place, signal, about, [source]) {
  const { path, saves, calls } = await ask("log", { source }, signal);
  const title = node("h1", {}, path);
  const earlier = calls.reduce((sum, call) => sum + call.waited_s, 0);
  if (!saves.length) {
    fill(place, title, node("p", {}, "No line of this log tells of a save. Waystation writes them at the level INFO."));
    return;
  }
  const ends = [saves[0].path.split("/").at(-1), saves.at(-1).path.split("/").at(-1)];
  const last = saves.slice(-MOST_BARS);
  fill(place, title,
    facts([["saves", count(saves.length)],
      ["saves kept the program for", seconds(saves.reduce((sum, save) => sum + save.blocked_s, 0))],
      calls.length > 0 && ["before that it waited for earlier saves", seconds(earlier)]]),
    node("div", { class: "charts" },
      bars("time from the call to the commit, and how long the program waited",
        last.map((save) => ({ value: save.duration_s, part: save.blocked_s, title: `${save.path}: ${seconds(save.duration_s)}, waited ${seconds(save.blocked_s)}` })),
        seconds, ends),
      bars("bytes that this process wrote", last.map((save) => ({ value: save.bytes_written, title: `${save.path}: ${bytes(save.bytes_written)}` })), bytes, ends)),
    node("h2", {}, "Saves"),
    table(["checkpoint", "written", "shared", "waited", "written after", "synced after", "committed after"],
      saves.slice(-1000).map((save) => [save.path, bytes(save.bytes_written), bytes(save.bytes_shared), seconds(save.blocked_s),
        seconds(save.written_s), seconds(save.synced_s), seconds(save.duration_s)]), [1, 2, 3, 4, 5, 6]));
}

// ---- differences -------------------------------------------------------------------------------

export async function differencePage(place, signal, about, [source, name, otherSource, other]) {
  const outcome = node("div", { "aria-live": "polite" });
  const run = (structureOnly) => followIn(outcome, "diff", {
    source, name, other_source: otherSource, other_name: other, structure_only: structureOnly ? 1 : 0,
  }, signal, differences);
  fill(place, 
    node("h1", {}, `${name} → ${other}`),
    node("div", { class: "tools" },
      node("button", { click: () => run(false) }, "Compare all values again"),
      node("button", { click: () => run(true) }, "Compare structures only")),
    outcome);
  try {
    await run(false);
  } catch (error) {
    if (!signal.aborted) fill(outcome, failure(error));
  }
}

const ORDERS = {
  "order of the tree": () => 0,
  "norm of the difference": (one, two) => size(two, "norm") - size(one, "norm"),
  "largest difference": (one, two) => size(two, "max_absolute") - size(one, "max_absolute"),
  "part that changed": (one, two) => part(two) - part(one),
};

function size(difference, name) {
  const value = difference.values?.[name];
  return value === "inf" || value === "nan" ? Number.MAX_VALUE : value ?? -1;
}

function part(difference) {
  return difference.values ? difference.values.differing / difference.values.elements : -1;
}

function differences(found) {
  const compared = `${some(found.leaves_compared, "leaf", "leaves")}, ${bytes(found.bytes_compared)} of arrays compared`;
  const head = facts([["A", found.first], ["B", found.second]]);
  if (found.same) return node("div", {}, head, node("p", { class: "good" }, `No difference: ${compared}.`));
  let shownNow = found.differences;
  const list = new LongList({
    label: "differences", kind: "differences",
    headings: ["leaf", "what", "elements", "largest", "relative", "norm", "A → B"],
    make: (number) => {
      const { checkpointable, key_path: path, kind, first, second, values } = shownNow[number];
      const texts = values && first === null ? values.first_values : [first ?? "nothing", second ?? "nothing"];
      return [path || checkpointable, kind, values ? `${(part(shownNow[number]) * 100).toPrecision(3)} %` : "",
        brief(values?.max_absolute), brief(values?.max_relative), brief(values?.norm), texts.join(" → ")];
    },
  });
  const order = node("select", {
    "aria-label": "order",
    change: () => {
      shownNow = order.value === "order of the tree" ? found.differences : [...found.differences].sort(ORDERS[order.value]);
      list.show(shownNow.length);
    },
  }, Object.keys(ORDERS).map((name) => node("option", {}, name)));
  queueMicrotask(() => {
    list.show(shownNow.length);
    takeKeys(list.element);
  });
  return node("div", {}, head, node("p", {}, `${some(found.differences.length, "difference")} (${compared})`),
    node("div", { class: "tools" }, node("span", { class: "faint" }, "in the order of the"), order), list.element);
}
