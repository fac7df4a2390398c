// A checkpoint: its tree, with search; of each leaf how it is sharded and cut, and what its values are like.

import {
  LongList, ask, bars, brief, bytes, count, drawn, facts, fill, failure, followIn, moment, node, seconds, some, takeKeys,
} from "./elements.js";
import { verified } from "./runs.js";

export async function checkpointPage(place, signal, about, [source, name = ""]) {
  const { opened, document: found } = await ask("inspect", { source, name }, signal);
  const outcome = node("div", { role: "status" });
  const verify = node("button", {
    click: () => followIn(outcome, "verify", { source, name }, signal, verified),
  }, "Verify");
  const body = node("div");
  const names = Object.keys(found.checkpointables);
  const tabs = names.map((each) => node("button", { click: () => open(each) }, each));
  const open = (each) => {
    tabs.forEach((tab, at) => tab.setAttribute("aria-pressed", String(names[at] === each)));
    showPart(body, signal, about, opened, each, found.checkpointables[each])
      .catch((error) => { if (!signal.aborted) fill(body, failure(error)); });
  };
  fill(place, node("h1", {}, found.path), facts([
    ["committed", moment(found.committed_at)],
    ["layout", found.layout === "native" ? `native, version ${found.format_version}` : "Orbax"],
    found.generation > 1 && ["generation", count(found.generation)],
    found.local && ["local storage", `part of process ${found.local.process} of ${found.local.process_count}`],
    found.custom_metadata !== null && ["custom metadata", node("code", {}, JSON.stringify(found.custom_metadata))],
  ]), node("div", { class: "tools" }, names.length > 1 ? tabs : null, verify), outcome, body);
  if (names.length) open(names.includes("state") ? "state" : names[0]);
}

async function showPart(place, signal, about, opened, name, part) {
  if (part.leaves === undefined) {
    fill(place, node("h2", {}, name), facts([
      ["saved by", part.handler ?? "a handler that it does not name"],
      ["files", `${count(part.files)}, ${bytes(part.file_bytes)}`],
    ]), part.paths.slice(0, 1000).map((path) => node("p", { class: "code" }, path)));
    return;
  }
  const totals = `${some(part.arrays, "array")}, ${bytes(part.array_bytes)} in ${some(part.files, "file")}`;
  const detail = node("section", { class: "detail", "aria-label": "the leaf that is picked" },
    node("p", { class: "faint" }, "Pick a leaf to see what it is."));
  let last = 0;
  const tree = new Tree((row) => {
    const mine = last += 1; // an answer may come after that to a later question
    return showLeaf(detail, signal, about, opened, name, row, () => mine === last);
  }, () => detail.querySelector("button")?.focus());
  const search = node("input", {
    type: "search", placeholder: "search names", "aria-label": "search names", input: () => tree.search(search.value),
    keydown: (event) => {
      if (event.key === "Enter" || event.key === "ArrowDown") {
        tree.goToHit();
        event.preventDefault();
      } else if (event.key === "Escape" && search.value) {
        search.value = "";
        tree.search("");
        event.preventDefault();
      }
    },
  });
  const state = node("span", { class: "faint", role: "status" });
  fill(place, node("h2", {}, `${name}: ${totals}`),
    node("div", { class: "tools" }, search,
      node("button", { click: () => tree.foldAll(false) }, "Open all"),
      node("button", { click: () => tree.foldAll(true) }, "Close all"), state),
    node("div", { class: "beside" }, tree.list.element, detail));
  takeKeys(tree.list.element);
  tree.onCount = (text) => { state.textContent = text; };
  for (let begin = 0, total = 1; begin < total;) {
    const page = await ask("rows", { opened, checkpointable: name, begin }, signal);
    total = page.total;
    begin += page.names.length;
    tree.add(page, total);
    if (!page.names.length) break;
  }
}

const OPEN_ROWS = 400; // of larger trees only the first levels are open at first

/** The rows of a tree in preorder, in columns, and which of them are visible. */
class Tree {
  constructor(onPick, onEnter) {
    Object.assign(this, { names: [], parents: [], depths: [], leaves: [], bytes: [], texts: [], folded: new Set(), visible: [] });
    this.wanted = "";
    this.firstHit = 0;
    this.onCount = () => {};
    this.list = new LongList({
      label: "tree", kind: "tree", role: "treegrid", headings: ["name", "what it is", "size", "sharding"],
      make: (at) => this.cells(this.visible[at]),
      about: (at) => this.attributes(this.visible[at]),
      onPick: (at) => { this.detail = onPick({ leaf: this.leaves[this.visible[at]], name: this.path(this.visible[at]) }); },
      onEnter: async (at) => {
        const row = this.visible[at];
        if (this.isContainer(row)) {
          this.fold(row, !this.folded.has(row));
        } else {
          await this.detail;
          onEnter();
        }
      },
      onKey: (key) => this.press(key),
    });
  }

  isContainer(row) {
    return this.leaves[row] === -2;
  }

  isOpen(row) {
    return this.isContainer(row) && (this.wanted !== "" || !this.folded.has(row));
  }

  attributes(row) {
    return { "aria-level": this.depths[row] + 1, "aria-expanded": this.isContainer(row) ? String(this.isOpen(row)) : null };
  }

  add(page, total) {
    for (const [at, name] of page.names.entries()) {
      const row = this.names.length;
      this.names.push(name);
      this.parents.push(page.parents[at]);
      this.depths.push(page.depths[at]);
      this.leaves.push(page.leaves[at]);
      this.bytes.push(page.bytes[at]);
      this.texts.push(page.kind_texts[page.kinds[at]]);
      if (total > OPEN_ROWS && page.depths[at] >= 1 && page.leaves[at] === -2) this.folded.add(row);
    }
    this.total = total;
    this.arrange();
  }

  path(row) {
    const parts = [];
    for (let at = row; at > 0; at = this.parents[at]) parts.push(this.names[at]);
    return parts.reverse().join(" › ") || "(root)";
  }

  /** Finds the visible rows: those below open containers, or those that were searched for and what they are in. */
  arrange() {
    const found = this.wanted ? this.matches() : null;
    const picked = this.visible[this.list.picked];
    const hidden = new Set();
    this.visible = [];
    for (let row = 0; row < this.names.length; row += 1) {
      if (found ? !found.has(row) : hidden.has(this.parents[row])) {
        if (!found) hidden.add(row);
        continue;
      }
      if (!found && this.folded.has(row)) hidden.add(row);
      this.visible.push(row);
    }
    this.list.show(this.visible.length, picked === undefined ? -1 : this.visible.indexOf(picked));
    const loaded = this.names.length < this.total ? `${count(this.names.length)} of ${some(this.total, "row")} read` : some(this.total, "row");
    this.onCount(found ? `${count(this.hits)} of ${loaded}` : loaded);
  }

  matches() {
    const words = this.wanted.toLowerCase().split(/\s+/).filter(Boolean);
    const lower = [];
    const found = new Set();
    this.hits = 0;
    this.firstHit = 0;
    for (let row = 0; row < this.names.length; row += 1) {
      const own = `${this.names[row]} ${this.texts[row][0]}`.toLowerCase();
      lower.push(row > 0 ? `${lower[this.parents[row]] ?? ""}${this.names[row].toLowerCase()}.` : "");
      if (!words.every((word) => own.includes(word) || lower[row].includes(word))) continue;
      if (!this.hits) this.firstHit = row;
      this.hits += 1;
      for (let at = row; at >= 0 && !found.has(at); at = this.parents[at]) found.add(at);
    }
    return found;
  }

  search(text) {
    this.wanted = text.trim();
    this.arrange();
  }

  foldAll(folds) {
    this.folded = new Set();
    if (folds) this.leaves.forEach((leaf, row) => { if (leaf === -2 && row > 0) this.folded.add(row); });
    this.arrange();
  }

  fold(row, folds) {
    const top = this.list.box.scrollTop;
    if (folds) this.folded.add(row);
    else this.folded.delete(row);
    this.arrange();
    this.list.box.scrollTop = top;
  }

  /** Right opens a container, or goes into it; left closes it, or goes to what a row is in. */
  press(key) {
    const at = this.list.picked;
    const row = this.visible[at];
    if (row === undefined || !["ArrowLeft", "ArrowRight"].includes(key)) return false;
    if (key === "ArrowRight" && this.isContainer(row)) {
      if (!this.isOpen(row)) this.fold(row, false);
      else if (this.parents[this.visible[at + 1]] === row) this.list.go(at + 1);
    } else if (key === "ArrowLeft") {
      if (this.isOpen(row) && !this.wanted) this.fold(row, true);
      else if (row > 0) this.list.go(this.visible.indexOf(this.parents[row]));
    }
    return true;
  }

  /** Goes to the first row that was searched for. */
  goToHit() {
    if (!this.visible.length) return;
    this.list.element.focus();
    this.list.go(this.wanted ? this.visible.indexOf(this.firstHit) : 0);
  }

  cells(row) {
    const isContainer = this.isContainer(row);
    const [description, placement] = this.texts[row];
    const mark = isContainer ? (this.isOpen(row) ? "▾" : "▸") : "";
    const fold = node("span", {
      class: "fold", "aria-hidden": "true",
      click: (event) => { event.stopPropagation(); if (isContainer) this.fold(row, !this.folded.has(row)); },
    }, mark);
    const name = node("span", { title: this.path(row) }, fold, this.names[row]);
    name.style.paddingLeft = `${Math.min(this.depths[row], 30) * 14}px`;
    return [name, node("span", { class: isContainer ? "faint" : null, title: description }, description),
      node("span", { class: "number" }, this.bytes[row] || !isContainer ? bytes(this.bytes[row]) : ""), placement];
  }
}

// ---- one leaf ----------------------------------------------------------------------------------

async function showLeaf(place, signal, about, opened, checkpointable, row, isWanted) {
  const title = node("h2", {}, row.name);
  if (row.leaf < 0) {
    fill(place, title, node("p", { class: "faint" }, row.leaf === -1 ? "None" : "a container"));
    return;
  }
  try {
    const { leaf, storage } = await ask("leaf", { opened, checkpointable, leaf: row.leaf }, signal);
    if (!isWanted()) return;
    if (leaf.kind !== "array") {
      fill(place, title, facts([["kind", leaf.kind], ["value", node("code", {}, String(leaf.value))]]));
      return;
    }
    fill(place, title, facts([
      ["key path", node("code", {}, leaf.path)],
      ["tensor name", node("code", {}, leaf.name)],
      ["dtype", leaf.dtype],
      ["shape", `[${leaf.shape.map(count).join(", ")}]`],
      ["size", bytes(leaf.bytes)],
      ["saved by", leaf.framework],
      ["chunks", count(leaf.chunks) + (storage?.chunk_shape ? ` of at most [${storage.chunk_shape.join(", ")}]` : "")],
    ]), shardingOf(leaf, storage), valuesOf(signal, about, { opened, checkpointable, leaf: row.leaf }, leaf));
  } catch (error) {
    if (!signal.aborted && isWanted()) fill(place, title, failure(error));
  }
}

function valuesOf(signal, about, where, leaf) {
  const outcome = node("div");
  const look = (all) => followIn(outcome, "statistics", { ...where, all: all ? 1 : 0 }, signal, statistics);
  const isSmall = leaf.bytes <= about.limit_bytes / 2;
  return node("div", {}, node("h2", {}, "Values"), node("div", { class: "tools" },
    node("button", { click: () => look(false) }, isSmall ? "Read the values" : `Read a sample, at most ${bytes(about.limit_bytes)}`),
    isSmall ? null : node("button", { click: () => look(true) }, `Read all ${bytes(leaf.bytes)}`)), outcome);
}

function statistics(found) {
  const is_whole = found.examined === found.elements;
  const read = is_whole
    ? `All ${some(found.elements, "element")} (${bytes(found.bytes_read)} read in ${seconds(found.took_s)}).`
    : `A sample: ${count(found.examined)} of ${some(found.elements, "element")}, in pieces spread over the array ` +
      `(${bytes(found.bytes_read)} read in ${seconds(found.took_s)}; the limit is ${bytes(found.limit_bytes)}).`;
  const special = [["NaN", found.nans], ["+∞", found.positive_infinities], ["−∞", found.negative_infinities], ["zero", found.zeros]]
    .filter(([, number]) => number > 0);
  const numbers = found.of === null ? [] : [
    found.of === "magnitudes" && ["of", "the magnitudes of complex numbers"],
    ["minimum", brief(found.minimum) || "none"], ["maximum", brief(found.maximum) || "none"],
    ["mean", brief(found.mean) || "none"], ["deviation", brief(found.deviation) || "none"],
    [is_whole ? "norm" : "norm of the sample", brief(found.norm) || "none"],
    ...special.map(([name, number]) => [name, some(number, "element")]),
  ];
  return node("div", { "data-whole": String(is_whole) }, node("p", { class: is_whole ? "faint" : null }, read),
    facts([...numbers, ["first values", node("code", {}, found.first_values.join("  ") || "none")]]),
    found.histogram ? histogram(found.histogram) : null,
    found.of === null && found.elements ? node("p", { class: "faint" }, "Elements of this dtype are no numbers.") : null);
}

function histogram({ begin, width, counts }) {
  const entries = counts.map((value, at) => ({
    value, title: `${brief(begin + at * width)} to ${brief(begin + (at + 1) * width)}: ${some(value, "element")}`,
  }));
  return bars("how many finite values lie where", entries, count, [brief(begin), brief(begin + counts.length * width)]);
}

// ---- how an array is cut -----------------------------------------------------------------------

const MOST_PARTS = 64; // beside each other in a picture

/** In how many parts a sharding cuts each axis, and how many devices have each part; null where it does not say. */
export function partsOf(sharding, shape) {
  const parts = shape.map(() => 1);
  let devices = 1;
  try {
    if (sharding?.kind === "named") {
      const sizes = new Map(sharding.mesh.axes);
      devices = [...sizes.values()].reduce((product, size) => product * size, 1);
      sharding.spec.forEach((axes, at) => {
        for (const axis of axes === null ? [] : [axes].flat()) parts[at] *= sizes.get(axis);
      });
    } else if (sharding?.kind === "dtensor") {
      devices = sharding.mesh.shape.reduce((product, size) => product * size, 1);
      sharding.placements.forEach(([kind, axis], at) => {
        if (kind === "shard") parts[axis < 0 ? axis + shape.length : axis] *= sharding.mesh.shape[at];
      });
    } else {
      return null;
    }
  } catch {
    return null;
  }
  const cells = parts.reduce((product, part) => product * part, 1);
  const isKnown = Number.isInteger(cells) && cells >= 1 && Number.isInteger(devices) && devices >= 1;
  return isKnown ? { parts, devices, copies: Math.max(1, devices / cells) } : null;
}

function shardingOf(leaf, storage) {
  const found = partsOf(leaf.sharding, leaf.shape);
  const chunks = storage?.chunk_shape?.map((part, at) => Math.ceil(leaf.shape[at] / Math.max(1, part)));
  if (!leaf.shape.length || (!found && (chunks ?? [1]).every((number) => number <= 1))) {
    return leaf.sharding ? node("p", { class: "code" }, JSON.stringify(leaf.sharding).slice(0, 2000)) : null;
  }
  const parts = found?.parts ?? leaf.shape.map(() => 1);
  const caption = found
    ? `${parts.join(" × ")} parts on ${some(found.devices, "device")}` + (found.copies > 1 ? `, each on ${count(found.copies)}` : "")
    : "not sharded";
  const axes = pictured(leaf.shape, parts);
  return node("div", {}, node("h2", {}, "How it is cut"),
    node("figure", {}, node("figcaption", {}, caption, chunks ? `; dashed: ${chunks.join(" × ")} chunks in files` : "",
      leaf.shape.length > 2 ? `; drawn: axes ${axes.join(" and ")}` : ""), picture(leaf.shape, parts, chunks, axes)));
}

/** The two axes that are drawn: those that are cut the most, else the last ones. */
function pictured(shape, parts) {
  const order = shape.map((_, axis) => axis).sort((one, two) => parts[two] - parts[one] || two - one);
  return order.slice(0, 2).sort((one, two) => one - two);
}

function picture(shape, parts, chunks, axes) {
  const [down, across] = axes.length === 1 ? [null, axes[0]] : axes;
  const extent = (axis) => (axis === null ? 1 : Math.max(1, shape[axis]));
  const ratio = Math.min(2.5, Math.max(0.25, Math.sqrt(extent(down) / extent(across))));
  const [width, height] = [320, down === null ? 48 : Math.max(48, 320 * Math.min(1, ratio))];
  const pieces = (axis, of) => (axis === null ? 1 : Math.min(MOST_PARTS, of[axis]));
  const [rows, columns] = [pieces(down, parts), pieces(across, parts)];
  const cells = [];
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      const number = row * columns + column;
      cells.push(drawn("rect", {
        class: "cell", x: (column * width) / columns, y: (row * height) / rows, width: width / columns, height: height / rows,
        fill: `hsl(${(number * 137.5) % 360} 45% 62%)`,
      }, drawn("title", {}, `part [${down === null ? "" : `${row}, `}${column}]`)));
    }
  }
  const lines = [];
  if (chunks) {
    const [cutDown, cutAcross] = [pieces(down, chunks), pieces(across, chunks)];
    for (let at = 1; at < cutAcross; at += 1) lines.push(drawn("line", { class: "cut", x1: (at * width) / cutAcross, x2: (at * width) / cutAcross, y1: 0, y2: height }));
    for (let at = 1; at < cutDown; at += 1) lines.push(drawn("line", { class: "cut", y1: (at * height) / cutDown, y2: (at * height) / cutDown, x1: 0, x2: width }));
  }
  return drawn("svg", { viewBox: `0 0 ${width} ${height + 18}`, width: width, role: "img", "aria-label": "how the array is cut" },
    cells, lines,
    drawn("text", { x: 0, y: height + 14 }, down === null ? `${count(shape[across])} along axis ${across}`
      : `${count(shape[down])} down (axis ${down}), ${count(shape[across])} across (axis ${across})`));
}
