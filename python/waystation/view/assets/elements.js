// What all pages share: elements, questions to the server, numbers for people, long lists, charts.
//
// Names in checkpoints and files are anybody's text. It goes into pages as text nodes and attributes only; the
// server's policy has the browser refuse anything else. `shown` makes visible what would turn or hide text.

const SVG = "http://www.w3.org/2000/svg";
const ANSWER_MS = 120_000; // how long the server may take for what it answers at once

// ---- elements ----------------------------------------------------------------------------------

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...parts(children));
  return element;
}

/** What children are: of lists of lists their elements, of what is no element its text, of nothing nothing. */
function parts(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : shown(child)));
}

/** Replaces what is in an element. */
export function fill(element, ...children) {
  element.replaceChildren(...parts(children));
}

/** An element; functions among its attributes listen to the event of that name. */
export function node(tag, attributes = {}, ...children) {
  return made(document.createElement(tag), attributes, children);
}

/** An element of a picture. */
export function drawn(tag, attributes = {}, ...children) {
  return made(document.createElementNS(SVG, tag), attributes, children);
}

/** Text in which characters that control, hide or turn text are written as escapes. */
export function shown(text) {
  return String(text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu,
    (character) => `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`);
}

/** The address of a page; parts may hold anything. */
export function link(...parts) {
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}`;
}

/** A value as JSON, line by line. */
export function json(value) {
  return JSON.stringify(value, null, 1).split("\n").map((line) => node("div", { class: "code" }, line));
}

export function facts(pairs) {
  return node("dl", { class: "facts" },
    pairs.filter((pair) => pair).map(([name, value]) => [node("dt", {}, name), node("dd", {}, value)]));
}

export function table(headings, rows, numeric = []) {
  const kind = (column) => (numeric.includes(column) ? "number" : null);
  return node("table", {},
    node("thead", {}, node("tr", {}, headings.map((name, at) => node("th", { class: kind(at) }, name)))),
    node("tbody", {}, rows.map((row) =>
      node("tr", {}, row.map((cell, at) => node("td", { class: kind(at) }, cell))))));
}

// ---- questions ---------------------------------------------------------------------------------

/** What the server says of an error, in the words of the command line. */
export class Told extends Error {
  constructor({ kind, message, context = {}, hint = null }) {
    super(message);
    Object.assign(this, { kind, context, hint });
  }
}

function told(error) {
  if (error instanceof Told) return error;
  if (error?.name === "TimeoutError") {
    return new Told({ kind: "Unavailable", message: "the program did not answer for two minutes" });
  }
  return new Told({
    kind: "Unavailable",
    message: "the program that shows this window does not answer: it has ended, or was interrupted",
  });
}

/** The element that shows an error. */
export function failure(error) {
  if (!(error instanceof Told)) console.error(error);
  const { kind, message, context, hint } = error instanceof Told ? error : { kind: "Internal", message: String(error) };
  return node("div", { class: "error", role: "alert" },
    node("p", {}, node("strong", {}, kind), ": ", message),
    Object.entries(context ?? {}).map(([name, value]) => node("p", { class: "faint" }, `${name}: ${value}`)),
    hint ? node("p", {}, hint) : null);
}

function address(name, values) {
  return `api/${name}?${new URLSearchParams(values)}`;
}

/** The answer to a question that is answered at once. */
export async function ask(name, values = {}, signal = null) {
  const limit = AbortSignal.timeout(ANSWER_MS);
  let found;
  try {
    const answer = await fetch(address(name, values), { signal: signal ? AbortSignal.any([signal, limit]) : limit });
    found = await answer.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw told(error);
  }
  if (found.error) throw new Told(found.error);
  return found;
}

/** The answer to a question that takes long; `onProgress` is told how far it is. Ends with the signal. */
export async function follow(name, values, signal, onProgress) {
  try {
    const answer = await fetch(address(name, values), { signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const parts = [];
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (parts.splice(0).join("") + value).split("\n");
      parts.push(lines.pop());
      for (const line of lines) {
        const found = JSON.parse(line);
        if (found.progress) onProgress(...found.progress);
        else if (found.error) throw new Told(found.error);
        else return found.result;
      }
    }
  } catch (error) {
    if (signal.aborted) throw error;
    throw told(error);
  }
  throw told(null);
}

/** Shows progress in an element until the answer is there, which `show` makes an element of. */
export async function followIn(place, name, values, page, show) {
  const stop = new AbortController();
  page.addEventListener("abort", () => stop.abort(), { once: true });
  const bar = node("progress", { max: 1, "aria-label": "how far it is" });
  const text = node("span", { class: "faint" });
  const cancel = node("button", { class: "stop", click: () => stop.abort() }, "Stop");
  fill(place, node("div", { class: "tools" }, bar, text, cancel));
  const begun = performance.now();
  try {
    const result = await follow(name, values, stop.signal, (done, total) => {
      if (total > 0) bar.value = done / total;
      const rate = done / Math.max(0.001, (performance.now() - begun) / 1000);
      text.textContent = total > 0 ? `${bytes(done)} of ${bytes(total)}, ${bytes(rate)}/s` : "";
    });
    fill(place, show(result));
    return result;
  } catch (error) {
    if (stop.signal.aborted) fill(place, node("p", { class: "faint" }, "stopped"));
    else fill(place, failure(error));
    return null;
  }
}

// ---- numbers for people ------------------------------------------------------------------------

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(count) {
  if (count === null || count === undefined) return "";
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return unit === 0 ? `${Math.round(value)} B` : `${value.toFixed(1)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${(value * 1e6).toPrecision(3)} µs`;
  if (value < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  return value < 100 ? `${value.toPrecision(3)} s` : `${(value / 60).toFixed(1)} min`;
}

/** A number in few digits; what JSON has no digits for comes as text. */
export function brief(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return count(value);
  return String(Number(value.toPrecision(6)));
}

export function count(value) {
  return value === null || value === undefined ? "" : value.toLocaleString("en");
}

export function some(value, noun, plural = `${noun}s`) {
  return `${count(value)} ${value === 1 ? noun : plural}`;
}

export function moment(text) {
  return text ? text.replace("T", " ").replace("Z", " UTC") : "";
}

// ---- long lists --------------------------------------------------------------------------------

const ROW = 24;
const MOST_PIXELS = 15_000_000; // browsers lose rows beyond

let lists = 0;

/**
 * A list of any length, of which only the rows exist that can be seen. `make(number)` gives the cells of one, and
 * `about(number)` attributes of it. One row is active: keys move it, and act on it. What is in rows takes no part in
 * the order of Tab. `onPick` is told of each row that becomes active, `onEnter` and `onSpace` of keys that mean one.
 */
export class LongList {
  constructor({
    headings, make, about = () => ({}), onPick = null, onEnter = null, onSpace = null, onKey = null, label, kind, role = "grid",
  }) {
    Object.assign(this, { make, about, onPick, onEnter, onSpace, onKey, length: 0, picked: -1, rows: new Map() });
    this.name = `list-${lists += 1}`;
    this.room = node("div", { class: "room" });
    this.box = node("div", { class: `list ${kind}`, role: "rowgroup", tabindex: -1, scroll: () => this.draw() }, this.room);
    this.element = node("div", {
      class: kind, role, tabindex: 0, "aria-label": label, "aria-colcount": headings.length, keydown: (event) => this.press(event),
    }, node("div", { role: "rowgroup" }, node("div", { class: "row heads", role: "row", "aria-rowindex": 1 },
      headings.map((name) => node("span", { role: "columnheader" }, name)))), this.box);
    this.sight = new ResizeObserver(() => this.draw());
    this.sight.observe(this.box);
  }

  /** There are so many rows now, and all of them may be others. */
  show(length, picked = -1) {
    this.length = length;
    this.picked = picked;
    this.element.setAttribute("aria-rowcount", String(length + 1));
    this.room.style.height = `${Math.min(MOST_PIXELS, length * ROW)}px`;
    this.box.style.height = `min(60vh, ${Math.max(3, length) * ROW + 2}px)`;
    this.rows.clear();
    this.room.replaceChildren();
    this.draw();
  }

  draw() {
    const height = this.box.clientHeight || 600;
    // Of lists that are higher than a browser can be, the place of the bar is the place in the list.
    const hidden = Math.max(1, this.length * ROW - height);
    const scale = this.length * ROW > MOST_PIXELS ? hidden / (MOST_PIXELS - height) : 1;
    const top = this.box.scrollTop * scale;
    const first = Math.max(0, Math.floor(top / ROW) - 5);
    const last = Math.min(this.length, Math.ceil((top + height) / ROW) + 5);
    for (const [number, row] of this.rows) {
      if (number < first || number >= last || scale !== 1) {
        row.remove();
        this.rows.delete(number);
      }
    }
    for (let number = first; number < last; number += 1) {
      if (this.rows.has(number)) continue;
      const row = node("div", {
        class: "row", role: "row", id: `${this.name}-${number}`, "aria-rowindex": number + 2,
        click: () => this.pick(number), ...this.about(number),
      }, this.make(number).map((cell) => {
        const made = cell instanceof Node ? cell : node("span", { title: shown(cell) }, cell);
        return node("div", { role: "gridcell" }, made);
      }));
      row.style.top = `${number * ROW - top + this.box.scrollTop}px`;
      this.rows.set(number, row);
      this.room.append(row);
    }
    this.mark();
  }

  /** Shows which row is active, to people and to what reads the page to them. */
  mark() {
    for (const [number, row] of this.rows) row.setAttribute("aria-selected", String(number === this.picked));
    if (this.rows.has(this.picked)) this.element.setAttribute("aria-activedescendant", `${this.name}-${this.picked}`);
    else this.element.removeAttribute("aria-activedescendant");
  }

  pick(number) {
    if (number < 0 || number >= this.length) return;
    this.picked = number;
    this.mark();
    this.onPick?.(number);
  }

  /** Makes a row the active one, and brings it into sight. */
  go(number) {
    const next = Math.max(0, Math.min(this.length - 1, number));
    const hidden = Math.max(1, this.length * ROW - this.box.clientHeight);
    // See `draw`: of a list that is too high, the place of the bar is the place in the list.
    const scale = this.length * ROW > MOST_PIXELS ? hidden / (MOST_PIXELS - this.box.clientHeight) : 1;
    const [top, at] = [this.box.scrollTop * scale, next * ROW];
    if (at < top) this.box.scrollTop = at / scale;
    if (at + ROW > top + this.box.clientHeight) this.box.scrollTop = (at + ROW - this.box.clientHeight) / scale;
    this.draw();
    this.pick(next);
  }

  press(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !this.length) return;
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW) - 1);
    const places = {
      ArrowDown: this.picked + 1, ArrowUp: this.picked - 1, PageDown: this.picked + page, PageUp: this.picked - page,
      Home: 0, End: this.length - 1,
    };
    const acts = { Enter: this.onEnter, " ": this.onSpace };
    if (event.key in places) this.go(places[event.key]);
    else if (acts[event.key] && this.picked >= 0) acts[event.key](this.picked);
    else if (!this.onKey?.(event.key)) return;
    event.preventDefault();
  }
}

/** Gives keys to an element of a page that has just come, unless somebody is elsewhere in it already. */
export function takeKeys(element) {
  const active = document.activeElement;
  if (!active || active === document.body || active.id === "page") element.focus({ preventScroll: true });
}

// ---- charts ------------------------------------------------------------------------------------

const WIDTH = 460;
const HEIGHT = 130;
const LEFT = 62;
const BOTTOM = 18;

/** Bars beside each other. Each has `value`, `title`, and perhaps `part`, which is drawn over it. */
export function bars(caption, entries, format, ends, onPick = null) {
  const highest = Math.max(...entries.map((entry) => entry.value ?? 0), 0) || 1;
  const width = (WIDTH - LEFT) / Math.max(1, entries.length);
  const tall = (value) => (HEIGHT - BOTTOM - 8) * Math.max(0, (value ?? 0) / highest);
  const bar = (entry, at, value, kind) => drawn("rect", {
    class: `bar ${kind}`, x: LEFT + at * width, width: Math.max(0.5, width - (width > 4 ? 1.5 : 0)),
    y: HEIGHT - BOTTOM - tall(value), height: Math.max(value ? 1 : 0, tall(value)),
    click: onPick && (() => onPick(at)),
  }, drawn("title", {}, entry.title));
  return node("figure", {}, node("figcaption", {}, caption),
    drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": shown(caption) },
      entries.map((entry, at) => [
        bar(entry, at, entry.value, ""), entry.part ? bar(entry, at, entry.part, "second") : null,
      ]),
      drawn("line", { class: "axis", x1: LEFT, x2: WIDTH, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
      drawn("text", { x: LEFT - 6, y: 14, "text-anchor": "end" }, format(highest)),
      drawn("text", { x: LEFT - 6, y: HEIGHT - BOTTOM, "text-anchor": "end" }, "0"),
      drawn("text", { x: LEFT, y: HEIGHT - 4 }, ends[0]),
      drawn("text", { x: WIDTH, y: HEIGHT - 4, "text-anchor": "end" }, ends[1])));
}

/** A small curve of the last values. */
export function spark(caption, values, format) {
  const known = values.filter((value) => typeof value === "number");
  const [low, high] = [Math.min(...known, 0), Math.max(...known, 0)];
  const last = known.at(-1);
  const step = 220 / Math.max(1, values.length - 1);
  const points = values.map((value, at) => [at * step, 44 - (40 * ((value ?? 0) - low)) / (high - low || 1)]);
  return node("figure", {}, node("figcaption", {}, caption, ": ", node("strong", {}, last === undefined ? "-" : format(last))),
    drawn("svg", { viewBox: "0 0 220 48", role: "img", "aria-label": shown(caption) },
      drawn("polyline", { class: "curve", points: points.map((point) => point.join(",")).join(" ") })));
}
