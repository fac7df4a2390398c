// Which page is shown: the part of the address behind `#` says. Each page gets a signal that ends with it.

import { ask, bytes, count, failure, fill, link, node, seconds, some, spark, table, takeKeys } from "./elements.js";
import { checkpointPage } from "./checkpoint.js";
import { differencePage, runPage, logPage } from "./runs.js";
import { timelinePage } from "./timeline.js";

const place = document.getElementById("page");
const places = document.getElementById("places");
let page = new AbortController();
let about = null;

const PAGES = {
  checkpoint: checkpointPage,
  run: runPage,
  log: logPage,
  timeline: timelinePage,
  diff: differencePage,
  agents: agentsPage,
  closed: closedPage,
};

async function show() {
  page.abort();
  page = new AbortController();
  const { signal } = page;
  fill(place, node("p", { class: "faint", role: "status" }, "reading …"));
  if (!places.contains(document.activeElement)) place.focus({ preventScroll: true });
  try {
    const [kind, ...parts] = addressed();
    about ??= await ask("sources");
    drawPlaces();
    const only = onlySource();
    if (!kind && only) await PAGES[only.kind](place, signal, about, [String(only.source)]);
    else if (PAGES[kind]) await PAGES[kind](place, signal, about, parts);
    else homePage();
  } catch (error) {
    if (!signal.aborted) fill(place, ...headOf(addressed()), failure(error));
  }
  if (signal.aborted) return;
  const heading = place.querySelector("h1");
  document.title = heading ? `${heading.textContent} - Waystation` : "Waystation";
}

function addressed() {
  try {
    return location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  } catch { // no address of ours
    return [""];
  }
}

/** The only thing that there is to show, if so: its page is the first one. */
function onlySource() {
  return about?.sources.length === 1 && !about.watches ? about.sources[0] : null;
}

function sourceOf(number) {
  return about?.sources.find((each) => String(each.source) === number);
}

/** What a page that cannot be shown is about. */
function headOf([, number, name]) {
  const source = sourceOf(number) ?? onlySource();
  return source ? [node("h1", {}, name ? `${source.path}/${name}` : source.path)] : [];
}

/** What is at a path that could not be looked at as the window began, and can be now; else the reason. */
async function closedPage(_place, signal, _about, [source]) {
  const found = await ask("look", { source }, signal);
  sourceOf(source).kind = found.kind;
  if (location.hash) location.replace(link(found.kind, found.source));
  else await show();
}

// ---- keys --------------------------------------------------------------------------------------

/** Escape ends what goes on; else it leads from a leaf to its tree, and from a page to the one above. */
function escape(event) {
  if (event.key !== "Escape" || event.defaultPrevented || event.target.closest?.("select")) return;
  const stop = place.querySelector("button.stop");
  const tree = place.querySelector('[role="treegrid"]');
  if (stop) stop.click();
  else if (tree && event.target.closest?.(".detail")) tree.focus();
  else goUp();
}

function goUp() {
  const [kind, source, name] = addressed();
  const above = sourceOf(source)?.kind === "run" && (kind === "diff" || name) ? link("run", source) : "#/";
  if (kind && !(above === "#/" && onlySource()?.kind === kind)) location.hash = above;
}

function drawPlaces() {
  const entries = about.sources.map(({ source, kind, path }) => [link(kind, source), path]);
  if (about.watches) entries.push([link("agents"), "agents"]);
  fill(places, entries.map(([href, text]) =>
    node("a", { href, title: text, "aria-current": location.hash === href ? "page" : null }, text)));
}

const MEANINGS = {
  run: "a directory of checkpoints", checkpoint: "a checkpoint", timeline: "a timeline", log: "a log of a program",
  closed: "cannot be looked at",
};

function homePage() {
  const rows = about.sources.map(({ source, kind, path }) =>
    [node("a", { href: link(kind, source) }, path), MEANINGS[kind]]);
  if (about.watches) rows.push([node("a", { href: link("agents") }, "agents"), "the memory tier, as it is now"]);
  fill(place, node("h1", {}, "What this window shows"), table(["place", "what it is"], rows));
}

// ---- agents: what `waystation top` shows, and curves of the last minutes ----------------------------

const INTERVAL_MS = 1000;
const REMEMBERED = 300;

async function agentsPage(place, signal) {
  const history = [];
  const body = node("div");
  const state = node("p", { class: "faint" });
  fill(place, node("h1", {}, "Agents"), state, body);
  while (!signal.aborted) {
    if (!document.hidden) {
      try {
        const { agents } = await ask("top", {}, signal);
        history.push({ moment: performance.now() / 1000, agents });
        if (history.length > REMEMBERED) history.shift();
        state.textContent = `asked every second, ${some(history.length, "answer")} so far`;
        fill(body, agentsShown(history));
      } catch (error) {
        if (signal.aborted) return;
        fill(body, failure(error));
      }
    }
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, INTERVAL_MS);
      signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
    });
  }
}

const HEADINGS = ["host", "slots", "memory", "processes", "epoch", "sealed", "committed", "lag", "sent", "received",
  "damaged", "recovery", "decide", "transfer"];

function agentsShown(history) {
  const now = history.at(-1);
  const rows = now.agents.map((agent) => {
    if (agent.problem) return [agent.name, node("span", { class: "bad" }, "silent: ", agent.problem)];
    const of = (name, label) => (label ? agent.numbers[name]?.[label] : agent.numbers[name]);
    const slots = Object.values(of("slots") ?? {}).reduce((sum, value) => sum + value, 0);
    const lag = of("replication_lag_versions");
    const name = agent.name + (of("is_controller") ? " *" : "");
    return [name, `${slots - (of("slots", "free") ?? 0)}/${slots}`, bytes(of("memory_bytes")), count(of("processes")),
      of("epoch") ?? "-", of("newest_step", "sealed") ?? "-", of("newest_step", "committed") ?? "-",
      lag ? `${lag} (${seconds(of("replication_lag_seconds"))})` : "0",
      perSecond(history, agent.name, "sent_bytes_total"), perSecond(history, agent.name, "received_bytes_total"),
      (of("verification_failures_total") ?? 0) + (of("slots", "quarantined") ?? 0),
      seconds(of("last_recovery_seconds")), seconds(of("last_recovery_phase_seconds", "decide")),
      seconds(of("last_recovery_phase_seconds", "transfer"))];
  });
  const curves = now.agents.filter((agent) => !agent.problem).map((agent) => [
    node("h2", {}, agent.name),
    node("div", { class: "sparks" },
      spark("memory held", past(history, agent.name, (numbers) => held(numbers)), bytes),
      spark("newest committed step", past(history, agent.name, (numbers) => numbers.newest_step?.committed), count),
      spark("replication lag", past(history, agent.name, (numbers) => numbers.replication_lag_seconds), seconds),
      spark("sent since it began", past(history, agent.name, (numbers) => numbers.sent_bytes_total), bytes),
      spark("received since it began", past(history, agent.name, (numbers) => numbers.received_bytes_total), bytes))]);
  return [node("div", { class: "scrolled" }, table(HEADINGS, rows)), ...curves.flat()];
}

function held(numbers) {
  return Object.values(numbers.slots_held_bytes ?? {}).reduce((sum, value) => sum + value, 0);
}

function past(history, name, of) {
  return history.map(({ agents }) => {
    const agent = agents.find((each) => each.name === name);
    return !agent || agent.problem ? null : of(agent.numbers);
  });
}

function perSecond(history, name, counter) {
  const [then, now] = history.slice(-2).map(({ moment, agents }) => [
    moment, agents.find((agent) => agent.name === name)?.numbers[counter]]);
  if (!now || then[1] === undefined || now[1] === undefined || now[1] < then[1]) return "-";
  return `${bytes((now[1] - then[1]) / (now[0] - then[0]))}/s`;
}

addEventListener("hashchange", show);
addEventListener("keydown", escape);
show();
