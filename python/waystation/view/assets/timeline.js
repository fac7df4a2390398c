// A timeline, drawn on a canvas: tracks below each other, time from left to right. The wheel and +/- zoom, dragging
// and the arrow keys move. Only what can be seen is drawn: events of a track are in the order of time.

import { ask, count, facts, failure, fill, json, node, seconds, shown, some } from "./elements.js";

const LANE = 16;
const HEAD = 18; // above the lanes of a track: its name
const SCALE = 26; // above all tracks: the times
const LEFT = 8;

export async function timelinePage(place, signal, about, [source]) {
  const found = await ask("timeline", { source }, signal);
  const detail = node("div", { class: "detail" }, node("p", { class: "faint" }, "Click an event to see all of it."));
  const view = new Timeline(found, async (event) => {
    try {
      const whole = (await ask("event", { source, event: event.number }, signal)).event;
      fill(detail, node("h2", {}, event.name), facts([
        ["track", `${event.track.process}, ${event.track.name}`],
        ["begins", seconds((event.begin - found.begin_us) / 1e6)],
        ["takes", seconds(event.duration / 1e6)],
      ]), json(whole.args ?? {}));
    } catch (error) {
      if (!signal.aborted) fill(detail, failure(error));
    }
  });
  const search = node("input", {
    type: "search", placeholder: "highlight events", "aria-label": "highlight events", input: () => view.highlight(search.value),
  });
  fill(place, node("h1", {}, found.path), facts([
    ["length", seconds((found.end_us - found.begin_us) / 1e6)],
    ["events", `${count(found.events)} on ${some(found.tracks.length, "track")}` +
      (found.left_out ? `; ${count(found.left_out)} more have no meaning, or lack their other half` : "")],
    found.about.lost_stamps > 0 && ["lost", `${some(found.about.lost_stamps, "stamp")} were overwritten before they were collected`],
  ]), node("div", { class: "tools" }, search,
    node("button", { click: () => view.zoom(2) }, "Zoom in"), node("button", { click: () => view.zoom(0.5) }, "Zoom out"),
    node("button", { click: () => view.whole() }, "Show all")),
  view.element, detail);
  view.whole();
  signal.addEventListener("abort", () => view.end(), { once: true });
}

class Timeline {
  constructor(found, onPick) {
    Object.assign(this, { found, onPick, wanted: "", picked: null });
    let top = SCALE;
    this.tracks = found.tracks.map((track) => {
      const lanes = track.lanes.reduce((most, lane) => Math.max(most, lane + 1), 1);
      const placed = { ...track, top, lanes_count: lanes, longest: track.duration_us.reduce((most, each) => Math.max(most, each), 0) };
      top += HEAD + lanes * LANE + 4;
      return placed;
    });
    this.height = Math.min(30_000, top + 4);
    this.colours = found.names.map((name) => `hsl(${hash(name) % 360} 45% 60%)`);
    this.canvas = node("canvas", {
      tabindex: 0, role: "img", "aria-label": "timeline",
      wheel: (event) => this.wheel(event), pointerdown: (event) => this.grab(event), pointermove: (event) => this.drag(event),
      pointerup: (event) => this.release(event), keydown: (event) => this.press(event),
    });
    this.element = node("div", { class: "timeline scroll" }, this.canvas);
    this.sight = new ResizeObserver(() => this.draw());
    this.sight.observe(this.element);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.draw();
    this.scheme.addEventListener("change", this.redraw);
  }

  end() {
    this.sight.disconnect();
    this.scheme.removeEventListener("change", this.redraw);
  }

  whole() {
    const length = Math.max(1e-3, this.found.end_us - this.found.begin_us);
    [this.begin, this.length] = [this.found.begin_us - length * 0.01, length * 1.02];
    this.draw();
  }

  get width() {
    return Math.max(200, this.element.clientWidth - 2);
  }

  x(time) {
    return LEFT + ((time - this.begin) / this.length) * (this.width - 2 * LEFT);
  }

  time(x) {
    return this.begin + ((x - LEFT) / (this.width - 2 * LEFT)) * this.length;
  }

  zoom(factor, at = this.begin + this.length / 2) {
    const whole = Math.max(1e-3, this.found.end_us - this.found.begin_us);
    const length = Math.min(whole * 4, Math.max(1e-3, this.length / factor));
    this.begin = at - ((at - this.begin) * length) / this.length;
    this.length = length;
    this.draw();
  }

  wheel(event) {
    if (event.shiftKey) return; // which scrolls the tracks
    event.preventDefault();
    if (event.deltaX) this.begin += (event.deltaX / this.width) * this.length;
    if (event.deltaY) this.zoom(Math.exp(-event.deltaY / 400), this.time(event.offsetX));
    else this.draw();
  }

  grab(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.held = { x: event.offsetX, begin: this.begin, has_moved: false };
  }

  drag(event) {
    if (!this.held) {
      const under = this.at(event.offsetX, event.offsetY);
      this.canvas.title = under ? `${shown(under.name)}: ${seconds(under.duration / 1e6)}` : "";
      return;
    }
    const moved = event.offsetX - this.held.x;
    this.held.has_moved ||= Math.abs(moved) > 3;
    this.begin = this.held.begin - (moved / (this.width - 2 * LEFT)) * this.length;
    this.draw();
  }

  release(event) {
    const wasClick = this.held && !this.held.has_moved;
    this.held = null;
    const under = wasClick ? this.at(event.offsetX, event.offsetY) : null;
    if (!under) return;
    this.picked = under.number;
    this.draw();
    this.onPick(under);
  }

  press(event) {
    const step = this.length / 8;
    const acts = {
      "+": () => this.zoom(2), "=": () => this.zoom(2), "-": () => this.zoom(0.5), 0: () => this.whole(),
      ArrowLeft: () => { this.begin -= step; this.draw(); }, ArrowRight: () => { this.begin += step; this.draw(); },
    };
    if (!acts[event.key]) return;
    acts[event.key]();
    event.preventDefault();
  }

  highlight(text) {
    this.wanted = text.trim().toLowerCase();
    this.draw();
  }

  /** The first event of a track that can be seen. Longer ones before it may reach into sight. */
  first(track) {
    let [low, high] = [0, track.begin_us.length];
    const wanted = this.begin - track.longest;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (track.begin_us[middle] < wanted) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  at(x, y) {
    const track = this.tracks.find((each) => y >= each.top + HEAD && y < each.top + HEAD + each.lanes_count * LANE);
    if (!track) return null;
    const lane = Math.floor((y - track.top - HEAD) / LANE);
    const end = this.begin + this.length;
    let found = null;
    for (let at = this.first(track); at < track.begin_us.length && track.begin_us[at] <= end; at += 1) {
      const left = this.x(track.begin_us[at]);
      const right = Math.max(left + 2, this.x(track.begin_us[at] + track.duration_us[at]));
      if (track.lanes[at] === lane && x >= left - 1 && x <= right + 1) {
        found = {
          track, number: track.events[at], name: this.found.names[track.names[at]],
          begin: track.begin_us[at], duration: track.duration_us[at],
        };
      }
    }
    return found;
  }

  draw() {
    if (this.length === undefined) return;
    const ratio = this.height * devicePixelRatio > 32_000 ? 1 : devicePixelRatio;
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    this.canvas.style.height = `${this.height}px`;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.drawScale(pen, colour);
    let process = null;
    for (const track of this.tracks) {
      pen.fillStyle = colour("--line");
      pen.fillRect(0, track.top, this.width, 1);
      pen.fillStyle = colour("--faint");
      pen.fillText(shown(track.process === process ? track.name : `${track.process}: ${track.name}`).slice(0, 200), LEFT, track.top + HEAD / 2);
      process = track.process;
      this.drawTrack(pen, track, colour);
    }
  }

  drawScale(pen, colour) {
    const step = 10 ** Math.ceil(Math.log10(this.length / 8));
    const fine = this.length / step < 3 ? step / 5 : step;
    const zero = this.found.begin_us;
    for (let at = Math.ceil((this.begin - zero) / fine); at * fine <= this.begin + this.length - zero; at += 1) {
      const x = this.x(zero + at * fine);
      pen.fillStyle = colour("--line");
      pen.fillRect(x, 0, 1, this.height);
      pen.fillStyle = colour("--faint");
      pen.fillText(seconds((at * fine) / 1e6), x + 3, SCALE / 2);
    }
  }

  drawTrack(pen, track, colour) {
    const end = this.begin + this.length;
    const drawnUntil = new Array(track.lanes_count).fill(-Infinity);
    for (let at = this.first(track); at < track.begin_us.length && track.begin_us[at] <= end; at += 1) {
      const lane = track.lanes[at];
      const left = Math.max(this.x(track.begin_us[at]), 0);
      const right = Math.min(Math.max(left + 1, this.x(track.begin_us[at] + track.duration_us[at])), this.width);
      if (right < 0 || (right <= drawnUntil[lane] && track.events[at] !== this.picked)) continue; // less than a pixel
      drawnUntil[lane] = right;
      const name = this.found.names[track.names[at]];
      const y = track.top + HEAD + lane * LANE;
      pen.globalAlpha = this.wanted && !name.toLowerCase().includes(this.wanted) ? 0.15 : 1;
      pen.fillStyle = this.colours[track.names[at]];
      pen.fillRect(left, y, Math.max(1, right - left - (right - left > 3 ? 1 : 0)), LANE - 2);
      if (track.events[at] === this.picked) {
        pen.strokeStyle = colour("--text");
        pen.lineWidth = 2;
        pen.strokeRect(left, y, right - left, LANE - 2);
      }
      if (right - left > 30) {
        pen.fillStyle = "#10161d";
        pen.save();
        pen.beginPath();
        pen.rect(left, y, right - left - 3, LANE);
        pen.clip();
        pen.fillText(shown(name).slice(0, 200), left + 4, y + LANE / 2 - 1);
        pen.restore();
      }
    }
    pen.globalAlpha = 1;
  }
}

function hash(text) {
  let value = 7;
  for (const character of text.slice(0, 200)) value = (value * 31 + character.codePointAt(0)) % 65_521;
  return value;
}
